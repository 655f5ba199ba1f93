"""The blocks that a worker holds: what lies in them, leases, the plane that serves them, what the directory hears."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import ArenaShape, BlockTables
from dataplane.blocks.lease import Lease, LeaseRefusedError, LeaseTable
from dataplane.blocks.ticket import Ticket, sign
from dataplane.cards.device_arena import KVArena
from dataplane.ends.choice import offered_carriers
from dataplane.ends.server import PlaneServer, ReadableKV, ServerOptions
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.handoff import FirstToken, KVOffered
from schemas.ids import BlockHash, LeaseId, WorkerId
from schemas.kv import LeaseGranted, RequestLease
from schemas.request import RunPrefill
from schemas.worker import BlockCounts
from services.config import WorkerConfig
from services.engine.interface import Sequence
from services.runtime import now_ms
from services.worker.core.content import SequenceContent
from services.worker.core.messages import handoff_fields
from services.worker.kv.ledger import BlockLedger
from services.worker.platform import MakeServer

log = logging.getLogger(__name__)

StartedCallback = Callable[[LeaseId], None]
"""The first byte of a read is on its way; called on a plane thread."""
ServedCallback = Callable[[LeaseId, TransferStats, str], None]
"""(lease, what was sent, why it failed or ''); called on a plane thread."""
NameCallback = Callable[[LeaseId], str]
"""What this end of a lease's stream is called in its trace; called on a plane thread."""

