#!/bin/sh
# Runs its arguments with a ticket secret: KVMESH_SECRET where it is set; else, where the shared folder is mounted, the
# one that the first worker to start has left there.
set -eu
umask 077

folder="${KVMESH_SECRET_DIR:-/var/lib/kvmesh}"
if [ -z "${KVMESH_SECRET:-}" ] && [ -w "$folder" ]; then
    if [ ! -e "$folder/secret" ]; then
        fresh="$(mktemp "$folder/fresh.XXXXXX")"
        head -c 32 /dev/urandom | base64 | tr -d '\n' > "$fresh"
        # A link appears whole or not at all, and only the first one: workers that start at once agree.
        ln "$fresh" "$folder/secret" 2> /dev/null || true
        rm -f "$fresh"
    fi
    KVMESH_SECRET="$(cat "$folder/secret")"
    export KVMESH_SECRET
fi
exec "$@"
