"""The runs of one role's core, and what both roles do with them the same way. Pure."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from schemas.ids import GatewayId, HandoffId, WorkerId
from schemas.observe import HeldRequest, RunStage
from schemas.request import AttemptEnd, CancelRequest, FailureCode, ReserveBlocks, RunPrefill
from services.engine.interface import Sequence
from services.worker.core.actions import Action, AttemptKey
from services.worker.core.content import PromptKV, SequenceContent
from services.worker.core.limits import PastAttempts, WorkerLimits
from services.worker.core.messages import emit_failure

RequestT = TypeVar("RequestT", RunPrefill, ReserveBlocks)


class EndedAttempt(NamedTuple):
    """An attempt that goes on here no more. `outcome`: why it was ended early, for people; "": it came to its end."""

    key: AttemptKey
    end: AttemptEnd
    outcome: str


@dataclass(slots=True, eq=False)
class Run(Generic[RequestT]):
    """One attempt on this worker. `tables` are its own reference to its blocks: empty before it has any, and once they
    are given back."""

    request: RequestT
    prompt: list[int]
    content: SequenceContent
    tables: BlockTables = ()
    kv: PromptKV | None = None
    """What of the prompt is in place; None while it is queued."""
    fetching_from: WorkerId | None = None
    taken_ms: int = 0
    """When this worker took it."""
    outcome: str = ""
    """Why it was ended early, for people."""
    end: AttemptEnd = AttemptEnd.FAILED
    """The same for code, once it was ended early."""

    @property
    def key(self) -> AttemptKey:
        return (self.request.request_id, self.request.attempt)

    @property
    def num_tokens_at_end(self) -> int:
        """Tokens of the prompt and the longest answer."""
        return len(self.prompt) - self.request.num_answered_tokens + self.request.sampling.max_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that need room here: where the answer is decoded all but its last."""
        return self.num_tokens_at_end - 1

    @property
    def has_ended(self) -> bool:
        """Nothing more comes of it; its blocks wait for whoever may still write them."""
        raise NotImplementedError

    @property
    def owes_tokens(self) -> bool:
        """Its gateway waits for more from this worker."""
        raise NotImplementedError

    @property
    def stage(self) -> RunStage:
        """How far it is, for people."""
        raise NotImplementedError

    @property
    def reading_from(self) -> WorkerId | None:
        """Whose KV is coming in."""
        return self.fetching_from


RunT = TypeVar("RunT", bound="Run[RunPrefill] | Run[ReserveBlocks]")


