"""The ticket that a reader presents: a lease's name, signed by its holder. It names no block and no address."""

import base64
import binascii
import hashlib
import hmac
from typing import Literal

import msgspec

from dataplane import limits
from schemas.ids import LeaseId, WorkerId

TicketRefusal = Literal["malformed", "signature", "expired"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Says that `holder` granted `reader` the lease `lease_id` with this `epoch`. `expires_at_ms` is Unix time."""

    lease_id: LeaseId
    epoch: int
    holder: WorkerId
    reader: WorkerId
    tenant: str
    expires_at_ms: int


class TicketRefusedError(Exception):
    """The token is not a valid ticket now. Carries nothing of the token: it may be anybody's."""

    def __init__(self, reason: TicketRefusal) -> None:
        super().__init__(f"ticket refused: {reason}")
        self.reason: TicketRefusal = reason


_decoder = msgspec.json.Decoder(Ticket)


def sign(secret: bytes, ticket: Ticket) -> str:
    """Return `base64url(json).base64url(hmac-sha256)`, without padding. Raises ValueError when it gets too long."""
    body = _encode(msgspec.json.encode(ticket))
    token = f"{body}.{_mac(secret, body)}"
    if len(token) > limits.MAX_TICKET_CHARS:
        raise ValueError(f"the ticket of {ticket.lease_id} would have {len(token)} characters")
    return token


def verify(secret: bytes, token: str, now_ms: int) -> Ticket:
    """Return the ticket in `token`. Raises TicketRefusedError for anything but a ticket of this secret in its time."""
    if len(token) > limits.MAX_TICKET_CHARS or not token.isascii():
        raise TicketRefusedError("malformed")
    body, _, mac = token.partition(".")
    if not hmac.compare_digest(mac, _mac(secret, body)):  # as text: one token has one spelling
        raise TicketRefusedError("signature")
    try:
        ticket = _decoder.decode(_decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TicketRefusedError("malformed") from error
    if ticket.expires_at_ms <= now_ms:
        raise TicketRefusedError("expired")
    return ticket


def _mac(secret: bytes, body: str) -> str:
    assert secret, "a ticket needs a secret"
    return _encode(hmac.new(secret, body.encode("ascii"), hashlib.sha256).digest())


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise TicketRefusedError("malformed") from error
