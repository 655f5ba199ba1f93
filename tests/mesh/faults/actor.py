"""Carries out a scenario on real processes: signals, the broker's port, the proxy between workers."""

import asyncio
import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from services.errors import UserError
from services.launch.restart import Child
from services.sim.scenario import Fault, Scenario
from tests.mesh.faults.bus_listener import BusListener
from tests.mesh.faults.client import Stream
from tests.mesh.faults.proxy import WIRE_FAULTS, TcpProxy, hold_port, listening_ports
from tests.mesh.faults.supervisor import CUT_GATEWAY, FaultSupervisor

LOOK_S = 0.02
"""Between two looks at a process that stands still."""
IN_PROCESSES = WIRE_FAULTS | frozenset(
    {
        "kill", "kill_engine", "hang_engine", "pause", "drain", "broker", "broker_pause", "bus_cut", "plane_cut",
        "disconnect",
    }
)  # fmt: skip
"""What can be done to real processes; the others need a bus that misbehaves, which only the simulator has."""


class FaultActor:
    """One scenario's. `counts`: the faults that struck; `killed`: whom, in order; `problems`: what a fault brought to
    light by itself."""

    def __init__(self, supervisor: FaultSupervisor, listener: BusListener, proxy: TcpProxy, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.killed: list[str] = []
        self.problems: list[str] = []
        self.on_kill: Callable[[str], None] = lambda _: None
        self._supervisor = supervisor
        self._listener = listener
        self._proxy = proxy
        self._rng = rng
        self._waiting: list[tuple[Fault, int]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._paused: set[int] = set()

    def begin(self, scenario: Scenario, streams: list[Stream], hang_up: Callable[[Stream], None]) -> None:
        """Start the scenario's clock. Raises UserError for what cannot be done to processes."""
        if strange := [fault.do for fault in scenario.faults if fault.do not in IN_PROCESSES]:
            raise UserError(f"{scenario.name}: {strange[0]} is for the simulator only")
        if any(fault.do == "bus_cut" and fault.target != CUT_GATEWAY for fault in scenario.faults):
            raise UserError(f"{scenario.name}: of processes only {CUT_GATEWAY} can be cut off from the broker")
        self._streams, self._hang_up = streams, hang_up
        self._listener.hearers.append(self._hear)
        for fault in scenario.faults:
            if fault.on:
                self._waiting.append((fault, fault.nth))
            else:
                self._spawn(fault, "", fault.at_s)

    async def heal(self) -> None:
        """Set right what lasts, and wait for what is under way."""
        self._waiting.clear()
        if self._hear in self._listener.hearers:
            self._listener.hearers.remove(self._hear)
        for task in self._tasks:
            await task
        self._proxy.heal()
        for pid in self._paused:
            os.kill(pid, signal.SIGCONT)
        self._paused.clear()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def living(self, target: str) -> list[Child]:
        """Return the services of a role or of a name that are there."""
        children = self._supervisor.children
        return [
            c for c in children if target in ("", c.role, c.name) and is_there(c) and c.process.pid not in self._paused
        ]

    def _hear(self, subject: str, _payload: bytes, _heard_s: float) -> None:
        word = subject.rsplit(".", 1)[-1]
        for at, (fault, left) in enumerate(self._waiting):
            if fault.on == word:
                if left > 1:
                    self._waiting[at] = (fault, left - 1)
                else:
                    del self._waiting[at]
                    self._spawn(fault, subject, 0.0)
                return

    def _spawn(self, fault: Fault, subject: str, after_s: float) -> None:
        """A fault that waited for a message strikes before anything else is done."""
        if after_s == 0 and fault.do in ("kill", "kill_engine"):
            self._kill(self._victims(fault, subject), engine=fault.do == "kill_engine")
            self.counts[fault.do] += 1
            return
        self._tasks.append(asyncio.create_task(self._strike(fault, subject, after_s), name=fault.do))

    def _victims(self, fault: Fault, subject: str) -> list[Child]:
        """Return one of the target's: who is named by the message, if anybody is."""
        living = self.living(fault.target)
        named = [child for child in living if child.name in subject.split(".")]
        return [self._rng.choice(named or living)] if living else []

    def _kill(self, victims: Iterable[Child], *, engine: bool = False) -> None:
        for child in victims:
            if engine:
                signal_engine(child, signal.SIGKILL)
                continue
            self.killed.append(child.name)
            child.kill()
            self.on_kill(child.name)

    async def _strike(self, fault: Fault, subject: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self.counts[fault.do] += 1
        match fault.do:
            case "kill" | "kill_engine":
                self._kill(self._victims(fault, subject), engine=fault.do == "kill_engine")
            case "hang_engine":
                for child in self._victims(fault, subject):
                    await _stand_still(engine_of(child.process.pid), fault.for_s)
            case "pause":
                await self._pause(self._victims(fault, subject), fault.for_s)
            case "drain":
                await self._drain(self._victims(fault, subject))
            case "broker":
                await self._take_broker_away(fault.for_s)
            case "broker_pause":
                async with broker_stopped(self._supervisor):
                    await asyncio.sleep(fault.for_s)
            case "bus_cut":
                async with gateway_cut(self._supervisor):
                    await asyncio.sleep(fault.for_s)
            case "plane_cut":
                for child in self._victims(fault, subject):
                    for port in listening_ports(child.process.pid):
                        self._proxy.cut(port)
                await asyncio.sleep(fault.for_s)
                self._proxy.heal("plane_cut")
            case "disconnect":
                await self._disconnect(fault)
            case _:
                self._proxy.strike(fault.do, fault.share)
                await asyncio.sleep(fault.for_s)
                self._proxy.heal(fault.do)

    async def _pause(self, victims: list[Child], for_s: float) -> None:
        for child in victims:
            pid = child.process.pid
            os.kill(pid, signal.SIGSTOP)
            self._paused.add(pid)
            await asyncio.sleep(for_s)
            if pid in self._paused:
                self._paused.discard(pid)
                os.kill(pid, signal.SIGCONT)

    async def _drain(self, victims: list[Child]) -> None:
        for child in victims:
            process = child.process
            process.send_signal(signal.SIGTERM)
            if (code := await process.wait()) and child.name not in self.killed:
                self.problems.append(f"{child.name} was drained and ended with code {code}")

    async def _take_broker_away(self, for_s: float) -> None:
        pid = self._supervisor.broker_pid
        address = urlsplit(self._supervisor.nats_url)
        assert pid is not None and address.hostname and address.port
        os.kill(pid, signal.SIGKILL)
        for _ in range(1_000):
            try:
                held = hold_port(address.hostname, address.port)
                break
            except OSError:  # it is still ending
                await asyncio.sleep(0.001)
        else:
            self.problems.append("the broker could not be kept away")
            return
        with held:
            await asyncio.sleep(for_s)
        while not is_alive(self._supervisor.broker_pid, pid):
            await asyncio.sleep(0.05)

    async def _disconnect(self, fault: Fault) -> None:
        """Let this share of the clients hang up, one now and then."""
        num_clients = max(1, round(fault.share * len(self._streams)))
        for _ in range(num_clients):
            await asyncio.sleep(self._rng.uniform(0, 2 * fault.for_s / num_clients))
            if open_streams := [s for s in self._streams if not s.ending]:
                self._hang_up(self._rng.choice(open_streams))


@asynccontextmanager
async def broker_stopped(supervisor: FaultSupervisor) -> AsyncGenerator[None]:
    """The broker's process stands still meanwhile."""
    pid = supervisor.broker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def gateway_cut(supervisor: FaultSupervisor) -> AsyncGenerator[None]:
    """The connection of `CUT_GATEWAY` to the broker is reset, and none is taken of it meanwhile."""
    supervisor.bus_way.strike("refusal", 1.0)
    try:
        yield
    finally:
        supervisor.bus_way.heal("refusal")


async def _stand_still(pid: int | None, for_s: float) -> None:
    """Stop a process for so long, or until somebody kills it."""
    until_s = time.monotonic() + for_s
    with contextlib.suppress(ProcessLookupError):
        if pid is not None:
            os.kill(pid, signal.SIGSTOP)
        while pid is not None and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)
            os.kill(pid, 0)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)


def signal_engine(child: Child, number: int) -> None:
    """Send a signal to a worker's engine, if there is one."""
    if (pid := engine_of(child.process.pid)) is not None:
        os.kill(pid, number)


def engine_of(worker: int | None) -> int | None:
    """Return the process of a worker's engine, if there is one: spares are younger."""
    return next(iter(engines_of(worker)), None)


def engines_of(worker: int | None) -> list[int]:
    """Return the processes of a worker's engine and of its spares, the oldest first: it has a pidfd of each."""
    pids: list[int] = []
    for path in Path(f"/proc/{worker}/fdinfo").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            pids += map(int, re.findall(r"^Pid:\t(\d+)$", path.read_text(), re.MULTILINE))
    return sorted(pids, key=_started)


def is_stopped(pid: int) -> bool:
    """Say whether a process stands still by a signal."""
    return _stat(pid)[0] in "Tt"


def _started(pid: int) -> int:
    """Return when a process was started, in ticks (proc_pid_stat(5), field 22)."""
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    """Return what stands behind the name: state, parent and so on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_there(child: Child) -> bool:
    return child.process.returncode is None and child.ready.is_set()


def is_alive(pid: int | None, not_pid: int) -> bool:
    return pid is not None and pid != not_pid
