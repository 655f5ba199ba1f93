"""Causes the faults of a scenario in a simulated mesh, and repairs them at the end."""

import asyncio
import contextvars
import random
from collections import Counter

from services.sim.client import Exchange
from services.sim.limits import MAX_DRIFT, MAX_STEP_S, SLOW_READ_S
from services.sim.mesh import Service, SimMesh
from services.sim.scenario import SERVER_FAULTS, Fault, Scenario


class FaultActor:
    """Carries out the faults of one scenario."""

    def __init__(self, mesh: SimMesh, rng: random.Random, counts: Counter[str], log: list[str]) -> None:
        self._mesh = mesh
        self._rng = rng
        self._counts = counts
        self._log = log
        self._waiting: list[tuple[Fault, int]] = []
        """Faults that wait for a message, and how many such messages are still to come before each."""
        self._tasks: list[asyncio.Task[None]] = []
        self._disconnect_share = 0.0
        self._slow_share = 0.0
        self._is_over = False
        self._num_away = 0
        self.most_away = 0
        """How many of the broker's servers were struck at once, at most."""
        self.healed_s: float | None = None
        """Since when all of them are as they should be, after one was not; None: there was none, or is one."""
        self._context = contextvars.copy_context()
        """Faults run in this context. Where a message causes one, the context at hand is that of the sender's process,
        which may be the one that is paused."""
        mesh.broker.taps.append(self._on_message)

    @property
    def lost_one_server(self) -> bool:
        """Nothing has gone wrong but that one of the broker's servers was away, never two at once."""
        return self.most_away == 1 and self._counts.keys() <= SERVER_FAULTS

    def begin(self, scenario: Scenario) -> None:
        """Start the scenario's clock."""
        for fault in scenario.faults:
            if fault.on:
                self._waiting.append((fault, fault.nth))
            else:
                self._spawn(fault, fault.at_s)

    async def heal(self) -> None:
        """Repair everything: no partition, no paused process, every dead service started again."""
        self._is_over = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        mesh, conditions = self._mesh, self._mesh.broker.conditions
        conditions.loss = conditions.duplication = conditions.reordering = 0.0
        conditions.delay_s = (0.0001, 0.001)
        # What a partition holds back is on its way already, and what is sent later comes after it.
        until_s = max(conditions.held_until_s.values(), default=0.0)
        await asyncio.sleep(max(until_s - asyncio.get_running_loop().time(), 0.0))
        conditions.held_until_s.clear()
        mesh.network.heal()
        mesh.broker.restore_all()
        if not mesh.broker.is_up:
            mesh.broker.come_up()
        mesh.broker.go_on()
        mesh.broker.heal_servers()
        for service in list(mesh.services.values()):
            mesh.resume(service)
            if service.stop.is_set() and service.task is not None and service.is_running:
                await asyncio.wait([service.task])  # it drains
            if not service.is_running:
                mesh.launch(service.role, service.name)
        await asyncio.sleep(0)

    def read_delay_s(self) -> float:
        """Return the delay of each read of the next client, in seconds."""
        return SLOW_READ_S if self._slow_share and self._rng.random() < self._slow_share else 0.0

    def watch_client(self, exchange: Exchange) -> None:
        """Close a client's connection at some time, as often as the scenario says."""
        if self._disconnect_share and self._rng.random() < self._disconnect_share:
            self._counts["disconnect"] += 1
            asyncio.get_running_loop().call_later(self._rng.uniform(0.0, 0.4), exchange.hang_up)

    def _on_message(self, subject: str, _source: str) -> None:
        if not self._waiting:
            return
        word = subject.rsplit(".", 1)[-1]
        for at, (fault, left) in enumerate(self._waiting):
            if fault.on == word:
                if left > 1:
                    self._waiting[at] = (fault, left - 1)
                else:
                    del self._waiting[at]
                    self._spawn(fault, self._rng.uniform(0.0, 0.002))
                return

    def _spawn(self, fault: Fault, after_s: float) -> None:
        strike = self._strike(fault, after_s)
        self._tasks.append(asyncio.get_running_loop().create_task(strike, name=fault.do, context=self._context.copy()))

    async def _strike(self, fault: Fault, after_s: float) -> None:
        await asyncio.sleep(after_s)
        # Count the fault as it begins. "disconnect" only sets a share: `watch_client` counts each closed connection.
        if fault.do not in ("disconnect",):
            self._counts[fault.do] += 1
        self._log.append(f"{asyncio.get_running_loop().time():.4f} {fault}")
        match fault.do:
            # The engine ends these two itself, so nothing waits here. Without a living engine they have no effect.
            case "kill_engine" | "hang_engine":
                living = self._mesh.living(fault.target)
                if engines := [service.engine for service in living if service.engine is not None]:
                    engine = self._rng.choice(engines)
                    (engine.kill_engine if fault.do == "kill_engine" else engine.hang_engine)(fault.for_s)
            case "kill" | "pause" | "drain" | "partition" | "plane_cut" | "bus_cut" | "clock_step" | "clock_drift":
                if living := self._mesh.living(fault.target):
                    await self._strike_service(fault, self._rng.choice(living))
            # The faults below last `for_s`. `heal` may cancel the wait: it resets broker, bus and network itself.
            case "broker":
                self._mesh.broker.go_down()
                await asyncio.sleep(fault.for_s)
                self._mesh.broker.come_up()
            case "broker_pause":
                self._mesh.broker.stand_still()
                await asyncio.sleep(fault.for_s)
                self._mesh.broker.go_on()
            case "kill_server" | "stop_server" | "split" | "unplug":
                await self._strike_server(fault)
            case "loss" | "duplication" | "reordering" | "delay":
                await self._degrade_bus(fault)
            case "disconnect":
                self._disconnect_share = fault.share
                await asyncio.sleep(fault.for_s)
                self._disconnect_share = 0.0
            case "slow_client":
                self._slow_share = fault.share
                await asyncio.sleep(fault.for_s)
                self._slow_share = 0.0
            case "truncation" | "corruption" | "stall" | "slowness" | "refusal":
                self._mesh.network.set_fault(fault.do, fault.share)
                await asyncio.sleep(fault.for_s)
                self._mesh.network.set_fault(fault.do, 0.0)

    async def _strike_service(self, fault: Fault, service: Service) -> None:
        mesh = self._mesh
        match fault.do:
            case "kill":
                mesh.kill(service)
            case "pause":
                mesh.loop.pause(service.process)
            case "clock_step":
                self._step(service, fault.share)
            case "clock_drift":
                mesh.drift(service, 1.0 + self._sign() * MAX_DRIFT * fault.share)
            # Both cut off the data plane, "partition" the bus as well. They end by `until_s`, without a second call.
            case "partition" | "plane_cut":
                until_s = asyncio.get_running_loop().time() + fault.for_s
                if fault.do == "partition":  # one that lasts longer goes on: what it holds back comes at its end
                    held_s = mesh.broker.conditions.held_until_s
                    until_s = held_s[service.name] = max(until_s, held_s.get(service.name, 0.0))
                mesh.network.partition(service.name, until_s)
            case "bus_cut":
                mesh.broker.cut(service.name)
            # Only "drain" is left: the service is asked to stop, and ends by itself.
            case _:
                service.stop.set()
        # Undo what does not end by itself. A drain may take longer than `for_s`; a stepped clock stays as it is.
        await asyncio.sleep(fault.for_s)
        if fault.do == "pause":
            mesh.resume(service)
        elif fault.do == "clock_drift":
            mesh.drift(service, 1.0)
        elif fault.do == "bus_cut":
            mesh.broker.restore(service.name)
        elif fault.do == "drain" and service.task is not None and service.is_running:
            await asyncio.wait([service.task])
        # Start a killed or drained service again. Once `_is_over` is set, `heal` starts whatever does not run.
        is_gone = mesh.services[service.name] is service and not service.is_running  # it was not started again
        if fault.do in ("kill", "drain") and is_gone and not self._is_over:
            mesh.launch(service.role, service.name)

    async def _strike_server(self, fault: Fault) -> None:
        mesh, broker = self._mesh, self._mesh.broker
        number = next(at for at, server in enumerate(broker.servers) if server.name == fault.target)
        server = broker.servers[number]
        self._num_away += 1
        self.most_away, self.healed_s = max(self.most_away, self._num_away), None
        match fault.do:
            case "kill_server":
                broker.kill_server(server)
            case "stop_server":
                broker.stop_server(server)
            case "split":
                broker.split(server, silently=self._rng.random() < 0.5)
            # The whole machine: what runs on it is reached by nobody else, on the data plane neither.
            case _:
                inside = mesh.on_machine(number)
                broker.unplug(server, inside)
                until_s = asyncio.get_running_loop().time() + fault.for_s
                for one in inside:
                    for other in mesh.services.keys() - inside:
                        mesh.network.partition(one, until_s, other)
        await asyncio.sleep(fault.for_s)
        match fault.do:
            case "kill_server":
                broker.start_server(server)
            case "stop_server":
                broker.resume_server(server)
            case "split":
                broker.mend(server)
            case _:
                broker.plug(server)
        self._num_away -= 1
        if not self._num_away:
            self.healed_s = asyncio.get_running_loop().time()

    def _step(self, service: Service, share: float) -> None:
        """Set the clock of a service's machine, and leave it so: whoever sets it again only steps once more."""
        service.process.clock.ahead_ns += round(self._sign() * MAX_STEP_S * share * 1e9)

    def _sign(self) -> int:
        return self._rng.choice((-1, 1))

    async def _degrade_bus(self, fault: Fault) -> None:
        conditions = self._mesh.broker.conditions
        match fault.do:
            case "loss":
                conditions.loss = fault.share
            case "duplication":
                conditions.duplication = fault.share
            case "reordering":
                conditions.reordering = fault.share
            case _:
                conditions.delay_s = (0.0001, 0.2 * fault.share)
        await asyncio.sleep(fault.for_s)
        match fault.do:
            case "loss":
                conditions.loss = 0.0
            case "duplication":
                conditions.duplication = 0.0
            case "reordering":
                conditions.reordering = 0.0
            case _:
                conditions.delay_s = (0.0001, 0.001)
