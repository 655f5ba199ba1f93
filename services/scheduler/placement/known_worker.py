"""A worker as a placement sees it: what it has reported of itself, and what was placed on it since. Pure."""

from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.worker import BlockCounts, WorkerInfo, WorkerLoad, WorkerState


def idle(info: WorkerInfo) -> WorkerLoad:
    """Return the load that a worker is taken to have until it reports its own."""
    return WorkerLoad(
        worker=info,
        state=WorkerState.READY,
        blocks=BlockCounts(total=info.num_blocks, free=info.num_blocks, running=0, leased=0),
        num_running=0,
        num_queued=0,
        num_uncomputed_tokens=0,
    )


class Line(NamedTuple):
    """Requests in line, and prompt tokens."""

    num_waiting: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class KnownWorker:
    """One incarnation of a worker. Only `observe` and `place` change it.

    Counts without "placed" in their name include what was placed since the worker last spoke.
    """

    info: WorkerInfo
    load: WorkerLoad
    """What it last reported of itself, rates included; `idle` until it has."""
    slot: int = 0
    """Its row in the fleet's arrays."""
    has_reported: bool = False
    is_draining: bool = False
    is_starting: bool = False
    """Its engine is, or it is in a state that only a later release knows: it lends, and takes no requests."""
    num_placed_requests: int = 0
    num_placed_tokens: int = 0
    num_placed_blocks: int = 0
    lines: dict[str, Line] = field(default_factory=dict[str, Line])
    """What tenants have in line here, as far as it names them, or on their way."""

    def observe(self, load: WorkerLoad) -> None:
        """Replace what is known by the worker's own report: what was placed before is in it."""
        self.load = load
        self.has_reported = True
        self.is_draining = self.is_draining or load.state == WorkerState.DRAINING
        self.is_starting = load.state not in (WorkerState.READY, WorkerState.DRAINING)
        self.num_placed_requests = self.num_placed_tokens = self.num_placed_blocks = 0
        self.lines = {line.tenant: Line(line.num_queued, line.num_uncomputed_tokens) for line in load.lines}

    def place(self, *, tenant: str, num_tokens: int, num_blocks: int) -> None:
        """Count a request as load until the worker reports its own."""
        line = self.lines.get(tenant, Line())
        self.lines[tenant] = Line(line.num_waiting + 1, line.num_tokens + num_tokens)
        self.num_placed_requests += 1
        self.num_placed_tokens += num_tokens
        self.num_placed_blocks += num_blocks

    @property
    def state(self) -> WorkerState:
        if self.is_draining:
            return WorkerState.DRAINING
        return WorkerState.STARTING if self.is_starting else WorkerState.READY

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

    def before(self, tenant: str, num_tokens: int) -> Line:
        """Return what is served here before a new request of a tenant, of so many prompt tokens. Tenants take turns:
        what another one has beyond the tenant's own, this request included, comes later."""
        own = self.lines.get(tenant, Line())
        others = [line for name, line in self.lines.items() if name != tenant]
        num_later = sum(max(0, line.num_waiting - own.num_waiting - 1) for line in others)
        num_later_tokens = sum(max(0, line.num_tokens - own.num_tokens - num_tokens) for line in others)
        return Line(max(0, self.num_waiting - num_later), max(0, self.num_waiting_tokens - num_later_tokens))

    @property
    def num_free_blocks(self) -> int:
        return self.load.blocks.free - self.num_placed_blocks

    @property
    def num_usable_blocks(self) -> int:
        """Count the blocks that are free, or kept for their content only and given up when room is needed."""
        return self.num_free_blocks + self.load.blocks.cached
