"""Members of a mesh whose broker is one's own: each has a key of one name, which ends, and can be revoked before.

The keys from which they are made stay where `kvmesh bus-config` has written them.
"""

import contextlib
import re
import time
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from schemas.ids import is_subject_token
from schemas.permissions import GUESTS, SERVICE_NAMES
from schemas.subjects import Role
from services.errors import UserError
from services.files import locked, private_folder, replace_private
from services.trust import nats_jwt
from services.trust.certificates import CA_FILE
from services.trust.keys import (
    BROKER_FILE,
    MESH_FILE,
    Made,
    MeshKey,
    RoleKey,
    credentials_file,
    key_file,
    load_role_key,
    read_key,
)


def add_member(folder: Path, name: str, life_s: int) -> Path:
    """Write the key of a member, for so long and in place of the one before, and return the folder that it needs. That
    has the broker's CA too, where there is one. Guests' own, `observer`, `operator` and `indexer`, lie in `folder`
    itself. Raises UserError."""
    pair = nats_jwt.new_pair(nats_jwt.USER)
    key = sign_member(folder, name, nats_jwt.public(pair), life_s)
    credentials = nats_jwt.credentials_of(pair, key.credentials)
    own = folder if key.role in GUESTS and name == key.role else folder / name
    write_member(own, msgspec.structs.replace(key, credentials=credentials))
    if own != folder and (folder / CA_FILE).exists():
        with _written(folder):
            replace_private(own / CA_FILE, (folder / CA_FILE).read_bytes())
    return own


def sign_member(folder: Path, name: str, public: str, life_s: int) -> RoleKey:
    """Return the key of a member for so long, of whose own key `public` is the public half: with a token in place of
    credentials, which its owner makes of both (`nats_jwt.credentials_of`). Raises UserError."""
    role = role_of_member(name)
    with _changing(folder) as (mesh, save):
        if role in GUESTS and role not in mesh.people:
            raise UserError(
                f"the keys in {folder} were made before there was an {role}: `kvmesh bus-config` makes new ones"
            )
        # Find the key that signs: guests' seeds are in the mesh's file alone, a service's role has a key file.
        if role in GUESTS:
            signing = RoleKey(role=role, account=mesh.account, seed=mesh.people[role])
        else:
            signing = load_role_key(key_file(folder, role))
        ends_s = int(time.time()) + life_s
        token = nats_jwt.user_token(nats_jwt.pair_of(signing.seed), mesh.account, name, public, ends_s)
        # The record comes before the key: what is not in it cannot be revoked.
        living = tuple(made for made in mesh.members.get(name, ()) if made.ends_s > time.time())
        made = (*living, Made(public=public, ends_s=ends_s))
        save(msgspec.structs.replace(mesh, members={**mesh.members, name: made}))
    # Without the role's seed: with that it could be any member of the role.
    return msgspec.structs.replace(signing, seed="", name=name, credentials=token)


def write_member(folder: Path, key: RoleKey) -> None:
    """Write a member's key, or a guest's credentials, into the folder that it needs. Raises UserError."""
    with _written(folder):
        private_folder(folder)
        if key.role in GUESTS:
            replace_private(credentials_file(folder, key.role), key.credentials.encode())
        else:
            replace_private(key_file(folder, key.role), msgspec.json.encode(key))


def revoke_member(folder: Path, *names: str) -> None:
    """Have the broker take no key any more that these members have been given: it does once it has read its
    configuration again. Raises UserError where one of them has none."""
    path, now_s = folder / BROKER_FILE, int(time.time())
    with _changing(folder) as (mesh, save):
        members = dict(mesh.members)
        for name in names:
            if not any(made.ends_s > now_s and not made.revoked_s for made in members.get(name, ())):
                raise UserError(
                    f"{name!r} has no key of its own that still is of use: `kvmesh bus-config {folder} --member {name}`"
                    " makes one; whoever has its role's whole key can only be locked out with new keys for all"
                )
            # Revoked is what was made until a moment. Clocks are set back: no key is made after its own end.
            living = [made for made in members[name] if made.ends_s > now_s]
            members[name] = tuple(
                msgspec.structs.replace(made, revoked_s=made.revoked_s or made.ends_s) for made in living
            )
        mesh = msgspec.structs.replace(mesh, members=members)
        config = path.read_text("utf-8")
        replaced, num_replaced = re.subn(rf"(?m)^(\s*{mesh.account}:\s*)\S+", rf"\g<1>{mesh.account_token()}", config)
        if num_replaced != 1:
            raise UserError(f"{path} does not name this mesh: put back what `kvmesh bus-config` has written")
        replace_private(path, replaced.encode())
        save(mesh)


def role_of_member(name: str) -> Role:
    """Return the role that a member's name gives. Raises UserError."""
    kinds = {kind: role for role, kinds in SERVICE_NAMES.items() for kind in kinds} | {role: role for role in GUESTS}
    kind = name.partition("-")[0]
    if kind not in kinds or not is_subject_token(name):
        raise UserError(f"--member {name!r} must begin with what it is, as decode-0 does: {', '.join(kinds)}")
    return kinds[kind]


@contextlib.contextmanager
def _changing(folder: Path) -> Generator[tuple[MeshKey, Callable[[MeshKey], None]]]:
    """Give what makes members, and what writes it anew, to one at a time."""
    path = folder / MESH_FILE
    read_key(path, MeshKey)  # where there is none, no lock is made
    with _written(folder), locked(path):
        mesh = read_key(path, MeshKey)
        yield mesh, lambda changed: replace_private(path, msgspec.json.encode(changed))


@contextlib.contextmanager
def _written(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"the keys in {folder} cannot be written: {error.strerror}") from error
