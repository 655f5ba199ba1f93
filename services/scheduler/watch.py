"""Watches over the fleet: pings the workers, and says of those that cannot that they have left."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from schemas import subjects
from schemas.worker import PingWorker, WorkerLeft
from services.bus.base import BusError, NoRespondersError
from services.bus.typed import TypedBus
from services.errors import BrokerUnreachableError
from services.runtime import now_ms
from services.scheduler.core import SchedulerCore
from services.scheduler.liveness import Ping

log = logging.getLogger(__name__)

PROOF_TIMEOUT_S = 1.0


class Watch:
    """The liveness of `core` on a bus. Each ping is a task of its own, bounded by `ping_timeout_s`. `on_left` hears of
    everybody who is said to have left."""

    def __init__(
        self,
        core: SchedulerCore,
        bus: TypedBus,
        tasks: asyncio.TaskGroup,
        ping_timeout_s: float,
        on_left: Callable[[WorkerLeft], None],
    ) -> None:
        self._core = core
        self._on_left = on_left
        self._bus = bus
        self._tasks = tasks
        self._ping_timeout_s = ping_timeout_s
        self._running: dict[asyncio.Task[None], None] = {}
        self._is_proving = False
        self._wake = asyncio.Event()
        self._num_seen = 0
        self._num_connects = bus.connection.num_connects

    def heard(self) -> None:
        """Somebody has spoken: one not known before is pinged at once."""
        if self._num_seen != (num_seen := self._core.liveness.num_seen):
            self._num_seen = num_seen
            self._wake.set()

    def say(self, said: list[WorkerLeft]) -> None:
        for left in said:
            log.warning("worker %s has left: %s", left.worker_id, left.reason)
            self._on_left(left)
            self._start(self._say_left(left), f"say that {left.worker_id} left")

    async def run(self) -> None:
        """Ping and judge until cancelled."""
        while True:
            self._notice_outage()
            self.say(self._core.expire(now_ms()))
            for ping in self._core.liveness.due(now_ms()):
                self._start(self._ping(ping), f"ping {ping.worker_id}")
            if self._core.liveness.needs_proof(now_ms()) and not self._is_proving:
                self._is_proving = True
                self._start(self._prove(), "ask whether the bus works")
            self._wake.clear()
            try:
                async with asyncio.timeout(self._core.liveness.wait_ms(now_ms()) / 1e3):
                    await self._wake.wait()
            except TimeoutError:
                pass

    def close(self) -> None:
        for task in list(self._running):
            task.cancel()

    def _start(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._running[task] = None
        task.add_done_callback(self._running.pop)

    def _notice_outage(self) -> None:
        if self._num_connects != (num_connects := self._bus.connection.num_connects):
            self._num_connects = num_connects
            self._core.liveness.reconnected(now_ms())

    async def _ping(self, ping: Ping) -> None:
        try:
            alive = await self._bus.ask(subjects.PING, (ping.worker_id,), PingWorker(), self._ping_timeout_s)
        except NoRespondersError:
            self._notice_outage()
            self.say(self._core.unserved(ping, now_ms()))
            self._wake.set()
        except BusError:
            self._core.liveness.unanswered(ping)
        else:
            self._core.answered(ping, alive, now_ms())

    async def _prove(self) -> None:
        """A round trip to the broker: without it nobody's silence counts."""
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._bus.connection.flush()
        except (BusError, BrokerUnreachableError, TimeoutError):
            return
        finally:
            self._is_proving = False
        self._core.liveness.proved(now_ms())

    async def _say_left(self, left: WorkerLeft) -> None:
        try:
            await self._bus.publish(subjects.LEFT, (left.worker_id,), left)
        except BusError as error:
            log.warning("could not say that %s left: %s", left.worker_id, error)
