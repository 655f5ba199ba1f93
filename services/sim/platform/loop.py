"""An event loop with virtual time and seeded scheduling, and the processes that run on it.

Time stands still while anything can run, then jumps to the next timer. Callbacks of one process run in order, as on any
loop; which process runs next is random. A process can be killed (nothing of it runs any more, not even a `finally`) and
paused (its callbacks wait).
"""

import asyncio
import contextvars
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.sim.limits import CHARGED_AT_LEAST_S, EXECUTOR_S, MAX_CALLBACKS_AT_ONCE
from services.sim.platform.clock import LocalClock, VirtualTime
from services.sim.platform.meter import CpuAccount, CpuMeter
from services.sim.platform.threads import CoThread, abandon_all

ResultT = TypeVar("ResultT")

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
"""The process whose code is running. Every callback carries it in its context."""


class SimulationStuckError(Exception):
    """No timer and no callback is left, or too many callbacks run without a tick of the clock."""


class Process:
    """One simulated operating-system process: a name, its machine's clocks, its queue of callbacks, whether it runs."""

    def __init__(self, name: str, clock: LocalClock | None = None) -> None:
        self.name = name
        self.clock = clock or LocalClock()
        self.queue: deque[events.Handle] = deque()
        self.is_paused = False
        self.is_dead = False
        self.is_listed = False
        """It is in the loop's list of processes that can run."""
        self.on_kill: list[Callable[[], None]] = []
        """Called when it dies: what the rest of the world notices."""
        self.tasks: list[asyncio.Task[Any]] = []
        """Kept to the end of the simulation: a task that is collected would run its `finally`."""
        self.cpu = CpuAccount()
        """What it has taken, where the loop has a meter."""
        self.is_charged = False
        """What it takes passes in virtual time too: meanwhile it does nothing else, and what it sends leaves later."""

    def __repr__(self) -> str:
        state = "dead" if self.is_dead else "paused" if self.is_paused else "running"
        return f"<process {self.name} {state}>"


def lag_s() -> float:
    """Return by how much the running process is behind the virtual clock: what it has taken since its last charge."""
    process = PROCESS.get()
    return process.cpu.lag_s if process is not None and process.is_charged else 0.0


class _Handle(events.Handle):
    """As asyncio's own, at half its cost: it records no traceback of where the callback comes from."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: "SimLoop", context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class SimLoop(asyncio.BaseEventLoop):
    """The event loop of one simulation. Not for sockets, signals or subprocesses. `meter`: who takes how much real CPU
    time is measured."""

    def __init__(self, clock: VirtualTime, rng: random.Random, meter: CpuMeter | None = None) -> None:
        super().__init__()
        self._meter = meter
        self._clock = clock
        self._rng = rng
        self._world = Process("world")
        local = self._world.clock
        clock.local = lambda: process.clock if (process := PROCESS.get()) is not None else local
        self._runnable: list[Process] = []
        self._timers: list[tuple[float, int, events.TimerHandle]] = []
        self._num_timers = 0
        self._num_at_once = 0
        self.num_callbacks = 0

    # Processes.

    def spawn(self, process: Process, work: Coroutine[Any, Any, ResultT], name: str = "") -> "asyncio.Task[ResultT]":
        """Run a coroutine as part of a process."""
        context = contextvars.copy_context()
        context.run(PROCESS.set, process)
        task = self.create_task(work, name=name or process.name, context=context)
        process.tasks.append(task)
        return task

    def kill(self, process: Process) -> None:
        """End a process as SIGKILL does."""
        if process.is_dead:
            return
        process.is_dead = True
        process.queue.clear()
        for notice in process.on_kill:
            notice()

    def pause(self, process: Process) -> None:
        process.is_paused = True

    def resume(self, process: Process) -> None:
        process.is_paused = False
        self._list(process)

    def run_to_end(self, main: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run until `main` returns, and close the loop. What is left, the tasks of killed processes, stays as it is."""
        try:
            return self.run_until_complete(self.create_task(main, name="world"))
        finally:
            abandon_all(self)
            for task in asyncio.all_tasks(self):
                task._log_destroy_pending = False  # pyright: ignore
            self.close()

    # What asyncio calls.

    def time(self) -> float:
        return self._clock.now_s

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = events.TimerHandle(when, callback, args, self, context)
        self._num_timers += 1
        heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self._clock.now_s + delay, callback, *args, context=context)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._push(handle)
        return handle

    call_soon_threadsafe = call_soon

    def run_in_executor(self, executor: Any, func: Callable[..., ResultT], *args: Any) -> "asyncio.Future[ResultT]":
        """Run the function in a cooperative thread, a moment later."""
        done: asyncio.Future[ResultT] = self.create_future()

        def run() -> None:
            if done.done():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001  (it is raised where the work is awaited)
                done.set_exception(error)

        self.call_later(self._rng.uniform(*EXECUTOR_S), CoThread(run, "executor").start)
        return done

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled timer is skipped when its time comes."""

    def _process_events(self, event_list: Any) -> None:
        raise NotImplementedError("there are no sockets here")

    def _run_once(self) -> None:
        """Run callbacks one at a time until the loop is to stop. Where there is none, advance the clock to the next
        timer."""
        runnable, chance = self._runnable, self._rng.random
        while not self._stopping:  # pyright: ignore
            if not runnable:
                self._advance()
                if not runnable:
                    continue  # the processes of these timers are dead or paused
            # Take the oldest callback of a random process. A process paused since it was listed keeps its callbacks.
            at = int(chance() * len(runnable)) if len(runnable) > 1 else 0
            process = runnable[at]
            queue = process.queue
            handle = queue.popleft() if queue and not process.is_paused else None
            # Unlist a process that has nothing to run: the last entry takes its place, so that no other entry moves.
            # `_push` or `resume` lists it again.
            if not queue or process.is_paused:
                process.is_listed = False
                runnable[at] = runnable[-1]
                runnable.pop()
            if handle is None or handle._cancelled:  # pyright: ignore
                continue
            # Find endless loops: `_advance` resets `_num_at_once` whenever it goes on to the next timers.
            self.num_callbacks += 1
            self._num_at_once += 1
            if self._num_at_once > MAX_CALLBACKS_AT_ONCE:
                at_s = self._clock.now_s
                raise SimulationStuckError(f"{MAX_CALLBACKS_AT_ONCE} callbacks at {at_s} s; last: {handle}")
            if self._meter is None:
                handle._run()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
            else:
                self._run_metered(self._meter, process, handle)

    def _run_metered(self, meter: CpuMeter, process: Process, handle: asyncio.Handle) -> None:
        before = meter.switch(process.cpu)
        handle._run()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        meter.switch(before)
        lag_s = process.cpu.lag_s
        if process.is_charged and lag_s >= CHARGED_AT_LEAST_S:
            process.cpu.passed_s = process.cpu.taken_s
            self.pause(process)
            self.call_later(lag_s, self.resume, process, context=contextvars.Context())

    def _advance(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            if self._stopping:  # pyright: ignore
                self._list(self._world)
                return
            raise SimulationStuckError("nothing can ever happen again")
        now = max(self._clock.now_s, timers[0][0])
        self._clock.move_to(now)
        self._num_at_once = 0
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            if not handle.cancelled():
                self._push(handle)

    def _push(self, handle: asyncio.Handle) -> None:
        process = handle._context.get(PROCESS) or self._world  # pyright: ignore
        if process.is_dead:
            return
        process.queue.append(handle)
        self._list(process)

    def _list(self, process: Process) -> None:
        if not process.is_listed and not process.is_paused and not process.is_dead:
            process.is_listed = True
            self._runnable.append(process)
