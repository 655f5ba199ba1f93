"""A worker as the scheduler knows it, and which workers go together. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.request import PlaceRequest
from schemas.worker import WorkerInfo, WorkerLoad
from services.scheduler.placement.admission import Wait
from services.scheduler.placement.cost import Contender, Demand, needed_blocks, queue_ms
from services.scheduler.placement.known_rates import FleetRates
from services.scheduler.placement.policy import Candidate

Pair = tuple["KnownWorker", "KnownWorker | None"]
"""Who computes the prompt and who decodes; None: the first does both."""


@dataclass(slots=True)
class KnownWorker:
    """A worker as it last described itself, and what has been placed on it since."""

    info: WorkerInfo
    load: WorkerLoad | None = None
    draining: bool = False
    num_placed_requests: int = 0
    num_placed_tokens: int = 0
    num_placed_blocks: int = 0

    def place(self, *, num_tokens: int, num_blocks: int) -> None:
        """Count a request as load until the worker reports its own."""
        self.num_placed_requests += 1
        self.num_placed_tokens += num_tokens
        self.num_placed_blocks += num_blocks

    def hear(self, load: WorkerLoad) -> None:
        self.load = load
        self.draining = self.draining or load.state == "draining"
        self.num_placed_requests = self.num_placed_tokens = self.num_placed_blocks = 0

    def candidate(self) -> Candidate:
        load = self.load
        return Candidate(
            worker_id=self.info.worker_id,
            num_uncomputed_tokens=self.num_placed_tokens + (load.num_uncomputed_tokens if load else 0),
            num_requests=self.num_requests,
            num_free_blocks=load.blocks.free + load.blocks.cached if load else self.info.num_blocks,
        )

    def contender(self) -> Contender:
        """What another worker computes for this one is no queue here."""
        load = self.load
        num_reported = load.num_uncomputed_tokens - load.num_unreceived_tokens if load else 0
        free = load.blocks.free if load else self.info.num_blocks
        return Contender(
            info=self.info,
            num_waiting_tokens=self.num_placed_tokens + num_reported,
            num_requests=self.num_requests,
            num_running=load.num_running if load else 0,
            num_free_blocks=free - self.num_placed_blocks,
            num_kept_blocks=load.blocks.cached if load else 0,
        )

    @property
    def num_requests(self) -> int:
        return self.num_placed_requests + (self.load.num_running + self.load.num_queued if self.load else 0)

    @property
    def num_waiting(self) -> int:
        """Requests in line here, or on their way."""
        return self.num_placed_requests + (self.load.num_queued if self.load else 0)

    @property
    def num_usable_blocks(self) -> int:
        """Free, or kept for their content only."""
        load = self.load
        free = load.blocks.free + load.blocks.cached if load else self.info.num_blocks
        return free - self.num_placed_blocks

    def is_queue(self, num_needed: int) -> bool:
        """Whether a request of so many blocks must wait for room."""
        return bool(self.load and self.load.num_queued) or num_needed > self.num_usable_blocks

    def num_at_once(self, num_needed: int) -> int:
        """How many requests of so many blocks run here beside each other."""
        load = self.load
        kept = load.blocks.free + load.blocks.cached if load else self.info.num_blocks
        return max(1, load.num_running if load else 0, kept // num_needed)


def fits(info: WorkerInfo, request: PlaceRequest) -> bool:
    num_tokens = request.num_prompt_tokens + request.max_tokens
    return num_tokens <= info.context_length and num_tokens <= info.num_blocks * info.block_size


def partners_of(prefill: KnownWorker, workers: Iterable[KnownWorker]) -> list[KnownWorker]:
    """Return the decode workers that can read this prefill worker's KV (none for another role)."""
    if prefill.info.role != "prefill":
        return []
    return [w for w in workers if w.info.role == "decode" and w.info.fingerprint == prefill.info.fingerprint]


def wait_of(demand: Demand, prefill: KnownWorker, decode: KnownWorker | None, rates: FleetRates) -> Wait:
    """Predict what a request would wait on these workers: for the prompts before it, and for room to decode."""
    predicted_ms = queue_ms(demand, prefill.contender(), rates)
    decoding = decode or prefill
    num_needed = needed_blocks(demand, decoding.info.block_size)
    if decoding.is_queue(num_needed):
        # Room comes as answers end: those who run end within about one answer's time, and let as many in. It is given
        # in the order of arrival: whoever is small waits behind whoever is large.
        answer_ms = demand.max_tokens * rates.step_ms(decoding.info.worker_id)
        predicted_ms += answer_ms * decoding.num_waiting / decoding.num_at_once(num_needed)
    return Wait(predicted_ms, max(prefill.num_waiting, decoding.num_waiting), rates.is_measured)


def replica_of(decoding: KnownWorker, workers: Iterable[KnownWorker]) -> WorkerId | None:
    """Return who should be offered what `decoding` completes: a store, else whoever decodes too and has most room."""
    like = [
        w
        for w in workers
        if w.info.worker_id != decoding.info.worker_id and w.info.fingerprint == decoding.info.fingerprint
    ]
    stores = [w for w in like if w.info.role == "store"]
    peers = [w for w in like if w.info.role in ("decode", "aggregated")]
    chosen = max(stores or peers, key=lambda w: w.num_usable_blocks, default=None)
    return chosen.info.worker_id if chosen else None
