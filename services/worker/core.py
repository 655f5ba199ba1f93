"""The core of a worker: what becomes of an attempt, by its stage and by what happens. Pure: events and the time come
in, actions go out.

An attempt computes its prompt and its answer, or one of them: then the KV is handed over from another worker
(`upstream`), or to one (`downstream`).
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from schemas.handoff import BlocksReserved, HandoffAborted, HandoffMessage, KVLanded, KVOffered
from schemas.observe import RunStage
from schemas.request import AttemptAccepted, CancelRequest, Refused
from schemas.worker import WorkerLeft
from services.decode import receive
from services.engine.messages import SampledToken, StepResult
from services.holder.core.actions import Action, SendReply
from services.holder.core.attempt import Attempt
from services.holder.core.attempts import Attempts
from services.holder.core.events import (
    AttemptAsked,
    AttemptUnwanted,
    DeadlinePassed,
    DrainBegun,
    DrainOver,
    EngineBack,
    EngineDied,
    Fenced,
    ReadEnded,
    ReadStarted,
    SequenceFailed,
    SequenceRemoved,
    StreamEnded,
    TimePassed,
)
from services.holder.core.messages import handoff_fields
from services.holder.core.rules import RuleTable
from services.prefill import hand_over
from services.worker import attempt_rules as rules

AttemptRule = Callable[[Attempts, Attempt, Any, int], list[Action]]
"""Takes the attempts, the one that an event is about, the event and the time in milliseconds; changes the attempt's
record, and returns what is to be done, in order."""

_ALWAYS: dict[type, AttemptRule] = {
    CancelRequest: rules.cancelled,
    AttemptUnwanted: rules.unwanted,
    HandoffAborted: rules.other_end_gave_up,
    WorkerLeft: rules.worker_left,
    Fenced: rules.fenced,
}
"""In any stage but `ENDING`."""
_OWING: dict[type, AttemptRule] = {
    **_ALWAYS,
    DeadlinePassed: rules.deadline_passed,
    EngineDied: rules.engine_died,
    DrainBegun: rules.moves_unless_finished,
    DrainOver: rules.may_wait_no_longer,
}
"""As long as the gateway waits for tokens from here."""
_IN_LINE: dict[type, AttemptRule] = {**_OWING, BlocksReserved: hand_over.reader_has_room, DrainBegun: rules.moves}
"""While it has no blocks here. In `QUEUED` it waits for room, in `WAITING` for blocks that an in-flight duplicate
fills. `admit` gives it blocks: on a prefill worker to compute (`hand_over.begin_prompts`), on a decode worker to
receive (`receive.begin_reservations`)."""
_LEASED: dict[type, AttemptRule] = {
    BlocksReserved: hand_over.reader_has_room,
    KVLanded: hand_over.landed,
    StreamEnded: hand_over.stream_ended,
    TimePassed: hand_over.watch_lease,
}
"""Where its prompt may be handed over under a lease."""

# Each worker has a record and a stage of its own for an attempt. On a prefill worker that hands over: QUEUED or
# WAITING, then FETCHING, COMPUTING and HANDING_OVER, under a lease from FETCHING on. Usually it begins once
# `BlocksReserved` has come; one that *runs ahead* may be in any of these before. On a decode worker: QUEUED or WAITING,
# RESERVED, RECEIVING, then COMPUTING, or FETCHING what the hand-over did not bring. Served alone: no RESERVED,
# RECEIVING, HANDING_OVER.
TABLE: Mapping[RunStage, Mapping[type, AttemptRule]] = {
    RunStage.QUEUED: _IN_LINE,
    RunStage.WAITING: _IN_LINE,
    RunStage.RESERVED: {**_OWING, KVOffered: receive.offered, TimePassed: receive.report_reserved_again},
    RunStage.RECEIVING: {**_OWING, ReadStarted: receive.read_started, ReadEnded: receive.hand_over_ended},
    RunStage.FETCHING: {**_OWING, **_LEASED, ReadEnded: rules.read_ended},
    RunStage.COMPUTING: {
        **_OWING,
        **_LEASED,
        SampledToken: rules.token_sampled,
        SequenceRemoved: rules.moving_removed,
        SequenceFailed: rules.sequence_failed,
    },
    RunStage.HANDING_OVER: {
        **_ALWAYS,
        **_LEASED,
        DeadlinePassed: rules.unread_in_time,
        DrainOver: hand_over.leaves_unread,
    },
    RunStage.ENDING: {
        Fenced: rules.fenced,
        ReadStarted: receive.read_started,
        ReadEnded: receive.ended_read_ended,
        SampledToken: rules.ended_token_sampled,
        SequenceRemoved: rules.ended_removed,
        SequenceFailed: rules.sequence_failed,
        EngineDied: rules.engine_died,
    },
}
"""What is done with an attempt in which stage, by what happens."""

HandoffT = TypeVar("HandoffT", bound=HandoffMessage)


class AttemptCore(Attempts):
    """The attempts of one worker, and what becomes of them. Each event finds the attempts that it is about, and these
    find their rule in `TABLE`."""

    def rules(self) -> RuleTable:
        """Return what is done with which event."""
        return {
            AttemptAsked: self._asked,
            BlocksReserved: self._reserved,
            KVOffered: self._offered,
            KVLanded: self._handed_over,
            HandoffAborted: self._handed_over,
            StreamEnded: self._stream_ended,
            StepResult: self._stepped,
            SequenceRemoved: self._about_key,
            SequenceFailed: self._about_key,
            EngineDied: self._engine_died,
            EngineBack: self._engine_back,
            ReadStarted: self._about_read,
            ReadEnded: self._about_read,
            CancelRequest: self._cancelled,
            AttemptUnwanted: self._unwanted,
            WorkerLeft: self._about_all,
            DrainBegun: self._drain_begun,
            DrainOver: self._about_all,
            Fenced: self._fenced,
            TimePassed: self._time_passed,
        }

    def admit(self, now_ms: int) -> list[Action]:
        """Begin what waits for blocks, where there are some."""
        return hand_over.begin_prompts(self, now_ms) + receive.begin_reservations(self, now_ms)

    # To one attempt, or to all.

    def _apply(self, attempt: Attempt | None, event: object, now_ms: int) -> list[Action]:
        """Do what the table says. What has no rule in an attempt's stage is counted and dropped here."""
        rule = TABLE[attempt.stage].get(type(event)) if attempt is not None else None
        if attempt is None or rule is None:
            self.num_late += 1
            return []
        return rule(self, attempt, event, now_ms)

    def _about_all(self, event: object, now_ms: int) -> list[Action]:
        """Do what the table says with each attempt to which this means something."""
        affected = [(attempt, TABLE[attempt.stage].get(type(event))) for attempt in self.records.values()]
        return [each for attempt, rule in affected if rule is not None for each in rule(self, attempt, event, now_ms)]

    def _about_key(self, event: SequenceRemoved | SequenceFailed, now_ms: int) -> list[Action]:
        return self._apply(self.records.get(event.key), event, now_ms)

    def _about_read(self, event: ReadStarted | ReadEnded, now_ms: int) -> list[Action]:
        """What happens to the reads of other cores is passed over."""
        attempt = self.records.get(event.read.key)
        if attempt is None or attempt.read is not event.read:
            return []
        if isinstance(event, ReadEnded):
            attempt.read = None
        return self._apply(attempt, event, now_ms)

    def _handed_over(self, event: HandoffMessage, now_ms: int) -> list[Action]:
        attempt = self.of_handoff(event.handoff_id)
        return [] if attempt is None or self._is_unfit(attempt, event) else self._apply(attempt, event, now_ms)

    def _is_unfit(self, attempt: Attempt, event: HandoffMessage) -> bool:
        """Return whether an event is not of the request, the attempt and the two workers that the gateway has named, or
        for the other one of these. Such events are counted."""
        ours = handoff_fields(attempt.request, self.limits.worker_id)
        theirs = (event.request_id, event.attempt, event.source_worker, event.target_worker)
        is_unfit = theirs != (ours["request_id"], ours["attempt"], ours["source_worker"], ours["target_worker"])
        is_unfit |= attempt.downstream is None and isinstance(event, BlocksReserved | KVLanded)
        is_unfit |= attempt.upstream is None and isinstance(event, KVOffered)
        self.num_unfit += is_unfit
        return is_unfit

    # Events that mean something beside the table, too.

    def _asked(self, event: AttemptAsked, now_ms: int) -> list[Action]:
        """Take an attempt, or answer why not."""
        attempt = self.take(event, now_ms)
        if isinstance(attempt, Refused):
            return [SendReply(attempt)]
        request, times, to = attempt.request, attempt.times, attempt.downstream
        if to is not None and self.early_reservations.pop(to.handoff_id, None) is not None:
            to.has_room = True
        accepted = AttemptAccepted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self.limits.worker_id,
            accepted_ns=times.accepted_ns + times.ahead_ns,
        )
        return [SendReply(accepted)]

    def _reserved(self, event: BlocksReserved, now_ms: int) -> list[Action]:
        if self.of_handoff(event.handoff_id) is None:
            return hand_over.reserved_too_early(self, event, now_ms)
        return self._handed_over(event, now_ms)

    def _offered(self, event: KVOffered, now_ms: int) -> list[Action]:
        if self.of_handoff(event.handoff_id) is None:
            return receive.offered_unasked(self, event)
        return self._handed_over(event, now_ms)

    def _stream_ended(self, event: StreamEnded, now_ms: int) -> list[Action]:
        """The streams of leases that were lent are another core's."""
        attempt = self.records.get((event.lease.request_id, event.lease.attempt))
        is_handed_over = attempt is not None and attempt.lease is event.lease
        return self._apply(attempt, event, now_ms) if is_handed_over else []

    def _stepped(self, result: StepResult, now_ms: int) -> list[Action]:
        """Send on what an engine step gave, and offer what it has filled."""
        actions: list[Action] = []
        for number, _ in result.computed:
            if (attempt := self.of_engine.get(number)) is not None:
                attempt.times.stepped(result.started_ns, result.ended_ns)
        for sampled in result.sampled:
            attempt = self.of_engine.get(sampled.number)
            if attempt is not None:
                attempt.times.sampled(result.ended_ns)
            actions += self._apply(attempt, sampled, now_ms)
        for number, _ in result.computed:
            if (attempt := self.of_engine.get(number)) is not None:
                actions += self.offer_copies(attempt, now_ms)
        return actions

    def _engine_died(self, event: EngineDied, now_ms: int) -> list[Action]:
        self.starting = True
        ended = [a for a in self.records.values() if a.owes_tokens or a.key in event.had]
        return [action for attempt in ended for action in self._apply(attempt, event, now_ms)]

    def _engine_back(self, _: EngineBack, __: int) -> list[Action]:
        self.starting = False
        return []

    def _cancelled(self, event: CancelRequest, now_ms: int) -> list[Action]:
        """A cancel may overtake what it cancels."""
        key = (event.request_id, event.attempt)
        self.past.remember(key)
        return self._apply(self.records[key], event, now_ms) if key in self.records else []

    def _unwanted(self, event: AttemptUnwanted, now_ms: int) -> list[Action]:
        self.past.remember(event.key)
        return self._apply(self.records[event.key], event, now_ms) if event.key in self.records else []

    def _drain_begun(self, event: DrainBegun, now_ms: int) -> list[Action]:
        self.draining = True
        return self._about_all(event, now_ms)

    def _fenced(self, event: Fenced, now_ms: int) -> list[Action]:
        self.early_reservations.clear()
        self.past.forget_answers()
        return self._about_all(event, now_ms)

    def _time_passed(self, event: TimePassed, now_ms: int) -> list[Action]:
        """Enforce deadlines, watch over what may be lost or silent."""
        self.past.forget_old(now_ms)
        actions: list[Action] = []
        for attempt in list(self.records.values()):
            is_over = attempt.request.deadline_ms <= now_ms and not attempt.has_ended
            about = DeadlinePassed() if is_over else event
            rule = TABLE[attempt.stage].get(type(about))
            actions += rule(self, attempt, about, now_ms) if rule is not None else []
        actions += hand_over.end_expired(self, now_ms) + hand_over.offer_again(self, now_ms)
        return actions + [action for each in self.records.values() for action in self.offer_copies(each, now_ms)]
