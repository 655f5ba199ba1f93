"""The hand-over: five events in order on one subject prefix, and the table of states they move through.

RESERVED (decode worker has room) → OFFERED (prefill worker grants a lease) → STREAMING (first byte has arrived) →
LANDED (verified, in place) → RELEASED (lease ended); ABORTED from anywhere but RELEASED.
"""

import enum

import msgspec

from schemas.ids import HandoffId, LeaseId, WorkerId
from schemas.message import RequestMessage
from schemas.numbers import Count, Ns, Number
from schemas.request import AttemptEnd, FinishReason


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a holder serves reads. Only ever made by the holder itself, which publishes it when it joins; what is read
    later is read there."""

    host: str
    port: Count
    carriers: tuple[str, ...]
    """What the holder offers, best first."""
    arena: str
    """Name of its shared memory, for a reader on the same host."""
    card: str = ""
    """The uuid of the graphics card that the KV lies on; "": in host memory."""
    arena_nonce: str = ""
    """Random text that stands in that memory: proves to the reader that it opened the right one. It comes with an offer
    or a lease, and nobody else receives it."""

    @property
    def public(self) -> "Endpoint":
        """What everybody may know of it."""
        return msgspec.structs.replace(self, arena_nonce="")


class HandoffMessage(RequestMessage, frozen=True, kw_only=True):
    """An event of one hand-over, from its prefill worker (source) to its decode worker (target)."""

    handoff_id: HandoffId
    source_worker: WorkerId
    target_worker: WorkerId


class BlocksReserved(HandoffMessage, frozen=True, kw_only=True):
    """The target has room for the prompt's KV."""

    num_blocks: Number


class KVOffered(HandoffMessage, frozen=True, kw_only=True):
    """Sent when prefill starts: the reader opens its stream before the first layer is computed, where this incarnation
    of the source has announced that it serves. `num_tokens`: what the lease is on, the prompt or, where blocks are only
    whole of use, the slots of its blocks."""

    lease_id: LeaseId
    epoch: Number
    lease_ms: Number
    ticket: str
    incarnation: str
    fingerprint: str
    num_tokens: Number
    arena_nonce: str = ""


class KVStreaming(HandoffMessage, frozen=True, kw_only=True):
    """The first byte has come to the target."""

    carrier: str


class KVLanded(HandoffMessage, frozen=True, kw_only=True):
    """All KV is in the target's blocks, and verified. `num_tokens`: the prompt's. `num_bytes`: as they lie in
    memory."""

    lease_id: LeaseId
    carrier: str
    num_tokens: Number
    num_bytes: Number


class KVReleased(HandoffMessage, frozen=True, kw_only=True):
    """The source's lease has ended, and its blocks with it."""

    lease_id: LeaseId
    num_blocks: Number


class HandoffAborted(HandoffMessage, frozen=True, kw_only=True):
    """Either end has given the hand-over up. `reason` is for people."""

    reason: str
    lease_id: LeaseId | None = None
    end: AttemptEnd = AttemptEnd.FAILED


class FirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """What the source knows once the prompt is computed. Rides at the end of the KV stream, not on the bus, so that
    the target can start as soon as the last byte is there."""

    token_id: Number
    finish_reason: FinishReason | None = None
    computed_ns: Ns = 0
    """When the prompt was computed, a date of the mesh's clock: what the transfer takes beyond it is exposed."""


class HandoffState(enum.StrEnum):
    """How far a hand-over has come, at either end."""

    NEW = "new"
    RESERVED = "reserved"
    OFFERED = "offered"
    STREAMING = "streaming"
    LANDED = "landed"
    RELEASED = "released"
    ABORTED = "aborted"


HANDOFF_TRANSITIONS: dict[HandoffState, frozenset[HandoffState]] = {
    HandoffState.NEW: frozenset({HandoffState.RESERVED, HandoffState.ABORTED}),
    HandoffState.RESERVED: frozenset({HandoffState.OFFERED, HandoffState.ABORTED}),
    HandoffState.OFFERED: frozenset({HandoffState.STREAMING, HandoffState.ABORTED}),
    HandoffState.STREAMING: frozenset({HandoffState.LANDED, HandoffState.ABORTED}),
    HandoffState.LANDED: frozenset({HandoffState.RELEASED, HandoffState.ABORTED}),
    HandoffState.RELEASED: frozenset(),
    HandoffState.ABORTED: frozenset(),
}


def advance(state: HandoffState, target: HandoffState) -> HandoffState:
    """Return `target`. Asserts that the table allows the step: a wrong one is our bug, never the peer's."""
    assert target in HANDOFF_TRANSITIONS[state], f"hand-over cannot go from {state} to {target}"
    return target
