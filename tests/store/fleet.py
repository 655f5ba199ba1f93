"""A store on a memory bus, with workers that hold known KV and readers that look at what they get."""

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTable, KVLayout, block_ids, segments_of, uniform_shape
from dataplane.blocks.ticket import Ticket
from dataplane.ends.reader import ReadRequest
from dataplane.ends.server import ServerOptions
from dataplane.memory.content_macs import BlockContents, ExpectedContent
from dataplane.protocol.gate import OpenLease
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from dataplane.times import PlaneTimes
from schemas import subjects
from schemas.block import join_hashes, split_hashes
from schemas.directory import BlocksEvicted, BlocksStored, ReadInventory
from schemas.handoff import Endpoint
from schemas.ids import BlockHash, LeaseId, RequestId, WorkerId, new_id, new_nonce
from schemas.kv import EvictionCandidates, LeaseGranted, RequestLease
from schemas.request import RefusalReason, Refused, refuse
from schemas.worker import (
    BlockCounts,
    DescribeFleet,
    FleetDescribed,
    LeftReason,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
)
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig, StoreConfig, WorkerConfig
from services.holder.core.leases import Grant, LeaseTable
from services.holder.kv.peers import Peers
from services.runtime import now_ms
from services.store.load import OpenTier, StoreParts, make_parts
from services.store.service import run_store
from services.telemetry import Telemetry
from services.times import Times, WorkerTimes
from tests.credentials import CREDENTIALS, SECRET, SEED, GatewayBus
from tests.plane.harness import CardMemory, HostMemory
from tests.promises import PromiseBrokenError
from tests.store.rig import LAYOUT, hashes_of
from tests.virtual import platform_of
from tests.waiting import until

STORE = WorkerId("store-0")
PATIENCE_S = 60.0


def kv_of(block_hash: BlockHash, layout: KVLayout = LAYOUT) -> bytes:
    """Return the KV that this block has wherever it lies."""
    seed = int.from_bytes(block_hash, "big")
    return np.random.default_rng(seed).integers(0, 256, layout.block_bytes, np.uint8).tobytes()


class _Seen(NamedTuple):
    """A fake card's memory, which the host can read."""

    host_array: np.ndarray


class BlockMemory:
    """An arena whose blocks are read and written whole."""

    def __init__(self, layout: KVLayout, num_blocks: int, *, on_card: bool = False) -> None:
        self.shape = uniform_shape(layout, num_blocks)
        self._memory = CardMemory(self.shape) if on_card else HostMemory(self.shape)
        self.arena = self._memory.arena
        self.contents = BlockContents(_Seen(self._memory.array), self.shape, CREDENTIALS.content_secrets)

    def put(self, block: int, kv: bytes) -> None:
        at = 0
        for view in self.contents.views(block):
            view[:] = np.frombuffer(kv[at : at + view.nbytes], np.uint8)
            at += view.nbytes

    def get(self, block: int) -> bytes:
        return b"".join(view.tobytes() for view in self.contents.views(block))

    def close(self) -> None:
        self._memory.close()


