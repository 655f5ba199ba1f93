"""A small mesh in virtual time around the real scheduler core: what a policy does to the time to first token.

Workers compute prompts in chunks and decode in batches, keep what they have computed, measure their own rates with
noise, and report on change and twice a second. Nothing here waits, and a seed replays a run.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.directory import HolderPrefix
from schemas.ids import RequestId, WorkerId
from schemas.request import Placement, PlaceRequest
from schemas.worker import (
    BlockCounts,
    PrefillRate,
    TransferRate,
    WorkerInfo,
    WorkerLoad,
    WorkerRates,
    WorkerRole,
)
from services.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.times import PresenceTimes

BLOCK_SIZE = 16
CHUNK_TOKENS = 512
NUM_BLOCKS = 20_000
TOKEN_BYTES = 65_536
MESSAGE_MS = 0.5
REPORT_MS = 500.0
RATE_STARTS = (0, 1_024, 2_048, 4_096)
NOISE = 0.1
GAIN = 0.2
"""Of the newest measurement in a moving average."""


@dataclass
class SimRequest:
    """`content` names the prompt's blocks; equal names are equal blocks from the first on."""

    number: int
    arrival_ms: float
    content: list[object]
    num_prompt_tokens: int
    num_answer_tokens: int
    on_end: Callable[[float], None] | None = None
    first_token_ms: float | None = None
    end_ms: float | None = None
    num_left: int = 0
    num_uncomputed: int = 0
    decode: "SimWorker | None" = None
    placement: Placement | None = None

    @property
    def ttft_ms(self) -> float:
        assert self.first_token_ms is not None, f"request {self.number} has no token"
        return self.first_token_ms - self.arrival_ms


