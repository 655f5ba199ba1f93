"""The words of `core.py`: what can happen to a request, and what the shell is asked to do about it."""

from dataclasses import dataclass

from schemas.ids import HandoffId, WorkerId
from schemas.request import FinishReason, KVSource, PlacementTerms, RefusalReason, RequestFailure, TransferReport

# What can happen to a request.


@dataclass(frozen=True, slots=True)
class Placed:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId | None
    sources: tuple[KVSource, ...] = ()
    terms: PlacementTerms | None = None


@dataclass(frozen=True, slots=True)
class PlaceRefused:
    attempt: int
    reason: RefusalReason
    detail: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class PlaceUnanswered:
    """No scheduler answered. `may_answer`: one was there, so that asking again may help."""

    attempt: int
    detail: str
    may_answer: bool


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    attempt: int
    worker_id: WorkerId
    reason: RefusalReason
    detail: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker did not say that it has taken the request."""

    attempt: int
    worker_id: WorkerId
    detail: str


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
    worker_id: WorkerId
    reason: str


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


AttemptEvent = Placed | PlaceRefused | PlaceUnanswered | WorkerRefused | WorkerSilent
Event = AttemptEvent | TokensReceived | WorkerLost | StopMatched | DeadlinePassed | ClientGone | GatewayStopping


# What the shell is asked to do.


@dataclass(frozen=True, slots=True)
class AskPlacement:
    attempt: int
    excluded_workers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class SendRun:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId | None
    handoff_id: HandoffId | None
    sources: tuple[KVSource, ...] = ()


@dataclass(frozen=True, slots=True)
class SendReserve:
    attempt: int
    prefill_worker: WorkerId
    decode_worker: WorkerId
    handoff_id: HandoffId
    sources: tuple[KVSource, ...] = ()


@dataclass(frozen=True, slots=True)
class SendCancel:
    attempt: int
    reason: str


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
Action = AskPlacement | SendRun | SendReserve | SendCancel | Output