@dataclass
class Worker:
    """Holds blocks, offers them, lends them. `refuses`: what it answers instead of a lease. `num_tokens_ready`: where
    its streams stop, and wait for what never comes."""

    worker_id: WorkerId
    bus: TypedBus
    carriers: tuple[str, ...] = ("shm", "tcp")
    layout: KVLayout = LAYOUT
    refuses: Refused | None = None
    num_tokens_ready: int | None = None
    on_card: bool = False
    incarnation: str = field(default_factory=new_nonce)
    asked: list[list[BlockHash]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.leases = LeaseTable()
        self.block_of: dict[BlockHash, int] = {}
        self.memory = BlockMemory(self.layout, 128, on_card=self.on_card)
        options = ServerOptions(carriers=self.carriers)
        make_server = platform_of(self.worker_id).make_server
        self.plane = make_server(self.memory.arena, self.memory.shape, self, CREDENTIALS.secrets, options)

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        self.plane.serve_streams()
        await self.bus.serve(tasks, subjects.LEASE, (self.worker_id, "*"), self._on_lease)
        await self.bus.publish(subjects.JOINED, (self.worker_id,), WorkerJoined(worker=self.info()))

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker_id=self.worker_id, incarnation=self.incarnation, role="prefill", model="m", num_blocks=128,
            context_length=4096, fingerprint=self.layout.fingerprint, block_size=self.layout.block_size,
            endpoint=self.plane.endpoint.public,
        )  # fmt: skip

    async def close(self) -> None:
        for lease in self.leases:
            lease.progress.fail("the worker is gone")
        await asyncio.to_thread(self.plane.close)
        self.memory.close()
        await self.bus.close()

    def hold(self, *numbers: int) -> None:
        for block_hash in hashes_of(*numbers):
            block = self.block_of.setdefault(block_hash, len(self.block_of) * 7 % 128)  # not in order, not in a row
            self.memory.put(block, kv_of(block_hash, self.layout))

    def forget(self, *numbers: int) -> None:
        for block_hash in hashes_of(*numbers):
            del self.block_of[block_hash]

    async def cool(self, *numbers: int) -> None:
        joined = join_hashes(hashes_of(*numbers))
        message = EvictionCandidates(worker_id=self.worker_id, incarnation=self.incarnation, block_hashes=joined)
        await self.bus.publish(subjects.EVICTION_CANDIDATES, (self.worker_id,), message)

    async def leave(self) -> None:
        message = WorkerLeft(worker_id=self.worker_id, incarnation=self.incarnation, reason=LeftReason.STOPPED)
        await self.bus.publish(subjects.LEFT, (self.worker_id,), message)

    async def _on_lease(self, received: Received[RequestLease]) -> LeaseGranted | Refused:
        request = received.message
        hashes = split_hashes(request.block_hashes)
        self.asked.append(hashes)
        if self.refuses is not None:
            return self.refuses
        run = hashes[
            : next((at for at, block_hash in enumerate(hashes) if block_hash not in self.block_of), len(hashes))
        ]
        if not run:
            return refuse(request, RefusalReason.GONE, "evicted")
        num_tokens = len(run) * self.layout.block_size
        table = BlockTable(segments_of([self.block_of[block_hash] for block_hash in run]))
        lease = self.leases.grant(
            lease_id=LeaseId(new_id("lease")),
            holder=self.worker_id,
            reader=request.reader,
            request_id=request.request_id,
            attempt=request.attempt,
            tables=(table,),
            num_tokens=num_tokens,
            progress=self._progress(num_tokens),
            expires_at_ms=now_ms() + 60_000,
            ends_by_ms=now_ms() + 60_000,
            tenant=request.tenant,
        )
        return granted(request, lease, self.incarnation, num_tokens, self.plane.endpoint.arena_nonce)

    def _progress(self, num_tokens: int) -> KVProgress:
        if self.num_tokens_ready is None:
            return KVProgress.completed(self.layout.num_layers, num_tokens)
        progress = KVProgress(self.layout.num_layers, num_tokens)
        for layer in range(self.layout.num_layers):
            progress.advance(layer, min(num_tokens, self.num_tokens_ready))  # it stops there
        return progress

    # `LeaseGate`.

    def open(self, ticket: Ticket) -> OpenLease:
        lease = self.leases.lease_of(ticket, self.incarnation, now_ms())
        hash_of = {block: block_hash for block_hash, block in self.block_of.items()}
        content = [(Content("", hash_of[block]), block) for block in block_ids(lease.tables[0].segments)]
        return WorkerLease(lease, self.outcomes, b"".join(self.memory.contents.tag(*each) for each in content))


@dataclass
class WorkerLease:
    """An `OpenLease`."""

    kv: Grant
    outcomes: list[str]
    tags: bytes
    traceparent: str = ""

    def give_back(self) -> None:
        pass

    def content_macs(self) -> bytes:
        return self.tags

    def still_valid(self) -> bool:
        return self.kv.is_valid(now_ms())

    def started(self) -> None:
        pass

    def served(self, stats: TransferStats, error: str) -> None:
        self.outcomes.append(error or "landed")


def granted(request: RequestLease, lease: Grant, incarnation: str, num_tokens: int, arena_nonce: str) -> LeaseGranted:
    return LeaseGranted(
        request_id=request.request_id,
        attempt=1,
        deadline_ms=request.deadline_ms,
        worker_id=lease.holder,
        lease_id=lease.lease_id,
        epoch=lease.epoch,
        lease_ms=60_000,
        ticket=CREDENTIALS.secrets.sign(lease.ticket(incarnation)),
        incarnation=incarnation,
        first_token=0,
        num_tokens=num_tokens,
        arena_nonce=arena_nonce,
    )


