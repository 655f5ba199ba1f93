"""A holder with known KV, a reader to put it, and a look at what arrived.

Threads and sockets are real, but where a test runs in a cooperative thread: then they are the simulator's.
"""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import ArenaShape, BlockTable, BlockTables, KVLayout, Segment, slot_spans, uniform_shape
from dataplane.blocks.ticket import Ticket, TicketSecrets
from dataplane.cards.arena import CardArena
from dataplane.cards.card import Card
from dataplane.cards.card import wait_until as wait_for_card
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.ends.server import PlaneServer, ServerOptions
from dataplane.memory.arena import ByteArray
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferFailedError, TransferStats
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from schemas.ids import LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd
from services.holder.core.leases import Grant, LeaseTable
from services.sim.platform import threads
from services.sim.platform.plane import SimNetwork, SimPlaneReader, SimPlaneServer
from tests import gpu
from tests.gpu import GPU_MARKS
from tests.plane.fake_card import Fabric, FakeCard, FakeMemory

SECRET = b"the mesh's secret"
SECRETS = TicketSecrets([SECRET])
INCARNATION = "one"
LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=16)
CARRIERS = ("loopback", "shm", "tcp")
HOLDER, READER = WorkerId("prefill-0"), WorkerId("decode-0")
NUM_BLOCKS = 48
SOURCE = BlockTable((Segment(7, 2), Segment(0, 5), Segment(20, 1), Segment(30, 12)))
"""320 slots, scattered. The target's borders lie elsewhere."""
TARGET = BlockTable((Segment(40, 1), Segment(3, 9), Segment(25, 10)))
DEADLINE_S = 60.0

SIMULATED = "sim-"
"""Before the name of a carrier that is a simulated one."""
STAGED = tuple(f"{ends}:tcp" for ends in ("card>card", "card>host", "host>card"))
"""Carriers by way of host memory, with where the holder and the target have their KV."""
ON_CARDS = ("card>card:cuda", "apart>apart:nccl")
"""Carriers between cards. Apart are cards that do not see each other's memory."""
FROM_OR_TO_CARDS = (*STAGED, *ON_CARDS)


ON_GPU = tuple(
    pytest.param(f"{ends}:{name}", marks=GPU_MARKS)
    for ends, names in (("gpu>gpu", ("cuda", "tcp")), ("gpu>host", ("tcp",)), ("host>gpu", ("tcp",)))
    for name in names
)
"""The same on a real card, where there is one."""


def name_of(param: str) -> str:
    """Return the carrier's own name."""
    return param.removeprefix(SIMULATED).rpartition(":")[2]


def ends_of(param: str) -> tuple[str, str]:
    """Return where the holder and the target of such a carrier have their KV: "card", "apart" (a card whose memory the
    other does not see), "gpu" (a real card) or "host"."""
    source, _, target = param.rpartition(":")[0].partition(">")
    return source or "host", target or "host"


class _Simulation:
    """The network over which holders and targets are made, if it is a simulated one."""

    network: SimNetwork | None = None
    hosts = itertools.count()


def use_network(network: SimNetwork | None) -> None:
    """Make holders and targets on this network from here on; None: on the real one."""
    _Simulation.network = network


class _Cards:
    """Whether holders and targets are made on a card, each on one of its own: a fake one, or all on a real one."""

    holder = False
    target = False
    kind = "card"
    seeds = itertools.count()


_FABRIC = Fabric()


def use_cards(*, holder: bool, target: bool, kind: str = "card") -> None:
    """Make holders and targets on cards of this kind from here on, or not."""
    _Cards.holder, _Cards.target, _Cards.kind = holder, target, kind


def use_ends(param: str) -> None:
    """Make holders and targets where the carrier's name says, from here on."""
    source, target = ends_of(param)
    use_cards(holder=source != "host", target=target != "host", kind=target if source == "host" else source)


