"""The words of `core.py`: what can happen to a request, and what the shell is asked to do about it."""

from dataclasses import dataclass
from typing import Literal

from schemas.ids import HandoffId, WorkerId
from schemas.request import (
    AttemptEnd,
    FinishReason,
    KVSource,
    PlacementTerms,
    RefusalReason,
    RequestFailure,
    TransferReport,
)

# What can happen to a request.


@dataclass(frozen=True, slots=True)
class Placed:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId | None
    sources: tuple[KVSource, ...] = ()
    terms: PlacementTerms | None = None
    replica: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class PlaceRefused:
    attempt: int
    reason: RefusalReason
    detail: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class PlaceUnanswered:
    """No scheduler answered."""

    attempt: int
    detail: str


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    attempt: int
    worker_id: WorkerId
    reason: RefusalReason
    detail: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class WorkerAccepted:
    attempt: int
    worker_id: WorkerId


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker did not say that it has taken the request. `may_have_taken`: its yes may be what was lost."""

    attempt: int
    worker_id: WorkerId
    detail: str
    may_have_taken: bool = False


ProgressOutcome = Literal["known", "unknown", "unserved", "unanswered"]
"""`unserved`: nobody serves the question, the process is not there. `unanswered`: no reply in time."""


@dataclass(frozen=True, slots=True)
class ProgressAnswered:
    """What became of an AskWorker. The tokens of a reply come as TokensReceived. `is_waiting`: it is in line there."""

    attempt: int
    worker_id: WorkerId
    outcome: ProgressOutcome
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived:
    attempt: int
    worker_id: WorkerId
    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    report: TransferReport | None = None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker has left. `is_back`: a new incarnation is there already."""

    worker_id: WorkerId
    reason: str
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The text reached a stop string: the client wants no more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class ClientGone:
    reason: str


@dataclass(frozen=True, slots=True)
class GatewayStopping:
    pass


PlaceEvent = Placed | PlaceRefused | PlaceUnanswered
AttemptEvent = PlaceEvent | WorkerRefused | WorkerAccepted | WorkerSilent | ProgressAnswered
Event = AttemptEvent | TokensReceived | WorkerLost | StopMatched | DeadlinePassed | ClientGone | GatewayStopping


# What the shell is asked to do.


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """`num_answered`: so many tokens of the answer are there already, and belong to the attempt's prompt."""

    attempt: int
    excluded_workers: tuple[WorkerId, ...]
    num_answered: int = 0


@dataclass(frozen=True, slots=True)
class SendRun:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId | None
    handoff_id: HandoffId | None
    sources: tuple[KVSource, ...] = ()
    num_answered: int = 0
    replica: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class SendReserve:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId
    handoff_id: HandoffId
    sources: tuple[KVSource, ...] = ()
    num_answered: int = 0
    replica: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class AskWorker:
    """What has this attempt come to at this worker? `index`: the first token that is lacking."""

    attempt: int
    worker_id: WorkerId
    index: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """`reason` is for people."""

    attempt: int
    reason: str
    end: AttemptEnd = AttemptEnd.CANCELLED


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client, in order, each index once. `index` is the answer's index of the first."""

    index: int
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends with an error. `status` is HTTP's, for an answer that has not begun."""

    code: str
    message: str
    status: int
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody wants the answer any more."""

    reason: str


Output = Deliver | Finish | Fail | Abandon
Action = AskPlacement | SendRun | SendReserve | AskWorker | SendCancel | Output
