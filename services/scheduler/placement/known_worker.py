"""A worker as a placement sees it: what it has said of itself, and what was placed on it since. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.ids import WorkerId
from schemas.worker import BlockCounts, TransferRate, WorkerInfo, WorkerLoad
from services.scheduler.limits import MIN_RATE


class Link(NamedTuple):
    """How one worker reads from another: a wait, then a stream."""

    latency_ms: float
    bytes_per_s: float

    def read_ms(self, num_bytes: float) -> float:
        return self.latency_ms + self.stream_ms(num_bytes)

    def stream_ms(self, num_bytes: float) -> float:
        return num_bytes / self.bytes_per_s * 1e3

    def towards(self, other: "Link", share: float) -> "Link":
        """Return the link this far on the way to another, in orders of magnitude."""
        latency_ms = (self.latency_ms + 0.001) * ((other.latency_ms + 0.001) / (self.latency_ms + 0.001)) ** share
        return Link(latency_ms, self.bytes_per_s * (other.bytes_per_s / self.bytes_per_s) ** share)


class Reads(NamedTuple):
    """What one reader has measured of its pairs: the quickest carrier of each, and since when that is unchanged."""

    by_source: dict[WorkerId, tuple[Link, int]]
    num_pairs: int = 0
    latency_ms: float = 0.0
    bytes_per_s: float = 0.0
    """This and the latency are sums over the pairs, as means without one of them are asked for."""

    def renewed(self, transfers: Sequence[TransferRate], now_ms: int) -> "Reads":
        """Return what is known after the reader's next report. Rates below `MIN_RATE` are ignored."""
        usable = sorted(
            (t for t in transfers if t.bytes_per_s >= MIN_RATE and t.latency_ms >= 0), key=lambda t: t.bytes_per_s
        )
        links = {t.source: Link(t.latency_ms, t.bytes_per_s) for t in usable}  # the quickest comes last, and stays
        by_source: dict[WorkerId, tuple[Link, int]] = {}
        for source, link in links.items():
            known = self.by_source.get(source)
            by_source[source] = known if known is not None and known[0] == link else (link, now_ms)
        return Reads(
            by_source,
            len(links),
            sum(link.latency_ms for link in links.values()),
            sum(link.bytes_per_s for link in links.values()),
        )

    def without(self, source: WorkerId) -> "Reads":
        """Return the sums over the other pairs."""
        found = self.by_source.get(source)
        if found is None:
            return self
        link = found[0]
        return Reads({}, self.num_pairs - 1, self.latency_ms - link.latency_ms, self.bytes_per_s - link.bytes_per_s)

    @property
    def mean(self) -> Link | None:
        if not self.num_pairs:
            return None
        # Differences of sums: what rounding leaves of very unequal pairs is still a link.
        return Link(max(0.0, self.latency_ms) / self.num_pairs, max(1.0, self.bytes_per_s) / self.num_pairs)


def idle(info: WorkerInfo) -> WorkerLoad:
    """Return the load that a worker is taken to have until it says its own."""
    return WorkerLoad(
        worker=info,
        state="ready",
        blocks=BlockCounts(total=info.num_blocks, free=info.num_blocks, running=0, leased=0),
        num_running=0,
        num_queued=0,
        num_uncomputed_tokens=0,
    )


@dataclass(slots=True, eq=False)
class KnownWorker:
    """One incarnation of a worker. Policies read it; only `hear` and `place` change it.

    Counts without "placed" in their name include what was placed since the worker last spoke.
    """

    info: WorkerInfo
    load: WorkerLoad
    """What it last said of itself, rates included; `idle` until it has."""
    has_reported: bool = False
    is_draining: bool = False
    reads: Reads = field(default_factory=lambda: Reads({}))
    """What its loads so far have said of its transfers."""
    num_placed_requests: int = 0
    num_placed_tokens: int = 0
    num_placed_blocks: int = 0

    def hear(self, load: WorkerLoad, now_ms: int) -> None:
        """Replace what is known by the worker's own report: what was placed before is in it."""
        self.load = load
        self.has_reported = True
        self.is_draining = self.is_draining or load.state == "draining"
        self.reads = self.reads.renewed(load.rates.transfers, now_ms)
        self.num_placed_requests = self.num_placed_tokens = self.num_placed_blocks = 0

    def place(self, *, num_tokens: int, num_blocks: int) -> None:
        """Count a request as load until the worker reports its own."""
        self.num_placed_requests += 1
        self.num_placed_tokens += num_tokens
        self.num_placed_blocks += num_blocks

    @property
    def num_requests(self) -> int:
        return self.num_waiting + self.load.num_running

    @property
    def num_waiting(self) -> int:
        """Count the requests in line here, or on their way."""
        return self.num_placed_requests + self.load.num_queued

    @property
    def num_uncomputed_tokens(self) -> int:
        """Count the prompt tokens in line here, whoever computes them."""
        return self.num_placed_tokens + self.load.num_uncomputed_tokens

    @property
    def num_waiting_tokens(self) -> int:
        """Count the prompt tokens that it computes before a new request's. What others compute for it is no queue."""
        return max(0, self.num_uncomputed_tokens - self.load.num_unreceived_tokens)

    @property
    def num_free_blocks(self) -> int:
        return self.load.blocks.free - self.num_placed_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Count the blocks that are free, or kept for their content only and given up when room is needed."""
        return self.num_free_blocks + self.load.blocks.cached

    def is_queue(self, num_needed: int) -> bool:
        """Say whether a request of so many blocks must wait for room."""
        return self.load.num_queued > 0 or num_needed > self.num_usable_blocks

    def num_at_once(self, num_needed: int) -> int:
        """Return how many requests of so many blocks run here beside each other."""
        num_blocks = self.num_usable_blocks + self.num_placed_blocks
        return max(1, self.load.num_running, num_blocks // num_needed)