@dataclass
class SimWorker:
    worker_id: WorkerId
    role: WorkerRole
    tokens_per_s: float = 3_000.0
    step_ms: float = 10.0
    bytes_per_s: float = 1e9
    waiting: deque[SimRequest] = field(default_factory=deque)
    running: list[SimRequest] = field(default_factory=list)
    incoming: int = 0
    kept: set[object] = field(default_factory=set)
    is_stepping: bool = False
    prefill_rates: dict[int, float] = field(default_factory=dict)
    transfer_rates: dict[WorkerId, tuple[float, float]] = field(default_factory=dict)
    measured_step_ms: float = 0.0

    def held_blocks(self, content: list[object]) -> int:
        return next((at for at, block in enumerate(content) if block not in self.kept), len(content))

    def load(self) -> WorkerLoad:
        num_used = min(NUM_BLOCKS, sum(-(-r.num_prompt_tokens // BLOCK_SIZE) for r in self.running))
        return WorkerLoad(
            worker=WorkerInfo(
                worker_id=self.worker_id, incarnation="1", role=self.role, model="m", fingerprint="f",
                num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, context_length=100_000,
            ),
            state="ready",
            blocks=BlockCounts(total=NUM_BLOCKS, free=NUM_BLOCKS - num_used, running=num_used, leased=0),
            num_running=len(self.running) + (1 if self.waiting else 0),
            num_queued=max(0, len(self.waiting) - 1) + self.incoming,
            num_uncomputed_tokens=sum(r.num_uncomputed for r in self.waiting),
            rates=WorkerRates(
                prefill=tuple(
                    PrefillRate(context_tokens=start, tokens_per_s=rate)
                    for start, rate in sorted(self.prefill_rates.items())
                ),
                transfers=tuple(
                    TransferRate(source=source, carrier="tcp", bytes_per_s=rate, latency_ms=latency)
                    for source, (rate, latency) in self.transfer_rates.items()
                ),
                decode_step_ms=self.measured_step_ms,
                kv_token_bytes=TOKEN_BYTES,
            ),
        )  # fmt: skip


class Simulation:
    """Runs requests through a fleet under one policy."""

    def __init__(self, policy: str, workers: list[SimWorker], seed: int) -> None:
        self.core = SchedulerCore(SchedulerConfig(policy=policy, silent_after_ms=10**9), PresenceTimes())
        self.workers = {worker.worker_id: worker for worker in workers}
        self.now_ms = 0.0
        self.finished: list[SimRequest] = []
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._num_open = 0
        for worker in workers:
            self.core.handle(worker.load(), 0)
            self._report_on(worker)

    def submit(self, request: SimRequest) -> None:
        self._num_open += 1
        self._at(request.arrival_ms, lambda: self._place(request))

    def run(self) -> list[SimRequest]:
        while self._num_open:
            self.now_ms, _, event = heapq.heappop(self._events)
            event()
        return self.finished

    def _at(self, time_ms: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_ms, next(self._order), event))

    def _noisy(self, value: float) -> float:
        return value * self._random.lognormvariate(0, NOISE)

    def _report_on(self, worker: SimWorker) -> None:
        self.core.handle(worker.load(), int(self.now_ms))
        self._at(self.now_ms + REPORT_MS, lambda: self._report_on(worker))

    def _changed(self, worker: SimWorker) -> None:
        load = worker.load()

        def arrive() -> None:
            self.core.handle(load, int(self.now_ms))

        self._at(self.now_ms + MESSAGE_MS, arrive)

    def _holders(self, request: SimRequest) -> tuple[HolderPrefix, ...]:
        held = [(w.held_blocks(request.content), w.worker_id) for w in self.workers.values()]
        return tuple(
            HolderPrefix(worker_id=worker_id, incarnation="1", num_blocks=num_blocks)
            for num_blocks, worker_id in sorted(held, reverse=True)
            if num_blocks
        )

    def _place(self, request: SimRequest) -> None:
        question = PlaceRequest(
            request_id=RequestId(str(request.number)),
            attempt=1,
            deadline_ms=2**52,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.num_answer_tokens,
        )
        holders = self._holders(request) if self.core.asks_directory else ()
        placement = self.core.place(question, int(self.now_ms), holders)
        assert isinstance(placement, Placement), placement
        request.placement = placement
        prefill = self.workers[placement.prefill_worker]
        request.decode = self.workers[placement.decode_worker] if placement.decode_worker else None
        if request.decode is not None:
            request.decode.incoming += 1
            self._changed(request.decode)
        self._at(self.now_ms + MESSAGE_MS + self._pull(request, prefill), lambda: self._accept(request, prefill))

    def _pull(self, request: SimRequest, reader: SimWorker) -> float:
        """Read from the sources in order; return how long it takes."""
        assert request.placement is not None
        spent_ms = 0.0
        for source in request.placement.sources:
            assert self.workers[source.worker_id].held_blocks(request.content) >= source.first_block + source.num_blocks
            latency_ms, rate = self._noisy(3.0), self._noisy(reader.bytes_per_s)
            spent_ms += latency_ms + source.num_blocks * BLOCK_SIZE * TOKEN_BYTES / rate * 1e3
            reader.kept.update(request.content[: source.first_block + source.num_blocks])
            old_rate, old_latency = reader.transfer_rates.get(source.worker_id, (rate, latency_ms))
            reader.transfer_rates[source.worker_id] = (
                old_rate + GAIN * (rate - old_rate),
                old_latency + GAIN * (latency_ms - old_latency),
            )
        return spent_ms

    def _accept(self, request: SimRequest, worker: SimWorker) -> None:
        held = min(worker.held_blocks(request.content), (request.num_prompt_tokens - 1) // BLOCK_SIZE)
        request.num_uncomputed = request.num_prompt_tokens - held * BLOCK_SIZE
        worker.waiting.append(request)
        self._changed(worker)
        self._step(worker)

    def _step(self, worker: SimWorker) -> None:
        """Begin an engine step: a chunk of the first prompt in line, and a token of every answer."""
        if worker.is_stepping or not (worker.waiting or worker.running):
            return
        worker.is_stepping = True
        chunk, chunk_ms = 0, 0.0
        if worker.waiting:
            first = worker.waiting[0]
            chunk = min(CHUNK_TOKENS, first.num_uncomputed)
            context = first.num_prompt_tokens - first.num_uncomputed
            chunk_ms = self._noisy(chunk / worker.tokens_per_s * 1e3 * (1 + context / 8_000))
            start = max(start for start in RATE_STARTS if start <= context)
            rate = chunk / chunk_ms * 1e3
            old = worker.prefill_rates.get(start, rate)
            worker.prefill_rates[start] = old + GAIN * (rate - old)
        decode_ms = self._noisy(worker.step_ms * (1 + 0.05 * len(worker.running))) if worker.running else 0.0
        if decode_ms:
            old = worker.measured_step_ms or decode_ms
            worker.measured_step_ms = old + GAIN * (decode_ms - old)
        self._at(self.now_ms + chunk_ms + decode_ms, lambda: self._stepped(worker, chunk, list(worker.running)))

    def _stepped(self, worker: SimWorker, chunk: int, decoded: list[SimRequest]) -> None:
        worker.is_stepping = False
        for request in decoded:
            request.num_left -= 1
            if request.num_left <= 0:
                worker.running.remove(request)
                worker.kept.update(request.content)
                self._end(request)
                self._changed(worker)
        if chunk:
            first = worker.waiting[0]
            first.num_uncomputed -= chunk
            if not first.num_uncomputed:
                worker.waiting.popleft()
                self._computed(first, worker)
            self._changed(worker)
        self._step(worker)

    def _computed(self, request: SimRequest, worker: SimWorker) -> None:
        request.first_token_ms = self.now_ms
        request.num_left = request.num_answer_tokens - 1
        worker.kept.update(request.content[: request.num_prompt_tokens // BLOCK_SIZE])
        target = request.decode
        if target is not None:
            target.incoming -= 1
            target.kept.update(request.content[: request.num_prompt_tokens // BLOCK_SIZE])
            worker = target
        if request.num_left <= 0:
            self._end(request)
        else:
            worker.running.append(request)
            self._changed(worker)
            self._step(worker)

    def _end(self, request: SimRequest) -> None:
        request.end_ms = self.now_ms
        self._num_open -= 1
        self.finished.append(request)
        if request.on_end is not None:
            request.on_end(self.now_ms)