COOLING_SHARE = 8
"""Once fewer than 1/8 of the blocks are free, the coldest of the cached ones are said to go."""
MAX_COOLING_BLOCKS = 256


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
    arena: KVArena
    cache: BlockCache
    secret: bytes
    make_server: MakeServer
    on_started: StartedCallback
    on_served: ServedCallback
    name_stream: NameCallback = lambda _: ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    leases: LeaseTable = field(default_factory=LeaseTable)
    _served: dict[LeaseId, ServedLease] = field(default_factory=dict[LeaseId, ServedLease])
    _cooled: set[BlockHash] = field(default_factory=set[BlockHash])
    _moved: set[LeaseId] = field(default_factory=set[LeaseId])
    """Leases whose streams have got on since the clockwork last looked."""
    num_orphaned: int = 0
    """Blocks that are in use and nobody's, when they were last counted."""

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.worker_id, self.incarnation)
        self.plane: PlaneServer | None = None

    @property
    def shape(self) -> ArenaShape:
        return self.cache.shape

    def start(self, config: WorkerConfig) -> None:
        """Serve reads."""
        parts = self.arena.pair_parts
        has_nccl = parts is not None and parts.refusal() is None
        carriers = offered_carriers(config.carrier, on_card=bool(self.arena.card), has_nccl=has_nccl)
        advertise_host = config.advertise_host
        if not advertise_host and config.plane_host == "0.0.0.0":
            advertise_host = socket.gethostname()  # nobody can connect to "everywhere"; containers resolve this name
        options = ServerOptions(
            carriers=carriers, host=config.plane_host, advertise_host=advertise_host, digests=config.digests
        )
        self.plane = self.make_server(self.arena, self.shape, self, self.secret, options)
        self.plane.start()

    def close(self) -> None:
        """Stop serving, then give the memory back."""
        for served in list(self._served.values()):
            served.progress.fail("the holder is stopping")
        if self.plane is not None:
            self.plane.close()
        self.arena.close()

    def begin(self, incarnation: str) -> None:
        """Go on as a new incarnation. What is cached stays: it is content, and still right."""
        self.incarnation = incarnation
        self.ledger.begin(incarnation)

    def counts(self, owned: Iterable[BlockTables]) -> BlockCounts:
        """Return the conservation law's terms: total = free + cached + running + leased. `owned`: the tables of all who
        hold references here, leases aside."""
        total, free, cached = self.cache.num_blocks, self.cache.num_free, self.cache.num_cached
        leased = self.leases.num_leased_blocks
        known = num_distinct_blocks(chain(owned, (lease.tables for lease in self.leases)))
        orphaned = total - free - cached - known
        if orphaned and not self.num_orphaned:
            log.warning("%s: %d blocks are in use and nobody's", self.worker_id, orphaned)
        self.num_orphaned = orphaned
        running = total - free - cached - leased
        return BlockCounts(total=total, free=free, cached=cached, running=running, leased=leased, orphaned=orphaned)

    # Leases, for the event loop.

    def open_lease(self, lease: Lease) -> None:
        """Let the plane serve a lease as its layers are computed."""
        self._served[lease.lease_id] = ServedLease(lease, KVProgress(self.shape.layout.num_layers, lease.num_tokens))

    def start_computing(self, lease_id: LeaseId, num_present_tokens: int) -> KVProgress | None:
        """What is in place already may be read; return who hears of the rest. None: the lease has ended."""
        served = self._served.get(lease_id)
        if served is None:
            return None
        if num_present_tokens:
            for layer in range(self.shape.layout.num_layers):
                served.progress.advance(layer, num_present_tokens)
        return served.progress

    def offer(self, lease: Lease, request: RunPrefill, lease_ms: int) -> KVOffered:
        """Return the signed offer of a lease."""
        assert self.plane is not None, "a holder that does not serve cannot offer"
        return KVOffered(
            **handoff_fields(request, self.worker_id),
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            lease_ms=lease_ms,
            ticket=self._ticket(lease, request.deadline_ms),
            endpoint=self.plane.endpoint_for(lease.reader),
            fingerprint=self.shape.layout.fingerprint,
            num_tokens=lease.num_tokens,
        )

    def lend(self, lease: Lease, request: RequestLease) -> LeaseGranted:
        """Let the plane serve a lease on what is all here, and return its signed terms."""
        assert self.plane is not None, "a holder that does not serve cannot lend"
        progress = KVProgress.completed(self.shape.layout.num_layers, lease.num_tokens)
        self._served[lease.lease_id] = ServedLease(lease, progress)
        return LeaseGranted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self.worker_id,
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            lease_ms=lease.expires_at_ms - now_ms(),
            ticket=self._ticket(lease, request.deadline_ms),
            endpoint=self.plane.endpoint_for(lease.reader),
            first_token=lease.first_token,
            num_tokens=lease.num_tokens,
        )

    def finish_lease(self, lease_id: LeaseId, first: FirstToken) -> None:
        """All is computed: the stream may end."""
        if served := self._served.get(lease_id):
            served.progress.finish(msgspec.json.encode(first))

    def renew_moved(self, now_ms: int, lease_ms: int) -> None:
        """A stream that gets on may take longer than its lease's first time."""
        moved, self._moved = self._moved, set()
        for lease_id in moved:
            with contextlib.suppress(LeaseRefusedError):  # it has ended meanwhile
                self.leases.renew(lease_id, now_ms, lease_ms)

    def close_lease(self, lease_id: LeaseId, reason: str) -> int:
        """The lease has ended: fail a stream that is still open on it. Return its number of blocks."""
        served = self._served.pop(lease_id, None)
        if served is None:
            return 0
        served.progress.fail(reason)
        return num_blocks_of(served.lease)

    def _ticket(self, lease: Lease, expires_at_ms: int) -> str:
        ticket = Ticket(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            holder=lease.holder,
            reader=lease.reader,
            tenant=lease.tenant,
            expires_at_ms=expires_at_ms,
        )
        return sign(self.secret, ticket)

    # What lies in the blocks, for the event loop.

    def submitted(self, sequence: Sequence, content: SequenceContent) -> None:
        """Take in what of a sequence is in place before the engine has it."""
        content.num_landed_tokens = sequence.num_computed_tokens
        self.computed(sequence, content, sequence.num_computed_tokens)

    def computed(self, sequence: Sequence, content: SequenceContent, num_tokens: int, *, ended: bool = False) -> None:
        """Take in that a sequence's first `num_tokens` tokens have their KV here. `ended`: no more will be written."""
        num_full_blocks = num_tokens // self.shape.layout.block_size
        if num_full_blocks == content.num_stored_blocks and not ended:
            return  # most decode steps fill no block
        hashes = content.extend(sequence.token_ids, num_tokens)
        num_stored, num_landed = content.num_stored_blocks, content.num_landed_tokens
        self.cache.store(sequence.tables, hashes, num_stored, num_tokens, num_landed, ended=ended)
        content.num_stored_blocks = num_full_blocks

    def ended(self, sequence: Sequence, content: SequenceContent) -> None:
        """The engine has let go of a sequence; its blocks are still its own."""
        self.computed(sequence, content, sequence.num_computed_tokens, ended=True)

    def events(self) -> list[BlocksStored | BlocksEvicted]:
        """Return what the directory has to hear of what came and went since the last call."""
        changes = self.cache.take_changes()
        self._cooled.difference_update(changes.evicted)
        return self.ledger.events(changes)

    def inventory(self, offset: int) -> Inventory:
        return self.ledger.inventory(self.cache.contents(), offset)

    def cooling(self) -> list[BlockHash]:
        """Return the blocks that will go soon and have not been named yet, while room is scarce."""
        if self.cache.num_free * COOLING_SHARE >= self.cache.num_blocks:
            return []
        if len(self._cooled) > self.cache.num_blocks:
            self._cooled.clear()
        named = [block for block in self.cache.coldest(MAX_COOLING_BLOCKS) if block not in self._cooled]
        self._cooled.update(named)
        return named

    # `LeaseGate`, for the plane's threads.

    def open(self, ticket: Ticket) -> ReadableKV:
        """Return what a ticket gives access to. Raises LeaseRefusedError."""
        with self.lock:
            lease = self.leases.check(ticket.lease_id, ticket.epoch, ticket.reader, now_ms(), ticket.tenant)
            served = self._served[lease.lease_id]
        return ReadableKV(
            tables=lease.tables,
            num_tokens=lease.num_tokens,
            progress=served.progress,
            first_token=lease.first_token,
            traceparent=self.name_stream(lease.lease_id),
        )

    def still_valid(self, ticket: Ticket) -> bool:
        """Say whether the leased blocks are still what they were."""
        with self.lock:
            is_current = self.leases.is_current(ticket.lease_id, ticket.epoch, now_ms())
            if is_current:
                self._moved.add(ticket.lease_id)
            return is_current

    def started(self, lease_id: LeaseId, carrier: str) -> None:
        self.on_started(lease_id)

    def served(self, lease_id: LeaseId, stats: TransferStats, error: str) -> None:
        self.on_served(lease_id, stats, error)


def num_blocks_of(lease: Lease) -> int:
    """Return how many blocks a lease names."""
    return sum(segment.num_blocks for table in lease.tables for segment in table.segments)


def num_distinct_blocks(tables: Iterable[BlockTables]) -> int:
    """Return how many blocks these are, each counted once however many share it."""
    extents = {
        (group, segment.first_block, segment.first_block + segment.num_blocks)
        for of_one in tables
        for group, table in enumerate(of_one)
        for segment in table.segments
    }
    num_blocks, reached = 0, (0, 0)
    for group, first, end in sorted(extents):
        start = max(first, reached[1]) if group == reached[0] else first
        num_blocks += max(0, end - start)
        reached = (group, max(end, start))
    return num_blocks
