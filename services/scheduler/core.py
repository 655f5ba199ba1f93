"""The view of the fleet, and who of it is alive. Pure: events and the time come in, actions go out.

A worker is known from the first message that names it. Its restart (a new incarnation) replaces it at once. One whose
pings nobody serves, or that has been silent for too long, is declared left; what has left never comes back as the same
incarnation. The rules are `services.presence`'s. Where a request goes is `placement`'s.

Workers speak by themselves. Asked is who is overdue, and who is in doubt: it is new, or its connection has ended, or
nobody has served the last question.

Three questions have an answer at once, and so are methods: `place`, `leave` and `describe_fleet`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.message import encode
from schemas.request import Placement, PlaceRequest, Refused
from schemas.worker import (
    FleetDescribed,
    LeaveAnswered,
    LeaveMesh,
    LeftReason,
    WorkerBeat,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRole,
    WorkerState,
)
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.config import SchedulerConfig
from services.presence import OVERDUE_PINGS, BusConnected, FailureDetector, Fences, Peer
from services.scheduler.events import (
    Action,
    BusProved,
    ConnectionEnded,
    Event,
    PingAnswered,
    PingUnanswered,
    PingUnserved,
    ProveBus,
    PublishLeft,
    SendPing,
)
from services.scheduler.limits import LOOK_GAP_MS, MAX_OUTSTANDING_PINGS, SECOND_PING_SHARE, WORDLESS_SHARE
from services.scheduler.placement.fleet_view import FleetView
from services.scheduler.placement.known_worker import KnownWorker
from services.scheduler.placement.named import policy_named
from services.scheduler.placement.place import Case, Placer
from services.scheduler.placement.policy import POLICIES
from services.times import PresenceTimes

_ENVELOPE_BYTES = 1_024
"""What a message of workers needs beside them."""


class Standing(NamedTuple):
    """A worker's role, and whether it is `ready`, `suspect`, `starting` or `draining`."""

    role: WorkerRole
    state: str


@dataclass(slots=True)
class Member:
    """Whether one incarnation of a worker is alive, and its pings."""

    worker: KnownWorker
    """The fleet's own record of it."""
    peer: Peer
    next_ping_ms: int
    """It is not asked again before."""
    num_outstanding: int = 0
    serves_pings: bool = False
    """It has answered a ping."""
    has_disconnected: bool = False
    """The broker has said that its connection has ended, and it has not answered a ping since."""


