"""Why a holder refuses a stream, or ends it early, as it is sent on the wire. To the reader each is one of the ends
that its read can come to (`schemas.kv.ReadEnd`), by the same value."""

import enum


class RefusalCode(enum.StrEnum):
    """Why a holder serves nothing of what was asked for."""

    MALFORMED = "malformed"
    VERSION = "version"
    TICKET = "ticket"
    """Forged, damaged or expired."""
    LEASE = "lease"
    """It has ended, or is another's."""
    FINGERPRINT = "fingerprint"
    """The reader's KV is of another model, dtype or layout."""
    CARRIER = "carrier"
    """It is not offered, or cannot be set up: another may do."""
    RANGE = "range"
    """The lease is on other tokens, or a block that is only whole of use would be cut."""
    BUSY = "busy"
    CLOSING = "closing"
    INTERNAL = "internal"


class FailCode(enum.StrEnum):
    """Why a holder ends a stream that it has accepted."""

    HOLDER = "holder"
    """Its lease has ended, or its engine has failed."""
    CODEC = "codec"
    """What it holds cannot be compressed, but can be read as it is."""
    MEMORY = "device"
    """What its KV lies in has failed."""