class RoleCore(ABC, Generic[RunT]):
    """Owns the runs of one role; shares its blocks with the worker's other cores."""

    def __init__(self, limits: WorkerLimits, cache: BlockCache) -> None:
        self._limits = limits
        self._cache = cache
        self._runs: dict[AttemptKey, RunT] = {}
        self._queue: deque[RunT] = deque()
        self._by_handoff: dict[HandoffId, RunT] = {}
        self._past = PastAttempts()
        self._ended: list[EndedAttempt] = []
        self.draining = False

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def has(self, key: AttemptKey) -> bool:
        return key in self._runs

    def take_ended(self) -> list[EndedAttempt]:
        """Return the attempts that have ended here since the last call."""
        if not self._ended:
            return []
        ended, self._ended = self._ended, []
        return ended

    def is_waiting(self, key: AttemptKey) -> bool:
        """Say whether this attempt is in line here: nothing of it is computed or received yet."""
        run = self._runs.get(key)
        return run is not None and run.stage in ("queued", "reserved")

    def attempts(self) -> dict[AttemptKey, GatewayId]:
        """Return the attempts that go on here, and whose they are."""
        return {run.key: run.request.gateway_id for run in self._runs.values() if not run.has_ended}

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield what goes on here, for people."""
        for run in self._runs.values():
            yield HeldRequest(
                request_id=run.request.request_id,
                attempt=run.request.attempt,
                part="prefill" if isinstance(run.request, RunPrefill) else "decode",
                stage=run.stage,
                age_ms=max(0, now_ms - run.taken_ms),
                num_prompt_tokens=len(run.prompt),
                reading_from=run.reading_from or "",
            )

    def owned_tables(self) -> Iterator[BlockTables]:
        """Yield the tables whose blocks a run here holds references to. Those of leases are the lease table's."""
        return (run.tables for run in self._runs.values() if run.tables)

    def cancelled(self, event: CancelRequest, now_ms: int) -> list[Action]:
        return self._cancel((event.request_id, event.attempt), event.end, event.reason, now_ms)

    def unwanted(self, key: AttemptKey, now_ms: int) -> list[Action]:
        """Its gateway has ended this attempt, or is dead: as a cancel that was lost."""
        return self._cancel(key, AttemptEnd.CANCELLED, "nobody wants it any more", now_ms)

    def drain(self, now_ms: int) -> list[Action]:
        """Take no new work. What waits for blocks goes elsewhere at once, the rest goes on."""
        self.draining = True
        queued = list(self._queue)
        self._queue.clear()
        return [action for run in queued for action in self._fail(run, "draining", "the worker is draining", now_ms)]

    def hand_back(self, now_ms: int) -> list[Action]:
        """The drain has taken its time: what still owes tokens goes on elsewhere. Finished prefixes stay for their
        readers."""
        self._queue.clear()
        owing = [run for run in self._runs.values() if run.owes_tokens]
        detail = "the worker is draining and may wait no longer"
        return [action for run in owing for action in self._fail(run, "draining", detail, now_ms)]

    def fence(self, now_ms: int, reason: str) -> list[Action]:
        """This worker has been declared dead and its requests go on elsewhere: end every run, and tell no gateway."""
        self._queue.clear()
        return [action for run in list(self._runs.values()) for action in self._end(run, reason, now_ms)]

    @abstractmethod
    def _end(self, run: RunT, reason: str, now_ms: int) -> list[Action]:
        """End a run early. Its blocks are free once neither a read nor the engine can write them."""

    def _cancel(self, key: AttemptKey, end: AttemptEnd, reason: str, now_ms: int) -> list[Action]:
        self._past.add(key)
        run = self._runs.get(key)
        if run is None or run.has_ended:
            return []
        run.end = end
        return self._end(run, reason, now_ms)

    def _fail(self, run: RunT, code: FailureCode, detail: str, now_ms: int) -> list[Action]:
        return [emit_failure(run.request, code, detail), *self._end(run, detail, now_ms)]

    def _repeated(self, request: RunPrefill | ReserveBlocks) -> RunT | None:
        """Return the run that goes on here and that this very message has begun before."""
        run = self._runs.get((request.request_id, request.attempt))
        return run if run is not None and run.request.handoff_id == request.handoff_id else None

    def _allocate(self, run: RunT) -> bool:
        """Give a run its blocks and what is cached of its prompt. False: there is no room now."""
        allocation = self._cache.admit(
            run.content.hashes, run.num_kv_tokens, len(run.prompt) - 1, tenant=run.content.tenant
        )
        if allocation is None:
            return False
        run.tables = allocation.tables
        run.kv = PromptKV(
            num_prompt_tokens=len(run.prompt),
            block_size=self._limits.block_size,
            num_cached_tokens=allocation.num_cached_tokens,
            keeps_parts=not self._cache.layout.is_windowed,
        )
        return True

    def _sequence(
        self, run: RunT, token_ids: list[int], num_computed_tokens: int, max_local_tokens: int | None = None
    ) -> Sequence:
        """Return what the engine is to compute. Tokens that were answered before count as the answer's."""
        request = run.request
        return Sequence(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=token_ids,
            num_prompt_tokens=len(run.prompt) - request.num_answered_tokens,
            sampling=request.sampling,
            tables=run.tables,
            num_computed_tokens=num_computed_tokens,
            stop_token_ids=self._limits.stop_token_ids(request.sampling),
            max_local_tokens=max_local_tokens,
        )

    def _forget(self, run: RunT) -> list[Action]:
        """Drop a run, and give its blocks back."""
        self._give_back(run)
        if run in self._queue:
            self._queue.remove(run)
        del self._runs[run.key]
        self._ended.append(EndedAttempt(run.key, run.end, run.outcome))
        if run.request.handoff_id is not None:
            self._by_handoff.pop(run.request.handoff_id, None)
        self._past.add(run.key)
        return []

    def _give_back(self, run: RunT) -> None:
        if run.tables:
            self._cache.free(run.tables)
            run.tables = ()
