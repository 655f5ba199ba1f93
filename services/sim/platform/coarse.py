"""Parts of a simulated worker that cost little: an engine that takes as long as a real one and computes nothing, and
reads that take as long as their bytes and move none. For a measurement, where no byte is at stake: leases, tickets and
how far a prompt is computed are the real ones."""

import asyncio
import mmap
import time
from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass

from dataplane.blocks.layout import KVLayout
from dataplane.blocks.ticket import TicketRefusedError
from dataplane.carriers import tcp
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import Landed, ReadRequest
from dataplane.memory.arena import HEADER_BYTES
from dataplane.protocol.gate import LeaseRefusedError, OpenLease
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas.kv import ReadEnd
from services.engine.interface import ChosenToken, Outcome, StepItem
from services.runtime import now_ms
from services.sim.platform.plane import SimPlaneReader

TOKEN = 1
"""The engine's only one."""


@dataclass(frozen=True, slots=True)
class ModelPace:
    """How long a model's steps take, in seconds: a prompt's token costs more the more tokens stand before it, and an
    answer's token is cheap beside what a step costs at all."""

    step_base_s: float
    prefill_token_s: float
    context_token_s: float
    """For each token before a prompt's token."""
    decode_token_s: float

    def step_s(self, items: Seq[StepItem]) -> float:
        total_s = self.step_base_s
        for item in items:
            if item.num_tokens == 1:
                total_s += self.decode_token_s
            else:
                total_s += self.span_s(item.start, item.num_tokens)
        return total_s

    def span_s(self, start: int, num_tokens: int) -> float:
        """Return what tokens [start, start + num_tokens) of a prompt add to steps."""
        return num_tokens * (self.prefill_token_s + (start + num_tokens / 2) * self.context_token_s)


class PacedEngine:
    """Implements `Engine`: its answers are always the same token. With `SimSteps` and a pace it takes its time."""

    def __init__(self, layout: KVLayout, vocab_size: int) -> None:
        self.layout = layout
        self.vocab_size = vocab_size

    def compute(self, items: Seq[StepItem]) -> list[Outcome]:
        for item in items:
            if (listener := item.sequence.layer_listener) is not None:
                for layer in range(self.layout.num_layers):
                    listener.advance(layer, item.start + item.num_tokens)
        return [ChosenToken(TOKEN) for item in items if item.samples]

    def close(self) -> None:
        """It has no memory."""


def no_memory(host: str) -> HostArena:
    """Return an arena of which nothing but its name is used."""
    return HostArena(host, f"nonce-{host}", mmap.mmap(-1, HEADER_BYTES), owned=False)


class CoarseReader(SimPlaneReader):
    """A read under a real lease takes the network's latency, and its bytes at the network's rate; of a prompt that is
    still being computed it takes what is there."""

    async def read_kv(self, request: ReadRequest, on_started: Callable[[str], None] = lambda _: None) -> Landed:
        stats = request.stats
        stats.carrier, stats.opened_ns = tcp.NAME, time.monotonic_ns()
        try:
            async with asyncio.timeout(request.deadline_s):
                await asyncio.sleep(self._network.latency_s())
                lease = self._open(request)
                stats.accepted_ns = time.monotonic_ns()
                with _served(lease, stats):
                    trailer = await self._follow(request, lease, on_started)
        except TimeoutError as error:
            raise TransferFailedError(ReadEnd.DEADLINE, "it took too long", request.first_token) from error
        stats.landed_ns = time.monotonic_ns()
        return Landed(request.num_tokens, trailer, stats)

    def _open(self, request: ReadRequest) -> OpenLease:
        server = self._network.server(request.endpoint)
        if server is None:
            raise TransferFailedError(ReadEnd.CONNECT, f"{request.endpoint.host} has gone", request.first_token)
        try:
            return server.gate.open(self._secrets.signed(request.ticket).ticket(now_ms()))
        except TicketRefusedError as error:
            raise TransferFailedError(ReadEnd.TICKET, str(error), request.first_token) from error
        except LeaseRefusedError as error:
            raise TransferFailedError(ReadEnd.LEASE, str(error), request.first_token) from error

    async def _follow(self, request: ReadRequest, lease: OpenLease, on_started: Callable[[str], None]) -> bytes:
        """Read as far as it is computed, until all is read; return what the holder sends behind it."""
        stats, progress, num_read = request.stats, lease.kv.progress, request.first_token
        token_bytes = self._shape.layout.block_bytes // self._shape.layout.block_size
        # Subscribe before the first look, and clear `changed` before each: a change after a look then ends the wait.
        changed = asyncio.Event()
        progress.subscribe(changed.set)
        try:
            while True:
                changed.clear()
                ready = progress.ready()
                # Once the holder gives up or the lease ends, the blocks may be used for other KV.
                if ready.failure is not None or not lease.still_valid():
                    raise TransferFailedError(ReadEnd.HOLDER, ready.failure or "the lease has ended", num_read)
                # A token is readable once all layers have it. Without new ones the read ends at the trailer,
                # or waits for a change.
                num_tokens = min(*ready.num_tokens, request.num_tokens)
                if num_tokens <= num_read:
                    if ready.trailer is not None:
                        return ready.trailer
                    await changed.wait()
                    continue
                # The first piece starts the read: notify the holder's lease and the caller, once.
                if not stats.first_byte_ns:
                    stats.first_byte_ns = time.monotonic_ns()
                    lease.started()
                    on_started(stats.carrier)
                # Let the bytes take their time on the network, and count them only on arrival.
                num_bytes = (num_tokens - num_read) * token_bytes
                await asyncio.sleep(num_bytes / self._network.bytes_per_s)
                num_read = num_tokens
                stats.num_bytes += num_bytes
                stats.num_wire_bytes += num_bytes
                stats.num_frames += 1
                stats.last_byte_ns = time.monotonic_ns()
        finally:
            progress.unsubscribe(changed.set)


@contextmanager
def _served(lease: OpenLease, stats: TransferStats) -> Generator[None]:
    """Report to the holder how the read ends."""
    try:
        yield
    except BaseException as error:
        lease.served(stats, str(error) or type(error).__name__)
        raise
    lease.served(stats, "")
