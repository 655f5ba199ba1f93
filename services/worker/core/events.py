"""What can happen to a worker's attempts, copies and leases. A message that needs no more than itself is an event as
it is, and so is an engine step's result."""

from dataclasses import dataclass

from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, KVLanded, KVOffered
from schemas.ids import LeaseId
from schemas.kv import ReplicateBlocks, ReturnLease
from schemas.request import CancelRequest, RefusalReason, ReserveBlocks, RunPrefill
from schemas.worker import WorkerLeft
from services.engine.interface import StepResult
from services.worker.core.attempts import AttemptTimes, KVRead
from services.worker.core.content import AttemptKey, ReadOutcome


@dataclass(frozen=True, slots=True)
class RunAsked:
    """A gateway wants a prompt computed. Answered by a `SendReply`. `times`: its trace, and when it came."""

    request: RunPrefill
    times: AttemptTimes


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    """A gateway wants room for an answer. Answered by a `SendReply`. `times`: its trace, and when it came."""

    request: ReserveBlocks
    times: AttemptTimes


@dataclass(frozen=True, slots=True)
class CopyOffered:
    """Another worker has completed blocks, and wants them kept here as well."""

    message: ReplicateBlocks
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ReadStarted:
    """The first byte of a hand-over is here."""

    read: KVRead
    carrier: str


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read has ended and writes no more. `failure`: why not all came; empty: it did. `refusal`: where the holder
    refused the lease. `first_token`: with a hand-over that landed."""

    read: KVRead
    outcome: ReadOutcome
    failure: str = ""
    refusal: RefusalReason | None = None
    first_token: FirstToken | None = None


@dataclass(frozen=True, slots=True)
class SequenceRemoved:
    """The engine has let go of a sequence that was withdrawn."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class SequenceFailed:
    """A step raised, or the engine does not take the sequence: it is with the engine no more."""

    key: AttemptKey
    reason: str


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The stream that was served under a lease has ended, well ('') or not."""

    lease_id: LeaseId
    error: str


@dataclass(frozen=True, slots=True)
class AttemptUnwanted:
    """Its gateway has ended this attempt, or is dead: as a cancel that was lost."""

    key: AttemptKey


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """Take no new work. What waits for blocks goes elsewhere at once, the rest goes on."""


@dataclass(frozen=True, slots=True)
class DrainOver:
    """The drain has taken its time: what still owes tokens goes on elsewhere."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """This worker has been declared dead and its requests go on elsewhere: all ends, and no gateway is told."""

    reason: str


HandOverEvent = BlocksReserved | KVOffered | KVLanded | HandoffAborted
EngineEvent = StepResult | SequenceRemoved | SequenceFailed
Event = (
    RunAsked
    | ReserveAsked
    | HandOverEvent
    | CancelRequest
    | AttemptUnwanted
    | WorkerLeft
    | EngineEvent
    | CopyOffered
    | ReadStarted
    | ReadEnded
    | ReturnLease
    | StreamEnded
    | DrainBegun
    | DrainOver
    | Fenced
)
