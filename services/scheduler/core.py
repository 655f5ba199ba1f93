"""The view of the fleet, and who of it is alive. Pure: events and the time come in, actions go out.

A worker is known from the first message that names it. Its restart (a new incarnation) replaces it at once. One that
the broker says nobody serves for, or that has been silent for too long, is declared left; what has left never comes
back as the same incarnation. The rules are `services.presence`'s. Where a request goes is `placement`'s.

Two questions have an answer at once, and so are methods: `place` and `describe`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import Placement, PlaceRequest, Refused
from schemas.worker import (
    FleetDescribed,
    LeftReason,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRole,
)
from services.config import SchedulerConfig
from services.presence import BusConnected, Fences, Hearing, Peer
from services.scheduler.events import (
    Action,
    BusProved,
    Event,
    PingAnswered,
    PingUnanswered,
    PingUnserved,
    ProveBus,
    SayLeft,
    SendPing,
)
from services.scheduler.limits import MAX_OUTSTANDING_PINGS, SECOND_PING_SHARE
from services.scheduler.placement.fleet_view import FleetView, partners_of
from services.scheduler.placement.known_worker import KnownWorker
from services.scheduler.placement.place import Case, Placer


class Standing(NamedTuple):
    """A worker's role, and whether it is `ready`, `suspect` or `draining`."""

    role: WorkerRole
    state: str


@dataclass(slots=True)
class Member:
    """Whether one incarnation of a worker is alive, and its pings."""

    worker: KnownWorker
    """The fleet's own record of it."""
    peer: Peer
    next_ping_ms: int
    num_outstanding: int = 0
    serves_pings: bool = False
    """It has answered a ping."""


