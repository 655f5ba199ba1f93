"""One request's life, pure: events come in, actions go out. The shell in `requests.py` carries them out.

Tokens depend on the prompt, the seed and their index only, so a later attempt goes on where the answer stopped: what
the client has had becomes part of the attempt's prompt. Up to `max_attempts` attempts in a row may give the client
nothing. A token that comes again and differs ends the request with an error. An attempt that had workers and did not
finish there is always cancelled. After its one end (Finish, FailRequest or Abandon) a request ignores everything.

What was under way waits for workers and schedulers to come back. What nobody has begun is refused at once where there
is no room for it, so that the client can come back itself; a scheduler that does not answer has a few seconds.
"""

import enum
from collections.abc import Sequence

from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.logprobs import TokenLogprob
from schemas.request import (
    AttemptEnd,
    AttemptFailure,
    FinishReason,
    KVSource,
    OtherEnd,
    Placement,
    RefusalReason,
    RequestFailure,
    Reuse,
    TransferReport,
)
from services.config import MeshConfig
from services.gateway.limits import DEATHS_WITHIN_MS, DEFAULT_RETRY_AFTER_MS, MAX_DEATHS, MAX_TROUBLES
from services.gateway.request.events import (
    Abandon,
    Action,
    AskPlacement,
    AskWorker,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    FailRequest,
    Finish,
    GatewayStopping,
    PlaceEvent,
    PlaceGranted,
    PlaceRefused,
    PlaceUnanswered,
    ProgressAnswered,
    ProgressOutcome,
    SendAttempt,
    SendCancel,
    StopMatched,
    Submitted,
    TaskFailed,
    TokensReceived,
    WorkerAccepted,
    WorkerLost,
    WorkerReady,
    WorkerRefused,
    WorkerSilent,
)
from services.gateway.request.progress_watch import NEVER_MS, Watch
from services.presence import FailureDetector


class Phase(enum.StrEnum):
    """What a request is waiting for."""

    PLACING = "placing"
    """It waits for a scheduler's answer, or has not been submitted yet."""
    WAITING = "waiting"
    """It waits until it is time to ask for a placement again."""
    RUNNING = "running"
    """It waits for its workers' tokens."""
    ENDED = "ended"


