"""The workers that a placement chooses from: which of them go together, and what a request would wait for. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from schemas.ids import WorkerId
from schemas.request import PlaceRequest
from schemas.worker import WorkerInfo, WorkerLoad
from services.scheduler.placement.known_rates import FleetRates
from services.scheduler.placement.known_worker import KnownWorker, idle

Pair = tuple[KnownWorker, KnownWorker | None]
"""Who computes the prompt and who decodes; None: the first does both."""


class FleetView:
    """The workers that are known to live, by id, and what follows from all of them together."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, KnownWorker] = {}
        self._rates: FleetRates | None = None

    def join(self, info: WorkerInfo) -> KnownWorker:
        """Return a worker that has just become known."""
        worker = self.workers[info.worker_id] = KnownWorker(info, idle(info))
        return worker

    def hear(self, load: WorkerLoad, now_ms: int) -> None:
        """Note what a known worker reports of itself."""
        self.workers[load.worker.worker_id].hear(load, now_ms)
        self._rates = None

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a known worker."""
        del self.workers[worker_id]
        self._rates = None

    def usable(self) -> list[KnownWorker]:
        """Return the workers that may be given requests, ordered by id."""
        ordered = sorted(self.workers.values(), key=lambda worker: worker.info.worker_id)
        return [worker for worker in ordered if not worker.is_draining and worker.info.role != "store"]

    def rates(self, now_ms: int) -> FleetRates:
        """Return what is known now. Kept until somebody reports: ages need not be finer than that."""
        if self._rates is None:
            self._rates = FleetRates(self.workers.values(), now_ms)
        return self._rates


class Demand(NamedTuple):
    """What is asked for."""

    num_prompt_tokens: int
    max_tokens: int


class PredictedQueue(NamedTuple):
    """What a new request would find before it on one worker."""

    prompts_ms: float
    """The prompts in line are computed after this long."""
    answers_ms: float
    """Enough answers have ended after this long that there is room to decode; 0: there is."""
    num_waiting: int


Queues = Mapping[KnownWorker, PredictedQueue]
"""The workers that have room for a request, each with what would be before it there. Each is predicted once."""


def queue_of(demand: Demand, worker: KnownWorker, rates: FleetRates) -> PredictedQueue:
    """Predict what a request would wait for on this worker."""
    # The prompts in line are taken to be as long as this one: their context decides their speed.
    whole_ms = rates.compute_ms(worker, 0, demand.num_prompt_tokens)
    prompts_ms = worker.num_waiting_tokens * whole_ms / demand.num_prompt_tokens
    num_needed, answers_ms = needed_blocks(demand, worker.info.block_size), 0.0
    if worker.is_queue(num_needed):
        # Room comes as answers end: those who run end within about one answer's time, and let as many in. It is given
        # in the order of arrival: whoever is small waits behind whoever is large.
        answer_ms = demand.max_tokens * rates.step_ms(worker)
        answers_ms = answer_ms * worker.num_waiting / worker.num_at_once(num_needed)
    return PredictedQueue(prompts_ms, answers_ms, worker.num_waiting)


def needed_blocks(demand: Demand, block_size: int) -> int:
    """Return how many blocks the prompt and the answer fill."""
    return -(-(demand.num_prompt_tokens + demand.max_tokens) // block_size)


def fits(info: WorkerInfo, request: PlaceRequest) -> bool:
    num_tokens = request.num_prompt_tokens + request.max_tokens
    return num_tokens <= info.context_length and num_tokens <= info.num_blocks * info.block_size


def partners_of(prefill: KnownWorker, workers: Iterable[KnownWorker]) -> list[KnownWorker]:
    """Return the decode workers that can read this prefill worker's KV (none for another role)."""
    if prefill.info.role != "prefill":
        return []
    return [w for w in workers if w.info.role == "decode" and w.info.fingerprint == prefill.info.fingerprint]


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
