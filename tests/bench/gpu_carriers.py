"""The carriers from and to a card's memory, beside what the card and its link to the host can do at all.

Two processes on one card: a child holds KV that is computed, this one reads. Cases take turns; figures are medians.
Every frame's digest is computed and compared at both ends, as always. `device` "fake" tries all of it without a card.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch

from dataplane.blocks.layout import ArenaShape, KVLayout, uniform_shape
from dataplane.cards.card_arena import CardArena
from dataplane.cards.device import Device, DeviceError
from dataplane.cards.fakes.fake_device import FakeDevice
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.ends.server import PlaneServer, ServerOptions
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas.handoff import Endpoint
from tests.bench.bench_carriers import SECRETS, TICKET, OneKV, OpenGate, measure, one_table
from tests.bench.gpu_report import Row, against

LAYOUT = KVLayout(weights="bench", dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128, block_size=16)
"""Of Qwen3-8B: a block is 2.25 MiB."""
FAKE_LAYOUT = KVLayout(weights="bench", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)
CARRIERS = ("cuda", "shm", "tcp")
STAGING_BYTES = 64 << 20
SLOT_BYTES = 8 << 20
AIM = 0.9
WAIT_S = 60.0


@dataclass
class Spec:
    """What both processes know. `num_tokens`: of one read."""

    device: str
    layout: KVLayout
    num_blocks: int
    rounds: int

    @property
    def shape(self) -> ArenaShape:
        return uniform_shape(self.layout, self.num_blocks)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.layout.block_size

    def open_device(self) -> Device:
        if self.device == "fake":
            return FakeDevice(uuid="GPU-bench")
        from dataplane.cards.cuda.cuda_driver import find_device

        return find_device(int(self.device.partition(":")[2] or 0))


def spec_of(device: str, *, quick: bool) -> Spec:
    if device == "fake":
        return Spec(device, FAKE_LAYOUT, 16, 1)
    return Spec(device, LAYOUT, (1 << 30) // LAYOUT.block_bytes, 5 if quick else 15)


def rows(device: str, models: Sequence[str], *, quick: bool) -> Iterator[Row]:
    """Yield this section's rows. The models do not matter: KV is KV."""
    spec = spec_of(device, quick=quick)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=hold, args=(theirs, spec), daemon=True)
    child.start()
    try:
        if not ours.poll(WAIT_S):
            yield Row(what="carriers", error="the holder's process did not start")
            return
        endpoint: Endpoint = ours.recv()
        with ExitStack() as stack:
            bench = Bench(spec, endpoint, stack)
            yield from bench.rows()
            yield from nccl_rows(bench)
    finally:
        ours.send("done")
        child.join(WAIT_S)
        child.kill()


def hold(control: Connection, spec: Spec) -> None:
    """The child: KV of random bytes on the card, served until a word comes."""
    device = spec.open_device()
    arena = CardArena(device, spec.shape, STAGING_BYTES)
    fill(device, arena)
    progress = KVProgress.completed(spec.layout.num_layers, spec.num_tokens)
    gate = OpenGate(OneKV(one_table(spec.num_blocks), spec.num_tokens, progress))
    server = PlaneServer(arena, spec.shape, gate, SECRETS, ServerOptions(carriers=CARRIERS))
    server.start()
    control.send(server.endpoint)
    control.recv()
    server.close()
    arena.close()


def fill(device: Device, arena: CardArena) -> None:
    """Write random bytes into the arena."""
    stream, done = device.new_stream(), device.new_event()
    rng = np.random.default_rng(1)
    for at in range(0, arena.num_bytes, len(arena.staging)):
        piece = arena.staging[: min(len(arena.staging), arena.num_bytes - at)]
        piece[:] = rng.integers(0, 256, len(piece), np.uint8)
        device.upload(stream, piece, arena.memory, at)
        done.record(stream)
        if not done.wait(WAIT_S):
            raise DeviceError("fill", f"not done in {WAIT_S} s")
    done.close()
    stream.close()


