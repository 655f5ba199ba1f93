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
from dataplane.cards.arena import CardArena
from dataplane.cards.card import Card, CardError, CardStream, wait_until
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.ends.server import PlaneServer, ServerOptions
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas.handoff import Endpoint
from tests.bench.bench_carriers import SECRETS, TICKET, OneKV, OpenGate, measure, one_table
from tests.bench.gpu_report import Row, against
from tests.plane.fake_card import FakeCard

LAYOUT = KVLayout(weights="bench", dtype="bfloat16", num_layers=36, num_kv_heads=8, head_dim=128, block_size=16)
"""Of Qwen3-8B: a block is 2.25 MiB."""
FAKE_LAYOUT = KVLayout(weights="bench", dtype="bfloat16", num_layers=2, num_kv_heads=2, head_dim=16, block_size=16)
CARRIERS = ("cuda", "tcp")
PIECE_BYTES = 64 << 20
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

    def open_card(self) -> Card:
        if self.device == "fake":
            return FakeCard("GPU-bench")
        from dataplane.cards.cupy_card import CupyCard

        return CupyCard(int(self.device.partition(":")[2] or 0))


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
    arena = CardArena(spec.open_card(), spec.shape)
    fill(arena)
    progress = KVProgress.completed(spec.layout.num_layers, spec.num_tokens)
    gate = OpenGate(OneKV(one_table(spec.num_blocks), spec.num_tokens, progress))
    server = PlaneServer(arena, spec.shape, gate, SECRETS, ServerOptions(carriers=CARRIERS))
    server.serve_streams()
    control.send(server.endpoint)
    control.recv()
    server.close()
    arena.close()


def fill(arena: CardArena) -> None:
    """Write random bytes into the arena."""
    rng, stream = np.random.default_rng(1), arena.card.stream()
    host = arena.card.pinned(arena.num_bytes)
    for at in range(0, len(host), PIECE_BYTES):
        piece = host[at : at + PIECE_BYTES]
        piece[:] = rng.integers(0, 256, len(piece), np.uint8)
    stream.upload(host, arena.memory)
    finish(stream)
    stream.close()


def finish(stream: CardStream) -> None:
    """Wait for a stream."""
    if not wait_until(stream.is_done, lambda: False, WAIT_S):
        raise CardError("wait", f"not done in {WAIT_S} s")


@dataclass
class Bench:
    """This process's side: an arena to read into, and the same card's limits."""

    spec: Spec
    endpoint: Endpoint
    stack: ExitStack
    gb_per_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.card = self.spec.open_card()
        self.arena = CardArena(self.card, self.spec.shape)
        self.stack.callback(self.arena.close)
        self.reader = PlaneReader(self.arena, self.spec.shape, SECRETS)
        self.stack.callback(self.reader.close)
        self.other = self.card.allocate(self.arena.num_bytes)
        self.stack.callback(self.other.close)
        self.host = self.card.pinned(self.arena.num_bytes)
        self.stream = self.card.stream()
        self.stack.callback(self.stream.close)
        self.reasons: dict[str, str] = {}

    def rows(self) -> Iterator[Row]:
        cases: dict[str, Callable[[], object]] = {
            "copy": self.copy_on_the_card,
            "down": lambda: self.over_the_link(self.stream.download, self.arena.memory, self.host),
            "up": lambda: self.over_the_link(self.stream.upload, self.host, self.other),
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

    def over_the_link(self, copy: Callable[..., None], *ends: object) -> None:
        """As many bytes between the card and page-locked memory."""
        copy(*ends)
        finish(self.stream)


def nccl_rows(bench: Bench) -> Iterator[Row]:
    """NCCL with one rank that sends to itself: what one card can tell of it."""
    what = "NCCL, one rank to itself"
    if bench.spec.device == "fake":
        return
    card = bench.card
    if refusal := card.no_communicators():
        yield Row(what=what, error=refusal)
        return
    from cupy.cuda import nccl

    try:
        communicator = card.join(card.new_id(), 0, 1)
        try:

            def to_itself() -> None:
                nccl.groupStart()
                communicator.send(bench.arena.memory, bench.arena.num_bytes, bench.stream)
                communicator.receive(bench.other, bench.arena.num_bytes, bench.stream)
                nccl.groupEnd()
                finish(bench.stream)

            seconds = measure({"nccl": to_itself}, bench.spec.rounds)["nccl"]
        finally:
            communicator.abort()
    except CardError as error:
        yield Row(what=what, error=str(error))
        return
    same = torch.equal(torch.from_dlpack(bench.arena.memory.exported), torch.from_dlpack(bench.other.exported))
    if not same:
        yield Row(what=what, error="the bytes that came are not those that were sent")
        return
    rate = bench.arena.num_bytes / seconds / 1e9
    yield against(what, "GB/s", rate, bench.gb_per_s["copy"], "a copy on the card")
