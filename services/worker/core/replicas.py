"""Copies that outlive their worker: it offers the blocks of its running requests to the replica that these name, and
takes in what it is offered itself, while it has room to spare. Nobody waits for either. Pure.

Of layers with windows nothing is copied: such blocks are of no use by themselves.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, join_hashes, split_hashes
from schemas.ids import BlockHash, GatewayId, RequestId, WorkerId, is_subject_token
from schemas.kv import ReplicateBlocks
from schemas.observe import HeldRequest
from schemas.request import CancelRequest
from schemas.worker import WorkerLeft
from services.engine.interface import StepResult
from services.worker.core.actions import Action, AttemptKey, Fetch, Publish, StopFetch
from services.worker.core.attempts import EndedAttempt
from services.worker.core.content import ReadOutcome, SequenceContent
from services.worker.core.limits import WorkerLimits

OFFER_INTERVAL_MS = 250
OFFER_BLOCKS = 8
"""So many blocks are offered before the interval is over."""
MAX_OFFER_BLOCKS = 1_024
"""Of one message."""
READ_WITHIN_MS = 10_000
"""How long an offer stands: the source gives the blocks up when it needs the room."""
MAX_READS = 2
MAX_READ_BLOCKS = 64
"""What a source has to keep for one read."""
MAX_WAITING = 64
SPARE_SHARE = 4
"""Copies are taken in only while more than this part of all blocks is free: a quarter."""


@dataclass(slots=True)
class _Offer:
    """A sequence that fills blocks, as far as its replica has heard."""

    content: SequenceContent
    replica: WorkerId
    num_offered: int = 0
    offered_ms: int | None = None
    has_ended: bool = False


class ReplicaOffers:
    """What this worker offers: at most one message a sequence in `OFFER_INTERVAL_MS`, or for `OFFER_BLOCKS`."""

    def __init__(self, worker_id: WorkerId, fingerprint: str) -> None:
        self._worker_id = worker_id
        self._fingerprint = fingerprint
        self._offers: dict[AttemptKey, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def submitted(self, key: AttemptKey, content: SequenceContent) -> None:
        """A sequence runs, whose first `content.num_stored_blocks` blocks the worker has taken in at any time."""
        if content.replica is not None and content.replica != self._worker_id:
            self._offers[key] = _Offer(content, content.replica)

    def ended(self, key: AttemptKey) -> None:
        """The sequence fills no more blocks."""
        if offer := self._offers.get(key):
            offer.has_ended = True

    def due(self, now_ms: int) -> list[Publish]:
        """Return the messages that are to go out now."""
        messages: list[Publish] = []
        for key, offer in list(self._offers.items()):
            num_new = offer.content.num_stored_blocks - offer.num_offered
            waited = offer.offered_ms is None or now_ms - offer.offered_ms >= OFFER_INTERVAL_MS
            if num_new > 0 and (offer.has_ended or num_new >= OFFER_BLOCKS or waited):
                messages += self._messages(key, offer, now_ms)
            if offer.has_ended:
                del self._offers[key]
        return messages

    def drop(self, key: AttemptKey) -> None:
        self._offers.pop(key, None)

    def clear(self) -> None:
        self._offers.clear()

    def _messages(self, key: AttemptKey, offer: _Offer, now_ms: int) -> Iterator[Publish]:
        first, end = offer.num_offered, offer.content.num_stored_blocks
        offer.num_offered, offer.offered_ms = end, now_ms
        for at in range(first, end, MAX_OFFER_BLOCKS):
            message = ReplicateBlocks(
                request_id=key[0],
                attempt=key[1],
                deadline_ms=now_ms + READ_WITHIN_MS,
                source=self._worker_id,
                fingerprint=self._fingerprint,
                first_block=at,
                block_hashes=join_hashes(offer.content.hashes[at : min(at + MAX_OFFER_BLOCKS, end)]),
                tenant=offer.content.tenant,
            )
            yield Publish(subjects.REPLICATE, (offer.replica,), message, key)


@dataclass(slots=True)
class _Copy:
    """Blocks `first_block`, … that `source` has completed. `tables`: where they are read into."""

    source: WorkerId
    first_block: int
    hashes: tuple[BlockHash, ...]
    tenant: str
    deadline_ms: int
    traceparent: str
    tables: BlockTables = ()


class ReplicaCore:
    """A worker's copies, of both directions, as a core among its others."""

    def __init__(self, limits: WorkerLimits, cache: BlockCache) -> None:
        self.draining = False
        self.offers = ReplicaOffers(limits.worker_id, limits.fingerprint)
        self.num_dropped = 0
        """Offers, in whole or in part, that there was no room for."""
        self._limits = limits
        self._cache = cache
        self._waiting: deque[_Copy] = deque()
        self._reading: dict[AttemptKey, _Copy] = {}
        self._num_read = 0

    # Out.

    def submitted(self, key: AttemptKey, content: SequenceContent) -> None:
        """As `ReplicaOffers.submitted`."""
        if not self._cache.layout.is_windowed:
            self.offers.submitted(key, content)

    def stepped(self, result: StepResult, now_ms: int) -> list[Action]:
        for sampled in result.sampled:
            if sampled.local_end:
                self.offers.ended((sampled.sequence.request_id, sampled.sequence.attempt))
        return [*self.offers.due(now_ms)] if len(self.offers) else []

    def take_ended(self) -> list[EndedAttempt]:
        """Copies are no attempts: their reads are all that is told of them."""
        return []

    def removed(self, key: AttemptKey, now_ms: int) -> list[Action]:
        self.offers.ended(key)
        return [*self.offers.due(now_ms)]

    def engine_failed(self, key: AttemptKey, reason: str, now_ms: int) -> list[Action]:
        self.offers.drop(key)
        return []

    # In.

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def offered(self, offer: ReplicateBlocks, traceparent: str, now_ms: int) -> list[Action]:
        """Somebody has completed these blocks: take those that are not here, or on their way, as far as there is
        room to spare."""
        if not self._is_wanted(offer, now_ms):
            self.num_dropped += 1
            return []
        coming = {block_hash for copy in (*self._waiting, *self._reading.values()) for block_hash in copy.hashes}
        run: list[BlockHash] = []
        first = offer.first_block
        for at, block_hash in enumerate(split_hashes(offer.block_hashes), start=offer.first_block):
            if run and (len(run) == MAX_READ_BLOCKS or at != first + len(run)):
                self._wait(offer, first, run, traceparent)
                run = []
            if block_hash in coming or self._cache.holds(block_hash):
                continue
            first = first if run else at
            run.append(block_hash)
        self._wait(offer, first, run, traceparent)
        return self._read(now_ms)

    def fetched(self, key: AttemptKey, outcome: ReadOutcome, now_ms: int) -> list[Action]:
        """A read has ended and writes no more: keep what landed of it."""
        copy = self._reading.pop(key, None)
        if copy is None:
            return []
        num_landed = outcome.num_landed_tokens // self._limits.block_size - copy.first_block
        self._cache.keep(copy.tables, copy.hashes[: max(0, num_landed)])
        self._cache.free(copy.tables)
        return self._read(now_ms)

    def left(self, event: WorkerLeft, now_ms: int) -> list[Action]:
        """A source is gone."""
        self._waiting = deque(copy for copy in self._waiting if copy.source != event.worker_id)
        return [StopFetch(key) for key, copy in self._reading.items() if copy.source == event.worker_id]

    def tick(self, now_ms: int) -> list[Action]:
        self._waiting = deque(copy for copy in self._waiting if copy.deadline_ms > now_ms)
        return [*self.offers.due(now_ms), *self._read(now_ms)]

    def drain(self, now_ms: int) -> list[Action]:
        self.draining = True
        return self._stop()

    def hand_back(self, now_ms: int) -> list[Action]:
        return self._stop()

    def fence(self, now_ms: int, reason: str) -> list[Action]:
        self.offers.clear()
        return self._stop()

    # What a worker asks of every core.

    @property
    def num_runs(self) -> int:
        return len(self._reading)

    num_queued = num_queued_tokens = num_unreceived_tokens = 0
    """No request waits here."""

    def has(self, key: AttemptKey) -> bool:
        return key in self._reading

    def is_waiting(self, key: AttemptKey) -> bool:
        return False

    def attempts(self) -> dict[AttemptKey, GatewayId]:
        return {}

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield the copies that are being read; their age counts from their offer."""
        for (request_id, attempt), copy in self._reading.items():
            yield HeldRequest(
                request_id=request_id,
                attempt=attempt,
                part="replica",
                stage="fetching",
                age_ms=max(0, now_ms - copy.deadline_ms + READ_WITHIN_MS),
                reading_from=copy.source,
            )

    def owned_tables(self) -> Iterator[BlockTables]:
        return (copy.tables for copy in self._reading.values())

    def cancelled(self, event: CancelRequest, now_ms: int) -> list[Action]:
        return []

    def unwanted(self, key: AttemptKey, now_ms: int) -> list[Action]:
        return []

    @property
    def _num_spare(self) -> int:
        """Return how many blocks may be taken for copies now."""
        return max(0, self._cache.num_free - self._cache.num_blocks // SPARE_SHARE)

    def _is_wanted(self, offer: ReplicateBlocks, now_ms: int) -> bool:
        joined = offer.block_hashes
        return (
            not self.draining
            and not self._cache.layout.is_windowed
            and offer.fingerprint == self._limits.fingerprint
            and offer.source != self._limits.worker_id
            and is_subject_token(offer.source)
            and offer.first_block >= 0
            and not len(joined) % BLOCK_HASH_BYTES
            and len(joined) <= MAX_OFFER_BLOCKS * BLOCK_HASH_BYTES
            and len(set(split_hashes(joined))) * BLOCK_HASH_BYTES == len(joined)
            and offer.deadline_ms > now_ms
            and self._num_spare > 0
        )

    def _wait(self, offer: ReplicateBlocks, first_block: int, run: list[BlockHash], traceparent: str) -> None:
        if not run:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.num_dropped += 1
            return
        copy = _Copy(offer.source, first_block, tuple(run), offer.tenant, offer.deadline_ms, traceparent)
        self._waiting.append(copy)

    def _read(self, now_ms: int) -> list[Action]:
        """Begin to read what waits; what there is no room for is dropped."""
        actions: list[Action] = []
        while self._waiting and len(self._reading) < MAX_READS:
            copy = self._waiting.popleft()
            hashes = tuple(islice(copy.hashes, self._num_spare))
            self.num_dropped += len(hashes) < len(copy.hashes)
            tables = self._cache.admit_spare(copy.first_block, len(hashes), tenant=copy.tenant)
            if tables is None:
                continue
            self._num_read += 1
            key = (RequestId(f"replica-{self._limits.worker_id}-{self._num_read}"), 1)
            copy.hashes, copy.tables = hashes, tables
            self._reading[key] = copy
            fetch = Fetch(
                key=key,
                source=copy.source,
                first_block=copy.first_block,
                block_hashes=hashes,
                tables=tables,
                deadline_ms=min(copy.deadline_ms, now_ms + READ_WITHIN_MS),
                tenant=copy.tenant,
                traceparent=copy.traceparent,
            )
            actions.append(fetch)
        return actions

    def _stop(self) -> list[Action]:
        self._waiting.clear()
        return [StopFetch(key) for key in self._reading]
