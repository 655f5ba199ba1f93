"""One request's life, pure: events come in, actions go out. The shell in `requests.py` carries them out.

A request makes up to `max_attempts` attempts. Tokens depend on the prompt, the seed and their index only, so a later
attempt replays the answer from index 0 and what the client already has is hidden; a replayed token that differs ends
the request with an error. An attempt that had workers and did not finish there is always cancelled. After its one end
(Finish, Fail or Abandon) a request ignores everything.
"""

import enum

from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.request import FinishReason, RefusalReason, RequestFailure, TransferReport
from services.gateway.events import (
    Abandon,
    Action,
    AskPlacement,
    AttemptEvent,
    ClientGone,
    DeadlinePassed,
    Deliver,
    Event,
    Fail,
    Finish,
    GatewayStopping,
    Placed,
    PlaceRefused,
    PlaceUnanswered,
    SendCancel,
    SendReserve,
    SendRun,
    StopMatched,
    TokensReceived,
    WorkerLost,
    WorkerRefused,
    WorkerSilent,
)

MAX_PLACE_TRIES = 3
"""How often one attempt asks for a placement: a scheduler that dies with the question in hand never answers it."""
DEFAULT_RETRY_AFTER_MS = 1_000


class Phase(enum.StrEnum):
    PLACING = "placing"
    RUNNING = "running"
    ENDED = "ended"


