"""The core of a role: it owns the attempts, and does with them what prefill and decode do the same way. Pure."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import num_blocks_for
from schemas import subjects
from schemas.block import BlockHasher, pack_tokens
from schemas.handoff import HandoffMessage
from schemas.ids import BlockHash, GatewayId, HandoffId
from schemas.logprobs import pack_logprobs
from schemas.request import (
    AttemptAccepted,
    AttemptEnd,
    AttemptFailure,
    CancelRequest,
    RefusalReason,
    RequestFailure,
    RequestTokens,
    TransferReport,
    refuse,
)
from schemas.subjects import Subject
from schemas.worker import WorkerLeft, WorkerState
from services.engine.interface import SampledToken, Sequence, StepResult
from services.engine.turns import TenantTurns
from services.worker.core.actions import (
    Action,
    AttemptEnded,
    Emit,
    Publish,
    SendReply,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.core.attempts import Attempt, KVRead, PastAttempts, SentAnswer, TwinWait, WantedLease
from services.worker.core.checks import WorkerLimits, check_request, read_prompt
from services.worker.core.content import AttemptKey, PromptKV
from services.worker.core.events import (
    AttemptAsked,
    AttemptUnwanted,
    DrainBegun,
    DrainOver,
    EngineBack,
    EngineDied,
    Fenced,
    ReadEnded,
    SequenceFailed,
    SequenceRemoved,
    TimePassed,
)
from services.worker.core.leases import Grant, LeaseTable
from services.worker.core.messages import handoff_fields
from services.worker.core.replica_offer import ReplicaOffer
from services.worker.core.rules import Rule, RuleTable
from services.worker.core.twins import Twins
from services.worker.limits import TWIN_WAIT_SHARE


class HeardSubject(NamedTuple):
    """The messages of one subject are events to a core."""

    subject: Subject[Any, Any]
    ids: tuple[str, ...]


AttemptT = TypeVar("AttemptT", bound=Attempt)
HandoffT = TypeVar("HandoffT", bound=HandoffMessage)


class RoleCore(ABC, Generic[AttemptT]):
    """Owns the attempts of one role; shares its blocks with the worker's other cores.

    Its rules are named by what has happened; each changes it, and returns what is to be done, in order.
    """

    record: ClassVar[type[Any]]
    """The class of an attempt's record."""
    twin_wait_ms: int
    """How long it waits for what others fill, at most."""

    def __init__(self, limits: WorkerLimits, cache: BlockCache, leases: LeaseTable, twins: Twins | None = None) -> None:
        self.attempts: dict[AttemptKey, AttemptT] = {}
        """What goes on here, and what has ended and whose blocks may still be written."""
        self.past = PastAttempts(limits.times.worker.retain_answer_ms)
        self.draining = False
        self.starting = False
        """Its engine is: nothing can be computed yet."""
        self.num_unfit = 0
        """Events of hand-overs that did not agree with what this worker was asked for."""
        self._limits = limits
        self._cache = cache
        self._leases = leases
        self._twins = twins or Twins(cache)
        self._twins.watch(self.attempts)
        self._queue: deque[AttemptT] = deque()
        self._turns = TenantTurns()
        """Of the queue's tenants, in blocks."""
        self._by_handoff: dict[HandoffId, AttemptT] = {}

    @property
    def state(self) -> WorkerState:
        """What the worker says of itself: all of its roles hear of the same."""
        return "draining" if self.draining else "starting" if self.starting else "ready"

    @property
    def num_queued(self) -> int:
        """Attempts that wait for room."""
        return sum(attempt.stage == "queued" for attempt in self._queue)

    @property
    def num_waiting_for_twin(self) -> int:
        """Attempts that wait for what another one fills."""
        return sum(attempt.stage == "waiting_for_twin" for attempt in self._queue)

    def wanted_by(self) -> dict[AttemptKey, GatewayId]:
        """Return the attempts that go on here, and whose they are."""
        return {key: attempt.request.gateway_id for key, attempt in self.attempts.items() if not attempt.has_ended}

    def answer_of(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an attempt has sent so far; None: it is not known here (any more)."""
        attempt = self.attempts.get(key)
        return attempt.answer if attempt is not None else self.past.answer(key)

    def rules(self) -> RuleTable:
        """Return what both roles do with which event."""
        return {
            StepResult: self._stepped,
            SequenceRemoved: self._removed,
            SequenceFailed: self._failed,
            EngineDied: self._engine_died,
            EngineBack: self._engine_back,
            ReadEnded: self._read_ended,
            CancelRequest: self._cancelled,
            AttemptUnwanted: self._unwanted,
            WorkerLeft: self._worker_left,
            DrainBegun: self._drain_begun,
            DrainOver: self._drain_over,
            Fenced: self._fenced,
            TimePassed: self._time_passed,
        }

    def _agreeing(self, rule: Rule[HandoffT]) -> Rule[HandoffT]:
        """Return a rule for the events of hand-overs that are of the request, the attempt and the two workers that the
        gateway has named; others are counted. Of a hand-over that is not known here nothing can be said."""

        def checked(event: HandoffT, now_ms: int) -> list[Action]:
            attempt = self._by_handoff.get(event.handoff_id)
            if attempt is not None:
                ours = handoff_fields(attempt.request, self._limits.worker_id)
                theirs = (event.request_id, event.attempt, event.source_worker, event.target_worker)
                if theirs != (ours["request_id"], ours["attempt"], ours["source_worker"], ours["target_worker"]):
                    self.num_unfit += 1
                    return []
            return rule(event, now_ms)

        return checked

    def _time_passed(self, _: TimePassed, now_ms: int) -> list[Action]:
        """Return what the time makes necessary."""
        self.past.forget_old(now_ms)
        running = [attempt for attempt in self.attempts.values() if attempt.replica_offer is not None]
        copies = [action for attempt in running for action in self._offer_copies(attempt, now_ms)]
        return self._on_time(now_ms) + copies

    # What a role decides for itself.

    @abstractmethod
    def hears(self) -> tuple[HeardSubject, ...]:
        """Return which messages are this role's events, beside those that every worker hears."""

    @abstractmethod
    def _on_time(self, now_ms: int) -> list[Action]:
        """Enforce deadlines, repeat what may have been lost."""

    @abstractmethod
    def admit(self, now_ms: int) -> list[Action]:
        """Begin what is queued while there are blocks: tenants in turn, of each what came first."""

    @abstractmethod
    def _read_on(self, attempt: AttemptT, event: ReadEnded, now_ms: int) -> list[Action]:
        """A read of an attempt that goes on has ended: go on with the next source, or compute."""

    @abstractmethod
    def _computed(self, attempt: AttemptT, sampled: SampledToken, ended_ns: int, now_ms: int) -> list[Action]:
        """The engine has computed all of an attempt that it was given, up to this token. `ended_ns`: when its last step
        ended."""

    @abstractmethod
    def _worker_left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """Do without a reader or a source."""

    @abstractmethod
    def _end(self, attempt: AttemptT, reason: str, now_ms: int) -> list[Action]:
        """End an attempt early. Its blocks are free once neither a read nor the engine can write them."""

    # Taking and ending, the same for all.

    def _take(self, event: AttemptAsked, now_ms: int) -> AttemptT | SendReply:
        """Return the attempt that this message has begun, now or before, or the refusal."""
        request, limits = event.request, self._limits
        if (refused := self.past.refuse(request)) is not None:
            return SendReply(refused)
        known = self.attempts.get((request.request_id, request.attempt))
        if known is not None and known.request.other_end == request.other_end:
            return known
        prompt = read_prompt(request.prompt)
        full = self._is_full(request.tenant)
        refused = check_request(request, prompt, limits, now_ms, state=self.state, full=full)
        if refused is not None:
            return SendReply(refused)
        handoff_id = request.other_end and request.other_end.handoff_id
        if known is not None or handoff_id in self._by_handoff:
            return SendReply(refuse(request, RefusalReason.INVALID, "this hand-over is another request's"))
        hasher = BlockHasher(limits.block_size, model_fingerprint=limits.fingerprint, tenant=request.tenant)
        hasher.extend(prompt, len(prompt))
        attempt: AttemptT = self.record(request, prompt, hasher, event.times, event.traceparent)
        self.attempts[attempt.key] = attempt
        self._queue.append(attempt)
        if handoff_id is not None:
            self._by_handoff[handoff_id] = attempt
        return attempt

    def _accepted(self, attempt: AttemptT) -> SendReply:
        request, times = attempt.request, attempt.times
        accepted = AttemptAccepted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self._limits.worker_id,
            accepted_ns=times.accepted_ns + times.ahead_ns,
        )
        return SendReply(accepted)

    def _is_full(self, tenant: str) -> bool:
        """Say whether the queue has no place for one more of this tenant. In a full one there is up to as much again
        for those that have less than their equal shares of it."""
        most = self._limits.max_queued
        if len(self._queue) < most:
            return False
        waiting = Counter(attempt.request.tenant for attempt in self._queue)
        share = most // len(waiting.keys() | {tenant})
        return waiting[tenant] >= share or len(self._queue) >= 2 * most

    def _stepped(self, result: StepResult, now_ms: int) -> list[Action]:
        """Send on what an engine step gave. Sequences of other cores are passed over."""
        actions: list[Action] = []
        for sequence, _ in result.computed:
            if (attempt := self.attempts.get((sequence.request_id, sequence.attempt))) is not None:
                attempt.times.stepped(result.started_ns, result.ended_ns)
        for sampled in result.sampled:
            attempt = self.attempts.get((sampled.sequence.request_id, sampled.sequence.attempt))
            if attempt is None:
                continue
            attempt.times.sampled(result.ended_ns)
            if sampled.local_end:
                actions += self._offer_copies(attempt, now_ms, ended=True)
            if not attempt.has_ended:
                actions.append(self._emit_token(attempt, sampled))
                actions += self._computed(attempt, sampled, result.ended_ns, now_ms) if sampled.local_end else []
            elif sampled.local_end:  # it ended before it could be withdrawn
                actions += self._forget(attempt, now_ms)
        for sequence, _ in result.computed:
            attempt = self.attempts.get((sequence.request_id, sequence.attempt))
            if attempt is not None and attempt.replica_offer is not None:
                actions += self._offer_copies(attempt, now_ms)
        return actions

    def _read_ended(self, event: ReadEnded, now_ms: int) -> list[Action]:
        """A read writes no more: go on with its attempt. Reads of other cores are passed over."""
        attempt = self.attempts.get(event.read.key)
        if attempt is None or attempt.read is not event.read:
            return []
        attempt.read = None
        return self._read_on(attempt, event, now_ms)

    def _removed(self, event: SequenceRemoved, now_ms: int) -> list[Action]:
        """The engine has let go of an attempt that was withdrawn."""
        attempt = self.attempts.get(event.key)
        if attempt is None:
            return []
        copies = self._offer_copies(attempt, now_ms, ended=True)
        if not attempt.moving or attempt.has_ended:
            return copies + self._forget(attempt, now_ms)
        attempt.outcome = attempt.moving
        moved = [*copies, self._give_away(attempt, attempt.moving, now_ms), *self._engine_lost(attempt)]
        return moved + self._given_away(attempt, now_ms)

    def _failed(self, event: SequenceFailed, now_ms: int) -> list[Action]:
        """The engine cannot compute an attempt."""
        attempt = self.attempts.get(event.key)
        if attempt is None:
            return []
        attempt.outcome = attempt.outcome or event.reason
        told = [] if attempt.has_ended else [self._emit_failure(attempt, event.code, event.reason)]
        return told + self._engine_lost(attempt) + self._forget(attempt, now_ms)

    def _engine_died(self, event: EngineDied, now_ms: int) -> list[Action]:
        """Let all that owes tokens go on elsewhere. What was stored before stays, and is lent."""
        self.starting = True
        self._queue.clear()
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            if not (attempt.owes_tokens or attempt.key in event.had):
                continue
            if not attempt.has_ended:
                code, in_step = AttemptFailure.ENGINE_DIED, attempt.key in event.in_step
                actions.append(self._tell_held(attempt, code, event.reason, now_ms, in_step=in_step))
            if attempt.key not in event.had:  # a read may still write its blocks
                actions += self._end(attempt, event.reason, now_ms)
                continue
            attempt.outcome = attempt.outcome or event.reason
            actions += [*self._offer_copies(attempt, now_ms, ended=True), *self._engine_lost(attempt)]
            actions += self._forget(attempt, now_ms)
        return actions

    def _engine_back(self, _: EngineBack, now_ms: int) -> list[Action]:
        self.starting = False
        return []

    def _given_away(self, attempt: AttemptT, now_ms: int) -> list[Action]:
        """The engine has let go of an attempt that goes on elsewhere. Nothing new is begun by a worker that drains, so
        that what is cached stays until it is read."""
        return self._forget(attempt, now_ms)

    def _engine_lost(self, attempt: AttemptT) -> list[Action]:
        """The engine has dropped an attempt: end what others hold of it."""
        return []

    def _cancelled(self, event: CancelRequest, now_ms: int) -> list[Action]:
        """The gateway has ended an attempt."""
        return self._cancel((event.request_id, event.attempt), event.end, event.reason, now_ms)

    def _unwanted(self, event: AttemptUnwanted, now_ms: int) -> list[Action]:
        """The gateway does not know an attempt any more."""
        return self._cancel(event.key, AttemptEnd.CANCELLED, "nobody wants it any more", now_ms)

    def _cancel(self, key: AttemptKey, end: AttemptEnd, reason: str, now_ms: int) -> list[Action]:
        self.past.remember(key)
        attempt = self.attempts.get(key)
        if attempt is None or attempt.has_ended:
            return []
        attempt.end = end
        return self._end(attempt, reason, now_ms)

    def _drain_begun(self, event: DrainBegun, now_ms: int) -> list[Action]:
        """Let everything go on elsewhere that owes tokens, unless it is all but done."""
        self.draining = True
        owing = [attempt for attempt in self.attempts.values() if attempt.owes_tokens and not self._soon_ends(attempt)]
        if event.finishes:
            owing = list(self._queue)
        self._queue.clear()
        detail = "the worker is draining"
        return [action for attempt in owing for action in self._move(attempt, detail, now_ms)]

    def _soon_ends(self, attempt: AttemptT) -> bool:
        """Say whether an attempt is so near its end here that it is finished even by a worker that drains."""
        return False

    def _move(self, attempt: AttemptT, detail: str, now_ms: int) -> list[Action]:
        """Let an attempt that owes tokens go on elsewhere: at once, or, where the engine has it, once it has let go of
        it and all that it has computed can be read."""
        if attempt.stage == "computing":
            attempt.moving = detail
            return [Withdraw(attempt.key)]
        return [self._give_away(attempt, detail, now_ms), *self._end(attempt, detail, now_ms)]

    def _drain_over(self, event: DrainOver, now_ms: int) -> list[Action]:
        """Fail what owes tokens. Finished prefixes stay for their readers."""
        self._queue.clear()
        owing = [attempt for attempt in self.attempts.values() if attempt.owes_tokens]
        detail = "the worker is draining and may wait no longer"
        actions: list[Action] = []
        for attempt in owing:
            actions += [self._give_away(attempt, detail, now_ms), *self._end(attempt, detail, now_ms)]
        return actions

    def _give_away(self, attempt: AttemptT, detail: str, now_ms: int) -> Emit:
        """Return the action that tells the gateway to go on elsewhere."""
        makes_room = attempt.moving and not self.draining
        code = AttemptFailure.MADE_ROOM if makes_room else AttemptFailure.DRAINING
        return self._tell_held(attempt, code, detail, now_ms)

    def _tell_held(
        self, attempt: AttemptT, code: AttemptFailure, detail: str, now_ms: int, *, in_step: bool = False
    ) -> Emit:
        """Return the action that tells the gateway why an attempt has failed, and what of it can be read here."""
        if attempt.num_stored_blocks:
            self._leases.expect(attempt.request.request_id, now_ms + self._limits.times.worker.readers_come_ms)
        return self._emit_failure(attempt, code, detail, attempt.num_stored_blocks, in_step=in_step)

    def _fenced(self, event: Fenced, now_ms: int) -> list[Action]:
        """Others take this worker for dead: end all, and tell no gateway."""
        self._queue.clear()
        self.past.forget_answers()
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            attempt.answer, attempt.replica_offer = SentAnswer(), None
            actions += self._end(attempt, event.reason, now_ms)
        return actions

    def _fail(self, attempt: AttemptT, code: AttemptFailure, detail: str, now_ms: int) -> list[Action]:
        return [self._emit_failure(attempt, code, detail), *self._end(attempt, detail, now_ms)]

    def _forget(self, attempt: AttemptT, now_ms: int) -> list[Action]:
        """Drop an attempt, and give its blocks back."""
        self._give_back(attempt)
        if attempt in self._queue:
            self._queue.remove(attempt)
        del self.attempts[attempt.key]
        if (other := attempt.request.other_end) is not None:
            self._by_handoff.pop(other.handoff_id, None)
        self.past.ended(attempt.key, attempt.answer, now_ms)
        return [AttemptEnded(attempt)]

    def _give_back(self, attempt: AttemptT) -> None:
        if attempt.tables:
            self._cache.free(attempt.tables)
            attempt.tables = ()

    # Words.

    def _emit(self, attempt: AttemptT, tokens: RequestTokens) -> Emit:
        """Return the action that sends this to the attempt's gateway, and keep it for a gateway that misses it."""
        attempt.answer.extend(tokens)
        return Emit(attempt.request.gateway_id, tokens)

    def _emit_token(self, attempt: AttemptT, sampled: SampledToken) -> Emit:
        """Return the action that sends a token; with the first one goes where its prompt's KV came from."""
        assert attempt.kv is not None, "it has blocks"
        report: TransferReport | None = None
        if attempt.answer.report is None:
            report = attempt.kv.report(
                num_reused_tokens=sampled.sequence.num_reused_tokens,
                is_prefill=attempt.hands_over,
                first_token=attempt.times.first_token(),
            )
        tokens = RequestTokens(
            request_id=attempt.request.request_id,
            attempt=attempt.request.attempt,
            index=sampled.index,
            tokens=pack_tokens([sampled.token_id]),
            logprobs=None if sampled.logprob is None else pack_logprobs([sampled.logprob]),
            prompt_logprobs=(
                pack_logprobs(sampled.sequence.prompt_logprobs)
                if sampled.index == 0 and sampled.sequence.wants_prompt_logprobs
                else None
            ),
            finish_reason=sampled.finish_reason,
            report=report,
        )
        return self._emit(attempt, tokens)

    def _emit_failure(
        self, attempt: AttemptT, code: AttemptFailure, detail: str, held_blocks: int = 0, *, in_step: bool = False
    ) -> Emit:
        """Return the action that tells the gateway that this attempt has failed here."""
        retryable = code not in (AttemptFailure.DEADLINE, AttemptFailure.GRAMMAR)
        failure = RequestFailure(
            code=code, detail=detail, retryable=retryable, in_step=in_step, held_blocks=held_blocks
        )
        request = attempt.request
        return self._emit(
            attempt, RequestTokens(request_id=request.request_id, attempt=request.attempt, index=0, failure=failure)
        )

    def _offer_copies(self, attempt: AttemptT, now_ms: int, *, ended: bool = False) -> list[Action]:
        """Offer its replica the blocks that have filled up, where that is due. `ended`: no more will."""
        offer = attempt.replica_offer
        if offer is None:
            return []
        if ended:
            attempt.replica_offer = None
        messages = offer.due(attempt.num_stored_blocks, now_ms, ended=ended)
        to, trace = offer.replica, attempt.traceparent
        return [Publish(subjects.REPLICATE, (to, message.source), message, trace) for message in messages]

    # Blocks, reads, the engine.

    def _next_queued(self, now_ms: int, may_begin: Callable[[AttemptT], bool] = lambda _: True) -> AttemptT | None:
        """Return whose turn it is of those in the queue that may begin and do not wait for a twin."""
        first: AttemptT | None = None
        for attempt in self._in_turn():  # those behind the first are looked at to say what they wait for
            if not may_begin(attempt):
                continue
            is_waiting = attempt.stage == "waiting_for_twin" or first is None
            if is_waiting and not self._waits(attempt, now_ms) and first is None:
                first = attempt
        return first

    def _in_turn(self) -> Iterator[AttemptT]:
        """Iterate over the queue: those of the tenant whose turn it is in front."""
        lines: dict[str, list[AttemptT]] = {}
        for attempt in self._queue:
            lines.setdefault(attempt.request.tenant, []).append(attempt)
        for tenant in self._turns.order(lines):
            yield from lines[tenant]

    def _begun(self, attempt: AttemptT) -> None:
        """An attempt has its blocks, and waits no more."""
        self._queue.remove(attempt)
        self._turns.gave(attempt.request.tenant, self._num_blocks(attempt))

    def _waits(self, attempt: AttemptT, now_ms: int) -> bool:
        """Say whether others fill the next blocks of this prompt, so that it is not to begin yet. One whose logarithms
        are wanted is computed whole."""
        wait = attempt.wait
        may_wait = wait is None or now_ms < wait.until_ms
        if may_wait and wait is not None and wait.twin is not None and self._twins.fills(wait.twin):
            return True
        twin = self._twins.find(attempt) if may_wait and not attempt.owes_prompt_logprobs else None
        if twin is None:
            if wait is not None and wait.twin is not None:
                wait.twin, wait.ended_ms = None, now_ms
            attempt.stage = "queued"
            return False
        request_id = twin.attempt.request.request_id
        if wait is None:
            left_ms = attempt.request.deadline_ms - now_ms
            until_ms = now_ms + min(self.twin_wait_ms, left_ms // TWIN_WAIT_SHARE)
            attempt.wait = TwinWait(twin, request_id, now_ms, until_ms)
        else:
            wait.twin, wait.request_id = twin, request_id
        attempt.stage = "waiting_for_twin"
        return True

    def _num_blocks(self, attempt: AttemptT) -> int:
        """Return how many blocks an attempt needs here."""
        return num_blocks_for(attempt.num_kv_tokens, self._limits.block_size)

    def _allocate(self, attempt: AttemptT, *, max_cached_tokens: int | None = None) -> bool:
        """Give an attempt its blocks and what is cached of its prompt, at most so much. False: there is no room now."""
        most = len(attempt.prompt) - 1 if max_cached_tokens is None else max_cached_tokens
        allocation = self._cache.admit(
            attempt.hasher.hashes, attempt.num_kv_tokens, most, tenant=attempt.request.tenant
        )
        if allocation is None:
            return False
        attempt.tables = allocation.tables
        attempt.kv = PromptKV(
            num_prompt_tokens=len(attempt.prompt),
            block_size=self._limits.block_size,
            num_cached_tokens=allocation.num_cached_tokens,
            keeps_parts=not self._cache.layout.is_windowed,
        )
        return True

    def _read_next(self, attempt: AttemptT) -> StartRead | None:
        """Begin to read the next piece that somebody is said to hold; None: the rest is to be computed."""
        assert attempt.kv is not None
        if self.draining:
            attempt.kv.sources.clear()
        piece = attempt.kv.next_piece(self._limits.worker_id)
        if piece is None:
            return None
        hashes: list[BlockHash] = attempt.hasher.hashes[piece.first_block : piece.first_block + piece.num_blocks]
        request = attempt.request
        lease = WantedLease(piece.first_block, tuple(hashes), request.deadline_ms, request.tenant, request.proof)
        first_token = piece.first_block * self._limits.block_size
        attempt.stage = "fetching"
        attempt.read = KVRead(attempt.key, piece.source, lease, attempt.tables, first_token, attempt.traceparent)
        return StartRead(attempt.read)

    def _submit(self, attempt: AttemptT, token_ids: list[int], lease: Grant | None = None) -> Submit:
        """Let the engine compute what is not in place. Tokens that were answered before count as the answer's."""
        request, limits = attempt.request, self._limits
        if request.replica not in (None, limits.worker_id) and not self._cache.layout.is_windowed:
            attempt.replica_offer = ReplicaOffer(
                request, attempt.hasher, request.replica, limits.worker_id, limits.fingerprint, limits.times.worker
            )
        assert attempt.kv is not None, "it has blocks"
        attempt.stage = "computing"
        self._cache.is_computed_from(attempt.tables, attempt.kv.num_present_tokens // limits.block_size)
        sequence = Sequence(
            request_id=request.request_id,
            attempt=request.attempt,
            token_ids=token_ids,
            num_prompt_tokens=len(attempt.prompt) - request.num_answered_tokens,
            sampling=request.sampling,
            tables=attempt.tables,
            num_computed_tokens=attempt.kv.num_present_tokens,
            stop_token_ids=limits.stop_token_ids(request.sampling),
            max_local_tokens=1 if attempt.hands_over else None,
            tenant=request.tenant,
            wants_prompt_logprobs=attempt.owes_prompt_logprobs and attempt.kv.num_present_tokens == 0,
        )
        times = attempt.times
        times.num_prompt_tokens, times.decodes = sequence.num_prompt_tokens, sequence.max_local_tokens is None
        # An answer that goes on after a hand-over has its prompt's KV, and its last token to compute.
        is_handed_over = attempt.part == "decode" and sequence.index > 0 and sequence.num_uncomputed_tokens == 1
        times.computes_prompt = not is_handed_over
        return Submit(sequence, attempt, lease)

    def _stop(self, attempt: AttemptT) -> StopRead | Withdraw | None:
        """End an attempt; return what stops whoever may still write its blocks. None: nobody may."""
        stage, attempt.stage = attempt.stage, "ending"
        if attempt.read is not None:
            return StopRead(attempt.read)
        return Withdraw(attempt.key) if stage == "computing" else None