class HostMemory:
    """An arena in host memory."""

    card = None

    def __init__(self, shape: ArenaShape) -> None:
        self.shape = shape
        self.arena = HostArena.create(shape)

    @property
    def array(self) -> ByteArray:
        """The KV."""
        return self.arena.array

    def fill(self, value: int) -> None:
        """Set all bytes."""
        self.array[:] = value

    def compute(self, work: Callable[[], None]) -> int:
        """Do it; return the mark of what is ready."""
        work()
        return 0

    def wait(self) -> None:
        """All is done."""

    def close(self) -> None:
        self.arena.close()


class CardMemory:
    """An arena on a fake card of its own, whose streams run late, and the stream of what stands for an engine."""

    def __init__(self, shape: ArenaShape) -> None:
        seed = next(_Cards.seeds)
        uuid = f"GPU-fake-{seed}" if _Cards.kind == "apart" else "GPU-fake-0"
        self.card = FakeCard(uuid, seed=seed, fabric=_FABRIC)
        self.arena = CardArena(self.card, shape)
        self.stream = self.card.stream()
        """The engine's."""

    @property
    def array(self) -> ByteArray:
        """The KV as it lies on the card now."""
        assert isinstance(self.arena.memory, FakeMemory)
        return self.arena.memory.array

    def fill(self, value: int) -> None:
        """Set all bytes. Nothing is under way."""
        self.array[:] = value

    def compute(self, work: Callable[[], None]) -> int:
        """Let the card do it when it comes to it; return the mark of its end."""
        self.stream.run(work)
        return self.arena.mark(self.stream.handle)

    def wait(self) -> None:
        """Wait for all that was to be computed."""
        assert wait_for_card(self.stream.is_done, lambda: False, DEADLINE_S), "the card does not come to an end"

    def close(self) -> None:
        """Close it. What was taken for a transfer has come back, whatever became of the transfer."""
        self.stream.close()
        self.arena.close()
        if self.card.died_of is None:
            assert not +self.card.opened, f"left open on the card: {self.card.opened}"
        self.card.close()


class RealCardMemory:
    """An arena on a card that only its own calls reach. What stands for an engine writes to a copy on the host, which
    goes up in the order of its stream."""

    def __init__(self, shape: ArenaShape, make_card: Callable[[], Card] = gpu.card) -> None:
        self.card = None
        self._card = make_card()
        self.arena = CardArena(self._card, shape)
        self.stream = self._card.stream()
        self._copy = self._card.pinned(shape.arena_bytes)
        self._copy[:] = 0
        self._is_writing = False

    @property
    def array(self) -> ByteArray:
        """The KV as it lies on the card now; inside of `compute` what is to go there."""
        if not self._is_writing:
            self.stream.download(self.arena.memory, self._copy)
            self.wait()
            return self._copy.copy()
        return self._copy

    def fill(self, value: int) -> None:
        """Set all bytes."""
        self.compute(lambda: self._copy.fill(value))
        self.wait()

    def compute(self, work: Callable[[], None]) -> int:
        """Let it be on the card when that comes to it; return the mark of its end."""
        self.wait()  # the copy has gone up
        self._is_writing = True
        work()
        self._is_writing = False
        self.stream.upload(self._copy, self.arena.memory)
        return self.arena.mark(self.stream.stream.ptr)

    def wait(self) -> None:
        """Wait for all that was to be computed."""
        assert wait_for_card(self.stream.is_done, lambda: False, DEADLINE_S), "the card does not come to an end"

    def close(self) -> None:
        self.stream.close()
        self.arena.close()
        self._card.close()


Memory = HostMemory | CardMemory | RealCardMemory


class EngineProgress(KVProgress):
    """Of an engine: it has its last token, and with it knows that all is computed, before it finishes."""

    def __init__(self, memory: Memory, num_layers: int, num_tokens: int) -> None:
        super().__init__(num_layers, num_tokens)
        self._memory = memory

    def complete(self, trailer: bytes = b"") -> None:
        self._memory.wait()
        super().complete(trailer)


