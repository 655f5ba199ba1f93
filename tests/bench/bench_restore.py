"""Restoring a prompt's KV from a store, beside what its device gives: `python -m tests.bench.bench_restore`.

A process of its own is the store, on a real broker; this one asks it for leases, as a worker does, and reads what they
grant into an arena. Two prompts take turns, as the store's memory holds one of them: each restore loads all of it from
behind memory, verifies it, lends it, and crosses the plane, which verifies it too. The device's rate is measured in
turn with it: the same files with plain reads into one buffer, one after another; the same values with a pipeline of one
MGET for some 8 MiB, by the client that the store uses. "cold": the kernel was asked to drop these files' pages first
(POSIX_FADV_DONTNEED, after they had been synced); "warm": they had just been read. A virtual machine's host may have
them in its own cache all the same.
"""

import argparse
import asyncio
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import valkey
import xxhash
from rich import box
from rich.console import Console
from rich.table import Table

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTable, KVLayout, Segment, uniform_shape
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.memory.content_macs import BlockContents, ExpectedContent
from schemas import subjects
from schemas.block import join_hashes
from schemas.handoff import Endpoint
from schemas.ids import BlockHash, RequestId, WorkerId, new_id
from schemas.kv import LeaseGranted, RequestLease
from schemas.observe import DescribeWorker
from schemas.request import RefusalReason, Refused
from services.bench.drive.progress_bar import progress
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.config import MeshConfig, StoreConfig, WorkerConfig
from services.runtime import now_ms
from services.store.load import make_parts, open_tier
from services.store.service import run_store
from services.store.tiers import StoreKey, key_of
from services.store.values import BlockValues
from services.telemetry import Telemetry
from services.trust.keys import BusAccess
from tests.credentials import CREDENTIALS, SECRET, SEED, GatewayBus
from tests.store.rig import running_server