class RequestCore:
    """The state of one request. `handle` and `tick` return what is to be done, in order.

    `max_tokens` 1 is never split: there is nothing to decode elsewhere. `must_split`: it fails where the worker that
    decodes has computed of the prompt what another one was to. `detector` knows when this gateway last received
    anything at all; it is shared by its requests, and only read here.
    """

    def __init__(
        self,
        request_id: RequestId,
        max_tokens: int,
        config: MeshConfig,
        detector: FailureDetector,
        *,
        must_split: bool = False,
    ) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.phase = Phase.PLACING
        self.attempt = 0
        self.prefill_worker: WorkerId | None = None
        self.decode_worker: WorkerId | None = None
        self.reuse: Reuse | None = None
        """What the placement of the first attempt that gave tokens has made of KV that others had."""
        self.report: TransferReport | None = None
        """Where the prompt's KV came from on the worker that decoded, in the first attempt that gave tokens."""
        self.prefill_report: TransferReport | None = None
        """The same of the prefill worker of a split request."""
        self.tokens: list[int] = []
        """What the client has. Survives attempts."""
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        """They have come, and go out with token 0."""
        self.num_answered = 0
        """So many of them are part of this attempt's prompt."""
        self.wake_ms = 0
        """`tick` has nothing to do before."""
        self._config = config
        self._times = config.times.gateway
        self._detector = detector
        self._must_split = must_split
        # What decides about further attempts survives each of them.
        self._excluded: list[WorkerId] = []
        self._moved_from: KVSource | None = None
        """Who has migrated an attempt, and what of its prompt lies there, until another attempt has got on."""
        self._troubles: list[str] = []
        self._num_vain = 0
        """Attempts in a row that gave the client nothing."""
        self._is_under_way = False
        """A worker has taken an attempt, or has sent tokens."""
        self._deaths: list[tuple[int, int]] = []
        """Times of engines' deaths in its steps, and the tokens that there were of it then."""
        self._num_untaken = 0
        """Attempts in a row that no worker has taken."""
        self._waiting_since_ms = 0
        """When a worker last had an attempt of it, or when it began to wait; 0: neither has happened."""
        self._asks_again = False
        """A worker became ready after the placement was asked for: a refusal may not know of it."""
        # The rest is the state of one attempt, which each attempt begins anew.
        self._begin_attempt()

    def __repr__(self) -> str:
        workers = f"{self.prefill_worker}→{self.decode_worker}"
        return f"<{self.request_id} attempt {self.attempt} {self.phase} {workers} {len(self.tokens)} tokens>"

    @property
    def last_trouble(self) -> str:
        """Why the last attempt that failed did."""
        return self._troubles[-1] if self._troubles else ""

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """Return what is to be done after an event. The first is Submitted, and comes once."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case Submitted():
                return [self._ask_placement()]
            case TokensReceived():
                return self._receive(event, now_ms) if self._concerns(event) else []
            case WorkerLost():
                return self._lose_worker(event, now_ms)
            case WorkerReady():
                self._asks_again = self.phase is Phase.PLACING
                if self.phase is Phase.WAITING:
                    self.wake_ms = now_ms
                return []
            # These events end the request in any phase, and cancel its attempt if one is running.
            case StopMatched():
                return self._end("a stop string was reached", Finish(FinishReason.STOP), AttemptEnd.COMPLETE)
            case DeadlinePassed():
                deadline = self._deadline("the request's deadline passed")
                return self._end("deadline", deadline, AttemptEnd.DEADLINE)
            case ClientGone():
                return self._end(event.reason, Abandon(event.reason))
            case GatewayStopping():
                stopping = FailRequest("draining", "this gateway is shutting down", 503, DEFAULT_RETRY_AFTER_MS)
                return self._end("gateway stopping", stopping)
            case TaskFailed():
                return self._end("the gateway failed", FailRequest("internal", event.reason, 500))
            # An answer counts only for the attempt that waits for it: answers to an earlier attempt may come late.
            case PlaceGranted() | PlaceRefused() | PlaceUnanswered():
                is_awaited = self.phase is Phase.PLACING and event.attempt == self.attempt
                return self._placing(event, now_ms) if is_awaited else []
            case _:
                is_ours = self.phase is Phase.RUNNING and event.attempt == self.attempt
                return self._running(event, now_ms) if is_ours else []

    def tick(self, now_ms: int) -> list[Action]:
        """Return what the time makes necessary: questions, another attempt, the end of a wait."""
        if now_ms < self.wake_ms:
            return []
        self.wake_ms = NEVER_MS
        if self.phase is Phase.WAITING:
            self.phase = Phase.PLACING
            return [self._ask_placement()]
        if self.phase is not Phase.RUNNING:
            return []
        seen = self._watch.look(self._needed(), now_ms)
        if seen.silent is not None:
            fail = FailRequest("worker_failed", f"{seen.silent} has been silent", 502)
            return self._retry(seen.silent, "a worker is silent", fail, now_ms)
        self.wake_ms = seen.next_ms
        return [AskWorker(self.attempt, worker_id, len(self.tokens)) for worker_id in seen.asked]

    def _placing(self, event: PlaceEvent, now_ms: int) -> list[Action]:
        match event:
            case PlaceGranted():
                return self._run(event.placement, now_ms)
            case PlaceRefused():
                message = self._with_troubles(event.detail or event.reason)
                fail = self._refusal(event.reason, message, event.retry_after_ms)
                # The last worker of a role may be starting again. A full mesh refuses new requests at once.
                if event.reason is RefusalReason.NO_WORKER or (self._is_under_way and event.reason in _PASSING):
                    return self._wait(event.retry_after_ms, fail, now_ms)
                return self._end("", fail)
            case PlaceUnanswered():
                message = self._with_troubles(f"no scheduler answers ({event.detail})")
                fail = FailRequest("no_scheduler", message, 503, DEFAULT_RETRY_AFTER_MS)
                return self._wait(self._times.pause_min_ms, fail, now_ms)

    def _wait(self, pause_ms: int, fail: FailRequest, now_ms: int) -> list[Action]:
        """Ask for a placement again in a while; fail where that has gone on for long enough."""
        self._waiting_since_ms = self._waiting_since_ms or now_ms
        gateway = self._config.gateway
        limit_ms = round(1000 * (gateway.resume_wait_s if self._is_under_way else gateway.place_wait_s))
        if self._detector.is_partitioned(now_ms):
            limit_ms += self._times.partitioned_wait_ms
        if now_ms - max(self._waiting_since_ms, self._detector.since_ms) >= limit_ms:
            return self._end("", fail)
        self.phase = Phase.WAITING
        pause_ms = min(max(pause_ms, self._times.pause_min_ms), self._times.pause_max_ms)
        self.wake_ms = now_ms if self._asks_again else now_ms + pause_ms
        return []

    def _running(
        self, event: WorkerRefused | WorkerAccepted | WorkerSilent | ProgressAnswered, now_ms: int
    ) -> list[Action]:
        worker_id = event.worker_id
        # Each answer may change when to ask a worker next: let the next tick look.
        self.wake_ms = 0
        match event:
            case WorkerAccepted():
                self._watch.seen(worker_id, now_ms)
                return []
            case ProgressAnswered():
                return self._progress(event, now_ms)
            case WorkerRefused():
                if not self._needs(worker_id):
                    return []
                refusal = self._refusal(event.reason, f"{worker_id}: {event.detail}", event.retry_after_ms)
                # Another attempt does not help a request that is too long, or too late.
                if event.reason in (RefusalReason.TOO_LONG, RefusalReason.DEADLINE):
                    return self._end(f"refused: {event.reason}", refusal)
                # `invalid` is also the reply to a message that comes a second time once its attempt is over.
                is_over = event.reason is RefusalReason.INVALID
                return self._retry(worker_id, f"refused: {event.reason}", refusal, now_ms, taken=is_over)
            case WorkerSilent():
                # A missing reply is no proof: tokens show that the attempt was taken, and where the reply may be lost
                # the worker is asked. Otherwise nobody has the attempt.
                if not self._needs(worker_id) or self._has_tokens_of(worker_id):
                    return []
                if event.may_have_taken:
                    self._watch.end_accept_wait(worker_id)
                    return []
                lost = FailRequest("worker_failed", f"{worker_id} did not answer: {event.detail}", 502)
                return self._retry(worker_id, "a worker did not answer", lost, now_ms, taken=False)

    def _progress(self, event: ProgressAnswered, now_ms: int) -> list[Action]:
        worker_id = event.worker_id
        self._watch.end_question(worker_id)
        if event.outcome is ProgressOutcome.KNOWN:
            self._watch.seen(worker_id, now_ms, is_waiting=event.is_waiting)
        if not self._needs(worker_id):
            return []
        if event.outcome is ProgressOutcome.UNKNOWN:
            fail = FailRequest("worker_failed", f"{worker_id} does not know the request any more", 502)
            return self._retry(worker_id, "a worker does not know it", fail, now_ms)
        if event.outcome is ProgressOutcome.UNSERVED and self._watch.is_dead(worker_id, now_ms):
            fail = FailRequest("worker_failed", f"{worker_id} is gone: nobody serves its requests", 502)
            return self._retry(worker_id, "a worker is gone", fail, now_ms)
        return []

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self.phase = Phase.PLACING
        self.wake_ms = NEVER_MS
        self.num_answered = len(self.tokens)
        self.prefill_worker = self.decode_worker = None
        self.moved_by: WorkerId | None = None
        """Who has given the attempt before away; None: it has ended otherwise, or this is the first."""
        if not self.tokens:
            self.report = self.prefill_report = None
        self._pending: dict[int, tuple[int, TokenLogprob | None]] = {}
        self.has_first_token = False
        """The attempt's first token is here, from whichever worker."""
        self._has_decode_tokens = False
        self._finish_reason: FinishReason | None = None
        self._num_final_tokens = 0
        self._watch = Watch(self._config, self._detector, (), 0)

    def _ask_placement(self) -> AskPlacement:
        self._asks_again = False
        return AskPlacement(self.attempt, tuple(self._excluded), self.num_answered, self._moved_from)

    def _run(self, placement: Placement, now_ms: int) -> list[Action]:
        self.phase = Phase.RUNNING
        prefill, answered = placement.prefill_worker, self.num_answered
        sources, replica = placement.sources, placement.replica
        self.prefill_worker = prefill
        if not answered:
            self.reuse = placement.reuse
        self.decode_worker = decode = placement.decode_worker if self.max_tokens - answered > 1 else None
        self._watch = Watch(self._config, self._detector, (prefill,) if decode is None else (prefill, decode), now_ms)
        self.wake_ms = 0
        if decode is None:
            return [SendAttempt(self.attempt, prefill, None, None, sources, answered, replica)]
        handoff_id = HandoffId(f"{self.request_id}-{self.attempt}")
        source, target = (OtherEnd(worker_id=each, handoff_id=handoff_id) for each in (prefill, decode))
        return [
            SendAttempt(self.attempt, prefill, None, target, sources, answered, replica),
            SendAttempt(self.attempt, decode, source, None, sources, answered, replica, placement.spare_blocks),
        ]

    def _concerns(self, event: TokensReceived) -> bool:
        """Only this attempt's own workers may speak."""
        return (
            event.attempt == self.attempt
            and self.phase is Phase.RUNNING
            and event.worker_id in (self.prefill_worker, self.decode_worker)
            and event.index >= 0
        )

    def _receive(self, event: TokensReceived, now_ms: int) -> list[Action]:
        self._watch.seen(event.worker_id, now_ms)
        # Keep reports of attempts that begin the answer: a resumed attempt's prompt has tokens of the answer in it.
        # Where a split is required, the decode worker must not have computed the prompt itself.
        if event.report is not None and self.num_answered == 0:
            if event.report.is_prefill:
                self.prefill_report = event.report
            else:
                self.report = event.report
                if self._must_split and event.report.recomputed_tokens:
                    message = f"{event.worker_id} computed {event.report.recomputed_tokens} tokens of the prompt itself"
                    return self._end("not split", FailRequest("not_split", message, 503, DEFAULT_RETRY_AFTER_MS))
        if event.failure is not None:
            return self._fail_worker(event.worker_id, event.failure, now_ms)
        if event.worker_id == self.decode_worker:
            self._has_decode_tokens = True
        # Messages come in any order, and again: keep what is new, and compare what is known, as attempts must agree.
        for index, token in enumerate(event.tokens, event.index):
            known = self.tokens[index] if index < len(self.tokens) else self._pending.get(index, (token, None))[0]
            if known != token:
                message = f"{event.worker_id} computed another token at index {index} than the one before it"
                return self._end("tokens differ", FailRequest("replay_mismatch", message, 500))
            if index == self.num_answered:
                self.has_first_token = True
            if len(self.tokens) <= index < self.max_tokens:
                self._pending[index] = (token, event.logprobs[index - event.index] if event.logprobs else None)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        # The end may come before tokens that precede it: note how many there are to be.
        if event.finish_reason is not None and self._finish_reason is None:
            self._finish_reason = event.finish_reason
            self._num_final_tokens = min(event.index + len(event.tokens), self.max_tokens)
        # Deliver what is in order. Where a token is missing before others or the end, the watch asks for it soon.
        actions = self._deliver()
        has_gap = bool(self._pending) or self._finish_reason is not None
        if self.phase is Phase.RUNNING and self._watch.set_gap(len(self.tokens) if has_gap else None, now_ms):
            self.wake_ms = 0
        return actions

    def _deliver(self) -> list[Action]:
        """Hand on what is next in order; end where the last token is among it."""
        start = len(self.tokens)
        limit = self.max_tokens if self._finish_reason is None else self._num_final_tokens
        logprobs: list[TokenLogprob] = []
        while len(self.tokens) < limit and (entry := self._pending.pop(len(self.tokens), None)) is not None:
            token, logprob = entry
            self.tokens.append(token)
            logprobs += () if logprob is None else (logprob,)
        actions: list[Action] = []
        if len(self.tokens) > start:
            prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
            actions.append(Deliver(start, tuple(self.tokens[start:]), tuple(logprobs), prompt_logprobs))
        if self._finish_reason is None or len(self.tokens) < self._num_final_tokens:
            return actions
        if len(self.tokens) > self._num_final_tokens:
            message = f"attempt {self.attempt} ended after {self._num_final_tokens} tokens, an earlier one went on"
            return self._end("answers differ", FailRequest("replay_mismatch", message, 500))
        if self.decode_worker is not None and not self._has_decode_tokens:
            actions.append(SendCancel(self.attempt, "finished on the prefill worker", AttemptEnd.COMPLETE))
        self.phase = Phase.ENDED
        return [*actions, Finish(self._finish_reason)]

    def _fail_worker(self, worker_id: WorkerId, failure: RequestFailure, now_ms: int) -> list[Action]:
        if not self._needs(worker_id):
            return []
        fail = FailRequest(failure.code, f"{worker_id}: {failure.detail}", _FAILURE_STATUS[failure.code])
        if fail.status == 504:
            fail = self._deadline(fail.message)
        if failure.in_step:
            had = len(self.tokens)
            recent = [each for each in self._deaths if now_ms - each[0] < DEATHS_WITHIN_MS or each[1] == had]
            self._deaths = [*recent, (now_ms, had)]
        if len(self._deaths) >= MAX_DEATHS:
            message = f"{MAX_DEATHS} engines died as they computed this request: {fail.message}"
            return self._end(failure.code, FailRequest(failure.code, message, 500))
        if failure.code in MIGRATED:
            held = KVSource(worker_id=worker_id, first_block=0, num_blocks=failure.held_blocks)
            return self._retry(worker_id, failure.code, fail, now_ms, taken=False, moved_from=held)
        if failure.code is AttemptFailure.ORPHANED:  # it was us who were away: its cache is as good as before
            return self._retry(worker_id, failure.code, fail, now_ms, taken=False, exclude=False)
        if failure.retryable or failure.code is AttemptFailure.OTHER:
            return self._retry(worker_id, failure.code, fail, now_ms)
        end = AttemptEnd.DEADLINE if failure.code is AttemptFailure.DEADLINE else AttemptEnd.CANCELLED
        return self._end(failure.code, fail, end)

    def _lose_worker(self, event: WorkerLost, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        if self._needs(event.worker_id):
            fail = FailRequest("worker_failed", f"{event.worker_id} has left: {event.reason}", 502)
            actions = self._retry(event.worker_id, "a worker has left", fail, now_ms, exclude=not event.is_back)
        elif event.worker_id in self._excluded:  # whoever comes back under this name has failed nobody
            self._excluded.remove(event.worker_id)
        return actions

    def _needed(self) -> Sequence[WorkerId]:
        """A split request's prefill worker may go once its token is here: without it the decode worker recomputes."""
        if self.phase is not Phase.RUNNING or self.prefill_worker is None:
            return ()
        if self.decode_worker is None:
            return (self.prefill_worker,)
        return (self.decode_worker,) if self.has_first_token else (self.decode_worker, self.prefill_worker)

    def _needs(self, worker_id: WorkerId) -> bool:
        return worker_id in self._needed()

    def _has_tokens_of(self, worker_id: WorkerId) -> bool:
        """Its tokens are proof enough that a worker has the request, even where its reply is lost."""
        return self._has_decode_tokens if worker_id == self.decode_worker else self.has_first_token

    def _retry(
        self,
        worker_id: WorkerId,
        reason: str,
        fail: FailRequest,
        now_ms: int,
        *,
        taken: bool = True,
        exclude: bool = True,
        moved_from: KVSource | None = None,
    ) -> list[Action]:
        """Give this attempt up and begin another, if possible without `worker_id`; fail where it was the last.

        Not `taken`: nobody has worked on it, or whoever has migrates it. Time bounds such attempts and no number
        does. `moved_from`: where what there is of it lies.
        """
        # Note what went wrong, and whether a worker has had the request: it may then wait longer for a placement.
        self._troubles = [*self._troubles[1 - MAX_TROUBLES :], f"attempt {self.attempt}: {fail.message}"]
        has_progressed = len(self.tokens) > self.num_answered
        if taken or has_progressed or moved_from is not None:  # a worker has had it
            self._is_under_way, self._waiting_since_ms = True, now_ms
        # Count attempts in a row: those that nobody took, for the pause below, and those in vain, for their limit.
        # Keep the place of migrated KV until an attempt has progressed.
        self._num_untaken = 0 if taken or has_progressed else self._num_untaken + 1
        if moved_from is not None or has_progressed:
            self._moved_from = moved_from if moved_from is not None and moved_from.num_blocks else None
        if has_progressed:
            self._num_vain = 0
        elif taken:
            self._num_vain += 1
        # End the request where it is complete already, or has no attempt left.
        if len(self.tokens) >= self.max_tokens:  # only its end has not been received
            return self._end(reason, Finish(FinishReason.LENGTH), AttemptEnd.COMPLETE)
        fail_all = FailRequest(fail.code, self._all_troubles(), fail.status, fail.retry_after_ms)
        if self._num_vain >= self._config.gateway.max_attempts:
            return self._end(reason, fail_all)
        # Make the cancel before the next attempt begins: it has the old attempt's number.
        cancel = SendCancel(self.attempt, reason)
        if worker_id in self._excluded:
            self._excluded.remove(worker_id)
        if exclude:
            self._excluded.append(worker_id)
        self._begin_attempt()
        self.moved_by = moved_from.worker_id if moved_from is not None else None
        # The first attempt that nobody took is retried at once, and each further one after a longer pause.
        if self._num_untaken > 1:
            return [cancel, *self._wait(self._times.pause_min_ms * self._num_untaken, fail_all, now_ms)]
        return [cancel, self._ask_placement()]

    def _end(
        self, reason: str, output: Finish | FailRequest | Abandon, end: AttemptEnd = AttemptEnd.CANCELLED
    ) -> list[Action]:
        """End the request, and cancel the attempt at the workers that have it."""
        cancels: list[Action] = [SendCancel(self.attempt, reason, end)] if self.phase is Phase.RUNNING else []
        self.phase = Phase.ENDED
        return [*cancels, output]

    def _refusal(self, reason: RefusalReason, message: str, retry_after_ms: int) -> FailRequest:
        match reason:
            case RefusalReason.TOO_LONG:
                return FailRequest("context_length_exceeded", message, 400)
            case RefusalReason.DEADLINE:
                return self._deadline(message)
            case RefusalReason.INVALID:
                return FailRequest("invalid", message, 500)
            case RefusalReason.OVERLOADED:
                return FailRequest("overloaded", message, 429, retry_after_ms or DEFAULT_RETRY_AFTER_MS)
            case _:
                return FailRequest(reason, message, 503, retry_after_ms or DEFAULT_RETRY_AFTER_MS)

    def _deadline(self, message: str) -> FailRequest:
        placing = "while it was being placed"
        where = {Phase.PLACING: placing, Phase.WAITING: placing, Phase.RUNNING: f"after {len(self.tokens)} tokens"}
        return FailRequest("deadline", f"{message} {where.get(self.phase, '')}".rstrip(), 504)

    def _with_troubles(self, message: str) -> str:
        return f"{message}; before that: {self._all_troubles()}" if self._troubles else message

    def _all_troubles(self) -> str:
        return "; ".join(self._troubles)


_PASSING = (RefusalReason.OVERLOADED, RefusalReason.DRAINING)
"""Refusals of a mesh that is full for a while: what is under way waits for their end."""
MIGRATED = (AttemptFailure.DRAINING, AttemptFailure.PREEMPTED, AttemptFailure.ENGINE_DIED)
"""Failures of workers that have done nothing wrong: what they have of the answer can be read there."""
_FAILURE_STATUS = {
    AttemptFailure.TRANSFER_FAILED: 502,
    AttemptFailure.WORKER_FAILED: 502,
    AttemptFailure.ENGINE_FAILED: 500,
    AttemptFailure.ENGINE_DIED: 503,
    AttemptFailure.DEADLINE: 504,
    AttemptFailure.DRAINING: 503,
    AttemptFailure.PREEMPTED: 503,
    AttemptFailure.ORPHANED: 503,
    AttemptFailure.GRAMMAR: 400,
    AttemptFailure.OTHER: 502,
}
"""HTTP's, for an answer that has not begun."""
