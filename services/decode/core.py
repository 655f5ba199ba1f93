"""What a decode worker decides. Pure: messages, reads, engine results and the time come in, actions go out.

A run waits for blocks, then for the offer, reads what it has not cached, and decodes. A read that fails keeps its
landed prefix; the rest is read from whoever else may hold it, or computed here as chunked prefill in the running batch:
bad KV costs time, never a token.
"""

from dataplane.blocks.layout import num_blocks_for
from schemas import subjects
from schemas.block import pack_tokens
from schemas.handoff import (
    BlocksReserved,
    FirstToken,
    HandoffAborted,
    HandoffState,
    KVLanded,
    KVOffered,
    KVStreaming,
    advance,
)
from schemas.ids import HandoffId
from schemas.request import KVSource, Refused, RequestTokens, ReservationQueued, ReserveBlocks, refuse
from schemas.worker import WorkerLeft
from services.decode.runs import DecodeRun
from services.engine.interface import SampledToken, StepResult
from services.worker.core.actions import (
    Action,
    AttemptKey,
    Emit,
    Publish,
    StartRead,
    StopFetch,
    StopRead,
    Submit,
    Withdraw,
)
from services.worker.core.attempts import RoleCore
from services.worker.core.content import ReadOutcome
from services.worker.core.limits import check_request, read_prompt
from services.worker.core.messages import emit_failure, handoff_fields, next_fetch, publish_event

RESERVED_AGAIN_MS = 500
"""How often the source is told again that there is room, until its offer comes: either word may be lost."""