STORE, READER = WorkerId("store-0"), WorkerId("decode-0")
AIM = 0.7
BLOCK_SIZE, LAYER_KIB = 16, 4
"""A layer has 4 KiB of KV a token: 8 heads of 128 bfloat16 numbers, as Llama-3.1-8B's."""
BATCH_BYTES = 8 << 20
"""About what the store asks its server for at a time."""
PATIENCE_S, REFUSALS_MAX, REFUSED_WAIT_S = 60.0, 1_000, 0.01
PROMPTS = ("a", "b")


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """One restore. `waited_s`: of its seconds, what passed until leases were granted: what the store took to load.
    `read_s`: what passed in the plane. `num_leases`: one, unless the store's `timeout_ms` was over before all was
    loaded."""

    seconds: float
    waited_s: float
    read_s: float
    num_leases: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one kind of store; rates in GiB of KV a second."""

    what: str
    device_gib_per_s: float
    restored_gib_per_s: float
    ratio: float
    waited_s: float
    read_s: float
    num_leases: float


def layout_of(kv_kib: int) -> KVLayout:
    """Return a layout with so much KV a token."""
    layers = kv_kib // LAYER_KIB
    return KVLayout(
        weights="bench", dtype="bfloat16", num_layers=layers, num_kv_heads=8, head_dim=128, block_size=BLOCK_SIZE
    )


def hashes_of(prompt: str, num_blocks: int) -> list[BlockHash]:
    return [BlockHash(xxhash.xxh3_128_digest(f"{prompt} {number}".encode())) for number in range(num_blocks)]


def config_of(store: StoreConfig) -> MeshConfig:
    return MeshConfig(
        ticket_secrets=(SECRET.decode(),), tenant_seed=SEED, store=store, worker=WorkerConfig(block_size=BLOCK_SIZE)
    )


def hold(control: Connection, broker: str, store: bytes, layout: KVLayout) -> None:
    """The child: be a store until SIGTERM."""

    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        config = config_of(msgspec.json.decode(store, type=StoreConfig))
        parts = make_parts(config, STORE, layout, CREDENTIALS, model="bench", context_length=1 << 20)
        bus = await NatsBus.connect(BusAccess(broker), STORE)
        await run_store(config, parts, bus, Telemetry(STORE), stop, lambda: control.send("ready"))

    asyncio.run(run())


@dataclass
class Bench:
    """This process's side: the reader's arena, whose first bytes are those of either prompt, and what is behind the
    store."""

    layout: KVLayout
    num_blocks: int
    carrier: str
    keys: dict[str, list[StoreKey]] = field(init=False)

    def __post_init__(self) -> None:
        self.shape = uniform_shape(self.layout, self.num_blocks)
        self.arena = HostArena.create(self.shape)
        self.contents = BlockContents(self.arena, self.shape, CREDENTIALS.content_secrets)
        self.values = BlockValues(self.contents)
        self.reader = PlaneReader(self.arena, self.shape, CREDENTIALS.secrets)
        rng = np.random.default_rng(5)
        for start in range(0, self.arena.num_bytes, BATCH_BYTES):
            part = self.arena.array[start : start + BATCH_BYTES]
            part[:] = rng.integers(0, 256, part.size, np.uint8)
        self.digest = xxhash.xxh3_64_intdigest(self.arena.array.data)
        self.keys = {prompt: [key_of("", each) for each in hashes_of(prompt, self.num_blocks)] for prompt in PROMPTS}

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes

    def content(self, prompt: str) -> list[Content]:
        return [Content("", block_hash) for block_hash in hashes_of(prompt, self.num_blocks)]

    def store_config(self, url: str, path: Path) -> StoreConfig:
        """Return the configuration of a store whose memory holds one prompt."""
        return StoreConfig(
            url=url,
            path=str(path),
            memory_bytes=self.num_bytes,
            max_bytes=len(PROMPTS) * self.num_blocks * self.values.value_bytes,
        )

    def fill(self, config: StoreConfig) -> None:
        """Write both prompts behind the store, as the store itself does."""
        tier = open_tier(config, self.values)
        assert tier is not None
        with progress(f"filling the {tier.name} tier", len(PROMPTS) * self.num_blocks) as advance:
            for prompt, keys in self.keys.items():
                for block, (key, content) in enumerate(zip(keys, self.content(prompt), strict=True)):
                    tier.write({key: self.values.pack(key, block, self.contents.tag(content, block))})
                    advance()
        tier.close()

    async def restore(self, bus: GatewayBus, endpoint: Endpoint, prompt: str) -> Restored:
        """Have all of a prompt, as a worker would that reads on where a lease has ended."""
        hashes, num_blocks = hashes_of(prompt, self.num_blocks), 0
        waited_s, read_s, num_leases, num_refused = 0.0, 0.0, 0, 0
        started = time.perf_counter()
        while num_blocks < self.num_blocks:
            asked = time.perf_counter()
            answer = await self._ask(bus, hashes[num_blocks:], num_blocks)
            granted_at = time.perf_counter()
            waited_s += granted_at - asked
            if isinstance(answer, Refused):  # nothing was loaded in time, or the last lease has not ended yet
                num_refused += 1
                assert num_refused < REFUSALS_MAX, answer
                await asyncio.sleep(REFUSED_WAIT_S if answer.reason is RefusalReason.OVERLOADED else 0)
                continue
            request = ReadRequest(
                endpoint,
                answer.ticket,
                carrier=self.carrier,
                tables=(BlockTable((Segment(0, self.num_blocks),)),),
                first_token=answer.first_token,
                num_tokens=answer.num_tokens,
                deadline_s=PATIENCE_S,
                content=ExpectedContent(
                    self.contents, self.content(prompt)[num_blocks:], range(num_blocks, self.num_blocks)
                ),
            )
            await self.reader.read_kv(request)
            read_s += time.perf_counter() - granted_at
            assert answer.has_more or answer.num_tokens == self.num_blocks * BLOCK_SIZE, "it is all behind the store"
            num_blocks, num_leases = answer.num_tokens // BLOCK_SIZE, num_leases + 1
        seconds = time.perf_counter() - started
        return Restored(seconds=seconds, waited_s=waited_s, read_s=read_s, num_leases=num_leases)

    async def check(self, bus: GatewayBus, endpoint: Endpoint) -> None:
        """Restore both prompts once, which is not timed, and look at the bytes."""
        for prompt in PROMPTS:
            self.arena.array[:] = 0
            await self.restore(bus, endpoint, prompt)
            assert xxhash.xxh3_64_intdigest(self.arena.array.data) == self.digest, (
                "what was restored is not what it was"
            )

    async def _ask(self, bus: GatewayBus, hashes: Sequence[BlockHash], first_block: int) -> LeaseGranted | Refused:
        request = RequestLease(
            request_id=RequestId(new_id("req")),
            attempt=1,
            deadline_ms=now_ms() + int(PATIENCE_S * 1000),
            reader=READER,
            fingerprint=self.layout.fingerprint,
            first_block=first_block,
            block_hashes=join_hashes(hashes),
        )
        return await bus.ask(subjects.LEASE, (STORE, READER), request, PATIENCE_S)

    def close(self) -> None:
        self.reader.close()
        self.arena.close()


@asynccontextmanager
async def running_store(bench: Bench, config: StoreConfig, folder: Path) -> AsyncGenerator[tuple[GatewayBus, Endpoint]]:
    """Run a store, and check that it gives what it was given."""
    broker = EmbeddedNats.launch(None, folder / "broker")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=hold, args=(theirs, broker.url, msgspec.json.encode(config), bench.layout), daemon=True
    )
    child.start()
    theirs.close()
    try:
        await asyncio.to_thread(ours.recv)
        bus = GatewayBus(await NatsBus.connect(BusAccess(broker.url), "bench"), "bench")
        described = await bus.ask(subjects.WORKER_STATUS, (STORE,), DescribeWorker(), PATIENCE_S)
        endpoint = described.load.worker.endpoint
        assert endpoint is not None
        with progress("restoring once, to check it"):
            await bench.check(bus, endpoint)
        yield bus, endpoint
        await bus.close()
    finally:
        child.terminate()
        await asyncio.to_thread(child.join, PATIENCE_S)
        broker.stop()


def drop_pages(paths: Sequence[Path]) -> None:
    """Ask the kernel to forget the files' pages. They have been synced."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


