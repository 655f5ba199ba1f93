"""What a decode worker decides. Pure: events and the time come in, actions go out.

An attempt waits for blocks, and while those that its prompt begins with come for another one; then for the offer. It
reads what it has not cached, and decodes. A read that fails keeps its landed prefix; the rest is read from whoever else
may hold it, or computed here as chunked prefill in the running batch: bad KV costs time, never a token.
"""

from dataclasses import dataclass

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import num_blocks_for
from schemas import subjects
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
from schemas.ids import WorkerId
from schemas.request import AttemptEnd, AttemptFailure, KVSource
from schemas.worker import WorkerLeft
from services.engine.interface import SampledToken
from services.worker.core.actions import Action, Publish, SendReply, StartRead, StopRead
from services.worker.core.attempts import Attempt, KVRead
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import AttemptAsked, ReadEnded, ReadStarted
from services.worker.core.leases import LeaseTable
from services.worker.core.messages import handoff_fields, publish_event
from services.worker.core.role import HeardSubject, RoleCore
from services.worker.core.rules import RuleTable
from services.worker.core.twins import Twins


@dataclass(slots=True, eq=False)
class DecodeAttempt(Attempt):
    """One attempt at decoding an answer. `state`: of its hand-over."""

    part = "decode"
    state: HandoffState = HandoffState.NEW
    reserved_ms: int | None = None
    """When its source was last told that there is room; None until the first tick after the first time."""
    source_left: bool = False
    lost_reason: str = ""
    """Why its source will not offer, learnt while it was waiting for blocks."""
    num_given_away: int = 0
    """Blocks of others that go on elsewhere so that it has room."""

    @property
    def source(self) -> WorkerId:
        """Who computes its prompt."""
        assert self.request.upstream is not None
        return self.request.upstream.worker_id


