"""Hears all of a mesh's bus: who is there, what their blocks are, and the message at which a fault is to strike."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.message import Message, UndecodableMessageError, decode
from schemas.worker import WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import BusError, Delivery
from services.bus.nats import NatsBus, NatsSubscription
from services.trust.keys import BusAccess

Hear = Callable[[str, bytes, float], None]
"""Subject, payload, and when it was heard (monotonic seconds)."""


@dataclass
class BusListener:
    """Belongs to the mesh's loop. `loads`: each living worker's last word, and when it came."""

    access: BusAccess
    loads: dict[str, tuple[WorkerLoad, float]] = field(default_factory=dict[str, tuple[WorkerLoad, float]])
    hearers: list[Hear] = field(default_factory=list[Hear])
    on_load: Callable[[WorkerLoad, float], None] = lambda _load, _heard_s: None
    on_joined: Callable[[WorkerJoined], None] = lambda _: None
    _bus: NatsBus | None = None
    _subscription: NatsSubscription | None = None
    _task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def open(self) -> None:
        self._bus = await NatsBus.connect(self.access, "listener")
        subscription = self._subscription = await self._bus.subscribe("mesh.>")
        await self._bus.flush()

        async def listen() -> None:
            async for delivery in subscription:
                self._hear(delivery)

        self._task = asyncio.create_task(listen(), name="listener")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._bus is not None:
            await self._bus.close()

    async def catch_up(self) -> None:
        """Return once everything is heard that was said before. Whoever shares the loop may have kept it busy: messages
        of long ago are heard only now."""
        assert self._bus is not None and self._subscription is not None
        while True:
            try:
                await self._bus.flush()
                break
            except BusError:  # the broker is on its way back
                await asyncio.sleep(0.05)
        while self._subscription._subscription.pending_msgs:
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
