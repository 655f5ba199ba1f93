"""What the servers of a broker need of each other: a part of nats-server's configuration, and a certificate for both
ends of a route, of a CA of its own. NATS verifies both, and whoever can open a route can say anything on the bus.
"""

import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from dataplane.addresses import in_url
from services.errors import UserError
from services.trust.certificates import CERTIFICATE_FILE, KEY_FILE, BrokerCertificate, new_certificate

BROKER_FILE = "broker.conf"
CLUSTER_FILE = "cluster.conf"
ROUTE_CA_FILE, ROUTE_CERTIFICATE_FILE, ROUTE_KEY_FILE = "route-ca.pem", "route.crt", "route.key"
SERVER_FILES = (
    BROKER_FILE, CLUSTER_FILE, CERTIFICATE_FILE, KEY_FILE, ROUTE_CA_FILE, ROUTE_CERTIFICATE_FILE, ROUTE_KEY_FILE,
)  # fmt: skip
"""What the machine of each server of several has, and no other machine."""
BROKER_PORT, ROUTE_PORT = 4222, 6222
ACCOUNTS_FOLDER = "accounts"
_USER = "route"
_EVERYWHERE = 'host: "0.0.0.0"'
_RESOLVER = 'resolver: {{ type: full, dir: {}, limit: 100, interval: "2s" }}'
_CONFIG = """\
# Of each server, beside broker.conf. A route over which nothing comes is closed within a second: clients hear of it.
ping_interval: "500ms"
lame_duck_grace_period: "1s"
lame_duck_duration: "30s"
# What one server is told of keys that are revoked, all know; one that was away asks as it is back.
{resolver}
cluster {{
  name: "kvmesh"
  host: "0.0.0.0"
  port: {port}
  authorization: {{ user: "{user}", password: "{password}", timeout: 5 }}
  tls: {{ cert_file: {certificate}, key_file: {key}, ca_file: {ca}, timeout: 5, min_version: "1.3" }}
  routes: [{routes}]
  ping_interval: "200ms"
  ping_max: 2
  no_advertise: false
  connect_retries: 1000000
}}
"""


class Routes:
    """Fresh secrets for the routes between servers that are called so. Raises UserError for what is no name."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts
        self._password = secrets.token_urlsafe(32)
        self._certificate: BrokerCertificate = new_certificate(hosts, is_client_too=True)

    def files(self, folder: Path) -> dict[str, bytes]:
        """Return the content of each file by its name. `folder`: where a server finds them."""
        at = {name: json.dumps(str(folder / name)) for name in (ROUTE_CA_FILE, ROUTE_CERTIFICATE_FILE, ROUTE_KEY_FILE)}
        config = _CONFIG.format(
            resolver=_RESOLVER.format(json.dumps(str(folder / ACCOUNTS_FOLDER))),
            port=ROUTE_PORT,
            user=_USER,
            password=self._password,
            certificate=at[ROUTE_CERTIFICATE_FILE],
            key=at[ROUTE_KEY_FILE],
            ca=at[ROUTE_CA_FILE],
            routes=", ".join(f'"tls://{_USER}:{self._password}@{in_url(host)}:{ROUTE_PORT}"' for host in self._hosts),
        )
        return {
            ROUTE_CA_FILE: self._certificate.ca,
            ROUTE_CERTIFICATE_FILE: self._certificate.certificate,
            ROUTE_KEY_FILE: self._certificate.key,
            CLUSTER_FILE: config.encode(),
        }


def has_routes(keys: Path) -> bool:
    """Return whether the broker of these keys is of several servers."""
    return (keys / CLUSTER_FILE).exists()


def server_config(keys: Path, state: Path, host: str) -> str:
    """Return the configuration of one server, whose files lie in `keys`, wherever they were when they were written.
    `state`: where it writes what it has been told. `host`: where it listens for routes. Raises UserError."""
    try:
        names = (BROKER_FILE, CLUSTER_FILE) if has_routes(keys) else (BROKER_FILE,)
        text = "".join((keys / name).read_text("utf-8") for name in names)
        if not has_routes(keys):  # it is told of what is revoked too
            text += _RESOLVER.format(json.dumps(ACCOUNTS_FOLDER)) + "\n"
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}; `kvmesh bus-config` makes it") from error
    for name in (*SERVER_FILES, ACCOUNTS_FOLDER):
        folder = state if name == ACCOUNTS_FOLDER else keys
        text = re.sub(rf'"([^"\n]*/)?{re.escape(name)}"', lambda _, at=folder / name: json.dumps(str(at)), text)
    return text.replace(_EVERYWHERE, f'host: "{host}"')
