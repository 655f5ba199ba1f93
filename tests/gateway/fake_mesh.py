"""A scheduler and workers that answer on the bus with scripted tokens, and misbehave on demand."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas import subjects
from schemas.block import pack_tokens, unpack_tokens
from schemas.ids import WorkerId
from schemas.logprobs import Logprobs, TokenLogprob, pack_logprobs, unpack_logprobs
from schemas.request import (
    AskProgress,
    AskWanted,
    AttemptAccepted,
    AttemptFailure,
    CancelRequest,
    Placement,
    PlaceRequest,
    Progress,
    RefusalReason,
    Refused,
    RequestFailure,
    RequestTokens,
    Reuse,
    RunAttempt,
    SourceTokens,
    TokensEmitted,
    TransferReport,
    Wanted,
)
from schemas.worker import BlockCounts, DescribeFleet, FleetDescribed, LeftReason, WorkerInfo, WorkerLeft, WorkerLoad
from services.bus.base import Bus, BusClosedError
from services.bus.typed import Received, TypedBus

PREFILL_WORKERS = ("p1", "p2")
DECODE_WORKERS = ("d1", "d2")


@dataclass
class Conduct:
    """What a worker does wrong."""

    refuses: RefusalReason | None = None
    fails_at: int | None = None
    """Sends a failure instead of the token of this index."""
    code: AttemptFailure = AttemptFailure.WORKER_FAILED
    retryable: bool = True
    hangs_at: int | None = None
    """Says nothing from this index on."""
    drops: tuple[int, ...] = ()
    """The messages with tokens of these indexes are lost on the bus; it knows them when asked."""
    forgets: bool = False
    """Knows nothing of what it has taken when asked."""
    is_gone: bool = False
    """Serves no questions any more."""
    shift: int = 0
    """Added to every token from index 1 on: wrong tokens."""


@dataclass
class FakeMesh:
    """`answers(prompt)` gives the tokens, the last of which ends the answer."""

    connection: Bus
    fingerprint: str
    answers: Callable[[list[int]], list[int]]
    split: bool = True
    ready: bool = True
    serves_scheduler: bool = True
    refusal: RefusalReason | None = None
    retry_after_ms: int = 0
    conduct: dict[str, Conduct] = field(default_factory=dict)
    places: list[PlaceRequest] = field(default_factory=list)
    place_traces: list[str] = field(default_factory=list)
    runs: list[RunAttempt] = field(default_factory=list)
    run_traces: list[str] = field(default_factory=list)
    reserves: list[RunAttempt] = field(default_factory=list)
    cancels: list[CancelRequest] = field(default_factory=list)
    questions: list[AskProgress] = field(default_factory=list)
    known: dict[tuple[str, str, int], list[RequestTokens]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    """Tokens from index 1 on wait for it."""
    place_gate: asyncio.Event = field(default_factory=asyncio.Event)
    """The scheduler's answers wait for it."""

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self.gate.set()
        self.place_gate.set()
        self.tasks = tasks
        self.bus = TypedBus(self.connection, "fake")
        if self.serves_scheduler:
            await self.bus.serve(tasks, subjects.PLACE, (), self._place)
            await self.bus.serve(tasks, subjects.FLEET, (), self._describe)
        for worker in (*PREFILL_WORKERS, *DECODE_WORKERS):
            await self.bus.serve(tasks, subjects.RUN, (worker,), self._runner(worker))
            if not self.conduct.get(worker, Conduct()).is_gone:
                await self.bus.serve(tasks, subjects.PROGRESS, (worker,), self._prober(worker))
        await self.bus.listen(tasks, subjects.CANCEL, ("*",), self._hear_cancel)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(condition)

    async def lose(self, worker: str) -> None:
        left = WorkerLeft(worker_id=WorkerId(worker), incarnation="1", reason=LeftReason.SILENT)
        await self.bus.publish(subjects.LEFT, (worker,), left)

    async def emit(self, gateway_id: str, worker: str, *shares: RequestTokens) -> None:
        message = TokensEmitted(worker_id=WorkerId(worker), requests=shares)
        await self.bus.publish(subjects.TOKENS, (message.worker_id, gateway_id), message)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _hear_cancel(self, received: Received[CancelRequest]) -> None:
        self.cancels.append(received.message)
        self.tasks.create_task(self._notify())

    async def _place(self, received: Received[PlaceRequest]) -> Placement | Refused:
        request = received.message
        self.places.append(request)
        self.place_traces.append(received.traceparent)
        await self._notify()
        await self.place_gate.wait()
        free = [w for w in PREFILL_WORKERS if w not in request.excluded_workers]
        decoders = [w for w in DECODE_WORKERS if w not in request.excluded_workers]
        if self.refusal or not free or not decoders:
            return self._refuse(request, self.refusal or RefusalReason.NO_WORKER, self.retry_after_ms)
        return Placement(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            prefill_worker=WorkerId(free[0]),
            decode_worker=WorkerId(decoders[0]) if self.split else None,
            reuse=Reuse.NOTHING_HELD,
        )

    async def _describe(self, received: Received[DescribeFleet]) -> FleetDescribed:
        info = WorkerInfo(
            worker_id=WorkerId("p1"), incarnation="1", role="prefill", model="demo", fingerprint=self.fingerprint,
            num_blocks=1, block_size=16, context_length=1,
        )  # fmt: skip
        load = WorkerLoad(
            worker=info, state="ready", blocks=BlockCounts(total=1, free=1, running=0, leased=0),
            num_running=0, num_queued=0, num_uncomputed_tokens=0,
        )  # fmt: skip
        return FleetDescribed(policy="fake", ready=self.ready, workers=(load,))

    async def ask_wanted(self, gateway_id: str, question: AskWanted) -> Wanted:
        return await self.bus.ask(subjects.WANTED, (gateway_id,), question, 5.0)

    def _prober(self, worker: str):
        async def progress(received: Received[AskProgress]) -> Progress:
            question = received.message
            self.questions.append(question)
            await self._notify()
            known = self.known.get((worker, question.request_id, question.attempt))
            if self.conduct.get(worker, Conduct()).forgets:
                known = None
            return Progress(
                request_id=question.request_id, attempt=question.attempt, deadline_ms=question.deadline_ms,
                worker_id=WorkerId(worker), known=known is not None, tokens=_from(known or [], question.index),
            )  # fmt: skip

        return progress

    def _runner(self, worker: str):
        async def run(received: Received[RunAttempt]) -> AttemptAccepted | Refused:
            message = received.message
            if message.upstream is None:
                self.runs.append(message)
                self.run_traces.append(received.traceparent)
            else:
                self.reserves.append(message)
            await self._notify()
            conduct = self.conduct.get(worker, Conduct())
            if conduct.refuses:
                return self._refuse(message, conduct.refuses, 1_500)
            first = message.num_answered_tokens + (message.upstream is not None)
            last = first + 1 if message.downstream else message.sampling.max_tokens
            self._take(worker, message, first, last)
            return AttemptAccepted(
                request_id=message.request_id, attempt=message.attempt, deadline_ms=message.deadline_ms,
                worker_id=WorkerId(worker),
            )  # fmt: skip

        return run

    def _take(self, worker: str, message: RunAttempt, start: int, end: int) -> None:
        self.known[worker, message.request_id, message.attempt] = []
        self.tasks.create_task(self._generate(worker, message, start, end))

    async def _generate(self, worker: str, message: RunAttempt, start: int, end: int) -> None:
        conduct = self.conduct.get(worker, Conduct())
        num_answered = message.num_answered_tokens
        num_prompt = len(message.prompt) // 4 - num_answered
        prompt = unpack_tokens(message.prompt)
        answer = self.answers(prompt[:num_prompt])
        assert prompt[num_prompt:] == answer[:num_answered]
        limit = min(len(answer), message.sampling.max_tokens)
        if start > num_answered:
            source = SourceTokens(worker_id=WorkerId("p1"), num_tokens=num_prompt)
            report = TransferReport(transferred_tokens=num_prompt, transferred_from=(source,), carrier="shm")
        else:
            report = TransferReport(cached_tokens=1, recomputed_tokens=num_prompt - 1, is_prefill=True)
        for index in range(start, min(limit, end)):
            if index > num_answered:
                await self.gate.wait()
            if conduct.hangs_at is not None and index >= conduct.hangs_at:
                return
            if conduct.fails_at == index:
                failure = RequestFailure(code=conduct.code, detail="it broke", retryable=conduct.retryable)
                await self._share(worker, message, RequestTokens(
                    request_id=message.request_id, attempt=message.attempt, index=index, failure=failure,
                ))  # fmt: skip
                return
            reason = None
            if index == limit - 1:
                reason = "stop" if limit == len(answer) else "length"
            token = answer[index] + (conduct.shift if index else 0)
            await self._share(worker, message, RequestTokens(
                request_id=message.request_id, attempt=message.attempt, index=index, tokens=pack_tokens([token]),
                finish_reason=reason, report=report if index == start else None,
                **_logprobs_of(message, prompt[:num_prompt], token, index),
            ))  # fmt: skip

    async def _share(self, worker: str, message: RunAttempt, share: RequestTokens) -> None:
        self.known[worker, message.request_id, message.attempt].append(share)
        if share.index in self.conduct.get(worker, Conduct()).drops:
            return
        with contextlib.suppress(BusClosedError):  # the test is over
            await self.emit(message.gateway_id, worker, share)

    def _refuse(self, message: PlaceRequest | RunAttempt, reason: RefusalReason, after_ms: int):
        return Refused(
            request_id=message.request_id, attempt=message.attempt, deadline_ms=message.deadline_ms, reason=reason,
            detail=f"{reason} for a test", retry_after_ms=after_ms,
        )  # fmt: skip


