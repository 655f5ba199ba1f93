"""What a broker itself publishes. Not a message of ours: NATS' own words, of which we read what we need."""

import msgspec

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""A message that is larger, headers included, is refused before it is sent. The broker's configuration says the same; a
broker of one's own may take less (`services.bus.base.Bus.max_bytes`)."""

DISCONNECTED = "_BROKER.disconnected"
"""A connection of the mesh has ended: `$SYS.ACCOUNT.*.DISCONNECT`, under a name of our own."""


class Client(msgspec.Struct, frozen=True):
    """Whose connection it was. `name`: what it called itself, which the broker does not check."""

    name: str


class Disconnected(msgspec.Struct, frozen=True):
    """NATS' `io.nats.server.advisory.v1.client_disconnect`."""

    client: Client


def disconnected(name: str) -> bytes:
    """Return what a broker publishes at the end of a connection, for brokers that are made up."""
    return msgspec.json.encode(Disconnected(Client(name)))


def name_of(payload: bytes) -> str:
    """Return whose connection has ended; empty where that is not given."""
    try:
        return msgspec.json.decode(payload, type=Disconnected).client.name
    except msgspec.DecodeError:
        return ""
