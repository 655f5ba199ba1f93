"""The words of `core.py`: what can happen to a request, and what the shell is asked to do about it."""

import enum
from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.logprobs import TokenLogprob
from schemas.request import (
    AttemptEnd,
    FinishReason,
    KVSource,
    OtherEnd,
    Placement,
    RefusalReason,
    RequestFailure,
    TransferReport,
)

# What can happen to a request.


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request begins. The first event of each."""


@dataclass(frozen=True, slots=True)
class PlaceGranted:
    """A scheduler has named workers."""

    attempt: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class PlaceRefused:
    """A scheduler has refused. `retry_after_ms` 0: it gave no time to ask again."""

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
    """A worker does not take the attempt."""

    attempt: int
    worker_id: WorkerId
    reason: RefusalReason
    detail: str
    retry_after_ms: int


@dataclass(frozen=True, slots=True)
class WorkerAccepted:
    """A worker has taken the attempt. `accepted_ns`: when, as a date of the mesh's clock; 0: it is not given."""

    attempt: int
    worker_id: WorkerId
    accepted_ns: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSilent:
    """A worker has not answered whether it takes the attempt. `may_have_taken`: its reply may be what was lost."""

    attempt: int
    worker_id: WorkerId
    detail: str
    may_have_taken: bool = False


class ProgressOutcome(enum.Enum):
    """How a question to a worker about an attempt has ended."""

    KNOWN = enum.auto()
    UNKNOWN = enum.auto()
    """The worker has never known the attempt, or has forgotten it."""
    UNSERVED = enum.auto()
    """Nobody serves the question: the process is not there."""
    UNANSWERED = enum.auto()
    """No reply came in time."""


@dataclass(frozen=True, slots=True)
class ProgressAnswered:
    """A worker's answer to AskWorker, or that there was none. The tokens of a reply come as TokensReceived.
    `is_waiting`: the attempt is in line there."""

    attempt: int
    worker_id: WorkerId
    outcome: ProgressOutcome
    is_waiting: bool = False


@dataclass(frozen=True, slots=True)
class TokensReceived:
    """What a worker sent of an attempt. `index` is the answer's index of the first token; none may be there where the
    attempt has ended (`finish_reason`, `failure`) or only a `report` comes. `logprobs`: of each token, where they are
    wanted; `prompt_logprobs`: with token 0."""

    attempt: int
    worker_id: WorkerId
    index: int
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    report: TransferReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker has left. `is_back`: a new incarnation is there already."""

    worker_id: WorkerId
    reason: str
    is_back: bool = False


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker takes requests that took none before: what waits for a placement asks again."""


@dataclass(frozen=True, slots=True)
class StopMatched:
    """The text reached a stop string: the client wants no more."""


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's deadline is over."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody reads the answer any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class GatewayStopping:
    """This gateway ends, and its requests with it."""


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """What this gateway was doing for the request has failed, in a way that nobody foresaw."""

    reason: str


PlaceEvent = PlaceGranted | PlaceRefused | PlaceUnanswered
AttemptEvent = PlaceEvent | WorkerRefused | WorkerAccepted | WorkerSilent | ProgressAnswered
RequestEvent = Submitted | StopMatched | DeadlinePassed | ClientGone | GatewayStopping | TaskFailed
FleetEvent = WorkerLost | WorkerReady
Event = AttemptEvent | TokensReceived | FleetEvent | RequestEvent


# What the shell is asked to do.


@dataclass(frozen=True, slots=True)
class AskPlacement:
    """Ask a scheduler for workers. `num_answered`: so many tokens of the answer are there already, and belong to the
    attempt's prompt. `moved_from`: where KV of it is known to lie."""

    attempt: int
    excluded_workers: tuple[WorkerId, ...]
    num_answered: int = 0
    moved_from: KVSource | None = None


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """Send the attempt, or one end of it, to a worker. The other fields as in RunAttempt."""

    attempt: int
    worker_id: WorkerId
    upstream: OtherEnd | None = None
    downstream: OtherEnd | None = None
    sources: tuple[KVSource, ...] = ()
    num_answered: int = 0
    replica: WorkerId | None = None
    spare_blocks: int = 0


@dataclass(frozen=True, slots=True)
class AskWorker:
    """Ask a worker how far the attempt is. `index`: the first token that is missing has it."""

    attempt: int
    worker_id: WorkerId
    index: int


@dataclass(frozen=True, slots=True)
class SendCancel:
    """Ask all workers to let go of the attempt. `reason` is for people."""

    attempt: int
    reason: str
    end: AttemptEnd = AttemptEnd.CANCELLED


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens for the client, in order, each index once. `index` is the answer's index of the first. `logprobs`: of each
    token, where they are wanted; `prompt_logprobs`: with token 0."""

    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """The answer is complete."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request ends with an error. `status` is HTTP's, for an answer that has not begun."""

    code: str
    message: str
    status: int
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Abandon:
    """Nobody wants the answer any more."""

    reason: str


Output = Deliver | Finish | FailRequest | Abandon
Action = AskPlacement | SendAttempt | AskWorker | SendCancel | Output