class DecodeCore(RoleCore[DecodeRun]):
    """Owns the runs of one worker; shares its blocks with the worker's other cores."""

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that wait to be computed here: none, what is to be computed is with the engine."""
        return 0

    @property
    def num_unreceived_tokens(self) -> int:
        """Prompt tokens whose KV is not here yet."""
        waiting = [run for run in self._runs.values() if not run.computing and not run.ended]
        return sum(len(run.prompt) - (run.kv.num_present_tokens if run.kv else 0) for run in waiting)

    def reserve(
        self, request: ReserveBlocks, now_ms: int
    ) -> tuple[BlocksReserved | ReservationQueued | Refused, list[Action]]:
        """Make room, now or as soon as there are blocks, or say why not."""
        if (refused := self._past.refuse(request)) is not None:
            return refused, []
        run = self._repeated(request)
        if run is None:
            prompt = read_prompt(request.prompt)
            full = len(self._queue) >= self._limits.max_queued
            refused = check_request(request, prompt, self._limits, now_ms, draining=self.draining, full=full)
            if refused is not None:
                return refused, []
            run = DecodeRun(request, prompt, self._limits.content_of(request, prompt), taken_ms=now_ms)
            if run.key in self._runs or request.handoff_id in self._by_handoff:
                return refuse(request, "invalid", "this hand-over is another request's"), []
            self._runs[run.key] = self._by_handoff[request.handoff_id] = run
            self._queue.append(run)
        actions = self._admit()
        if run.state is not HandoffState.NEW:
            return self._reserved(run), actions
        queued = ReservationQueued(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self._limits.worker_id,
        )
        return queued, actions

    def offered(self, offer: KVOffered) -> list[Action]:
        """The source has begun: open the stream."""
        run = self._by_handoff.get(offer.handoff_id)
        if run is None:
            aborted = HandoffAborted(**handoff_fields(offer, self._limits.worker_id), reason="no such reservation")
            return [publish_event(subjects.ABORTED, aborted)]
        if run.state is not HandoffState.RESERVED:
            return []  # a repeated offer, or one for a hand-over that has ended
        if offer.fingerprint != self._limits.fingerprint or offer.num_tokens != len(run.prompt):
            return self._go_without(run, "the offered KV is of another model or prompt")
        assert run.kv is not None
        run.state = advance(run.state, HandoffState.OFFERED)
        run.offer, run.reading = offer, True
        return [StartRead(offer, run.tables, run.kv.num_present_tokens)]

    def read_started(self, handoff_id: HandoffId, carrier: str) -> list[Action]:
        """The first byte is here."""
        run = self._by_handoff.get(handoff_id)
        if run is None or run.state is not HandoffState.OFFERED:
            return []
        run.state = advance(run.state, HandoffState.STREAMING)
        streaming = KVStreaming(**handoff_fields(run.request, self._limits.worker_id), carrier=carrier)
        return [publish_event(subjects.STREAMING, streaming)]

    def read_landed(self, handoff_id: HandoffId, outcome: ReadOutcome, first: FirstToken) -> list[Action]:
        """All is here and verified: say so, and decode from token 1 on."""
        run = self._by_handoff[handoff_id]
        run.reading = False
        assert run.offer is not None and run.kv is not None
        actions: list[Action] = []
        if run.state is HandoffState.OFFERED:  # so short that nothing was said of its start
            actions += self.read_started(handoff_id, outcome.carrier)
        if run.state is HandoffState.STREAMING:
            run.state = advance(run.state, HandoffState.LANDED)
            landed = KVLanded(
                **handoff_fields(run.request, self._limits.worker_id),
                lease_id=run.offer.lease_id,
                carrier=outcome.carrier,
                num_tokens=outcome.num_landed_tokens,
                num_bytes=outcome.num_bytes,
            )
            actions.append(publish_event(subjects.LANDED, landed))
        if run.ended or first.finish_reason is not None:
            return actions + self._forget(run)
        run.kv.landed(run.request.prefill_worker, outcome)
        run.report = run.kv.report()
        return [*actions, self._submit(run, [*run.prompt, first.token_id], len(run.prompt))]

    def read_failed(self, handoff_id: HandoffId, outcome: ReadOutcome, reason: str) -> list[Action]:
        """The read has stopped and writes no more; get what is missing elsewhere."""
        run = self._by_handoff[handoff_id]
        run.reading = False
        if run.ended:
            return [self._publish_aborted(run, reason), *self._forget(run)]
        assert run.kv is not None
        run.kv.landed(run.request.prefill_worker, outcome)
        return self._go_without(run, reason)

    def fetched(self, key: AttemptKey, outcome: ReadOutcome, now_ms: int) -> list[Action]:
        """A fetch has ended and writes no more: go on with the next source, or compute the rest."""
        run = self._runs.get(key)
        if run is None or run.fetching_from is None:
            return []
        assert run.kv is not None
        source, run.fetching_from = run.fetching_from, None
        if run.ended:
            return self._forget(run)
        run.kv.landed(source, outcome)
        return self._assemble(run)

    def aborted(self, event: HandoffAborted) -> list[Action]:
        """The source will send no (more) KV."""
        run = self._by_handoff.get(event.handoff_id)
        return [] if run is None else self._lose_source(run, event.reason)

    def left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """A source is gone."""
        actions: list[Action] = []
        for run in list(self._runs.values()):
            if run.fetching_from == event.worker_id:
                actions.append(StopFetch(run.key))
            elif run.request.prefill_worker == event.worker_id:
                run.source_left = True
                actions += self._lose_source(run, "the prefill worker left")
        return actions

    def stepped(self, result: StepResult, now_ms: int) -> list[Action]:
        """Send on what an engine step gave. Sequences of other cores are passed over."""
        actions: list[Action] = []
        for sampled in result.sampled:
            run = self._runs.get((sampled.sequence.request_id, sampled.sequence.attempt))
            if run is None:
                continue
            if not run.ended:
                actions += self._sampled(run, sampled)
            elif sampled.local_end:  # it ended before it could be withdrawn
                actions += self._forget(run)
        return actions + self._admit()  # the step may have ended a run of the worker's other core

    def removed(self, key: AttemptKey, now_ms: int) -> list[Action]:
        """The engine has let go of a sequence that was withdrawn."""
        run = self._runs.get(key)
        return self._admit() if run is None else self._forget(run)

    def engine_failed(self, key: AttemptKey, reason: str, now_ms: int) -> list[Action]:
        """A step raised; the engine has dropped the sequence."""
        run = self._runs.get(key)
        if run is None:
            return []
        run.outcome = run.outcome or reason
        told: list[Action] = [] if run.ended else [emit_failure(run.request, "engine_failed", reason)]
        return told + self._forget(run)

    def tick(self, now_ms: int) -> list[Action]:
        """Enforce deadlines, and say again that there is room where no offer has come."""
        actions: list[Action] = []
        for run in [run for run in self._runs.values() if not run.ended]:
            if run.request.deadline_ms <= now_ms:
                waited_for = "decode" if run.computing else "its KV"
                actions += self._fail(run, "deadline", f"the deadline passed while waiting for {waited_for}", now_ms)
            elif run.state is HandoffState.RESERVED:
                if run.reserved_ms is not None and now_ms - run.reserved_ms >= RESERVED_AGAIN_MS:
                    actions.append(publish_event(subjects.RESERVED, self._reserved(run)))
                    run.reserved_ms = now_ms
                run.reserved_ms = now_ms if run.reserved_ms is None else run.reserved_ms
        return actions + self._admit()

    def _admit(self) -> list[Action]:
        """Reserve for queued runs, first come first served, while there are blocks."""
        actions: list[Action] = []
        while self._queue:
            run = self._queue[0]
            if not self._allocate(run):
                break
            self._queue.popleft()
            run.state = advance(run.state, HandoffState.RESERVED)
            actions.append(publish_event(subjects.RESERVED, self._reserved(run)))
            if run.lost_reason:
                actions += self._go_without(run, run.lost_reason)
        return actions

    def _reserved(self, run: DecodeRun) -> BlocksReserved:
        num_blocks = num_blocks_for(run.num_kv_tokens, self._limits.block_size)
        return BlocksReserved(**handoff_fields(run.request, self._limits.worker_id), num_blocks=num_blocks)

    def _go_without(self, run: DecodeRun, reason: str) -> list[Action]:
        """The hand-over brings no more. Whoever is said to hold a part of the prompt is asked, the prefill worker among
        them: what it has computed may be cached there."""
        assert run.kv is not None
        run.state = advance(run.state, HandoffState.ABORTED)
        source = run.request.prefill_worker
        if not run.source_left:
            num_blocks = num_blocks_for(len(run.prompt), self._limits.block_size)
            run.kv.sources.append(KVSource(worker_id=source, first_block=0, num_blocks=num_blocks))
        run.kv.sources.extend(run.request.sources)
        return [self._publish_aborted(run, reason), *self._assemble(run)]

    def _assemble(self, run: DecodeRun) -> list[Action]:
        """Read the next piece that somebody is said to hold; with none left, compute. The prompt's last token is always
        computed here, as it must be to sample token 0 again (the same one: it depends on prompt and seed only)."""
        assert run.kv is not None
        if self.draining:
            run.kv.sources.clear()
        if (fetch := next_fetch(run.request, run.kv, run.content, run.tables, self._limits.worker_id)) is not None:
            run.fetching_from = fetch.source
            return [fetch]
        run.kv.keep_at_most(len(run.prompt) - 1)
        run.report = run.kv.report()
        return [self._submit(run, list(run.prompt), run.kv.num_present_tokens)]

    def _submit(self, run: DecodeRun, token_ids: list[int], num_computed_tokens: int) -> Submit:
        run.computing = True
        return Submit(self._sequence(run, token_ids, num_computed_tokens), run.content)

    def _lose_source(self, run: DecodeRun, reason: str) -> list[Action]:
        if run.ended or run.computing or run.fetching_from is not None:
            return []
        if run.state is HandoffState.NEW:
            run.lost_reason = reason
            return []
        if run.reading:
            return [StopRead(run.request.handoff_id)]
        return self._go_without(run, reason)

    def _sampled(self, run: DecodeRun, sampled: SampledToken) -> list[Action]:
        report, run.report = run.report, None
        tokens = RequestTokens(
            request_id=run.request.request_id,
            attempt=run.request.attempt,
            index=sampled.index,
            tokens=pack_tokens([sampled.token_id]),
            finish_reason=sampled.finish_reason,
            report=report,
        )
        actions: list[Action] = [Emit(run.request.gateway_id, tokens)]
        return actions + self._forget(run) if sampled.local_end else actions

    def _end(self, run: DecodeRun, reason: str, now_ms: int) -> list[Action]:
        if run.ended:
            return []
        run.ended, run.outcome = True, reason
        if run.reading:
            return [StopRead(run.request.handoff_id)]
        if run.fetching_from is not None:
            return [StopFetch(run.key)]
        if run.computing:
            return [Withdraw(run.key)]
        return [self._publish_aborted(run, reason), *self._forget(run)]  # the source waits for room here

    def _publish_aborted(self, run: DecodeRun, reason: str) -> Publish:
        aborted = HandoffAborted(**handoff_fields(run.request, self._limits.worker_id), reason=reason, end=run.end)
        return publish_event(subjects.ABORTED, aborted)

    def _forget(self, run: DecodeRun) -> list[Action]:
        """Drop the run and its blocks, and let the next one in."""
        return super()._forget(run) + self._admit()
