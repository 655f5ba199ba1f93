"""Hears a mesh's bus: who is there, what their blocks are, and the message at which a fault is to strike.

It hears as an observer does, and as an operator only the few subjects that it is told. Whoever may hear a question is
taken by the broker for somebody who serves it: a listener to all of them would hide that a worker has died.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas import subjects
from schemas.message import Message, UndecodableMessageError, decode
from schemas.subjects import Subject
from schemas.worker import WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import BusError, Delivery
from services.bus.nats import NatsBus, NatsSubscription
from services.trust.keys import BusAccess

Hear = Callable[[str, bytes, float], None]
"""Subject, payload, and when it was heard (monotonic seconds)."""
STRIKES_AT: tuple[Subject[Any, Any], ...] = (
    subjects.PLACE, subjects.RUN, subjects.OFFERED, subjects.STORED,
)  # fmt: skip
"""What faults and clients wait for, and no observer hears."""


@dataclass
class BusListener:
    """Belongs to the mesh's loop. `loads`: each living worker's last word, and when it came."""

    observer: BusAccess
    operator: BusAccess
    as_operator: Sequence[Subject[Any, Any]] = STRIKES_AT
    loads: dict[str, tuple[WorkerLoad, float]] = field(default_factory=dict[str, tuple[WorkerLoad, float]])
    hearers: list[Hear] = field(default_factory=list[Hear])
    on_load: Callable[[WorkerLoad, float], None] = lambda _load, _heard_s: None
    on_joined: Callable[[WorkerJoined], None] = lambda _: None
    _buses: list[NatsBus] = field(default_factory=list[NatsBus])
    _subscriptions: list[NatsSubscription] = field(default_factory=list[NatsSubscription])
    _tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        everywhere = [subject.of(*("*" for _ in subject.ids)) for subject in self.as_operator]
        for access, patterns in ((self.observer, ["mesh.>"]), (self.operator, everywhere)):
            bus = await NatsBus.connect(access, "listener")
            self._buses.append(bus)
            for pattern in patterns:
                self._subscriptions.append(subscription := await bus.subscribe(pattern))
                self._tasks.append(asyncio.create_task(self._listen(subscription), name=f"listener to {pattern}"))
            await bus.flush()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for bus in self._buses:
            await bus.close()

    async def catch_up(self) -> None:
        """Return once everything is heard that was said before. Whoever shares the loop may have kept it busy: messages
        of long ago are heard only now."""
        for bus in self._buses:
            while True:
                try:
                    await bus.flush()
                    break
                except BusError:  # the broker is on its way back
                    await asyncio.sleep(0.05)
        while any(each._subscription.pending_msgs for each in self._subscriptions):
            await asyncio.sleep(0)

    async def until(self, holds: Callable[[], bool], within_s: float) -> bool:
        """Wait until something holds, looking whenever anything is heard. False: not within that time."""
        try:
            async with asyncio.timeout(within_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            await self.catch_up()  # what has come meanwhile is not heard while the loop is kept busy
            return holds()
        return True

    async def _listen(self, subscription: NatsSubscription) -> None:
        async for delivery in subscription:
            self._hear(delivery)

    def _hear(self, delivery: Delivery) -> None:
        heard_s = time.monotonic()
        for hearer in list(self.hearers):
            hearer(delivery.subject, delivery.payload, heard_s)
        word = delivery.subject.rsplit(".", 1)[-1]
        if word in ("joined", "load", "left") and delivery.subject.startswith("mesh.v1.worker."):
            self._take(_decoded(delivery.payload), heard_s)
        self._changed.set()

    def _take(self, message: Message | None, heard_s: float) -> None:
        match message:
            case WorkerLoad(worker=worker):
                self.loads[worker.worker_id] = (message, heard_s)
                self.on_load(message, heard_s)
            case WorkerJoined():
                self.on_joined(message)
            case WorkerLeft(worker_id=worker_id, incarnation=incarnation):
                if (known := self.loads.get(worker_id)) and known[0].worker.incarnation == incarnation:
                    del self.loads[worker_id]
            case _:
                pass


def _decoded(payload: bytes) -> Message | None:
    try:
        return decode(payload, WorkerLoad, WorkerJoined, WorkerLeft)
    except UndecodableMessageError:
        return None
