"""What a worker or a store reports of itself: who it is, what it has to do, what it holds, and, to whoever asks, what
is going on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas import subjects
from schemas.directory import Inventory
from schemas.observe import AttachedServer, HeldLease, HeldRequest, WorkerDescribed
from schemas.worker import (
    LeftReason,
    WorkerBeat,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRates,
)
from services.bus.typed import TypedBus
from services.holder.core.leases import Grant
from services.holder.kv.blocks import LentBlocks
from services.holder.limits import MAX_LISTED
from services.holder.observe.journal import Journal
from services.holder.outbox import Outbox
from services.times import PresenceTimes


class LoadPublisher:
    """Publishes a worker's or store's load as it changes and every `load_interval_ms`, and in between that it lives."""

    def __init__(self, outbox: Outbox, times: PresenceTimes) -> None:
        self._outbox = outbox
        self._times = times
        self._published: WorkerLoad | None = None
        self._published_ms = 0

    def publish_due(self, load: WorkerLoad, now_ms: int) -> None:
        """To be called every `beat_interval_ms`, and where something may have changed."""
        # Half a beat early is in time: else a timer that is a little early would skip a whole beat.
        is_due = now_ms - self._published_ms >= self._times.load_interval_ms - self._times.beat_interval_ms // 2
        worker = load.worker
        if is_due or self._published is None or _weighed(load) != _weighed(self._published):
            self._published, self._published_ms = load, now_ms
            self._outbox.put(subjects.LOAD, (worker.worker_id,), load)
        else:
            beat = WorkerBeat(worker_id=worker.worker_id, incarnation=worker.incarnation)
            self._outbox.put(subjects.BEAT, (worker.worker_id,), beat)


def _weighed(load: WorkerLoad) -> WorkerLoad:
    """Return what a placement would weigh of it at once: what goes on counting or averaging has time."""
    return msgspec.structs.replace(load, num_tokens=0, num_dropped_messages=0, num_refused_reads=0, rates=WorkerRates())


@dataclass(kw_only=True)
class Reporter:
    """Describes one holder of KV. `identity`: what of it is known before it serves. `load`: what there is to do at a
    time in ms. `requests`: what goes on here then, for people. `servers`: that are attached to it."""

    identity: WorkerInfo
    blocks: LentBlocks[Any]
    bus: TypedBus
    outbox: Outbox
    times: PresenceTimes
    journal: Journal
    load: "Callable[[Reporter, int], WorkerLoad]"
    requests: Callable[[int], Iterable[HeldRequest]]
    servers: Callable[[], tuple[AttachedServer, ...]] = tuple

    def __post_init__(self) -> None:
        self._publisher = LoadPublisher(self.outbox, self.times)

    def current_load(self, now_ms: int) -> WorkerLoad:
        """Return what there is to do at `now_ms`."""
        return self.load(self, now_ms)

    def info(self) -> WorkerInfo:
        """Return who this is now."""
        endpoint = self.blocks.plane.endpoint if self.blocks.plane else None
        return msgspec.structs.replace(
            self.identity,
            incarnation=self.blocks.incarnation,
            carriers=endpoint.carriers if endpoint else (),
            endpoint=endpoint.public if endpoint else None,
        )

    @property
    def num_refused_reads(self) -> int:
        plane = self.blocks.plane
        return plane.num_refused + plane.num_junk if plane else 0

    def describe(self, now_ms: int) -> WorkerDescribed:
        """Return the state at `now_ms`."""
        requests, leases = self.requests(now_ms), list(self.blocks.leases)
        described = describe(self.current_load(now_ms), requests, leases, now_ms, self.journal.lines())
        return msgspec.structs.replace(described, servers=self.servers())

    def inventory(self, offset: int) -> Inventory:
        """Return a page of the blocks that are here. Blocks that have come or gone are published first: what a page has
        is in the events up to its number."""
        self.publish_blocks()
        return self.blocks.inventory(offset, self.bus.connection.max_bytes)

    def publish_joined(self) -> None:
        """Publish who this is; all subscriptions must be there."""
        self.outbox.put(subjects.JOINED, (self.identity.worker_id,), WorkerJoined(worker=self.info()))

    def publish_draining(self) -> None:
        """Publish that this worker takes no new work."""
        me = self.identity.worker_id
        self.outbox.put(subjects.DRAINING, (me,), WorkerDraining(worker_id=me, incarnation=self.blocks.incarnation))

    def publish_left(self) -> None:
        """Publish that this worker stops."""
        me = self.identity.worker_id
        left = WorkerLeft(worker_id=me, incarnation=self.blocks.incarnation, reason=LeftReason.STOPPED)
        self.outbox.put(subjects.LEFT, (me,), left)

    def publish_load(self, now_ms: int) -> None:
        """Publish what there is to do, or that it is what was published last (`LoadPublisher`)."""
        self._publisher.publish_due(self.current_load(now_ms), now_ms)

    def publish_blocks(self) -> bool:
        """Publish which blocks have come and gone since the last time. True: some have."""
        events = self.blocks.events()
        self.outbox.put_block_events(events)
        return bool(events)


def describe(
    load: WorkerLoad,
    requests: Iterable[HeldRequest],
    leases: Iterable[Grant],
    now_ms: int,
    last_steps: tuple[str, ...] = (),
) -> WorkerDescribed:
    """Return the state of a worker or store at `now_ms`."""
    held = sorted((_held(lease, now_ms) for lease in leases), key=lambda lease: -lease.age_ms)
    running = sorted(requests, key=lambda request: -request.age_ms)
    return WorkerDescribed(
        load=load,
        requests=tuple(running[:MAX_LISTED]),
        leases=tuple(held[:MAX_LISTED]),
        num_requests=len(running),
        num_leases=len(held),
        last_steps=last_steps,
    )


def _held(lease: Grant, now_ms: int) -> HeldLease:
    return HeldLease(
        lease_id=lease.lease_id,
        reader=lease.reader,
        num_blocks=lease.num_blocks,
        age_ms=max(0, now_ms - lease.granted_ms),
        left_ms=max(0, lease.expires_at_ms - now_ms),
    )