class Fleet:
    """Everybody around a store, on one broker."""

    def __init__(self, tasks: asyncio.TaskGroup, *, on_cards: bool = False, layout: KVLayout = LAYOUT) -> None:
        self.on_cards = on_cards
        self.layout = layout
        self.broker = MemoryBroker()
        self.tasks = tasks
        self.bus = GatewayBus(MemoryBus(self.broker), "tests")
        self.workers: list[Worker] = []
        self.held: dict[str, dict[str, set[BlockHash]]] = {}
        """Incarnation → tier → what its events say is there."""
        self.heard: list[str] = []
        self.loads: list[WorkerLoad] = []
        self.fresh_numbers = itertools.count(1_000)
        """Of blocks that no test names."""
        self._sequences: dict[str, int] = {}
        self._memory = BlockMemory(layout, 64, on_card=on_cards)
        make_reader = platform_of("decode-0").make_reader
        self._reader = make_reader(self._memory.arena, self._memory.shape, CREDENTIALS.secrets, PlaneTimes())
        self._peers = Peers(self.bus, WorkerTimes())
        self._endpoint: Endpoint | None = None
        """Where the store served last."""

    async def start(self) -> None:
        await self._peers.listen(self.tasks)
        await self.bus.serve(self.tasks, subjects.FLEET, (), self._describe)
        await self.bus.listen(self.tasks, subjects.STORED, (STORE,), self._on_change)
        await self.bus.listen(self.tasks, subjects.EVICTED, (STORE,), self._on_change)
        await self.bus.listen(self.tasks, subjects.LOAD, (STORE,), self._on_load)
        for subject in (subjects.JOINED, subjects.DRAINING, subjects.LEFT):
            await self.bus.listen(
                self.tasks, subject, (STORE,), lambda received: self.heard.append(type(received.message).__name__)
            )

    async def _describe(self, _: Received[DescribeFleet]) -> FleetDescribed:
        """Say who there is, as a scheduler does."""
        loads = tuple(
            WorkerLoad(
                worker=worker.info(), state="ready", blocks=BlockCounts(total=128, free=128, running=0, leased=0),
                num_running=0, num_queued=0, num_uncomputed_tokens=0,
            )
            for worker in self.workers
        )  # fmt: skip
        return FleetDescribed(policy="", ready=True, workers=loads)

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        self._reader.close()
        self._memory.close()
        await self.bus.close()

    async def worker(self, name: str = "prefill-0", *numbers: int, **options) -> Worker:
        settings = {"on_card": self.on_cards, "layout": self.layout} | options
        worker = Worker(WorkerId(name), TypedBus(MemoryBus(self.broker), name), **settings)
        self.workers.append(worker)
        worker.hold(*numbers)
        await worker.start(self.tasks)
        return worker

    async def gone(self, worker: Worker) -> None:
        self.workers.remove(worker)
        await worker.close()

    @property
    def tiers(self) -> dict[str, set[BlockHash]]:
        """What the store that was heard last says it holds."""
        return list(self.held.values())[-1] if self.held else {}

    def has(self, tier: str, *numbers: int) -> bool:
        return set(hashes_of(*numbers)) <= self.tiers.get(tier, set())

    async def ask(self, *numbers: int, first_block: int = 0, deadline_ms: int = 30_000) -> LeaseGranted | Refused:
        request = RequestLease(
            request_id=RequestId(new_id("req")),
            attempt=1,
            deadline_ms=now_ms() + deadline_ms,
            reader=WorkerId("decode-0"),
            fingerprint=LAYOUT.fingerprint,
            first_block=first_block,
            block_hashes=join_hashes(hashes_of(*numbers)),
        )
        return await self.bus.ask(subjects.LEASE, (STORE, request.reader), request, PATIENCE_S)

    async def read(self, grant: LeaseGranted, carrier: str = "auto", *numbers: int) -> list[bytes]:
        """Read what was granted into blocks of our own, and return these blocks' bytes. `numbers`: what they are, where
        they have to prove it."""
        first, rest = divmod(grant.first_token, LAYOUT.block_size)
        end, more = divmod(grant.num_tokens, LAYOUT.block_size)
        assert not rest and not more
        blocks = [63 - at for at in range(end)]  # not in a row
        for block in blocks:
            self._memory.put(block, bytes(LAYOUT.block_bytes))
        self._endpoint = await self._peers.endpoint(STORE, grant.incarnation) or self._endpoint
        assert self._endpoint is not None, "the store has joined"
        content = [Content("", block_hash) for block_hash in hashes_of(*numbers)]
        expected = ExpectedContent(self._memory.contents, content, blocks[first:]) if numbers else None
        request = ReadRequest(
            msgspec.structs.replace(self._endpoint, arena_nonce=grant.arena_nonce),
            grant.ticket,
            carrier=carrier,
            tables=(BlockTable(segments_of(blocks)),),
            first_token=grant.first_token,
            num_tokens=grant.num_tokens,
            deadline_s=PATIENCE_S,
            content=expected,
        )
        landed = await self._reader.read_kv(request)
        assert landed.num_tokens == grant.num_tokens
        assert all(self._memory.get(block) == bytes(LAYOUT.block_bytes) for block in blocks[:first])
        return [self._memory.get(block) for block in blocks[first:]]

    async def fetch(self, *numbers: int, first_block: int = 0, carrier: str = "auto") -> int:
        """Ask for blocks and read them; assert that they are right, and return how many there were. In a store of a few
        blocks the lease of the read before may count still: it is asked again."""
        answer = await self.ask(*numbers, first_block=first_block)

        async def has_answered() -> bool:
            nonlocal answer
            if isinstance(answer, LeaseGranted) or answer.reason is not RefusalReason.OVERLOADED:
                return True
            answer = await self.ask(*numbers, first_block=first_block)
            return False

        await until(has_answered)
        if isinstance(answer, Refused):
            assert answer.reason == RefusalReason.GONE, answer
            return 0
        assert answer.first_token == first_block * LAYOUT.block_size
        found = await self.read(answer, carrier, *numbers)
        if found != [kv_of(block_hash) for block_hash in hashes_of(*numbers[: len(found)])]:
            raise PromiseBrokenError(f"KV of other blocks than {numbers}")
        return len(found)

    async def inventory(self) -> dict[str, set[BlockHash]]:
        held: dict[str, set[BlockHash]] = {}
        offset: int | None = 0
        while offset is not None:
            page = await self.bus.ask(subjects.INVENTORY, (STORE,), ReadInventory(offset=offset), PATIENCE_S)
            held.setdefault(page.tier, set()).update(split_hashes(page.block_hashes))
            offset = page.next_offset
        return {tier: hashes for tier, hashes in held.items() if hashes}

    async def until_events_tell_all(self) -> None:
        """Wait until the inventory is what the events have told: the store may be at work still."""

        async def tell_all() -> bool:
            return await self.inventory() == {tier: hashes for tier, hashes in self.tiers.items() if hashes}

        await until(tell_all)

    def _on_change(self, received: Received[BlocksStored | BlocksEvicted]) -> None:
        event = received.message
        assert event.sequence == self._sequences.get(event.incarnation, 0) + 1, "events are numbered without gaps"
        self._sequences[event.incarnation] = event.sequence
        hashes = set(split_hashes(event.block_hashes))
        tiers = self.held.setdefault(event.incarnation, {})
        held = tiers.setdefault(event.tier, set())
        tiers[event.tier] = held | hashes if isinstance(event, BlocksStored) else held - hashes

    def _on_load(self, received: Received[WorkerLoad]) -> None:
        blocks = received.message.blocks
        assert blocks.total == blocks.free + blocks.cached + blocks.running + blocks.leased
        self.loads.append(received.message)


