"""`kvmesh drain` and `kvmesh restart`: have workers leave; what they do goes on elsewhere."""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from schemas import subjects
from schemas.worker import DrainWorker, FleetDescribed, WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from services.bus.base import BusError, NoRespondersError
from services.bus.fleet import ask_fleet
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.cli.limits import ASK_TIMEOUT_S, COMES_BACK_S, DRAIN_ANSWER_S, LEAVE_POLL_S, LEAVES_WITHIN_S
from services.cli.running import BusOptions, access_of
from services.errors import MeshNotRunningError, UserError
from services.trust.keys import BusAccess


def run_drain(options: BusOptions, worker_id: str, *, forced: bool) -> None:
    """Have one worker leave, and wait until it has. Raises UserError where it stays, or is not there."""
    asyncio.run(_drain(access_of(options), worker_id, forced=forced))


def run_restart(options: BusOptions, *, forced: bool) -> None:
    """Have one worker after another leave and come back. Raises UserError where one of them does not."""
    asyncio.run(_restart(access_of(options), forced=forced))


@dataclass(frozen=True)
class Leaving:
    """Has workers leave, one after another, and shows how far they are."""

    bus: TypedBus
    access: BusAccess
    status: Status

    async def fleet(self) -> FleetDescribed:
        """Raises MeshNotRunningError."""
        try:
            return await ask_fleet(self.bus, ASK_TIMEOUT_S)
        except BusError as error:
            raise MeshNotRunningError(f"no scheduler answers at {self.access.shown} ({error.reason})") from error

    async def leave(self, worker: WorkerInfo, message: DrainWorker) -> str:
        """Have a worker leave, and wait until it has; return in words how long that took. Raises UserError."""
        name, began_s = worker.worker_id, time.monotonic()
        try:
            answer = await self.bus.ask(subjects.DRAIN, (name,), message, timeout_s=DRAIN_ANSWER_S)
        except NoRespondersError:
            raise UserError(f"{name} does not answer any more: `kvmesh status` shows who is there") from None
        except BusError as error:
            raise UserError(f"{name} does not answer ({error.reason}): it may be leaving all the same") from error
        if answer.refusal:
            raise UserError(f"{name} stays: {answer.refusal}; start another one first, or say --force")
        while (load := await self._load_of(name)) is not None and load.worker.incarnation == answer.incarnation:
            took_s = time.monotonic() - began_s
            if took_s > LEAVES_WITHIN_S:
                raise UserError(f"{name} has not left after {took_s:.0f} s; it goes on leaving")
            self.status.update(f"{name} leaves: {load.num_running} run, {load.blocks.leased} blocks are read")
            await asyncio.sleep(LEAVE_POLL_S)
        again = ", as it was asked before" if answer.is_leaving else ""
        return f"{name} has left after {time.monotonic() - began_s:.1f} s{again}"

    async def comes_back(self, worker: WorkerInfo) -> str:
        """Wait until a worker that has left is ready again; return in words how long that took. Raises UserError."""
        name, began_s = worker.worker_id, time.monotonic()
        while (load := await self._load_of(name)) is None or load.state != WorkerState.READY:
            took_s = time.monotonic() - began_s
            if took_s > COMES_BACK_S:
                raise UserError(f"{name} has not come back after {took_s:.0f} s: the others were left as they are")
            self.status.update(f"{name} starts again")
            await asyncio.sleep(LEAVE_POLL_S)
        return f"it is back after {time.monotonic() - began_s:.1f} s"

    async def _load_of(self, worker_id: str) -> WorkerLoad | None:
        return next((load for load in (await self.fleet()).workers if load.worker.worker_id == worker_id), None)


async def _drain(access: BusAccess, worker_id: str, *, forced: bool) -> None:
    connection = await NatsBus.connect(access, "kvmesh-drain")
    console = Console(highlight=False)
    try:
        with console.status("asking") as status:
            leaving = Leaving(TypedBus(connection, "drain"), access, status)
            loads = {load.worker.worker_id: load for load in (await leaving.fleet()).workers}
            worker = next((load.worker for name, load in loads.items() if name == worker_id), None)
            if worker is None:
                raise UserError(f"there is no worker called {worker_id!r}: `kvmesh status` shows who there is")
            if worker.role == WorkerRole.STORE:
                raise UserError(f"{worker_id} is a store, and no answers run there: end its process to have it leave")
            answer = await leaving.leave(worker, DrainWorker(forced=forced))
        console.print(escape(answer))
    finally:
        await connection.close()


async def _restart(access: BusAccess, *, forced: bool) -> None:
    connection = await NatsBus.connect(access, "kvmesh-restart")
    console = Console(highlight=False)
    try:
        with console.status("asking") as status:
            leaving = Leaving(TypedBus(connection, "restart"), access, status)
            workers = sorted(
                (load.worker for load in (await leaving.fleet()).workers if load.worker.role != WorkerRole.STORE),
                key=lambda worker: worker.worker_id,
            )
            if not workers:
                raise UserError("there is no worker to be started again: `kvmesh status` shows who there is")
            counts = Counter(worker.role for worker in workers)
            if (alone := [role for role, count in counts.items() if count == 1]) and not forced:
                raise UserError(
                    f"there is one {alone[0]} worker alone, and nobody can stand in for it: start another one first, "
                    "or say --force, and what comes meanwhile waits"
                )
            for number, worker in enumerate(workers, start=1):
                left = await leaving.leave(worker, DrainWorker(forced=forced, again=True))
                back = await leaving.comes_back(worker)
                console.print(escape(f"{number}/{len(workers)}: {left}, {back}"))
    finally:
        await connection.close()