def holder_memory(shape: ArenaShape) -> Memory:
    """Return an arena where holders have theirs now."""
    return _memory(shape, on_card=_Cards.holder)


def target_memory(shape: ArenaShape) -> Memory:
    """Return an arena where those who read have theirs now."""
    return _memory(shape, on_card=_Cards.target)


def _memory(shape: ArenaShape, *, on_card: bool) -> Memory:
    if not on_card:
        return HostMemory(shape)
    return RealCardMemory(shape) if _Cards.kind == "gpu" else CardMemory(shape)


def fast_network() -> SimNetwork:
    """Return a network on which nothing goes wrong, for loops on which time is real."""
    return SimNetwork(random.Random(0), latency_s=(0.0, 0.0001), bytes_per_s=5e9)


KV = np.ndarray[tuple[int, int, int, int], np.dtype[np.uint8]]
"""[layer, k/v, token, byte]"""


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def random_kv(num_tokens: int, layout: KVLayout = LAYOUT, seed: int = 7) -> KV:
    shape = (layout.num_layers, 2, num_tokens, layout.token_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)  # pyright: ignore[reportReturnType]


def rows(array: ByteArray, shape: ArenaShape, tables: BlockTables, layer: int, start: int, end: int) -> list:
    """Return (k/v, first token, view) of every contiguous piece of these tokens."""
    layout = shape.layout
    table = tables[layout.group_of_layer[layer]]
    pieces = []
    for key_or_value in (0, 1):
        token = start
        for slot, num_tokens in slot_spans(table, layout.block_size, start, end):
            at = shape.offset(layer, key_or_value, slot)
            pieces.append((key_or_value, token, array[at : at + num_tokens * layout.token_bytes]))
            token += num_tokens
    return pieces


def write_kv(array: ByteArray, shape: ArenaShape, tables: BlockTables, kv: KV, layer: int, start: int, end: int):
    for key_or_value, token, view in rows(array, shape, tables, layer, start, end):
        num_tokens = view.nbytes // shape.layout.token_bytes
        view[:] = kv[layer, key_or_value, token : token + num_tokens].ravel()


def read_layer(array: ByteArray, shape: ArenaShape, tables: BlockTables, layer: int, start: int, end: int):
    """Return one layer's [k/v, token, byte] of tokens [start, end)."""
    kv = np.zeros((2, end - start, shape.layout.token_bytes), np.uint8)
    for key_or_value, token, view in rows(array, shape, tables, layer, start, end):
        num_tokens = view.nbytes // shape.layout.token_bytes
        kv[key_or_value, token - start : token - start + num_tokens] = view.reshape(num_tokens, -1)
    return kv


def read_kv(array: ByteArray, shape: ArenaShape, tables: BlockTables, start: int, end: int) -> KV:
    layers = range(shape.layout.num_layers)
    return np.stack([read_layer(array, shape, tables, layer, start, end) for layer in layers])


@dataclass
class Gate:
    """Leases as a worker keeps them, with what the plane's threads said of them, and a hook to do mischief in."""

    leases: LeaseTable = field(default_factory=LeaseTable)
    lock: threading.Lock = field(default_factory=threading.Lock)
    before_recheck: Callable[[int], None] = lambda _: None
    num_rechecks: int = 0
    num_started: int = 0
    outcomes: list[tuple[TransferStats, str]] = field(default_factory=list)
    outcome_known: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def open(self, ticket: Ticket) -> "GateLease":
        with self.lock:
            lease = self.leases.lease_of(ticket, INCARNATION, now_ms())
            lease.is_opened = False  # tests read as often as they like
            return GateLease(self, lease)

    def wait_outcome(self) -> tuple[TransferStats, str]:
        if threads.is_thread():
            while not self.outcome_known.acquire(blocking=False):
                threads.pause(0.001)
        else:
            assert self.outcome_known.acquire(timeout=DEADLINE_S), "the holder was told nothing"
        return self.outcomes[-1]