async def from_disk(bench: Bench, folder: Path, num_rounds: int) -> list[Figures]:
    root = folder / "disk"
    config = bench.store_config("disk", root)
    bench.fill(config)
    by_name = {path.stem: path for path in root.rglob("*.kv")}
    files = {prompt: [by_name[key.hex()] for key in keys] for prompt, keys in bench.keys.items()}
    with progress("syncing the files"):
        for path in by_name.values():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    buffer = bytearray(bench.values.value_bytes)

    def read_plainly(paths: Sequence[Path]) -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                assert file.readinto(buffer) == len(buffer)

    prepared = {"disk, cold": drop_pages, "disk, warm": read_plainly}
    device: dict[str, list[float]] = {what: [] for what in prepared}
    restored: dict[str, list[Restored]] = {what: [] for what in prepared}
    async with running_store(bench, config, folder) as (bus, endpoint):
        with progress("disk: rounds", num_rounds) as advance:
            for number in range(num_rounds):
                for (what, prepare), prompt in zip(prepared.items(), PROMPTS, strict=True):
                    paths = files[prompt]
                    for is_ours in (True, False) if number % 2 else (False, True):
                        prepare(paths)
                        if is_ours:
                            restored[what].append(await bench.restore(bus, endpoint, prompt))
                        else:
                            device[what].append(timed(lambda paths=paths: read_plainly(paths)))
                advance()
    return [figures(bench, what, device[what], restored[what]) for what in device]