@dataclass
class Bench:
    """This process's side: an arena to read into, and the same card's limits."""

    spec: Spec
    endpoint: Endpoint
    stack: ExitStack
    gb_per_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = self.spec.open_device()
        self.arena = CardArena(self.device, self.spec.shape, STAGING_BYTES)
        self.stack.callback(self.arena.close)
        self.reader = PlaneReader(self.arena, self.spec.shape, SECRETS)
        self.stack.callback(self.reader.close)
        self.other = self.device.allocate(self.arena.num_bytes)
        self.stack.callback(self.other.close)
        self.stream, self.done = self.device.new_stream(), self.device.new_event()
        self.stack.callback(self.stream.close)
        self.stack.callback(self.done.close)
        self.reasons: dict[str, str] = {}

    def rows(self) -> Iterator[Row]:
        cases: dict[str, Callable[[], object]] = {
            "copy": self.copy_on_the_card,
            "down": lambda: self.over_the_link(is_up=False),
            "up": lambda: self.over_the_link(is_up=True),
        }
        failures: dict[str, str] = {}
        for carrier in CARRIERS:
            try:
                self.read(carrier)
            except TransferFailedError as error:
                failures[carrier] = str(error)
            else:
                cases[carrier] = lambda name=carrier: self.read(name)
        seconds = measure(cases, self.spec.rounds)
        rate = self.gb_per_s = {name: self.arena.num_bytes / s / 1e9 for name, s in seconds.items()}
        link = min(rate["down"], rate["up"])
        mib = self.arena.num_bytes >> 20
        yield Row(
            what=f"{mib} MiB: copy on the card; to the host; from the host",
            result=f"{rate['copy']:,.1f}; {rate['down']:,.1f}; {rate['up']:,.1f} GB/s",
        )
        for carrier in CARRIERS:
            limit, limit_is = (rate["copy"], "a copy on the card") if carrier == "cuda" else (link, "the host link")
            what = f"`{carrier}`, two processes, one card, digests on ({self.reasons.get(carrier, '')})"
            if carrier in failures:
                yield Row(what=what, aim=AIM, error=failures[carrier])
            else:
                yield against(what, "GB/s", rate[carrier], limit, limit_is, AIM)

    def read(self, carrier: str) -> TransferStats:
        request = ReadRequest(
            endpoint=self.endpoint,
            ticket=SECRETS.sign(TICKET),
            carrier=carrier,
            tables=one_table(self.spec.num_blocks),
            first_token=0,
            num_tokens=self.spec.num_tokens,
            deadline_s=WAIT_S,
        )
        stats = self.reader.read_blocking(request).stats
        self.reasons[carrier] = stats.reason.removesuffix("; asked for")
        return stats

    def copy_on_the_card(self) -> None:
        """The driver's own copy of as many bytes."""
        source, target = torch.from_dlpack(self.arena.memory.exported), torch.from_dlpack(self.other.exported)
        target.copy_(source)
        if target.is_cuda:
            torch.cuda.synchronize(target.device)

    def over_the_link(self, *, is_up: bool) -> None:
        """As many bytes between the card and page-locked memory, in pieces as staging has them."""
        for at in range(0, self.arena.num_bytes, SLOT_BYTES):
            slot = at % (len(self.arena.staging) // SLOT_BYTES * SLOT_BYTES)
            piece = self.arena.staging[slot : slot + min(SLOT_BYTES, self.arena.num_bytes - at)]
            if is_up:
                self.device.upload(self.stream, piece, self.other, at)
            else:
                self.device.download(self.stream, self.arena.memory, at, piece)
        self.wait()

    def wait(self) -> None:
        self.done.record(self.stream)
        if not self.done.wait(WAIT_S):
            raise DeviceError("wait", f"not done in {WAIT_S} s")


def nccl_rows(bench: Bench) -> Iterator[Row]:
    """NCCL with one rank that sends to itself: what one card can tell of it."""
    what = "NCCL, one rank to itself, 8 MiB a group"
    if bench.spec.device == "fake":
        return
    from dataplane.cards.nccl.communicator import CommunicatorError
    from dataplane.cards.nccl.library import NcclLibrary

    library = NcclLibrary(int(bench.spec.device.partition(":")[2] or 0))
    if refusal := library.refusal():
        yield Row(what=what, error=refusal)
        return
    try:
        communicator = library.make(library.new_id(), 1, 0)
        try:

            def to_itself() -> None:
                for at in range(0, bench.arena.num_bytes, SLOT_BYTES):
                    size = min(SLOT_BYTES, bench.arena.num_bytes - at)
                    with communicator.group():
                        communicator.send(bench.arena.memory, at, size, bench.stream)
                        communicator.receive(bench.other, at, size, bench.stream)
                bench.wait()

            seconds = measure({"nccl": to_itself}, bench.spec.rounds)["nccl"]
        finally:
            communicator.abort()
    except (CommunicatorError, DeviceError) as error:
        yield Row(what=what, error=str(error))
        return
    same = torch.equal(torch.from_dlpack(bench.arena.memory.exported), torch.from_dlpack(bench.other.exported))
    if not same:
        yield Row(what=what, error="the bytes that came are not those that were sent")
        return
    rate = bench.arena.num_bytes / seconds / 1e9
    yield against(what, "GB/s", rate, bench.gb_per_s["copy"], "a copy on the card")
