"""Names for the identifiers that cross the wire. Each is opaque to everybody but its maker."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)
HandoffId = NewType("HandoffId", str)
LeaseId = NewType("LeaseId", str)
BlockHash = NewType("BlockHash", bytes)
"""16 bytes: the chained, keyed identity of a full block (`schemas.block`)."""
TokenIds = NewType("TokenIds", bytes)
"""Token ids as little-endian u32, base64 in JSON: an eighth of what a JSON list costs to read."""


MAX_SUBJECT_TOKEN = 128
"""Characters of a name: several are part of one subject, of a ticket, of a metric's labels."""


def new_id(prefix: str) -> str:
    """Return a fresh identifier that is also one NATS subject token, e.g. `req-9f86d081884c7d65`."""
    return f"{prefix}-{secrets.token_hex(8)}"


def new_nonce() -> str:
    """Return random text that nobody can guess: 128 bits."""
    return secrets.token_hex(16)


def is_subject_token(text: str) -> bool:
    """Return whether `text` may stand between two dots of a subject."""
    return 0 < len(text) <= MAX_SUBJECT_TOKEN and all(c.isalnum() or c in "-_" for c in text) and text.isascii()


def is_tenant(text: str) -> bool:
    """Return whether `text` may name a tenant; empty: there are none. It goes into tickets, which have a bound."""
    return not text or is_subject_token(text)
