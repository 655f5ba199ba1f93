"""What a fleet costs its control plane while nobody asks anything: `python -m tests.bench.bench_fleet`.

A real broker with keys and permissions; a scheduler, a directory and a gateway as `kvmesh serve` runs them; and made-up
workers in this process, which join, beat, say their loads (each with 64 measured pairs) when they change, and answer
pings and questions for inventories. A few have a connection of their own; the others share some, as 1,000 connections
would cost this process more than all that is measured. At each size the costs of all processes over a
window are shown, and how long it takes until the end of a worker's connection is heard as `left`. Workers take part of
the same cores. `--json` prints one object instead of the table.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest import mock

import httpx
import msgspec

from schemas import subjects
from schemas.directory import Inventory, ReadInventory
from schemas.ids import WorkerId
from schemas.permissions import Permissions, permissions_of
from schemas.subjects import Role
from schemas.worker import DescribeFleet, PingWorker, WorkerAlive, WorkerJoined, WorkerLeft, WorkerLoad
from services.bus.base import BusError
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.config import GatewayConfig, MeshConfig, NatsConfig, TelemetryConfig, write_config
from services.errors import BrokerUnreachableError
from services.holder.outbox import Outbox
from services.holder.report import LoadPublisher
from services.launch.serve import READY_LINE
from services.ports import free_port
from services.runtime import now_ms
from services.times import Times
from services.trust import nats_jwt
from services.trust.keys import BusAccess, MeshKeys
from tests.bench.bench_scheduler import load_of

BEAT_INTERVAL_MS = Times().presence.beat_interval_ms
LOAD_MIN_GAP_S = Times().worker.load_min_gap_s

SIZES = (8, 64, 250, 1_000)
ROLES = ("scheduler", "directory", "gateway")
BROKER = "broker"
SETTLE_S = 5.0
NUM_CROWDS = 8
NUM_ENDS = 5
CONNECT_TRIES = 20
LOOK_S = 0.01
CROWD = "mesh.v1.>"
KNOWN_WITHIN_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """Of one process. `core_share`: of one core. `heard_per_s`, `said_per_s`: messages from and to the broker; of the
    broker itself: what it has sent and received."""

    core_share: float
    mib: float
    heard_per_s: float
    said_per_s: float


@dataclass(frozen=True)
class Row:
    """`left_ms`: from the end of a worker's connection until a gateway's `left`, median. `workers_core_share`: what the
    made-up workers take of a core."""

    workers: int
    costs: dict[str, Cost]
    left_ms: float
    workers_core_share: float
    lost: int
    """How many workers that live were taken for dead meanwhile."""


@dataclass
class MadeUpWorker:
    """Speaks as a worker does, and computes nothing."""

    load: WorkerLoad
    bus: TypedBus
    said_s: float = 0.0
    due_s: float = 0.0
    """When it speaks next."""
    num_lost: int = 0
    """How often it was declared lost."""

    @property
    def worker_id(self) -> WorkerId:
        return self.load.worker.worker_id

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        me = (self.worker_id,)
        await self.bus.serve(tasks, subjects.PING, me, self._on_ping)
        await self.bus.serve(tasks, subjects.INVENTORY, me, self._on_inventory)
        await self.bus.listen(tasks, subjects.LEFT, me, self._on_left)
        self._outbox = Outbox(self.bus, self.worker_id)
        self._publisher = LoadPublisher(self._outbox, Times().presence)
        self._outbox.put(subjects.JOINED, me, WorkerJoined(worker=self.load.worker))
        self._sending = tasks.create_task(self._outbox.run())

    def change(self) -> None:
        """A request has come, or gone."""
        self.load = msgspec.structs.replace(self.load, num_running=self.load.num_running ^ 1)
        self.due_s = min(self.due_s, self.said_s + LOAD_MIN_GAP_S)

    def speak(self, now_s: float) -> None:
        """Say the load, or that it lives."""
        self.said_s, self.due_s = now_s, now_s + BEAT_INTERVAL_MS / 1000
        self._publisher.publish_due(self.load, now_ms())

    async def end(self) -> None:
        """As the end of its process looks to the broker: without a word."""
        self._sending.cancel()
        await self.bus.close()

    def _on_left(self, received: Received[WorkerLeft]) -> None:
        """It was taken for dead, and joins anew."""
        worker = self.load.worker
        if received.message.incarnation == worker.incarnation:
            self.num_lost += 1
            worker = msgspec.structs.replace(worker, incarnation=str(int(worker.incarnation) + 1))
            self.load = msgspec.structs.replace(self.load, worker=worker)
            self._outbox.put(subjects.JOINED, (self.worker_id,), WorkerJoined(worker=worker))

    async def _on_ping(self, _: Received[PingWorker]) -> WorkerAlive:
        return WorkerAlive(worker_id=self.worker_id, incarnation=self.load.worker.incarnation)

    async def _on_inventory(self, _: Received[ReadInventory]) -> Inventory:
        return Inventory(
            worker_id=self.worker_id, incarnation=self.load.worker.incarnation, sequence=0, block_hashes=b""
        )


@dataclass(frozen=True)
class Snapshot:
    """Of all processes: CPU seconds, and messages that each has heard and said."""

    time_s: float
    cpu_s: dict[str, float]
    messages: dict[str, tuple[int, int]]


@dataclass
class Mesh:
    """A broker and a control plane, and who is made up."""

    url: str
    monitor: str
    keys: MeshKeys
    pids: dict[str, int]
    tasks: asyncio.TaskGroup
    workers: list[MadeUpWorker] = field(default_factory=list[MadeUpWorker])
    crowds: list[TypedBus] = field(default_factory=list[TypedBus])
    """The connections that workers share."""
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Who has left does not come back under its name."""

    async def connect(self, role: Role, name: str, service: str = "") -> TypedBus:
        access = BusAccess(self.url, self.keys.roles[role].identity(name))
        for _ in range(CONNECT_TRIES):
            with contextlib.suppress(BrokerUnreachableError):  # where all share two cores the broker's patience may end
                return TypedBus(await NatsBus.connect(access, name, KNOWN_WITHIN_S), service or role)
        raise BrokerUnreachableError(f"the broker does not let {name} in")

    async def grow(self, num_workers: int, rng: random.Random) -> None:
        """Have so many workers, and return once the scheduler knows them."""
        names = [f"w{next(self.numbers)}" for _ in range(len(self.workers), num_workers)]
        sources = [worker.worker_id for worker in self.workers] + names
        while len(self.crowds) < NUM_CROWDS:
            self.crowds.append(await self.connect(Role.HOLDER, f"crowd-{len(self.crowds)}", "decode"))
        for number, name in enumerate(reversed(names)):
            load = load_of(rng, name, rng.choice(("prefill", "decode")), sources)
            has_own = number >= len(names) - NUM_ENDS  # the last ones, which `end_some` ends
            bus = await self.connect(Role.HOLDER, name, "decode") if has_own else self.crowds[number % NUM_CROWDS]
            worker = MadeUpWorker(load, bus)
            await worker.start(self.tasks)
            self.workers.append(worker)
            report(f"{len(self.workers):,} of {num_workers:,} workers have joined")

    async def until_known(self, asking: TypedBus) -> None:
        """Raises TimeoutError."""
        async with asyncio.timeout(KNOWN_WITHIN_S):
            known = set[WorkerId]()
            while known != {worker.worker_id for worker in self.workers}:
                await asyncio.sleep(0.5)
                with contextlib.suppress(BusError):
                    fleet = await asking.ask(subjects.FLEET, (), DescribeFleet(), 5)
                    known = {load.worker.worker_id for load in fleet.workers}

    async def speak(self) -> None:
        """Let all workers speak, until cancelled."""
        while True:
            now_s = time.monotonic()
            for worker in self.workers:
                if worker.due_s <= now_s:
                    worker.speak(now_s)
            await asyncio.sleep(LOOK_S)

    async def change(self, changes_per_s: float, rng: random.Random) -> None:
        """Change workers' loads until cancelled."""
        while True:
            await asyncio.sleep(0.1)
            for worker in rng.choices(self.workers, k=round(0.1 * changes_per_s * len(self.workers))):
                worker.change()

    async def snapshot(self, client: httpx.AsyncClient) -> Snapshot:
        about = (await client.get(f"{self.monitor}/varz")).json()
        listed = (await client.get(f"{self.monitor}/connz?limit=10000")).json()["connections"]
        messages = {BROKER: (about["out_msgs"], about["in_msgs"])}
        for role in ROLES:
            # The broker's words: what it has sent to a client is what that has heard.
            own = next(each for each in listed if each["name"] == role)
            messages[role] = (own["out_msgs"], own["in_msgs"])
        cpu_s = {name: cpu_of(pid) for name, pid in self.pids.items()} | {"workers": time.process_time()}
        return Snapshot(time.monotonic(), cpu_s, messages)

    async def end_some(self) -> float:
        """End some workers' connections, one after another; return how long until `left` is heard, median, in ms."""
        left: asyncio.Queue[WorkerId] = asyncio.Queue()

        def on_left(received: Received[WorkerLeft]) -> None:
            left.put_nowait(received.message.worker_id)

        spent_s = list[float]()
        async with asyncio.TaskGroup() as tasks:
            listening = await self.connect(Role.DIRECTORY, "hears-who-left")
            await listening.listen(tasks, subjects.LEFT, ("*",), on_left)
            await listening.connection.flush()
            for _ in range(NUM_ENDS):
                worker = self.workers.pop()
                started = time.monotonic()
                await worker.end()
                async with asyncio.timeout(KNOWN_WITHIN_S):
                    while await left.get() != worker.worker_id:
                        pass
                spent_s.append(time.monotonic() - started)
            await listening.close()
        return 1e3 * statistics.median(spent_s)