class DecodeCore(RoleCore[DecodeAttempt]):
    """Owns the attempts at decoding answers; shares its blocks with the worker's other cores."""

    record = DecodeAttempt

    def __init__(self, limits: WorkerLimits, cache: BlockCache, leases: LeaseTable, twins: Twins | None = None) -> None:
        super().__init__(limits, cache, leases, twins)
        self._times = limits.times.decode
        self.twin_wait_ms = self._times.twin_lands_within_ms
        self._given: list[DecodeAttempt] = []
        """They have made room, once somebody has come for what is here of them."""

    def hears(self) -> tuple[HeardSubject, ...]:
        as_target = ("*", self._limits.worker_id, "*")
        return (
            HeardSubject(subjects.OFFERED, as_target),
            HeardSubject(subjects.ABORTED, as_target),
        )

    def rules(self) -> RuleTable:
        return {
            **super().rules(),
            AttemptAsked: self._asked,
            KVOffered: self._agreeing(self._offered),
            ReadStarted: self._read_started,
            HandoffAborted: self._agreeing(self._aborted),
        }

    def _asked(self, event: AttemptAsked, now_ms: int) -> list[Action]:
        """Make room, now or as soon as there are blocks, or say why not."""
        if event.request.upstream is None:
            return []
        attempt = self._take(event, now_ms)
        if isinstance(attempt, SendReply):
            return [attempt]
        return [self._accepted(attempt), *self.admit(now_ms)]

    def _offered(self, offer: KVOffered, now_ms: int) -> list[Action]:
        """The source has begun: open the stream."""
        attempt = self._by_handoff.get(offer.handoff_id)
        if attempt is None:
            aborted = HandoffAborted(**handoff_fields(offer, self._limits.worker_id), reason="no such reservation")
            return [publish_event(subjects.ABORTED, aborted)]
        if attempt.state is not HandoffState.RESERVED:
            return []  # a repeated offer, or one for a hand-over that has ended
        num_tokens = self._cache.layout.padded(len(attempt.prompt))
        if offer.fingerprint != self._limits.fingerprint or offer.num_tokens != num_tokens:
            return self._go_without(attempt, "the offered KV is of another model or prompt", now_ms)
        assert attempt.kv is not None
        attempt.state = advance(attempt.state, HandoffState.OFFERED)
        attempt.stage = "receiving"
        holder, first_token = offer.source_worker, attempt.kv.num_present_tokens
        attempt.read = KVRead(attempt.key, holder, offer, attempt.tables, first_token, attempt.traceparent)
        return [StartRead(attempt.read)]

    def _read_started(self, event: ReadStarted, _: int) -> list[Action]:
        """The first byte of a hand-over is here."""
        attempt = self.attempts.get(event.read.key)
        if attempt is None or attempt.read is not event.read or attempt.state is not HandoffState.OFFERED:
            return []
        return self._streaming(attempt, event.carrier)

    def _streaming(self, attempt: DecodeAttempt, carrier: str) -> list[Action]:
        attempt.state = advance(attempt.state, HandoffState.STREAMING)
        streaming = KVStreaming(**handoff_fields(attempt.request, self._limits.worker_id), carrier=carrier)
        return [publish_event(subjects.STREAMING, streaming, attempt.traceparent)]

    def _read_on(self, attempt: DecodeAttempt, event: ReadEnded, now_ms: int) -> list[Action]:
        if event.first_token is not None:
            return self._landed(attempt, event, event.first_token, now_ms)
        if attempt.has_ended:
            gave_up = [self._publish_aborted(attempt, event.reason)] if event.read.is_hand_over else []
            return [*gave_up, *self._forget(attempt, now_ms)]
        assert attempt.kv is not None
        attempt.kv.landed(event.read.holder, event.outcome)
        return self._go_without(attempt, event.reason, now_ms) if event.read.is_hand_over else self._assemble(attempt)

    def _landed(self, attempt: DecodeAttempt, event: ReadEnded, first: FirstToken, now_ms: int) -> list[Action]:
        """All is here and verified: say so, and decode from token 1 on."""
        offer, outcome = event.read.lease, event.outcome
        assert isinstance(offer, KVOffered) and attempt.kv is not None
        actions: list[Action] = []
        if attempt.state is HandoffState.OFFERED:  # so short that nothing was said of its start
            actions += self._streaming(attempt, outcome.carrier)
        if attempt.state is HandoffState.STREAMING:
            attempt.state = advance(attempt.state, HandoffState.LANDED)
            landed = KVLanded(
                **handoff_fields(attempt.request, self._limits.worker_id),
                lease_id=offer.lease_id,
                carrier=outcome.carrier,
                num_tokens=min(outcome.num_landed_tokens, len(attempt.prompt)),
                num_bytes=outcome.num_bytes,
            )
            actions.append(publish_event(subjects.LANDED, landed, attempt.traceparent))
        if attempt.has_ended or first.finish_reason is not None:
            return actions + self._forget(attempt, now_ms)
        attempt.kv.landed(attempt.source, outcome)
        return [*actions, self._submit(attempt, [*attempt.prompt, first.token_id])]

    def _aborted(self, event: HandoffAborted, now_ms: int) -> list[Action]:
        """The source will send no (more) KV."""
        attempt = self._by_handoff.get(event.handoff_id)
        return [] if attempt is None else self._lose_source(attempt, event.reason, now_ms)

    def _worker_left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """A source is gone."""
        actions: list[Action] = []
        for attempt in list(self.attempts.values()):
            read = attempt.read
            if read is not None and not read.is_hand_over and read.holder == event.worker_id:
                actions.append(StopRead(read))
            elif attempt.source == event.worker_id:
                attempt.source_left = True
                actions += self._lose_source(attempt, "the prefill worker left", now_ms)
        return actions

    def _on_time(self, now_ms: int) -> list[Action]:
        """Enforce deadlines, and say again that there is room where no offer has come."""
        actions: list[Action] = []
        for attempt in [attempt for attempt in self.attempts.values() if not attempt.has_ended]:
            if attempt.request.deadline_ms <= now_ms:
                awaited = "decode" if attempt.stage == "computing" else "its KV"
                detail = f"the deadline passed while waiting for {awaited}"
                attempt.end = AttemptEnd.DEADLINE
                actions += self._fail(attempt, AttemptFailure.DEADLINE, detail, now_ms)
            elif attempt.state is HandoffState.RESERVED:
                if attempt.reserved_ms is not None and now_ms - attempt.reserved_ms >= self._times.reserved_again_ms:
                    actions.append(self._publish_reserved(attempt))
                    attempt.reserved_ms = now_ms
                attempt.reserved_ms = now_ms if attempt.reserved_ms is None else attempt.reserved_ms
        return actions

    def admit(self, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        for given in [given for given in self._given if not self._leases.is_expected(given.request.request_id)]:
            self._given.remove(given)
            actions += self._forget(given, now_ms)
        while (attempt := self._next_queued(now_ms)) is not None:
            if not self._allocate(attempt):
                actions += self._make_room(attempt, now_ms)
                break
            self._begun(attempt)
            attempt.state, attempt.stage = advance(attempt.state, HandoffState.RESERVED), "reserved"
            actions.append(self._publish_reserved(attempt))
            if attempt.lost_reason:
                actions += self._go_without(attempt, attempt.lost_reason, now_ms)
        return actions

    def _make_room(self, attempt: DecodeAttempt, now_ms: int) -> list[Action]:
        """Let the youngest answers go on elsewhere whose blocks this attempt lacks, where another worker has room for
        them: they have most before them, and the least to be read. An answer is moved once for this."""
        if self.draining or self._cache.layout.is_windowed:
            return []
        lacking = self._num_blocks(attempt) - self._cache.num_free - self._cache.num_cached
        lacking -= sum(self._num_blocks(other) for other in self.attempts.values() if other.moving)
        spare, chosen = attempt.request.spare_blocks - attempt.num_given_away, list[DecodeAttempt]()
        for other in reversed(self.attempts.values()):
            num_blocks = self._num_blocks(other)
            may_move = other.stage == "computing" and not other.moving and not other.request.num_answered_tokens
            if lacking > 0 and may_move and other.answer.token_ids and num_blocks <= spare:
                chosen.append(other)
                lacking, spare = lacking - num_blocks, spare - num_blocks
        if lacking > 0:
            return []
        attempt.num_given_away += sum(self._num_blocks(other) for other in chosen)
        detail = f"it makes room for {attempt.request.request_id}"
        return [action for other in chosen for action in self._move(other, detail, now_ms)]

    def _given_away(self, attempt: DecodeAttempt, now_ms: int) -> list[Action]:
        """Others wait for its blocks: they keep what is in them until whoever goes on has come for it."""
        if not self._leases.is_expected(attempt.request.request_id) or self.draining:
            return super()._given_away(attempt, now_ms)
        attempt.stage = "ending"
        self._given.append(attempt)
        return []

    def _publish_reserved(self, attempt: DecodeAttempt) -> Publish:
        fields = handoff_fields(attempt.request, self._limits.worker_id)
        reserved = BlocksReserved(**fields, num_blocks=self._num_blocks(attempt))
        return publish_event(subjects.RESERVED, reserved, attempt.traceparent)

    def _go_without(self, attempt: DecodeAttempt, reason: str, now_ms: int) -> list[Action]:
        """The hand-over brings no more. Whoever is said to hold a part of the prompt is asked, the prefill worker among
        them: what it has computed may be cached there. Where the prompt's logarithms are wanted another attempt must
        begin: if its first token has come, they have, and it goes on from there."""
        assert attempt.kv is not None
        if attempt.owes_prompt_logprobs:
            detail = f"{reason}, and the prompt's logarithms are wanted, which only who computes it all has"
            return self._fail(attempt, AttemptFailure.TRANSFER_FAILED, detail, now_ms)
        attempt.state = advance(attempt.state, HandoffState.ABORTED)
        source = attempt.source
        if not attempt.source_left:
            num_blocks = num_blocks_for(len(attempt.prompt), self._limits.block_size)
            attempt.kv.sources.append(KVSource(worker_id=source, first_block=0, num_blocks=num_blocks))
        attempt.kv.sources.extend(attempt.request.sources)
        return [self._publish_aborted(attempt, reason), *self._assemble(attempt)]

    def _assemble(self, attempt: DecodeAttempt) -> list[Action]:
        """Read the next piece that somebody is said to hold; with none left, compute. The prompt's last token is always
        computed here, as it must be to sample token 0 again (the same one: it depends on prompt and seed only); where
        blocks are only whole of use, all of its block is."""
        if (start := self._read_next(attempt)) is not None:
            return [start]
        assert attempt.kv is not None
        attempt.kv.keep_at_most(self._cache.layout.usable(len(attempt.prompt) - 1))
        return [self._submit(attempt, list(attempt.prompt))]

    def _lose_source(self, attempt: DecodeAttempt, reason: str, now_ms: int) -> list[Action]:
        match attempt.stage:
            case "queued" | "waiting_for_twin":
                attempt.lost_reason = reason
            case "reserved":
                return self._go_without(attempt, reason, now_ms)
            case "receiving" if attempt.read is not None:
                return [StopRead(attempt.read)]
            case _:  # it does without already
                pass
        return []

    def _computed(self, attempt: DecodeAttempt, sampled: SampledToken, ended_ns: int, now_ms: int) -> list[Action]:
        return self._forget(attempt, now_ms)

    def _end(self, attempt: DecodeAttempt, reason: str, now_ms: int) -> list[Action]:
        if attempt.has_ended:
            return []
        attempt.outcome = reason
        if (stop := self._stop(attempt)) is not None:
            return [stop]
        # The source waits for room here.
        return [self._publish_aborted(attempt, reason), *self._forget(attempt, now_ms)]

    def _publish_aborted(self, attempt: DecodeAttempt, reason: str) -> Publish:
        fields = handoff_fields(attempt.request, self._limits.worker_id)
        aborted = HandoffAborted(**fields, reason=reason, end=attempt.end)
        return publish_event(subjects.ABORTED, aborted, attempt.traceparent)