def files_in(root: Path) -> list[Path]:
    """Return a disk tier's blocks."""
    return sorted(root.rglob("*.kv"))


def arenas() -> set[Path]:
    """Return this process's."""
    return set(Path("/dev/shm").glob(f"kvmesh-{os.getpid()}-*"))


@asynccontextmanager
async def fleet(*, on_cards: bool = False, layout: KVLayout = LAYOUT) -> AsyncGenerator[Fleet]:
    """Run the block among workers and a reader. `on_cards`: these have their KV on cards; a store never has."""
    async with asyncio.TaskGroup() as tasks:
        around = Fleet(tasks, on_cards=on_cards, layout=layout)
        await around.start()
        yield around
        await around.close()


def config_of(
    num_blocks: int = 64, carrier: str = "auto", lease_ms: int = 60_000, times: Times | None = None, **store
) -> MeshConfig:
    settings = StoreConfig(memory_bytes=num_blocks * LAYOUT.block_bytes, **store)
    worker = WorkerConfig(block_size=LAYOUT.block_size, carrier=carrier, lease_ms=lease_ms)  # type: ignore[arg-type]
    secrets = (SECRET.decode(),)
    return MeshConfig(ticket_secrets=secrets, tenant_seed=SEED, store=settings, worker=worker, times=times or Times())


@asynccontextmanager
async def store(
    around: Fleet, config: MeshConfig, *, open_behind: OpenTier | None = None, layout: KVLayout = LAYOUT
) -> AsyncGenerator[StoreParts]:
    """Run a store beside the block; it has left when the block has."""
    parts = make_parts(
        config, STORE, layout, CREDENTIALS,
        model="m", context_length=4096, open_behind=open_behind, platform=platform_of(STORE),
    )  # fmt: skip
    stop, ready = asyncio.Event(), asyncio.Event()
    connection = MemoryBus(around.broker)
    running = asyncio.create_task(run_store(config, parts, connection, Telemetry(STORE), stop, ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        await running
    try:
        yield parts
    finally:
        stop.set()
        async with asyncio.timeout(PATIENCE_S):
            await running
