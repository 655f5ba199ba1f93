"""What can happen to a worker's attempts, copies and leases. A message that needs no more than itself is an event as
it is, and so is an engine step's result."""

from dataclasses import dataclass, field

from dataplane.protocol.stream import TransferStats
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, KVLanded, KVOffered
from schemas.ids import WorkerId
from schemas.kv import EvictionCandidates, PurgeBlocks, ReadEnd, ReplicateBlocks, RequestLease, ReturnLease
from schemas.request import AttemptFailure, CancelRequest, RefusalReason, RunAttempt
from schemas.worker import WorkerLeft
from services.engine.messages import StepResult
from services.holder.core.attempt import AttemptTimes, KVRead
from services.holder.core.content import AttemptKey, ReadOutcome
from services.holder.core.leases import Grant


@dataclass(frozen=True, slots=True)
class AttemptAsked:
    """A gateway wants a prompt computed, or room for an answer. Answered by a `SendReply`. `times`: when it came."""

    request: RunAttempt
    times: AttemptTimes
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class CopyOffered:
    """Another worker has completed blocks, and wants them kept here as well."""

    message: ReplicateBlocks
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class CopyWanted:
    """This holder itself wants these blocks (joined hashes), which `source` is said to have, until a time."""

    source: WorkerId
    tenant: str
    block_hashes: bytes
    deadline_ms: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """The first byte of a hand-over is here."""

    read: KVRead
    carrier: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended and writes no more. `detail`: why it `end`ed so, for people. `refusal`: where the holder refused
    the lease. `first_token`: with a hand-over that landed."""

    read: KVRead
    outcome: ReadOutcome
    end: ReadEnd = ReadEnd.LANDED
    detail: str = ""
    refusal: RefusalReason | None = None
    first_token: FirstToken | None = None

    @property
    def reason(self) -> str:
        """How it ended, for people."""
        return self.detail or self.end.value


@dataclass(frozen=True, slots=True)
class SequenceRemoved:
    """The engine has let go of a sequence that was withdrawn."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A step raised, the engine does not take the sequence, or no token can be chosen for it: the engine no longer has
    it."""

    key: AttemptKey
    reason: str
    code: AttemptFailure = AttemptFailure.ENGINE_FAILED


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's process has ended by itself: none of what it had is written any more. `had`, `in_step`: as
    `EngineDeath`, those for which it was yet to begin included."""

    reason: str
    had: frozenset[AttemptKey]
    in_step: frozenset[AttemptKey]


@dataclass(frozen=True, slots=True)
class EngineBack:
    """There is an engine again."""


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """The first frame of a read under this lease is on its way."""

    lease: Grant


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """A read under this lease is over. `error`: why it failed, for people; "": all was sent. `stats`: what was sent."""

    lease: Grant
    error: str = ""
    stats: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, slots=True)
class AttemptUnwanted:
    """Its gateway has ended this attempt: as a cancel that was lost. `is_orphaned`: the gateway seems to be dead; one
    that was cut off comes back and asks."""

    key: AttemptKey
    is_orphaned: bool = False


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """Take no new work. What runs goes on elsewhere, now; a prompt that is nearly computed is finished. `finishes`: all
    that has blocks is, as nobody else could go on with it."""

    finishes: bool = False


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The drain has taken its time: what still owes tokens goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """This worker (or store) has been declared dead and its requests go on elsewhere: all ends, and no gateway is
    notified."""

    reason: str


@dataclass(frozen=True, slots=True)
class MemoryChanged:
    """What a store has in memory has changed beside what is decided: it came from behind it, or has been written there,
    and may be given up."""


@dataclass(frozen=True, slots=True)
class LeaseAsked:
    """A reader wants a lease on blocks that are here. Answered by a `SendReply` or a `Lend`."""

    request: RequestLease
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's deadline is over."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """The clock has ticked: do what the time makes necessary."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """The holder is about to stop serving: nothing more is lent. What is lent already may still be read."""


class OwnersEvent:
    """Base of events that only the owner of a holder has rules for."""

    __slots__ = ()

    @property
    def about(self) -> str:
        """What it is about, for people."""
        return ""


HandOverEvent = BlocksReserved | KVOffered | KVLanded | HandoffAborted
EngineEvent = StepResult | SequenceRemoved | SequenceFailed | EngineDied | EngineBack
Event = (
    AttemptAsked
    | HandOverEvent
    | CancelRequest
    | AttemptUnwanted
    | WorkerLeft
    | EngineEvent
    | CopyOffered
    | CopyWanted
    | EvictionCandidates
    | ReadStarted
    | ReadEnded
    | ReturnLease
    | PurgeBlocks
    | LeaseAsked
    | MemoryChanged
    | StreamStarted
    | StreamEnded
    | DrainBegun
    | DrainOver
    | Fenced
    | Stopping
    | TimePassed
    | OwnersEvent
)