@dataclass
class GateLease:
    """A lease of a gate, as one stream reads under it."""

    gate: Gate
    kv: Grant
    traceparent: str = ""

    def content_macs(self) -> bytes:
        return b""

    def give_back(self) -> None:
        with self.gate.lock:
            self.kv.is_opened = False

    def still_valid(self) -> bool:
        gate = self.gate
        gate.num_rechecks += 1
        gate.before_recheck(gate.num_rechecks)
        with gate.lock:
            return self.kv.is_valid(now_ms())

    def started(self) -> None:
        self.gate.num_started += 1

    def served(self, stats: TransferStats, error: str) -> None:
        self.gate.outcomes.append((stats, error))
        self.gate.outcome_known.release()


class Holder:
    """A worker that holds `num_tokens` tokens in `tables`, or is still computing them. `kv` may be what it holds."""

    def __init__(
        self,
        carriers: tuple[str, ...],
        num_tokens: int = 300,
        layout: KVLayout = LAYOUT,
        *,
        shape: ArenaShape | None = None,
        tables: BlockTables | None = None,
        kv: KV | None = None,
        first_token: int = 0,
        secrets: TicketSecrets = SECRETS,
        **options,
    ) -> None:
        self.shape = uniform_shape(layout, NUM_BLOCKS) if shape is None else shape
        self.layout = self.shape.layout
        self.tables = (SOURCE,) * len(self.layout.groups) if tables is None else tables
        self.num_tokens = num_tokens
        self.first_token = first_token
        self.kv = random_kv(num_tokens, self.layout) if kv is None else kv
        self.memory = holder_memory(self.shape)
        self.arena, self.card = self.memory.arena, self.memory.card
        self.gate = Gate()
        self._leases: dict[LeaseId, Grant] = {}
        parts = (
            self.arena,
            self.shape,
            self.gate,
            secrets,
            ServerOptions(carriers=carriers, **options),
        )
        if _Simulation.network is None:
            self.server = PlaneServer(*parts)
        else:
            self.host = f"holder-{next(_Simulation.hosts)}"
            self.server = SimPlaneServer(_Simulation.network, self.host, *parts)
        self.server.serve_streams()
        self.lease, self.progress = self.grant("lease-0")

    @property
    def endpoint(self) -> Endpoint:
        return self.server.endpoint

    def lease_of(self, reader: WorkerId) -> Grant:
        """Return the lease, or for another than the first reader one more on the same."""
        if reader == READER:
            return self.lease
        with self.gate.lock:
            lease_id = LeaseId(f"{self.lease.lease_id}-{reader}")
            if lease_id not in self._leases:
                self._leases[lease_id] = self.gate.leases.grant(
                    lease_id=lease_id,
                    holder=HOLDER,
                    reader=reader,
                    request_id=RequestId("r1"),
                    attempt=1,
                    tables=self.tables,
                    num_tokens=self.num_tokens,
                    progress=self.progress,
                    expires_at_ms=self.lease.expires_at_ms,
                    first_token=self.first_token,
                )
            return self._leases[lease_id]

    @property
    def array(self) -> ByteArray:
        """The KV, wherever it lies."""
        return self.memory.array

    def grant(self, lease_id: str, lease_ms: int = 600_000) -> tuple[Grant, KVProgress]:
        progress = EngineProgress(self.memory, self.layout.num_layers, self.num_tokens)
        with self.gate.lock:
            lease = self.gate.leases.grant(
                lease_id=LeaseId(lease_id),
                holder=HOLDER,
                reader=READER,
                request_id=RequestId("r1"),
                attempt=1,
                tables=self.tables,
                num_tokens=self.num_tokens,
                progress=progress,
                expires_at_ms=now_ms() + lease_ms,
                first_token=self.first_token,
            )
        return lease, progress

    def ticket(self, lease: Grant | None = None, secret: bytes = SECRET, **changes) -> str:
        ticket = (lease or self.lease).ticket(INCARNATION)
        return TicketSecrets([secret]).sign(msgspec.structs.replace(ticket, **changes))

    def end_lease(self) -> None:
        with self.gate.lock:
            self.gate.leases.end(self.lease.lease_id, LeaseEnd.CANCELLED)

    def compute(self, chunk: int, start: int = 0, end: int | None = None) -> None:
        """Compute tokens [start, end) as an engine does: chunk by chunk, layer by layer."""
        end = self.num_tokens if end is None else end
        for first in range(start, end, chunk):
            last = min(first + chunk, end)
            for layer in range(self.layout.num_layers):
                self.compute_layer(layer, first, last)

    def compute_layer(self, layer: int, start: int, end: int) -> None:
        def write() -> None:
            write_kv(self.array, self.shape, self.tables, self.kv, layer, start, end)

        self.progress.advance(layer, end, self.memory.compute(write))

    def compute_all(self, trailer: bytes = b"token 0") -> None:
        self.compute(64)
        self.progress.complete(trailer)

    def close(self) -> None:
        self.server.close()
        self.memory.close()


