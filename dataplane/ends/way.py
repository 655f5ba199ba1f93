"""Tries the way to a holder's data plane before anything depends on it.

    tries → Try      who asks, whom it means, and the proof that it has the holders' secret
    holder → Tried   4 MiB that mean nothing, and the same proof over them; or Refused

So many, as a way may let a greeting through and lose every full packet.
"""

import hashlib
import hmac
import time
from collections.abc import Sequence

import msgspec

from dataplane import limits
from dataplane.blocks.ticket import MAC_BYTES, TicketSecrets
from dataplane.ends.connections import Cancellation, connect_tcp
from dataplane.protocol.stream import (
    Header,
    Kind,
    ProtocolError,
    StreamRefused,
    TransferFailedError,
    decode_body,
    decoded_by_threads,
    encode_frame,
    encode_header,
    new_nonce,
)
from dataplane.protocol.wire import SocketWire, WireClosedError, WireTimeoutError
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd


@decoded_by_threads
class Try(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for bytes that mean nothing. `arena`: whose way is tried. `mac`: of all the others."""

    reader: str
    arena: str
    nonce: str
    mac: bytes = b""

    @property
    def text(self) -> bytes:
        """What is proved."""
        return msgspec.json.encode(("kvmesh way 1", self.reader, self.arena, self.nonce))


def try_way(endpoint: Endpoint, reader: str, secrets: TicketSecrets, timeout_s: float) -> float:
    """Return how many bytes a second came from the holder at this endpoint; blocks. Raises TransferFailedError: nobody
    answers, too little came in time, or who answers is another one."""
    deadline = time.monotonic() + timeout_s
    asked = Try(reader=reader, arena=endpoint.arena, nonce=new_nonce())
    asked = msgspec.structs.replace(asked, mac=secrets.mac(asked.text))
    wire = SocketWire(connect_tcp(endpoint, timeout_s, Cancellation()))
    try:
        wire.send([encode_frame(Kind.TRY, asked)], timeout_s)
        header = wire.receive_header(deadline, Kind.TRIED, Kind.REFUSED)
        began = time.monotonic()
        body = wire.receive(header.length, deadline)
        took_s = time.monotonic() - began
    except WireTimeoutError:
        raise TransferFailedError(ReadEnd.DEADLINE, f"4 MiB did not come within {timeout_s:g} s") from None
    except WireClosedError as error:
        raise TransferFailedError(ReadEnd.CLOSED, str(error)) from error
    except ProtocolError as error:
        raise TransferFailedError(ReadEnd.PROTOCOL, f"who answers there is no holder of ours ({error})") from error
    finally:
        wire.close()
    if header.kind is Kind.REFUSED:
        raise TransferFailedError(ReadEnd.TICKET, decode_body(body, StreamRefused).detail)
    if not secrets.proves(_answer_text(asked, body[MAC_BYTES:]), bytes(body[:MAC_BYTES])):
        raise TransferFailedError(ReadEnd.TICKET, "who answers there does not prove that it is a holder of ours")
    return limits.WAY_BYTES / max(took_s, 1e-6)


def tried(body: bytes, arena: str, secrets: TicketSecrets) -> Sequence[bytes] | str:
    """Return what answers a Try, or why it is refused. Raises ProtocolError for what is no Try."""
    asked = decode_body(body, Try)
    if not secrets.proves(asked.text, asked.mac):
        return "who asks does not prove that it is a holder: are all holders' ticket_secrets the same?"
    if not hmac.compare_digest(asked.arena.encode(), arena.encode()):
        return "another holder answers at this address: no two may be given the same"
    payload = bytes(limits.WAY_BYTES)
    mac = secrets.mac(_answer_text(asked, payload))
    return [encode_header(Header(Kind.TRIED, length=MAC_BYTES + len(payload))) + mac, payload]


def _answer_text(asked: Try, payload: bytes | bytearray) -> bytes:
    return asked.text + hashlib.sha256(payload).digest()
