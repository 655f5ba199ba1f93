"""The ticket that a reader presents: a lease's name, signed by its holder. It names no block and no address."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from dataplane import limits
from schemas.ids import LeaseId, WorkerId

MAC_BYTES = hashlib.sha256().digest_size

TicketRefusal = Literal["malformed", "signature", "expired"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Says that this incarnation of `holder` granted `reader` the lease `lease_id` with this `epoch`. `nonce` is random
    and of this lease alone. `expires_at_ms` is by its holder's clock."""

    lease_id: LeaseId
    epoch: int
    nonce: str
    holder: WorkerId
    incarnation: str
    reader: WorkerId
    tenant: str
    expires_at_ms: int


class TicketRefusedError(Exception):
    """The token is not a valid ticket now. Carries nothing of the token: it may be anybody's."""

    def __init__(self, reason: TicketRefusal) -> None:
        super().__init__(f"ticket refused: {reason}")
        self.reason: TicketRefusal = reason


_decoder = msgspec.json.Decoder(Ticket)


class TicketSecrets:
    """What holders sign with: the first secret signs, all of them verify. For any thread."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        self._secrets: tuple[bytes, ...] = ()
        self.replace(secrets)

    def replace(self, secrets: Sequence[bytes]) -> None:
        """Go on with these. What was signed with a secret that stays among them is still good."""
        assert secrets and all(secrets), "what is signed needs a secret"
        self._secrets = tuple(secrets)

    def sign(self, ticket: Ticket) -> str:
        """Return `base64url(json).base64url(hmac-sha256)`, without padding. Raises ValueError when it gets too long."""
        body = _encode(msgspec.json.encode(ticket))
        token = f"{body}.{_encode(self.mac(body.encode('ascii')))}"
        if len(token) > limits.MAX_TICKET_CHARS:
            raise ValueError(f"the ticket of {ticket.lease_id} would have {len(token)} characters")
        return token

    def signed(self, token: str) -> "Signed":
        """Return what this token proves. Raises TicketRefusedError when none of these secrets signed it."""
        if len(token) > limits.MAX_TICKET_CHARS or not token.isascii():
            raise TicketRefusedError("malformed")
        body, _, mac = token.partition(".")
        for secret in self._secrets:
            if hmac.compare_digest(mac, _encode(_mac(secret, body.encode("ascii")))):  # as text: one spelling only
                return Signed(token, secret)
        raise TicketRefusedError("signature")

    def keys_for(self, use: bytes) -> list[bytes]:
        """Return 32 bytes for each secret, the one that signs first, others for each `use`."""
        return [_mac(secret, b"kvmesh use 1" + use) for secret in self._secrets]

    def mac(self, message: bytes) -> bytes:
        """Return the HMAC-SHA-256 of a message under the secret that signs."""
        return _mac(self._secrets[0], message)

    def proves(self, message: bytes, mac: bytes) -> bool:
        """Return whether somebody who has one of these secrets made this `mac` of a message."""
        return any(hmac.compare_digest(mac, _mac(secret, message)) for secret in self._secrets)


@dataclass(slots=True, frozen=True, repr=False)
class Signed:
    """A token, and the secret that signed it."""

    token: str
    secret: bytes

    def ticket(self, now_ms: int) -> Ticket:
        """Return the ticket. Raises TicketRefusedError when the token is none, or none any more."""
        try:
            ticket = _decoder.decode(_decode(self.token.partition(".")[0]))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TicketRefusedError("malformed") from error
        if ticket.expires_at_ms <= now_ms:
            raise TicketRefusedError("expired")
        return ticket

    def key_of(self, opening: bytes) -> hmac.HMAC:
        """Return the MAC of this ticket and of what was sent first: the key of a stream, once the answer is added."""
        signed = b"\0".join((b"kvmesh key 1", self.token.encode("ascii"), hashlib.sha256(opening).digest()))
        return hmac.new(self.secret, signed, hashlib.sha256)


def _mac(secret: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, message, "sha256")


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise TicketRefusedError("malformed") from error