class Target:
    """A worker that reads."""

    def __init__(
        self,
        layout: KVLayout = LAYOUT,
        *,
        shape: ArenaShape | None = None,
        tables: BlockTables | None = None,
        name: str = READER,
        times: PlaneTimes | None = None,
    ) -> None:
        self.name = WorkerId(name)
        self.shape = uniform_shape(layout, NUM_BLOCKS) if shape is None else shape
        self.layout = self.shape.layout
        self.tables = (TARGET,) * len(self.layout.groups) if tables is None else tables
        self.memory = target_memory(self.shape)
        self.arena, self.card = self.memory.arena, self.memory.card
        if _Simulation.network is None:
            self.reader = PlaneReader(self.arena, self.shape, SECRETS, times)
        else:
            self.host = f"reader-{next(_Simulation.hosts)}"
            self.reader = SimPlaneReader(_Simulation.network, self.host, self.arena, self.shape, SECRETS, times)

    @property
    def array(self) -> ByteArray:
        """The KV, wherever it lies."""
        return self.memory.array

    def request(self, endpoint: Endpoint, ticket: str, carrier: str, num_tokens: int, **changes) -> ReadRequest:
        fields = {
            "endpoint": endpoint,
            "ticket": ticket,
            "carrier": carrier,
            "tables": self.tables,
            "first_token": 0,
            "num_tokens": num_tokens,
            "deadline_s": DEADLINE_S,
        }
        return ReadRequest(**(fields | changes))

    def read_from(self, holder: Holder, carrier: str, on_started: Callable[[str], None] = lambda _: None, **changes):
        """Read all that the holder's lease is on, on this thread."""
        ticket = holder.ticket(holder.lease_of(self.name))
        fields = {"ticket": ticket, "num_tokens": holder.num_tokens} | changes
        request = self.request(holder.endpoint, carrier=carrier, **fields)
        return self.reader.read_blocking(request, on_started=on_started)

    def landed(self, end: int, start: int = 0) -> KV:
        return read_kv(self.array, self.shape, self.tables, start, end)

    def close(self) -> None:
        self.reader.close()
        self.memory.close()


class Thread(Protocol):
    def join(self, timeout: float | None = None) -> None: ...
    def is_alive(self) -> bool: ...


def start_thread(run: Callable[[], object]) -> Thread:
    """Start a thread of the test's own kind: real, or cooperative."""
    if threads.is_thread():
        return threads.spawn(lambda: run() and None, "test-helper")
    thread = threading.Thread(target=run, name="test-helper")
    thread.start()
    return thread


def fails(read: Callable[[], object]) -> TransferFailedError:
    """Carry out a read that must fail, and return its error."""
    with pytest.raises(TransferFailedError) as raised:
        read()
    return raised.value


@contextlib.contextmanager
def running(function: Callable[[], object]) -> Iterator[Thread]:
    """Run `function` on a thread beside the block; it has ended, without an error, when the block has."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            failures.append(error)

    thread = start_thread(run)
    try:
        yield thread
    finally:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "the helper does not end"
    if failures:
        raise failures[0]