async def from_valkey(bench: Bench, folder: Path, num_rounds: int) -> list[Figures]:
    device, restored = list[float](), list[Restored]()
    (folder / "valkey").mkdir()
    with running_server(folder / "valkey") as server:
        config = bench.store_config(server.url, folder)
        bench.fill(config)
        client = valkey.Valkey.from_url(server.url)
        batch = max(1, BATCH_BYTES // bench.values.value_bytes)
        prefix = f"kvmesh:{bench.values.identity}:".encode()

        def read_plainly(keys: Sequence[StoreKey]) -> None:
            names = [prefix + key.hex().encode() for key in keys]
            for start in range(0, len(names), batch):
                pipeline = client.pipeline(transaction=False)
                pipeline.mget(names[start : start + batch])
                [values] = pipeline.execute()
                assert all(len(value) == bench.values.value_bytes for value in values)

        async with running_store(bench, config, folder) as (bus, endpoint):
            with progress("Valkey: rounds", num_rounds) as advance:
                for number in range(num_rounds):
                    prompt = PROMPTS[number % 2]
                    device.append(timed(lambda keys=bench.keys[prompt]: read_plainly(keys)))
                    restored.append(await bench.restore(bus, endpoint, prompt))
                    advance()
        client.close()
    return [figures(bench, "Valkey", device, restored)]


def figures(bench: Bench, what: str, device: Sequence[float], restored: Sequence[Restored]) -> Figures:
    """Return the medians. `ratio`: of the rounds' own."""
    gib = bench.num_bytes / 2**30
    seconds = [each.seconds for each in restored]
    return Figures(
        what=what,
        device_gib_per_s=gib / median(device),
        restored_gib_per_s=gib / median(seconds),
        ratio=median(plain / ours for plain, ours in zip(device, seconds, strict=True)),
        waited_s=median(each.waited_s for each in restored),
        read_s=median(each.read_s for each in restored),
        num_leases=median(each.num_leases for each in restored),
    )


async def measure(bench: Bench, folder: Path, kinds: Sequence[str], num_rounds: int) -> list[Figures]:
    found: list[Figures] = []
    if "disk" in kinds:
        found += await from_disk(bench, folder, num_rounds)
    if "valkey" in kinds:
        found += await from_valkey(bench, folder, num_rounds)
    return found


def table(found: Sequence[Figures], title: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title=title)
    for heading in (
        "from",
        "device\nGiB/s",
        "restored\nGiB/s",
        f"ratio\naim {AIM}",
        "of it: loading\ns",
        "plane\ns",
        "leases",
    ):
        shown.add_column(heading, justify="left" if heading == "from" else "right")
    for each in found:
        rates = (f"{each.device_gib_per_s:.2f}", f"{each.restored_gib_per_s:.2f}", f"{each.ratio:.2f}")
        shown.add_row(each.what, *rates, f"{each.waited_s:.2f}", f"{each.read_s:.2f}", f"{each.num_leases:g}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--kv-kib", type=int, default=128, help=f"KV of a token, a multiple of {LAYER_KIB} KiB")
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--only", choices=("disk", "valkey"), help="this kind of store alone")
    parser.add_argument(
        "--carrier", choices=("auto", "shm", "tcp"), default="auto", help="from the store to the reader"
    )
    parser.add_argument("--folder", default="", help="where the disk's files go for the time of it; a temporary one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds = (options.only,) if options.only else ("disk", "valkey")
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-restore-", dir=options.folder or None) as folder:
        with progress("making the KV"):
            bench = Bench(layout_of(options.kv_kib), options.tokens // BLOCK_SIZE, options.carrier)
        try:
            found = asyncio.run(measure(bench, Path(folder), kinds, options.rounds))
        finally:
            bench.close()
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return
    title = f"{options.tokens:,} tokens, {bench.num_bytes / 2**30:.2f} GiB of KV, medians of {options.rounds} rounds"
    Console(highlight=False).print(table(found, title))


if __name__ == "__main__":
    main()
