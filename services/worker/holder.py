"""The blocks that a worker holds: pool, leases, the plane that serves them, and what the directory hears of them."""

import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from dataplane.arena import Arena
from dataplane.layout import KVLayout, Segment, block_ids
from dataplane.lease import Lease, LeaseTable
from dataplane.pool import BlockPool
from dataplane.progress import KVProgress
from dataplane.server import PlaneServer, ReadableKV, ServerOptions
from dataplane.stream import TransferStats
from dataplane.ticket import Ticket, sign
from schemas.block import BlockHasher
from schemas.directory import BlocksEvicted, BlocksStored
from schemas.handoff import FirstToken, KVOffered
from schemas.ids import LeaseId, WorkerId
from schemas.request import RunPrefill
from schemas.worker import BlockCounts
from services.config import WorkerConfig
from services.engine.base import Sequence
from services.runtime import now_ms
from services.worker.actions import AttemptKey
from services.worker.handoff import handoff_fields
from services.worker.ledger import BlockLedger

ServedCallback = Callable[[LeaseId, TransferStats | None, str], None]
"""(lease, what was sent or None, why it failed or ''); called on a plane thread."""


class TrackedPool(BlockPool):
    """A pool that remembers what was freed until the ledger has heard of it."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._freed: list[int] = []

    def free(self, segments: Iterable[Segment]) -> list[int]:
        freed = super().free(segments)
        self._freed += freed
        return freed

    def take_freed(self) -> list[int]:
        freed, self._freed = self._freed, []
        return freed


@dataclass(slots=True)
class ServedLease:
    """A lease as the plane's threads see it."""

    lease: Lease
    progress: KVProgress


@dataclass
class KVHolder:
    """One worker's blocks. Its state is changed on the event loop, under `lock`; the plane's threads only look."""

    worker_id: WorkerId
    incarnation: str
    arena: Arena
    layout: KVLayout
    num_blocks: int
    secret: bytes
    on_served: ServedCallback
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: LeaseTable = field(default_factory=LeaseTable)
    _served: dict[LeaseId, ServedLease] = field(default_factory=dict[LeaseId, ServedLease])
    _hashers: dict[AttemptKey, BlockHasher] = field(default_factory=dict[AttemptKey, BlockHasher])

    def __post_init__(self) -> None:
        self.pool = TrackedPool(self.num_blocks)
        self.ledger = BlockLedger(self.worker_id, self.incarnation)
        self.plane: PlaneServer | None = None

    def start(self, config: WorkerConfig) -> None:
        """Serve reads. Only a worker that hands over needs it."""
        carriers = ("shm", "tcp") if config.carrier == "auto" else (config.carrier,)
        advertise_host = config.advertise_host
        if not advertise_host and config.plane_host == "0.0.0.0":
            advertise_host = socket.gethostname()  # nobody can connect to "everywhere"; containers resolve this name
        options = ServerOptions(
            carriers=carriers, host=config.plane_host, advertise_host=advertise_host, digests=config.digests
        )
        self.plane = PlaneServer(self.arena, self.num_blocks, self.layout, self, self.secret, options)
        self.plane.start()

    def close(self) -> None:
        """Stop serving, then give the memory back."""
        for served in list(self._served.values()):
            served.progress.fail("the holder is stopping")
        if self.plane is not None:
            self.plane.close()
        self.arena.close()

    def counts(self) -> BlockCounts:
        """Return the conservation law's terms: total = free + running + leased."""
        free, leased = self.pool.num_free, self.leases.num_leased_blocks
        return BlockCounts(total=self.num_blocks, free=free, running=self.num_blocks - free - leased, leased=leased)

    # Leases, for the event loop.

    def open_lease(self, lease: Lease) -> KVProgress:
        """Let the plane serve a lease as its layers are computed."""
        progress = KVProgress(self.layout.num_layers, lease.num_tokens)
        self._served[lease.lease_id] = ServedLease(lease, progress)
        return progress

    def offer(self, lease: Lease, request: RunPrefill, lease_ms: int) -> KVOffered:
        """Return the signed offer of a lease."""
        assert self.plane is not None, "a holder that does not serve cannot offer"
        ticket = Ticket(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            holder=lease.holder,
            reader=lease.reader,
            tenant="",
            expires_at_ms=request.deadline_ms,
        )
        return KVOffered(
            **handoff_fields(request, self.worker_id),
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            lease_ms=lease_ms,
            ticket=sign(self.secret, ticket),
            endpoint=self.plane.endpoint,
            fingerprint=self.layout.fingerprint,
            num_tokens=lease.num_tokens,
        )

    def finish_lease(self, lease_id: LeaseId, first: FirstToken, computed_ns: int) -> None:
        """All is computed: the stream may end."""
        if served := self._served.get(lease_id):
            served.progress.finish(msgspec.json.encode(msgspec.structs.replace(first, computed_ns=computed_ns)))

    def close_lease(self, lease_id: LeaseId, reason: str) -> int:
        """The lease has ended: fail a stream that is still open on it. Return its number of blocks."""
        served = self._served.pop(lease_id, None)
        if served is None:
            return 0
        served.progress.fail(reason)
        return sum(segment.num_blocks for segment in served.lease.segments)

    # What the directory hears, for the event loop.

    def stored(self, sequence: Sequence, num_tokens: int) -> BlocksStored | None:
        """Take in that a sequence's first `num_tokens` tokens have their KV here."""
        key = (sequence.request_id, sequence.attempt)
        hasher = self._hashers.get(key)
        if hasher is None:
            fingerprint = self.layout.fingerprint
            hasher = self._hashers[key] = BlockHasher(self.layout.block_size, model_fingerprint=fingerprint)
        return self.ledger.record(hasher, sequence.token_ids, num_tokens, block_ids(sequence.segments))

    def sequence_ended(self, key: AttemptKey) -> None:
        self._hashers.pop(key, None)

    def evicted(self) -> BlocksEvicted | None:
        """Return the event for what has been freed since the last call."""
        return self.ledger.forget(self.pool.take_freed())

    # `LeaseGate`, for the plane's threads.

    def open(self, ticket: Ticket) -> ReadableKV:
        """Return what a ticket gives access to. Raises LeaseRefusedError."""
        with self.lock:
            lease = self.leases.check(ticket.lease_id, ticket.epoch, ticket.reader, now_ms())
            served = self._served[lease.lease_id]
        return ReadableKV(segments=lease.segments, num_tokens=lease.num_tokens, progress=served.progress)

    def still_valid(self, ticket: Ticket) -> bool:
        """Say whether the leased blocks are still what they were."""
        with self.lock:
            return self.leases.is_current(ticket.lease_id, ticket.epoch, now_ms())

    def started(self, lease_id: LeaseId, carrier: str) -> None:
        """Nothing to do: the reader says KVStreaming."""

    def served(self, lease_id: LeaseId, stats: TransferStats | None, error: str) -> None:
        self.on_served(lease_id, stats, error)
