"""Why a stream is refused, or ends early: what both ends' code looks at, and what metrics count by. Values are said on
the wire."""

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
    """The lease is on other tokens, or the holder has other heads."""
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


class FailureCode(enum.StrEnum):
    """Why a read ended early: the holder's word, as in the two above, or what its reader found."""

    MALFORMED = "malformed"
    VERSION = "version"
    TICKET = "ticket"
    LEASE = "lease"
    FINGERPRINT = "fingerprint"
    CARRIER = "carrier"
    """Also: none leads there, or what was to carry it cannot be opened here."""
    RANGE = "range"
    BUSY = "busy"
    CLOSING = "closing"
    INTERNAL = "internal"
    CONNECT = "connect"
    """Nobody can be connected to."""
    CLOSED = "closed"
    """The holder has gone."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"
    """The holder sent what the protocol does not allow."""
    DIGEST = "digest"
    """What arrived is not what was sent."""
    HOLDER = "holder"
    CODEC = "codec"
    ARENA = "arena"
    MEMORY = "device"
    """What the KV of one of the two ends lies in has failed."""