class SchedulerCore:
    """Knows the fleet and places requests on it. Raises UserError for an unknown policy."""

    def __init__(self, settings: SchedulerConfig) -> None:
        self.wake_ms = 0
        """`tick` has nothing to do before."""
        self._settings = settings
        # Its own pings are answered several times in half of a silence, and it asks the broker where none is: who hears
        # nothing for that long is cut off.
        self._hearing = Hearing(settings.silent_after_ms // 2)
        self._fences = Fences()
        self._members: dict[WorkerId, Member] = {}
        self._fleet = FleetView()
        self._placer = Placer(settings)
        self.asks_directory = self._placer.asks_directory
        """Whether `place` makes use of holders."""
        self._is_proving = False

    def incarnations(self) -> dict[WorkerId, str]:
        """Return who is known to live."""
        return {worker_id: member.worker.info.incarnation for worker_id, member in self._members.items()}

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """React to what has happened: return what is to be done."""
        if not isinstance(event, PingUnanswered | BusConnected | BusProved):
            self._hearing.hear(now_ms)
        match event:
            case WorkerJoined(worker=info) | WorkerLoad(worker=info):
                if self._fences.holds(info.worker_id, info.incarnation):
                    again = self._fences.repeat(info.worker_id, info.incarnation, now_ms)
                    return [SayLeft(again)] if again else []
                return self._hear(event, info, now_ms)
            case WorkerDraining():
                if member := self._member(event.worker_id, event.incarnation):
                    member.worker.is_draining = True
            case WorkerLeft():
                self._leave(event, now_ms)
            case PingAnswered() | PingUnserved() | PingUnanswered():
                return self._end_ping(event, now_ms)
            case BusProved(works=works):
                self._is_proving = False
                if works:
                    self._hearing.proved(now_ms)
            case BusConnected(num_connects=num_connects):
                self._hearing.connects(num_connects, now_ms)
        return []

    def tick(self, now_ms: int) -> list[Action]:
        """Return what the time makes necessary: words on behalf of the silent, pings, a proof that the bus works."""
        limit_ms = self._settings.silent_after_ms
        silent = [
            worker_id
            for worker_id, member in self._members.items()
            if self._hearing.is_silent(member.peer.heard_ms, limit_ms, now_ms)
        ]
        actions: list[Action] = [self._declare(worker_id, LeftReason.SILENT, now_ms) for worker_id in silent]
        self.wake_ms = now_ms + self._settings.ping_interval_ms
        for worker_id, member in self._members.items():
            if member.num_outstanding >= MAX_OUTSTANDING_PINGS:
                continue
            if member.next_ping_ms <= now_ms:
                member.num_outstanding += 1
                member.next_ping_ms = now_ms + self._settings.ping_interval_ms
                actions.append(SendPing(worker_id, member.worker.info.incarnation, now_ms))
            self.wake_ms = min(self.wake_ms, member.next_ping_ms)
        if not self._is_proving and self._suspects(now_ms):
            self._is_proving = True
            self._hearing.ask_proof(now_ms)
            actions.append(ProveBus())
        return actions

    def place(self, request: PlaceRequest, now_ms: int, holders: tuple[HolderPrefix, ...] = ()) -> Placement | Refused:
        """Choose the workers of one attempt (`placement.place`)."""
        return self._placer.place(Case(request, now_ms, self._fleet, self._suspects(now_ms), holders))

    def describe(self, now_ms: int) -> FleetDescribed:
        """Return what is known, and whether a request could be placed now on workers that are well."""
        suspects = self._suspects(now_ms)
        well = [worker for worker in self._fleet.usable() if worker.info.worker_id not in suspects]
        ready = any(worker.info.role == "aggregated" or partners_of(worker, well) for worker in well)
        loads = tuple(worker.load for worker in self._fleet.workers.values() if worker.has_reported)
        return FleetDescribed(policy=self._settings.policy, ready=ready, workers=loads)

    def standing(self, now_ms: int) -> list[Standing]:
        """Return how each known worker stands."""
        suspects = self._suspects(now_ms)
        return [
            Standing(worker.info.role, "draining" if worker.is_draining else "suspect" if key in suspects else "ready")
            for key, worker in self._fleet.workers.items()
        ]

    def _hear(self, event: WorkerJoined | WorkerLoad, info: WorkerInfo, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        member = self._members.get(info.worker_id)
        if member is not None and member.worker.info.incarnation != info.incarnation:
            actions.append(self._declare(info.worker_id, LeftReason.RESTARTED, now_ms))
            member = None
        if member is None:
            worker = self._fleet.join(info)
            member = self._members[info.worker_id] = Member(worker, Peer(now_ms), next_ping_ms=now_ms)
            self.wake_ms = now_ms
        member.peer.hear(now_ms)
        if isinstance(event, WorkerLoad):
            self._fleet.hear(event, now_ms)
        return actions

    def _end_ping(self, event: PingAnswered | PingUnserved | PingUnanswered, now_ms: int) -> list[Action]:
        """React to the end of a ping; do nothing where the worker's incarnation has been replaced."""
        ping = event.ping
        member = self._member(ping.worker_id, ping.incarnation)
        if member is None:
            return []
        member.num_outstanding -= 1
        match event:
            case PingAnswered():  # another one than was asked will speak for itself
                if (event.worker_id, event.incarnation) == (ping.worker_id, ping.incarnation):
                    member.serves_pings = True
                    member.peer.hear(now_ms)
            case PingUnserved():
                gap_ms = self._settings.ping_interval_ms // SECOND_PING_SHARE
                is_gone = member.peer.is_gone(ping.sent_ms, self._hearing, now_ms, gap_ms)
                # One that has never answered may serve no pings at all; its silence tells of its end.
                if is_gone and member.serves_pings:
                    return [self._declare(ping.worker_id, LeftReason.DIED, now_ms)]
                if member.peer.unserved_ms is not None:
                    member.next_ping_ms = min(member.next_ping_ms, now_ms + gap_ms)
                    self.wake_ms = min(self.wake_ms, member.next_ping_ms)
            case PingUnanswered():
                pass
        return []

    def _declare(self, worker_id: WorkerId, reason: LeftReason, now_ms: int) -> SayLeft:
        """Say of a known worker that it has left."""
        incarnation = self._members[worker_id].worker.info.incarnation
        left = WorkerLeft(worker_id=worker_id, incarnation=incarnation, reason=reason)
        self._leave(left, now_ms)
        return SayLeft(left)

    def _leave(self, left: WorkerLeft, now_ms: int) -> None:
        self._fences.add(left, now_ms)
        if self._member(left.worker_id, left.incarnation):
            del self._members[left.worker_id]
            self._fleet.leave(left.worker_id)

    def _member(self, worker_id: WorkerId, incarnation: str) -> Member | None:
        member = self._members.get(worker_id)
        return member if member is not None and member.worker.info.incarnation == incarnation else None

    def _suspects(self, now_ms: int) -> set[WorkerId]:
        """Return who has been quiet for so long that it may be stopped."""
        return {
            worker_id
            for worker_id, member in self._members.items()
            if self._hearing.quiet_ms(member.peer.heard_ms, now_ms) >= self._patience_ms(member)
        }

    def _patience_ms(self, member: Member) -> int:
        """Loads alone come too rarely to tell a stop from a pause."""
        suspect_after_ms = self._settings.suspect_after_ms
        if member.serves_pings:
            return suspect_after_ms
        return max(suspect_after_ms, self._settings.silent_after_ms // 2)
