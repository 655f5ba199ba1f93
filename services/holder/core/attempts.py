"""The attempts of one worker: their one owner, and what is done the same way with each. Pure.

What happens to an attempt in which stage is decided by the rules of `services/worker/core.py`; these change its record
by the methods here.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import num_blocks_for
from schemas import subjects
from schemas.block import BlockHasher, join_hashes, pack_tokens
from schemas.handoff import HandoffAborted
from schemas.ids import BlockHash, GatewayId, HandoffId
from schemas.kv import LeaseEnd, RequestLease
from schemas.logprobs import pack_logprobs
from schemas.observe import RunStage
from schemas.request import (
    AttemptEnd,
    AttemptFailure,
    RefusalReason,
    Refused,
    RequestFailure,
    RequestTokens,
    RunAttempt,
    TransferReport,
    refuse,
)
from schemas.worker import WorkerState
from services.engine.messages import SampledToken, SubmitSequence
from services.engine.turns import TenantTurns
from services.holder.core.actions import (
    Action,
    AttemptEnded,
    CloseLease,
    Emit,
    Publish,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.holder.core.attempt import Attempt, DuplicateWait, KVRead, SentAnswer
from services.holder.core.checks import WorkerLimits, check_request, read_prompt
from services.holder.core.content import AttemptKey, PromptKV
from services.holder.core.events import AttemptAsked
from services.holder.core.inflight import InFlightDuplicates
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.messages import handoff_fields, publish_event
from services.holder.core.replica_offer import ReplicaOffer
from services.holder.limits import DUPLICATE_WAIT_SHARE, MAX_PAST_ATTEMPTS

_LEASE_ENDS = {
    AttemptEnd.COMPLETE: LeaseEnd.UNNEEDED,
    AttemptEnd.CANCELLED: LeaseEnd.CANCELLED,
    AttemptEnd.DEADLINE: LeaseEnd.DEADLINE,
    AttemptEnd.FAILED: LeaseEnd.CANCELLED,
    AttemptEnd.OTHER: LeaseEnd.CANCELLED,
}
"""What becomes of the lease of an attempt that ends early."""


class Line:
    """Attempts that wait for blocks: tenants in turn, of each what came first."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._waiting: deque[Attempt] = deque()
        self._turns = TenantTurns()
        """Of its tenants, in blocks."""

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._waiting)

    def is_full(self, tenant: str) -> bool:
        """Return whether there is no place for one more of this tenant. In a full line there is up to as much again for
        those that have less than their equal shares of it."""
        most = self._max_queued
        if len(self._waiting) < most:
            return False
        waiting = Counter(attempt.request.tenant for attempt in self._waiting)
        share = most // len(waiting.keys() | {tenant})
        return waiting[tenant] >= share or len(self._waiting) >= 2 * most

    def queue(self, attempt: Attempt) -> None:
        """Add an attempt at the end."""
        self._waiting.append(attempt)

    def unqueue(self, attempt: Attempt) -> None:
        """Take an attempt out, if it is in line."""
        if attempt in self._waiting:
            self._waiting.remove(attempt)

    def let_begin(self, attempt: Attempt, num_blocks: int) -> None:
        """Take out an attempt that has got so many blocks."""
        self._waiting.remove(attempt)
        self._turns.gave(attempt.request.tenant, num_blocks)

    def in_turn(self) -> Iterator[Attempt]:
        """Iterate over all: those of the tenant whose turn it is in front."""
        of_tenant: dict[str, list[Attempt]] = {}
        for attempt in self._waiting:
            of_tenant.setdefault(attempt.request.tenant, []).append(attempt)
        for tenant in self._turns.order(of_tenant):
            yield from of_tenant[tenant]