class SchedulerCore:
    """Knows the fleet and places requests on it. Raises UserError for an unknown policy."""

    def __init__(self, settings: SchedulerConfig, times: PresenceTimes) -> None:
        self.wake_ms = 0
        """`tick` has nothing to do before."""
        self._settings = settings
        # Every worker speaks several times in half of a silence, and where none does the broker is asked: who receives
        # nothing for that long is cut off.
        self._detector = FailureDetector(times, settings.silent_after_ms // 2)
        self._fences = Fences(times)
        self._members: dict[WorkerId, Member] = {}
        """Whoever was seen last comes last, so that those who are quiet are found without looking at all."""
        self._doubted: dict[WorkerId, Member] = {}
        """Who is asked, whatever else it sends, until it has answered."""
        self._fleet = FleetView()
        self._placer = Placer(settings, policy_named(settings))
        self.asks_directory = settings.policy not in POLICIES
        """Whether `place` makes use of holders."""
        self._is_proving = False
        self._num_reroutes = self._num_returns = 0

    def incarnations(self) -> dict[WorkerId, str]:
        """Return who is known to live."""
        return {worker_id: member.worker.info.incarnation for worker_id, member in self._members.items()}

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """React to what has happened: return what is to be done."""
        # All events but these three have come through the broker: they prove that this process is not partitioned.
        if not isinstance(event, PingUnanswered | BusConnected | BusProved):
            self._detector.received(now_ms)
        # An incarnation that has left counts no more: its end is published again, so that it rejoins as a new one.
        match event:
            case WorkerJoined(worker=info) | WorkerLoad(worker=info):
                if self._fences.holds(info.worker_id, info.incarnation):
                    return self._repeat_left(info.worker_id, info.incarnation, now_ms)
                return self._worker_published(event, info, now_ms)
            case WorkerBeat(worker_id=worker_id, incarnation=incarnation):
                if self._fences.holds(worker_id, incarnation):
                    return self._repeat_left(worker_id, incarnation, now_ms)
                if member := self._member(worker_id, incarnation):
                    self._seen(worker_id, member, now_ms)
            case ConnectionEnded(name=name):
                if member := self._members.get(WorkerId(name)):
                    member.has_disconnected = True
                    self._doubt(member, now_ms)
            case WorkerDraining():
                if member := self._member(event.worker_id, event.incarnation):
                    self._fleet.drain(member.worker)
            case WorkerLeft():
                self._leave(event, now_ms)
            case PingAnswered() | PingUnserved() | PingUnanswered():
                return self._end_ping(event, now_ms)
            case BusProved(works=works):
                self._is_proving = False
                if works:
                    self._detector.proved(now_ms)
            case BusConnected():
                self._detector.connects(event, now_ms)
                self._note_reroutes(event.num_reroutes, now_ms)
                if event.num_returns != self._num_returns:
                    self._num_returns = event.num_returns
                    self._fences.servers_returned(now_ms)
        return []

    def tick(self, now_ms: int) -> list[Action]:
        """Return what the time makes necessary: words on behalf of the silent, pings, a proof that the bus works."""
        limit_ms = self._settings.silent_after_ms
        silent = [
            worker_id
            for worker_id, member in self._quiet(limit_ms, now_ms)
            if self._detector.is_silent(member.peer.seen_ms, limit_ms, now_ms)
        ]
        actions: list[Action] = [self._declare(worker_id, LeftReason.SILENT, now_ms) for worker_id in silent]
        ping_ms = self._settings.ping_interval_ms
        self.wake_ms = now_ms + ping_ms
        for worker_id, member in (dict(self._quiet(OVERDUE_PINGS * ping_ms, now_ms)) | self._doubted).items():
            if member.num_outstanding >= MAX_OUTSTANDING_PINGS:
                continue
            if member.next_ping_ms <= now_ms:
                member.num_outstanding += 1
                member.next_ping_ms = now_ms + ping_ms
                actions.append(SendPing(worker_id, member.worker.info.incarnation, now_ms))
            self.wake_ms = min(self.wake_ms, member.next_ping_ms)
        self.wake_ms = min(self.wake_ms, self._overdue_ms(now_ms))
        if not self._is_proving and (self._detector.is_unproved or self._suspects(now_ms)):
            self._is_proving = True
            self._detector.ask_proof(now_ms)
            actions.append(ProveBus())
        return actions

    def place(
        self, request: PlaceRequest, now_ms: int, holders: tuple[HolderPrefix, ...] | None = ()
    ) -> Placement | Refused:
        """Choose the workers of one attempt (`placement.place`). `holders` None: nobody has reported who they are."""
        return self._placer.place(Case(request, now_ms, self._fleet, self._suspects(now_ms), holders))

    def leave(self, message: LeaveMesh, now_ms: int) -> LeaveAnswered:
        """Return whether a worker may leave. One that does is given nothing new from now on: of two that could stand in
        for each other and ask at once, one is refused."""
        member = self._member(message.worker_id, message.incarnation)
        if member is None:
            return LeaveAnswered(refusal=f"the scheduler does not know {message.worker_id} yet")
        info, suspects = member.worker.info, self._suspects(now_ms)
        others = [w.info for w in self._fleet.usable if w is not member.worker and w.info.worker_id not in suspects]
        roles = {other.role for other in others if other.fingerprint == info.fingerprint}
        is_last = WorkerRole.AGGREGATED not in roles and not (
            {WorkerRole.PREFILL, WorkerRole.DECODE} <= roles
            if info.role == WorkerRole.AGGREGATED
            else info.role in roles
        )
        if not is_last or message.forced:
            self._fleet.drain(member.worker)
        refusal = f"{message.worker_id} is the last {info.role} worker that is ready" if is_last else ""
        return LeaveAnswered(refusal=refusal, is_last=is_last)

    @property
    def policy_failure(self) -> str:
        """What was wrong with the policy's last choice, so that another one has chosen; empty: nothing."""
        return self._placer.policy_failure

    def describe_fleet(self, now_ms: int, after: str = "", max_bytes: int = MAX_PAYLOAD_BYTES) -> FleetDescribed:
        """Return what is known of the workers `after` this id, as much as fits into a message of `max_bytes`, and
        whether a request could be placed now on workers that are well."""
        suspects = self._suspects(now_ms)
        well = [worker.info for worker in self._fleet.usable if worker.info.worker_id not in suspects]
        halves = WorkerRole.PREFILL, WorkerRole.DECODE
        first, second = ({info.fingerprint for info in well if info.role == role} for role in halves)
        ready = any(info.role == WorkerRole.AGGREGATED for info in well) or not first.isdisjoint(second)
        loads: list[WorkerLoad] = []
        left = max_bytes - _ENVELOPE_BYTES
        for worker_id, worker in sorted(self._fleet.workers.items()):
            if worker.has_reported and worker_id > after:
                left -= len(encode(worker.load)) + 1
                if left < 0:
                    break
                loads.append(worker.load)
        return FleetDescribed(policy=self._settings.policy, ready=ready, workers=tuple(loads), more=left < 0)

    def standing(self, now_ms: int) -> list[Standing]:
        """Return how each known worker stands."""
        suspects = self._suspects(now_ms)
        return [
            Standing(
                worker.info.role, "suspect" if key in suspects and worker.state == WorkerState.READY else worker.state
            )
            for key, worker in self._fleet.workers.items()
        ]

    def _worker_published(self, event: WorkerJoined | WorkerLoad, info: WorkerInfo, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        member = self._members.get(info.worker_id)
        if member is not None and member.worker.info.incarnation != info.incarnation:
            actions.append(self._declare(info.worker_id, LeftReason.RESTARTED, now_ms))
            member = None
        if member is None:
            worker = self._fleet.add_worker(info)
            member = self._members[info.worker_id] = Member(worker, Peer(now_ms), next_ping_ms=now_ms)
            self._doubt(member, now_ms)
        self._seen(info.worker_id, member, now_ms)
        if isinstance(event, WorkerLoad):
            self._fleet.note_load(event, now_ms)
        return actions

    def _end_ping(self, event: PingAnswered | PingUnserved | PingUnanswered, now_ms: int) -> list[Action]:
        """React to the end of a ping; do nothing where the worker's incarnation has been replaced."""
        ping = event.ping
        member = self._member(ping.worker_id, ping.incarnation)
        if member is None:
            return []
        member.num_outstanding = max(0, member.num_outstanding - 1)
        match event:
            case PingAnswered():  # another one than was asked will speak for itself
                if (event.worker_id, event.incarnation) == (ping.worker_id, ping.incarnation):
                    member.serves_pings, member.has_disconnected = True, False
                    self._doubted.pop(ping.worker_id, None)
                    self._seen(ping.worker_id, member, now_ms)
            case PingUnserved():
                # Without the broker's word its server may be cut off from ours, of which we are told a moment later.
                share = SECOND_PING_SHARE if member.has_disconnected else WORDLESS_SHARE
                gap_ms = self._settings.ping_interval_ms // share
                is_gone = member.peer.is_gone(ping.sent_ms, self._detector, now_ms, gap_ms)
                # One that has never answered may serve no pings at all; its silence shows its end.
                if is_gone and member.serves_pings:
                    return [self._declare(ping.worker_id, LeftReason.DIED, now_ms)]
                if member.peer.unserved_ms is not None:
                    self._doubt(member, now_ms + gap_ms)
            case PingUnanswered():
                pass
        return []

    def _note_reroutes(self, num_reroutes: int, now_ms: int) -> None:
        """Give up the pings that are under way, and ask anew: they may have gone to a server that is lost."""
        if num_reroutes == self._num_reroutes:
            return
        self._num_reroutes = num_reroutes
        for member in self._members.values():
            if member.num_outstanding:
                member.num_outstanding = 0
                self._doubt(member, now_ms)

    def _declare(self, worker_id: WorkerId, reason: LeftReason, now_ms: int) -> PublishLeft:
        """Declare that a known worker has left."""
        incarnation = self._members[worker_id].worker.info.incarnation
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason=reason)
        self._leave(left, now_ms)
        return PublishLeft(left)

    def _leave(self, left: WorkerLeft, now_ms: int) -> None:
        self._fences.fence(left, now_ms)
        if self._member(left.worker_id, left.incarnation):
            del self._members[left.worker_id]
            self._doubted.pop(left.worker_id, None)
            self._fleet.leave(left.worker_id)

    def _repeat_left(self, worker_id: WorkerId, incarnation: str, now_ms: int) -> list[Action]:
        again = self._fences.repeat(worker_id, incarnation, now_ms)
        return [PublishLeft(again)] if again else []

    def _doubt(self, member: Member, ask_ms: int) -> None:
        """Ask this worker from then on until it answers."""
        self._doubted[member.worker.info.worker_id] = member
        member.next_ping_ms = min(member.next_ping_ms, ask_ms)
        self.wake_ms = min(self.wake_ms, member.next_ping_ms)

    def _overdue_ms(self, now_ms: int) -> int:
        """Return when the next worker will be overdue if it sends nothing more."""
        limit_ms = OVERDUE_PINGS * self._settings.ping_interval_ms
        left_ms = (limit_ms - self._detector.quiet_ms(m.peer.seen_ms, now_ms) for m in self._members.values())
        return now_ms + max(LOOK_GAP_MS, next((left for left in left_ms if left > 0), limit_ms))

    def _member(self, worker_id: WorkerId, incarnation: str) -> Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.worker.info.incarnation == incarnation else None

    def _suspects(self, now_ms: int) -> set[WorkerId]:
        """Return who has been quiet for so long that it may be stopped."""
        return {
            worker_id
            for worker_id, member in self._quiet(self._settings.suspect_after_ms, now_ms)
            if self._detector.quiet_ms(member.peer.seen_ms, now_ms) >= self._patience_ms(member)
        }

    def _quiet(self, limit_ms: int, now_ms: int) -> Iterator[tuple[WorkerId, Member]]:
        """Return who has sent nothing for so long."""
        for worker_id, member in self._members.items():
            if self._detector.quiet_ms(member.peer.seen_ms, now_ms) < limit_ms:
                break
            yield worker_id, member

    def _seen(self, worker_id: WorkerId, member: Member, now_ms: int) -> None:
        member.peer.seen(now_ms)
        self._members[worker_id] = self._members.pop(worker_id)

    def _patience_ms(self, member: Member) -> int:
        """Loads alone come too rarely to tell a stop from a pause."""
        suspect_after_ms = self._settings.suspect_after_ms
        if member.serves_pings:
            return suspect_after_ms
        return max(suspect_after_ms, self._settings.silent_after_ms // 2)