def report(doing: str) -> None:
    sys.stderr.write(f"\r\033[K{doing}")
    sys.stderr.flush()


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def mib_of(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@asynccontextmanager
async def mesh(keys: MeshKeys) -> AsyncGenerator[Mesh]:
    """Start a broker and a control plane; end them afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-fleet-") as name, contextlib.ExitStack() as ending:
        folder, monitor = Path(name), f"127.0.0.1:{free_port()}"
        keys.save(folder / "keys")
        broker = EmbeddedNats.launch(None, folder / "broker", f'{keys.broker_config}http: "{monitor}"\n')
        ending.callback(broker.stop)
        file = folder / "mesh.toml"
        config = MeshConfig(
            nats=NatsConfig(url=broker.url), gateway=GatewayConfig(port=free_port()),
            telemetry=TelemetryConfig(metrics_port=-1),
        )  # fmt: skip
        write_config(config, file)
        pids = {BROKER: broker.pid}
        for role in ROLES:
            report(f"starting the {role}")
            command = ["-m", "services.cli.main", "serve", role, "--id", role, "--config", str(file), "--supervised"]
            # It ends with us: once its standard input is closed.
            process = subprocess.Popen(  # noqa: ASYNC220 -- it is started quickly
                [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            ending.callback(process.wait)
            ending.callback(process.terminate)
            assert process.stdout is not None
            said = await asyncio.to_thread(process.stdout.readline)
            assert said.strip() == READY_LINE, f"the {role} did not start: {said}"
            pids[role] = process.pid
        async with asyncio.TaskGroup() as tasks:
            made = Mesh(broker.url, f"http://{monitor}", keys, pids, tasks)
            speaking = tasks.create_task(made.speak())
            yield made
            report("ending")
            speaking.cancel()
            await asyncio.gather(*(worker.end() for worker in made.workers), *(bus.close() for bus in made.crowds))


def _of_a_crowd(role: Role, name: str) -> Permissions:
    """Return what the members of a role may do; here a holder may speak for others."""
    may = permissions_of(role, name)
    return (
        replace(may, publish=(*may.publish, CROWD), subscribe=(*may.subscribe, CROWD)) if role is Role.HOLDER else may
    )


async def measure(sizes: list[int], window_s: float, changes_per_s: float) -> list[Row]:
    rng, rows = random.Random(1), list[Row]()
    with mock.patch.object(nats_jwt, "permissions_of", _of_a_crowd):
        keys = MeshKeys.fresh()
    async with mesh(keys) as made, httpx.AsyncClient(timeout=KNOWN_WITHIN_S) as client:
        asking = await made.connect(Role.GATEWAY, "asks")
        for size in sizes:
            await made.grow(size, rng)
            await made.until_known(asking)
            changing = asyncio.create_task(made.change(changes_per_s, rng))
            report(f"{size:,} workers: recovering")
            await asyncio.sleep(SETTLE_S)
            before, lost_before = await made.snapshot(client), sum(worker.num_lost for worker in made.workers)
            report(f"{size:,} workers: measuring for {window_s:g} s")
            await asyncio.sleep(window_s)
            after = await made.snapshot(client)
            mib = {name: mib_of(pid) for name, pid in made.pids.items()}
            lost = sum(worker.num_lost for worker in made.workers) - lost_before
            left_ms = await made.end_some()
            changing.cancel()
            rows.append(row_of(size, before, after, mib, left_ms, lost))
        await asking.close()
    report("")
    return rows


def row_of(size: int, before: Snapshot, after: Snapshot, mib: dict[str, float], left_ms: float, lost: int) -> Row:
    spent_s = after.time_s - before.time_s

    def share(name: str) -> float:
        return round((after.cpu_s[name] - before.cpu_s[name]) / spent_s, 4)

    def per_s(name: str, at: int) -> float:
        return round((after.messages[name][at] - before.messages[name][at]) / spent_s, 1)

    costs = {name: Cost(share(name), round(mib[name], 1), per_s(name, 0), per_s(name, 1)) for name in mib}
    return Row(size, costs, round(left_ms, 1), share("workers"), lost)


def table(rows: list[Row]) -> str:
    lines = [f"  {'workers':>7}  {'process':<10}{'of a core':>10}{'MiB':>8}{'heard/s':>10}{'said/s':>10}\n"]
    for row in rows:
        for name, cost in row.costs.items():
            lines.append(
                f"  {row.workers:>7,}  {name:<10}{cost.core_share:>10.1%}{cost.mib:>8.0f}{cost.heard_per_s:>10,.0f}"
                f"{cost.said_per_s:>10,.0f}\n"
            )
        lines.append(
            f"  {'':7}  a worker whose connection ends has left after {row.left_ms:.0f} ms; the made-up ones take "
            f"{row.workers_core_share:.0%} of a core; {row.lost} of them taken for dead\n"
        )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default=",".join(map(str, SIZES)), help="how many, with commas between, growing")
    parser.add_argument("--window", type=float, default=20.0, help="seconds that each size is measured for")
    parser.add_argument("--changes", type=float, default=1.0, help="changes of each worker's load a second")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = sorted(int(size) for size in options.workers.split(","))
    rows = asyncio.run(measure(sizes, options.window, options.changes))
    sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n" if options.json else table(rows))


if __name__ == "__main__":
    main()