class Attempts:
    """Owns the attempts of one worker; shares its blocks and leases with the worker's other cores."""

    def __init__(
        self, limits: WorkerLimits, cache: BlockCache, leases: LeaseTable, *, wait_for_duplicates: bool = True
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.leases = leases
        self.records: dict[AttemptKey, Attempt] = {}
        """What goes on here, and what has ended and whose blocks may still be written."""
        self.of_engine: dict[int, Attempt] = {}
        """By number: what was submitted of them."""
        self._num_submitted = 0
        self.past = PastAttempts(limits.times.worker.retain_answer_ms)
        self.to_compute = Line(limits.max_queued)
        """Prompts that wait for blocks."""
        self.to_receive = Line(limits.max_queued)
        """The same of attempts whose prompts others compute."""
        self.preempted: list[Attempt] = []
        """They go on elsewhere, and their blocks are given back once somebody has come for what is here of them."""
        self.early_reservations: dict[HandoffId, int] = {}
        """When each hand-over that is not known here was first seen."""
        self.draining = False
        self.starting = False
        """The engine is: nothing can be computed yet."""
        self.num_unfit = 0
        """Events of hand-overs that did not agree with what this worker was asked for."""
        self.num_late = 0
        """Events that mean nothing (any more) to the attempt that they are about."""
        self._duplicates = InFlightDuplicates(cache, self.records, wait_for_duplicates)
        self._by_handoff: dict[HandoffId, Attempt] = {}

    # What others ask of them.

    @property
    def state(self) -> WorkerState:
        """What the worker reports of itself."""
        return WorkerState.DRAINING if self.draining else WorkerState.STARTING if self.starting else WorkerState.READY

    @property
    def num_queued(self) -> int:
        """Attempts that wait for room."""
        return sum(attempt.stage is RunStage.QUEUED for attempt in self.records.values())

    @property
    def num_waiting_for_duplicate(self) -> int:
        """Attempts that wait for what another one fills."""
        return sum(attempt.stage is RunStage.WAITING for attempt in self.records.values())

    def wanted_by(self) -> dict[AttemptKey, GatewayId]:
        """Return the attempts that go on here, and whose they are."""
        return {key: attempt.request.gateway_id for key, attempt in self.records.items() if not attempt.has_ended}

    def of_handoff(self, handoff_id: HandoffId) -> Attempt | None:
        """Return the attempt that is handed over under this id."""
        return self._by_handoff.get(handoff_id)

    def answer_of(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an attempt has sent so far; None: it is not known here (any more)."""
        attempt = self.records.get(key)
        return attempt.answer if attempt is not None else self.past.answer(key)

    def is_computing(self, block_hash: BlockHash, place: int, tenant: str) -> bool:
        """Return whether the engine is computing this block, the `place`-th of a sequence of this tenant. Whoever reads
        it may wait for it: who computes waits for nobody."""
        return any(
            attempt.stage is RunStage.COMPUTING
            and attempt.num_stored_blocks <= place < len(attempt.hasher.hashes)
            and attempt.hasher.hashes[place] == block_hash
            and attempt.request.tenant == tenant
            for attempt in self.records.values()
        )

    # Taking and ending.

    def take(self, event: AttemptAsked, now_ms: int) -> Attempt | Refused:
        """Return the attempt that this message has begun, now or before, or the refusal."""
        request, limits = event.request, self.limits
        # An attempt that is over does not begin again: a message may come twice, or after its cancel.
        if (refused := self.past.refuse(request)) is not None:
            return refused
        known, other = self.records.get((request.request_id, request.attempt)), request.other_end
        # The same order has come again: return the attempt that runs. The same key with other ends is refused below.
        if known is not None and (known.request.upstream, known.request.downstream) == (
            request.upstream,
            request.downstream,
        ):
            return known
        # Check the request; then its key and its hand-over must be free: later events find the attempt by either.
        prompt, line = read_prompt(request.prompt), self._line_of(request)
        full = line.is_full(request.tenant)
        refused = check_request(request, prompt, limits, now_ms, state=self.state, full=full)
        if refused is not None:
            return refused
        if known is not None or (other is not None and other.handoff_id in self._by_handoff):
            return refuse(request, RefusalReason.INVALID, "this hand-over is another request's")
        # Hash the prompt's full blocks for this tenant, register the attempt, and let it wait in line for blocks.
        hasher = BlockHasher(limits.block_size, model_fingerprint=limits.fingerprint, tenant=request.tenant)
        hasher.extend(prompt, len(prompt))
        attempt = Attempt(request, prompt, hasher, event.times, event.traceparent)
        self.records[attempt.key] = attempt
        line.queue(attempt)
        if other is not None:
            self._by_handoff[other.handoff_id] = attempt
        return attempt

    def end_attempt(
        self,
        attempt: Attempt,
        reason: str,
        now_ms: int,
        *,
        lease_end: LeaseEnd | None = None,
        notifies_other_end: bool = True,
    ) -> list[Action]:
        """End an attempt early. Its lease ends at once; its blocks are free once neither a read nor the engine can
        write them."""
        if attempt.has_ended:
            return []
        # The lease has references of its own to the blocks, so it ends now, whoever may still write them.
        attempt.outcome, actions = reason, list[Action]()
        if attempt.downstream is not None:
            lease_end = lease_end or _LEASE_ENDS[attempt.end]
            actions += self.close_lease(attempt, lease_end, reason, notifies_other_end=notifies_other_end)
        # Whoever may still write its blocks is stopped first.
        stage = attempt.stage
        attempt.enter(RunStage.ENDING)
        if attempt.read is not None:
            return [*actions, StopRead(attempt.read)]
        if stage is RunStage.COMPUTING:
            return [*actions, Withdraw(attempt.key)]
        # Nobody writes its blocks: they are given back now, and a source learns that its KV is not wanted.
        if attempt.upstream is not None:
            actions.append(self.abort(attempt, reason))  # with a read, its end does so (`ended_read_ended`)
        return actions + self.forget_attempt(attempt, now_ms)

    def fail(self, attempt: Attempt, code: AttemptFailure, detail: str, now_ms: int) -> list[Action]:
        """Report to the gateway that an attempt has failed here, and end it."""
        return [self.emit_failure(attempt, code, detail), *self.end_attempt(attempt, detail, now_ms)]

    def forget_attempt(self, attempt: Attempt, now_ms: int) -> list[Action]:
        """Drop an attempt, and give its blocks back."""
        self.give_back(attempt)
        self._line_of(attempt.request).unqueue(attempt)
        del self.records[attempt.key]
        self.of_engine.pop(attempt.number, None)
        if (other := attempt.request.other_end) is not None:
            self._by_handoff.pop(other.handoff_id, None)
        self.past.ended(attempt.key, attempt.answer, now_ms)
        return [AttemptEnded(attempt)]

    def give_back(self, attempt: Attempt) -> None:
        """Drop an attempt's own references to its blocks."""
        if attempt.tables:
            self.cache.free(attempt.tables)
            attempt.tables = ()

    def close_lease(
        self, attempt: Attempt, end: LeaseEnd, detail: str = "", *, notifies_other_end: bool = False
    ) -> list[Action]:
        """End the lease under which an attempt is handed over, if it has one."""
        if attempt.downstream is None:
            return []
        if attempt.lease is None:
            return [self.abort(attempt, detail)] if notifies_other_end else []
        lease = self.leases.end(attempt.lease.lease_id, end, detail)
        return [] if lease is None else self.lease_gone(attempt, lease, notifies_other_end=notifies_other_end)

    def lease_gone(self, attempt: Attempt, lease: Grant, *, notifies_other_end: bool) -> list[Action]:
        """Give back the blocks of a hand-over's lease that has ended."""
        assert attempt.downstream is not None
        self.cache.free(lease.tables)
        attempt.downstream.lease = None
        actions: list[Action] = [CloseLease(lease)]
        return [*actions, self.abort(attempt, lease.outcome)] if notifies_other_end else actions

    def abort(self, attempt: Attempt, reason: str) -> Publish:
        """Return the action that notifies the other end that this hand-over is over."""
        end = attempt.end if attempt.upstream is not None else AttemptEnd.FAILED
        aborted = HandoffAborted(**handoff_fields(attempt.request, self.limits.worker_id), reason=reason, end=end)
        return publish_event(subjects.ABORTED, aborted, attempt.traceparent)

    # Going on elsewhere.

    def move(self, attempt: Attempt, detail: str, now_ms: int) -> list[Action]:
        """Let an attempt that owes tokens go on elsewhere: at once, or, where the engine has it, once it has let go of
        it and all that it has computed can be read."""
        if attempt.stage is RunStage.COMPUTING:
            attempt.moving = detail
            return [Withdraw(attempt.key)]
        return [self.migrate(attempt, detail, now_ms), *self.end_attempt(attempt, detail, now_ms)]

    def migrate(self, attempt: Attempt, detail: str, now_ms: int) -> Emit:
        """Return the action that asks the gateway to go on elsewhere."""
        preempted = attempt.moving and not self.draining
        code = AttemptFailure.PREEMPTED if preempted else AttemptFailure.DRAINING
        return self.report_held(attempt, code, detail, now_ms)

    def report_held(
        self, attempt: Attempt, code: AttemptFailure, detail: str, now_ms: int, *, in_step: bool = False
    ) -> Emit:
        """Return the action that reports to the gateway why an attempt has failed, and what of it can be read here."""
        if attempt.num_stored_blocks:
            self.leases.expect(attempt.request.request_id, now_ms + self.limits.times.worker.readers_come_ms)
        return self.emit_failure(attempt, code, detail, attempt.num_stored_blocks, in_step=in_step)

    # Words for the gateway and the replica.

    def emit_token(self, attempt: Attempt, sampled: SampledToken) -> Emit:
        """Return the action that sends a token; with the first one goes where its prompt's KV came from."""
        assert attempt.kv is not None, "it has blocks"
        report: TransferReport | None = None
        if attempt.answer.report is None:
            report = attempt.kv.report(
                num_reused_tokens=sampled.num_reused_tokens,
                is_prefill=attempt.downstream is not None,
                first_token=attempt.times.first_token(),
            )
        tokens = RequestTokens(
            request_id=attempt.request.request_id,
            attempt=attempt.request.attempt,
            index=sampled.index,
            tokens=pack_tokens([sampled.token_id]),
            logprobs=None if sampled.logprob is None else pack_logprobs([sampled.logprob]),
            prompt_logprobs=None if sampled.prompt_logprobs is None else pack_logprobs(sampled.prompt_logprobs),
            finish_reason=sampled.finish_reason,
            report=report,
        )
        return self._emit(attempt, tokens)

    def emit_failure(
        self, attempt: Attempt, code: AttemptFailure, detail: str, held_blocks: int = 0, *, in_step: bool = False
    ) -> Emit:
        """Return the action that reports to the gateway that this attempt has failed here."""
        retryable = code not in (AttemptFailure.DEADLINE, AttemptFailure.GRAMMAR)
        failure = RequestFailure(
            code=code, detail=detail, retryable=retryable, in_step=in_step, held_blocks=held_blocks
        )
        request = attempt.request
        return self._emit(
            attempt, RequestTokens(request_id=request.request_id, attempt=request.attempt, index=0, failure=failure)
        )

    def _emit(self, attempt: Attempt, tokens: RequestTokens) -> Emit:
        """Return the action that sends this to the attempt's gateway, and keep it for a gateway that misses it."""
        attempt.answer.extend(tokens)
        return Emit(attempt.request.gateway_id, tokens)

    def offer_copies(self, attempt: Attempt, now_ms: int, *, ended: bool = False) -> list[Action]:
        """Offer its replica the blocks that have filled up, where that is due. `ended`: no more will."""
        offer = attempt.replica_offer
        if offer is None:
            return []
        if ended:
            attempt.replica_offer = None
        messages = offer.due(attempt.num_stored_blocks, now_ms, ended=ended)
        to, trace = offer.replica, attempt.traceparent
        return [Publish(subjects.REPLICATE, (to, message.source), message, trace) for message in messages]

    # Lines and blocks.

    def _line_of(self, request: RunAttempt) -> Line:
        return self.to_compute if request.upstream is None else self.to_receive

    def next_of(self, line: Line, now_ms: int, may_begin: Callable[[Attempt], bool] = lambda _: True) -> Attempt | None:
        """Return whose turn it is of those in line that may begin and do not wait for a duplicate."""
        first: Attempt | None = None
        for attempt in line.in_turn():  # those behind the first are looked at to note what they wait for
            if not may_begin(attempt):
                continue
            is_waiting = attempt.stage is RunStage.WAITING or first is None
            if is_waiting and not self._waits(attempt, now_ms) and first is None:
                first = attempt
        return first

    def _waits(self, attempt: Attempt, now_ms: int) -> bool:
        """Return whether others fill the next blocks of this prompt, so that it is not to begin yet. One whose logprobs
        are wanted is computed whole."""
        # Go on waiting while the duplicate still fills the blocks and the time for it is not over.
        wait = attempt.wait
        may_wait = wait is None or now_ms < wait.until_ms
        if may_wait and wait is not None and wait.duplicate is not None and self._duplicates.fills(wait.duplicate):
            return True
        # Else look for another duplicate; without one the wait ends now, and the attempt may begin.
        duplicate = self._duplicates.find(attempt) if may_wait and not attempt.owes_prompt_logprobs else None
        if duplicate is None:
            if wait is not None and wait.duplicate is not None:
                wait.duplicate, wait.ended_ms = None, now_ms
            attempt.enter(RunStage.QUEUED)
            return False
        # Only the first wait sets the time limit: later duplicates do not extend it, so a chain of waits is bounded.
        request_id = duplicate.attempt.request.request_id
        if wait is None:
            times, left_ms = self.limits.times, attempt.request.deadline_ms - now_ms
            is_computed = attempt.upstream is None
            most_ms = (
                times.prefill.duplicate_computes_within_ms if is_computed else times.decode.duplicate_lands_within_ms
            )
            until_ms = now_ms + min(most_ms, left_ms // DUPLICATE_WAIT_SHARE)
            attempt.wait = DuplicateWait(duplicate, request_id, now_ms, until_ms)
        else:
            wait.duplicate, wait.request_id = duplicate, request_id
        attempt.enter(RunStage.WAITING)
        return True

    def leave_line(self, attempt: Attempt) -> None:
        """An attempt has its blocks, and waits no more."""
        self._line_of(attempt.request).let_begin(attempt, self.blocks_needed(attempt))

    def blocks_needed(self, attempt: Attempt) -> int:
        """Return how many blocks an attempt needs here."""
        return num_blocks_for(attempt.num_kv_tokens, self.limits.block_size)

    def allocate(self, attempt: Attempt, *, max_cached_tokens: int | None = None) -> bool:
        """Give an attempt its blocks and what is cached of its prompt, at most so much. False: there is no room now."""
        most = attempt.num_prompt_tokens - 1 if max_cached_tokens is None else max_cached_tokens
        tenant = attempt.request.tenant
        allocation = self.cache.admit(attempt.hasher.hashes, attempt.num_kv_tokens, most, tenant=tenant)
        if allocation is None:
            return False
        attempt.tables = allocation.tables
        attempt.kv = PromptKV(
            num_prompt_tokens=attempt.num_prompt_tokens,
            block_size=self.limits.block_size,
            num_cached_tokens=allocation.num_cached_tokens,
            keeps_parts=not self.cache.layout.is_windowed,
        )
        return True

    # Reads and the engine.

    def read_next(self, attempt: Attempt) -> StartRead | None:
        """Begin to read the next piece that somebody is reported to hold; None: the rest is to be computed."""
        assert attempt.kv is not None
        if self.draining:
            attempt.kv.sources.clear()
        piece = attempt.kv.next_piece(self.limits.worker_id)
        if piece is None:
            return None
        request, limits = attempt.request, self.limits
        lease = RequestLease(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            reader=limits.worker_id,
            fingerprint=limits.fingerprint,
            first_block=piece.first_block,
            block_hashes=join_hashes(attempt.hasher.hashes[piece.first_block : piece.first_block + piece.num_blocks]),
            tenant=request.tenant,
            signature=request.signature,
        )
        first_token = piece.first_block * limits.block_size
        attempt.enter(RunStage.FETCHING)
        attempt.read = KVRead(attempt.key, piece.source, lease, attempt.tables, first_token, attempt.traceparent)
        return StartRead(attempt.read)

    def assemble(self, attempt: Attempt) -> list[Action]:
        """Read the next piece that somebody is reported to hold; with none left, compute. Of an attempt that decodes,
        the prompt's last token is always computed here, as it must be to sample token 0 again (the same one: it depends
        on prompt and seed only); where blocks are only whole of use, all of its block is."""
        if (start := self.read_next(attempt)) is not None:
            return [start]
        assert attempt.kv is not None
        if attempt.upstream is not None:
            attempt.kv.keep_at_most(self.cache.layout.usable(attempt.num_prompt_tokens - 1))
        return [self.submit(attempt)]

    def submit(self, attempt: Attempt) -> Submit:
        """Let the engine compute what is not in place. Tokens that were answered before count as the answer's."""
        request, limits = attempt.request, self.limits
        # Prepare the offers to the replica. Blocks of windowed layers are not copied: they are of no use by themselves.
        if request.replica not in (None, limits.worker_id) and not self.cache.layout.is_windowed:
            attempt.replica_offer = ReplicaOffer(
                request, attempt.hasher, request.replica, limits.worker_id, limits.fingerprint, limits.times.worker
            )
        # The engine will write the blocks that are not present: drop their old tags, and number the sequence for it.
        assert attempt.kv is not None, "it has blocks"
        attempt.enter(RunStage.COMPUTING)
        self.cache.is_computed_from(attempt.tables, attempt.kv.num_present_tokens // limits.block_size)
        self._num_submitted += 1
        attempt.number = self._num_submitted
        self.of_engine[attempt.number] = attempt
        # A prompt that is handed over stops after its first token. Prompt logprobs need the whole prompt computed here.
        num_prompt_tokens = attempt.num_prompt_tokens - request.num_answered_tokens
        sequence = SubmitSequence(
            number=attempt.number,
            request_id=request.request_id,
            tokens=pack_tokens(attempt.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=request.sampling,
            tables=attempt.tables,
            num_computed_tokens=attempt.kv.num_present_tokens,
            stop_token_ids=tuple(limits.stop_token_ids(request.sampling)),
            max_local_tokens=1 if attempt.downstream is not None else None,
            tenant=request.tenant,
            wants_prompt_logprobs=attempt.owes_prompt_logprobs and attempt.kv.num_present_tokens == 0,
        )
        # The spans record a computed prompt and a decoded answer only where this worker does that part.
        times = attempt.times
        times.num_prompt_tokens, times.decodes = num_prompt_tokens, attempt.downstream is None
        # An answer that goes on after a hand-over has its prompt's KV, and its last token to compute.
        num_tokens = len(attempt.token_ids)
        has_last_left = num_prompt_tokens < num_tokens == attempt.kv.num_present_tokens + 1
        times.computes_prompt = not (attempt.upstream is not None and has_last_left)
        return Submit(sequence, attempt, attempt.lease)


class PastAttempts:
    """The attempts that have ended here, or were cancelled before they came: a cancel may overtake what it cancels, and
    a message may come again after all is over. What those that ended have sent is kept for `retain_ms`. Bounded."""

    def __init__(self, retain_ms: int, max_attempts: int = MAX_PAST_ATTEMPTS) -> None:
        self._max_attempts = max_attempts
        self._retain_ms = retain_ms
        self._keys: dict[AttemptKey, None] = {}
        self._answers: dict[AttemptKey, tuple[SentAnswer, int]] = {}
        """With the time of the attempt's end; the one that ended first in front."""

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._keys

    def remember(self, key: AttemptKey) -> None:
        """This attempt is not to begin (again)."""
        self._keys[key] = None
        if len(self._keys) > self._max_attempts:
            del self._keys[next(iter(self._keys))]

    def ended(self, key: AttemptKey, answer: SentAnswer, now_ms: int) -> None:
        """This attempt has ended, and has sent this."""
        self.remember(key)
        if not answer.is_empty:
            self._answers[key] = (answer, now_ms)
        if len(self._answers) > self._max_attempts:
            del self._answers[next(iter(self._answers))]

    def answer(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an ended attempt has sent, if that is still known."""
        entry = self._answers.get(key)
        return entry[0] if entry else None

    def forget_old(self, now_ms: int) -> None:
        """Drop the answers whose time is over."""
        while self._answers:
            key, (_, ended_ms) = next(iter(self._answers.items()))
            if ended_ms + self._retain_ms > now_ms:
                return
            del self._answers[key]

    def forget_answers(self) -> None:
        """Drop all answers: their gateways have been notified that this worker is dead."""
        self._answers.clear()

    def refuse(self, request: RunAttempt) -> Refused | None:
        """Return the refusal of an attempt that is over."""
        if (request.request_id, request.attempt) not in self._keys:
            return None
        return refuse(request, RefusalReason.INVALID, "this attempt has ended here, or was cancelled before it came")