class RequestCore:
    """The state of one request. `max_tokens` 1 is never split: there is nothing to decode elsewhere."""

    def __init__(self, request_id: RequestId, max_tokens: int, max_attempts: int) -> None:
        self.request_id = request_id
        self.max_tokens = max_tokens
        self.max_attempts = max_attempts
        self.phase = Phase.PLACING
        self.attempt = 0
        self.prefill_worker: WorkerId | None = None
        self.decode_worker: WorkerId | None = None
        self.report: TransferReport | None = None
        """Where the prompt's KV came from on the worker that decodes."""
        self.prefill_report: TransferReport | None = None
        """The same of the prefill worker of a split request."""
        self.tokens: list[int] = []
        """What the client has. Survives attempts; all else below belongs to one attempt."""
        self._excluded: list[WorkerId] = []
        self._troubles: list[str] = []
        self._begin_attempt()

    def __repr__(self) -> str:
        workers = f"{self.prefill_worker}→{self.decode_worker}"
        return f"<{self.request_id} attempt {self.attempt} {self.phase} {workers} {len(self.tokens)} tokens>"

    def start(self) -> list[Action]:
        """Return the first actions. Call once, before any event."""
        return [AskPlacement(self.attempt, ())]

    def handle(self, event: Event) -> list[Action]:
        """Take in what has happened; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        match event:
            case TokensReceived():
                return self._receive(event) if self._concerns(event) else []
            case WorkerLost():
                return self._lose_worker(event)
            case StopMatched():
                return self._end("a stop string was reached", Finish("stop"))
            case DeadlinePassed():
                return self._end("deadline", self._deadline("the request's deadline passed"))
            case ClientGone():
                return self._end(event.reason, Abandon(event.reason))
            case GatewayStopping():
                stopping = Fail("draining", "this gateway is shutting down", 503, DEFAULT_RETRY_AFTER_MS)
                return self._end("gateway stopping", stopping)
            case _:
                if event.attempt != self.attempt:
                    return []
                return self._placing(event) if self.phase is Phase.PLACING else self._running(event)

    def _placing(self, event: AttemptEvent) -> list[Action]:
        match event:
            case Placed():
                return self._run(event)
            case PlaceRefused():
                return self._end("", self._refusal(event.reason, event.detail, event.retry_after_ms))
            case PlaceUnanswered():
                self._place_tries += 1
                if event.may_answer and self._place_tries < MAX_PLACE_TRIES:
                    return [AskPlacement(self.attempt, tuple(self._excluded))]
                message = self._with_troubles(f"no scheduler answers ({event.detail})")
                return self._end("", Fail("no_scheduler", message, 503, DEFAULT_RETRY_AFTER_MS))
            case _:
                return []

    def _running(self, event: AttemptEvent) -> list[Action]:
        match event:
            case WorkerRefused():
                if not self._needs(event.worker_id):
                    return []
                refusal = self._refusal(event.reason, f"{event.worker_id}: {event.detail}", event.retry_after_ms)
                if event.reason in ("too_long", "deadline", "invalid"):
                    return self._end(f"refused: {event.reason}", refusal)
                return self._retry(event.worker_id, f"refused: {event.reason}", refusal)
            case WorkerSilent():
                if not self._needs(event.worker_id) or self._is_heard(event.worker_id):
                    return []
                lost = Fail("worker_failed", f"{event.worker_id} did not answer: {event.detail}", 502)
                return self._retry(event.worker_id, "a worker did not answer", lost)
            case _:
                return []

    def _begin_attempt(self) -> None:
        self.attempt += 1
        self.phase = Phase.PLACING
        self.prefill_worker = self.decode_worker = None
        self.report = self.prefill_report = None
        self._place_tries = 0
        self._pending: dict[int, int] = {}
        self._has_first_token = False
        self._heard_decode = False
        self._finish_reason: FinishReason | None = None
        self._num_final_tokens = 0

    def _run(self, event: Placed) -> list[Action]:
        self.phase = Phase.RUNNING
        self.prefill_worker = event.prefill_worker
        self.decode_worker = event.decode_worker if self.max_tokens > 1 else None
        if self.decode_worker is None:
            return [SendRun(self.attempt, event.prefill_worker, None, None, event.sources)]
        handoff_id = HandoffId(f"{self.request_id}-{self.attempt}")
        return [
            SendRun(self.attempt, event.prefill_worker, self.decode_worker, handoff_id, event.sources),
            SendReserve(self.attempt, event.prefill_worker, self.decode_worker, handoff_id, event.sources),
        ]

    def _concerns(self, event: TokensReceived) -> bool:
        """Only this attempt's own workers may speak."""
        return (
            event.attempt == self.attempt
            and self.phase is Phase.RUNNING
            and event.worker_id in (self.prefill_worker, self.decode_worker)
            and event.index >= 0
        )

    def _receive(self, event: TokensReceived) -> list[Action]:
        if event.report is not None and event.report.is_prefill:
            self.prefill_report = event.report
        elif event.report is not None:
            self.report = event.report
        if event.failure is not None:
            return self._fail_worker(event.worker_id, event.failure)
        if event.worker_id == self.decode_worker:
            self._heard_decode = True
        for index, token in enumerate(event.tokens, event.index):
            known = self.tokens[index] if index < len(self.tokens) else self._pending.get(index, token)
            if known != token:
                message = f"{event.worker_id} computed another token at index {index} than the one before it"
                return self._end("tokens differ", Fail("replay_mismatch", message, 500))
            if index == 0:
                self._has_first_token = True
            if len(self.tokens) <= index < self.max_tokens:
                self._pending[index] = token
        if event.finish_reason is not None and self._finish_reason is None:
            self._finish_reason = event.finish_reason
            self._num_final_tokens = min(event.index + len(event.tokens), self.max_tokens)
        return self._deliver()

    def _deliver(self) -> list[Action]:
        """Hand on what is next in order; end where the last token is among it."""
        start = len(self.tokens)
        limit = self.max_tokens if self._finish_reason is None else self._num_final_tokens
        while len(self.tokens) < limit and (token := self._pending.pop(len(self.tokens), None)) is not None:
            self.tokens.append(token)
        actions: list[Action] = []
        if len(self.tokens) > start:
            actions.append(Deliver(start, tuple(self.tokens[start:])))
        if self._finish_reason is None or len(self.tokens) < self._num_final_tokens:
            return actions
        if len(self.tokens) > self._num_final_tokens:
            message = f"attempt {self.attempt} ended after {self._num_final_tokens} tokens, an earlier one went on"
            return self._end("answers differ", Fail("replay_mismatch", message, 500))
        if self.decode_worker is not None and not self._heard_decode:
            actions.append(SendCancel(self.attempt, "finished on the prefill worker"))
        self.phase = Phase.ENDED
        return [*actions, Finish(self._finish_reason)]

    def _fail_worker(self, worker_id: WorkerId, failure: RequestFailure) -> list[Action]:
        if not self._needs(worker_id):
            return []
        fail = Fail(failure.code, f"{worker_id}: {failure.detail}", _FAILURE_STATUS.get(failure.code, 500))
        if fail.status == 504:
            fail = self._deadline(fail.message)
        if failure.retryable:
            return self._retry(worker_id, failure.code, fail)
        return self._end(failure.code, fail)

    def _lose_worker(self, event: WorkerLost) -> list[Action]:
        if not self._needs(event.worker_id):
            return []
        fail = Fail("worker_failed", f"{event.worker_id} has left: {event.reason}", 502)
        return self._retry(event.worker_id, "a worker has left", fail)

    def _needs(self, worker_id: WorkerId) -> bool:
        """A split request's prefill worker may go once token 0 is here: without it the decode worker recomputes."""
        if self.phase is not Phase.RUNNING:
            return False
        if worker_id == self.prefill_worker and self.decode_worker is not None:
            return not self._has_first_token
        return worker_id in (self.prefill_worker, self.decode_worker)

    def _is_heard(self, worker_id: WorkerId) -> bool:
        """Its tokens are proof enough that a worker has the request, whatever became of its reply."""
        return self._heard_decode if worker_id == self.decode_worker else self._has_first_token

    def _retry(self, worker_id: WorkerId, reason: str, fail: Fail) -> list[Action]:
        """Give this attempt up and begin another without `worker_id`; fail where it was the last."""
        self._troubles.append(fail.message)
        if self.attempt >= self.max_attempts:
            return self._end(reason, Fail(fail.code, self._all_troubles(), fail.status, fail.retry_after_ms))
        cancel = SendCancel(self.attempt, reason)
        self._excluded.append(worker_id)
        self._begin_attempt()
        return [cancel, AskPlacement(self.attempt, tuple(self._excluded))]

    def _end(self, reason: str, output: Finish | Fail | Abandon) -> list[Action]:
        """End the request; workers that have the attempt are told to let go."""
        cancels: list[Action] = [SendCancel(self.attempt, reason)] if self.phase is Phase.RUNNING else []
        self.phase = Phase.ENDED
        return [*cancels, output]

    def _refusal(self, reason: RefusalReason, detail: str, retry_after_ms: int) -> Fail:
        message = self._with_troubles(detail or reason)
        match reason:
            case "too_long":
                return Fail("context_length_exceeded", message, 400)
            case "deadline":
                return self._deadline(message)
            case "invalid":
                return Fail("invalid", message, 500)
            case _:
                return Fail(reason, message, 503, retry_after_ms or DEFAULT_RETRY_AFTER_MS)

    def _deadline(self, message: str) -> Fail:
        where = {Phase.PLACING: "while it was being placed", Phase.RUNNING: f"after {len(self.tokens)} tokens"}
        return Fail("deadline", f"{message} {where.get(self.phase, '')}".rstrip(), 504)

    def _with_troubles(self, message: str) -> str:
        return f"{message}; before that: {self._all_troubles()}" if self._troubles else message

    def _all_troubles(self) -> str:
        return "; ".join(f"attempt {number}: {trouble}" for number, trouble in enumerate(self._troubles, 1))


_FAILURE_STATUS = {"transfer_failed": 502, "worker_failed": 502, "deadline": 504, "draining": 503}