def logprob_of(token: int, num_top: int) -> TokenLogprob:
    """What the fake workers say of a token: exact in float32."""
    return TokenLogprob(-(token % 8) / 8, tuple((other, -other / 16) for other in range(num_top)))


def _logprobs_of(message: RunAttempt, prompt: list[int], token: int, index: int) -> dict[str, Logprobs]:
    sampling, found = message.sampling, dict[str, Logprobs]()
    if sampling.logprobs is not None:
        found["logprobs"] = pack_logprobs([logprob_of(token, sampling.logprobs)])
    if sampling.prompt_logprobs is not None and index == 0:
        found["prompt_logprobs"] = pack_logprobs([logprob_of(other, sampling.prompt_logprobs) for other in prompt[1:]])
    return found


def _from(shares: list[RequestTokens], index: int) -> RequestTokens | None:
    """Return what a worker has said from `index` on, in one share."""
    later = [share for share in shares if share.index >= index]
    if not later:
        return None
    first, last = later[0], later[-1]
    tokens = [token for share in later for token in unpack_tokens(share.tokens)]
    return RequestTokens(
        request_id=first.request_id, attempt=first.attempt, index=first.index, tokens=pack_tokens(tokens),
        finish_reason=last.finish_reason, failure=last.failure, prompt_logprobs=first.prompt_logprobs,
        logprobs=pack_logprobs([one for share in later if share.logprobs for one in unpack_logprobs(share.logprobs)]),
    )  # fmt: skip
