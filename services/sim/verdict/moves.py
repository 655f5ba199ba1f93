"""Checks what becomes of answers that workers migrate, as the broker saw it: each goes on, once, or has ended."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from schemas.ids import RequestId, WorkerId
from schemas.message import decode
from schemas.observe import RequestCancelled, RequestFailed, RequestFinished, RequestPlaced, RequestResumed
from schemas.request import AskProgress, AttemptFailure, Progress, RequestTokens, TokensEmitted
from services.holder.core.content import AttemptKey
from services.sim.limits import GOES_ON_WITHIN_S
from services.sim.scenario import FaultKind

WENT_WRONG = frozenset(
    {
        AttemptFailure.TRANSFER_FAILED,
        AttemptFailure.DEADLINE,
        AttemptFailure.WORKER_FAILED,
        AttemptFailure.ENGINE_FAILED,
        AttemptFailure.ORPHANED,
        AttemptFailure.GRAMMAR,
    }
)
"""With any other failure a worker migrates an answer: it is well, and somebody else goes on."""
PROMPT: frozenset[FaultKind] = frozenset(
    {"drain", "disconnect", "slow_client", "corruption", "truncation", "refusal", "stall", "slowness"}
)
"""Faults under which the bus loses nothing and nobody stands still: what a worker sends is received at once."""
STORY = {
    "placed": RequestPlaced,
    "resumed": RequestResumed,
    "finished": RequestFinished,
    "failed": RequestFailed,
    "cancelled": RequestCancelled,
}


class MoveTap:
    """Collects who has given which attempts away, and what became of them. `note_message` is a tap of `SimBroker`;
    `now_s` is the clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._given: defaultdict[AttemptKey, dict[WorkerId, float]] = defaultdict(dict)
        """When who gave an attempt away."""
        self._resumed: defaultdict[AttemptKey, list[tuple[WorkerId | None, float]]] = defaultdict(list)
        """Who gave the attempt before this one away, and when this one began."""
        self._ended: dict[RequestId, tuple[int, float]] = {}
        """A request's last attempt, and when it ended."""
        self._decode_worker: dict[AttemptKey, WorkerId | None] = {}
        self._answered: set[tuple[AttemptKey, WorkerId]] = set()
        """Who has sent tokens of which attempt."""
        self._leaving: set[WorkerId] = set()
        self._failed: set[tuple[AttemptKey, WorkerId]] = set()
        """Who has reported of which attempt that it failed."""
        self._wrong: list[str] = []

    @property
    def num_moved(self) -> int:
        """How many attempts go on with what another worker has migrated."""
        return sum(moved_by is not None for resumed in self._resumed.values() for moved_by, _ in resumed)

    def note_message(self, subject: str, payload: bytes) -> None:
        match subject.split(".")[2:]:
            case ["tokens", worker_id, _]:
                for tokens in decode(payload, TokensEmitted).requests:
                    self._note_failure(WorkerId(worker_id), tokens)
                    self._received(WorkerId(worker_id), tokens)
            case ["worker", worker_id, "progress"]:  # it may be here before what it repeats
                published = decode(payload, Progress, AskProgress)
                if isinstance(published, Progress) and published.tokens is not None:
                    self._received(WorkerId(worker_id), published.tokens)
            case ["worker", worker_id, "draining"]:
                self._leaving.add(WorkerId(worker_id))
            case ["worker", worker_id, "joined"]:
                self._leaving.discard(WorkerId(worker_id))
            case ["request", _, word] if word in STORY:
                self._note(decode(payload, STORY[word]))
            case _:
                pass

    def problems(self, kinds: set[FaultKind]) -> Iterator[str]:
        """Yield what is wrong once all requests have ended. `kinds`: the run's faults.

        Nothing is known where the broker died: what it had not read, or clients could keep no more of, is lost.
        """
        if "broker" in kinds:
            return
        yield from self._wrong
        # An attempt begins once, and goes on only for a worker that has migrated the attempt before it.
        for (request_id, attempt), resumed in self._resumed.items():
            if len(resumed) > 1:
                yield f"attempt {attempt} of {request_id} began {len(resumed)} times"
            givers = self._given.get((request_id, attempt - 1), {})
            for moved_by, _ in resumed:
                if moved_by is not None and moved_by not in givers:
                    yield f"attempt {attempt} of {request_id} goes on for {moved_by}, which has migrated nothing"
        # The next attempt follows each migrated one, unless the request ends first.
        for (request_id, attempt), givers in self._given.items():
            if request_id not in self._ended:
                continue  # its gateway has died; where none has, `RequestEventTap` says so
            last, ended_s = self._ended[request_id]
            resumed = self._resumed.get((request_id, attempt + 1), [])
            if not resumed and last > attempt + 1:  # one that is over before it is placed never began
                yield f"attempt {attempt} of {request_id} was migrated by {', '.join(givers)} and nothing came of it"
            if kinds - PROMPT:
                continue  # what was sent may have been lost, and was asked for in its time
            # The wait ends as the next attempt begins, or with the request. A worker no longer needed is exempt.
            over_s = resumed[0][1] if resumed else ended_s
            for worker_id, given_s in givers.items():
                waited_s = over_s - given_s
                if waited_s > GOES_ON_WITHIN_S and not self._goes_without((request_id, attempt), worker_id):
                    yield f"attempt {attempt} of {request_id}, migrated by {worker_id}, waited {waited_s:.3f} s"

    def _note_failure(self, worker_id: WorkerId, tokens: RequestTokens) -> None:
        """A failure is sent once; a question for progress is answered with what was sent last."""
        if tokens.failure is None:
            return
        published = ((RequestId(tokens.request_id), tokens.attempt), worker_id)
        if published in self._failed:
            self._wrong.append(f"{worker_id} said twice that attempt {tokens.attempt} of {tokens.request_id} failed")
        self._failed.add(published)

    def _received(self, worker_id: WorkerId, tokens: RequestTokens) -> None:
        request_id = RequestId(tokens.request_id)
        key = (request_id, tokens.attempt)
        if tokens.failure is not None:
            if tokens.failure.code not in WENT_WRONG:
                self._given[key].setdefault(worker_id, self._now_s())
            return
        self._answered.add((key, worker_id))
        gave = (worker_id in self._given.get((request_id, earlier), {}) for earlier in range(1, tokens.attempt))
        if worker_id in self._leaving and any(gave):
            self._wrong.append(f"{worker_id} drains, gave {request_id} away and answers attempt {tokens.attempt}")

    def _note(self, event: RequestPlaced | RequestResumed | RequestFinished | RequestFailed | RequestCancelled) -> None:
        key = (event.request_id, event.attempt)
        match event:
            case RequestPlaced(decode_worker=decode_worker):
                self._decode_worker[key] = decode_worker
            case RequestResumed(moved_by=moved_by):
                self._resumed[key].append((moved_by, self._now_s()))
            case _:
                self._ended[event.request_id] = (event.attempt, self._now_s())

    def _goes_without(self, key: AttemptKey, worker_id: WorkerId) -> bool:
        """Return whether an attempt needs this worker no more: its decode worker has answered, whoever gave it up."""
        decode_worker = self._decode_worker.get(key)
        return decode_worker not in (None, worker_id) and (key, decode_worker) in self._answered
