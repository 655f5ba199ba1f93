"""A holder's blocks as others read them: its leases, and the plane that serves them. A worker's and the store's."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

import msgspec

from dataplane.addresses import EVERYWHERE, ports_of
from dataplane.blocks.layout import ArenaShape, BlockTables, block_ids, num_distinct_blocks
from dataplane.blocks.ticket import Ticket
from dataplane.carriers.carrier import KVArena
from dataplane.ends.server import PlaneServer, ServerOptions
from dataplane.memory.content_macs import BlockContents
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from dataplane.times import PlaneTimes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.handoff import FirstToken, KVOffered
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, RequestLease
from schemas.request import RunAttempt
from schemas.worker import BlockCounts
from services.config import WorkerConfig
from services.errors import UserError
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.lending import HolderMemory
from services.holder.core.messages import handoff_fields
from services.holder.kv.ledger import BlockLedger
from services.holder.platform import MakeServer
from services.runtime import now_ms
from services.telemetry import Telemetry
from services.trust.credentials import HolderCredentials

log = logging.getLogger(__name__)

MemoryT = TypeVar("MemoryT", bound=HolderMemory)


@dataclass(kw_only=True)
class LentBlocks(Generic[MemoryT]):
    """One process's blocks. The leases are changed on the event loop, under `lock`; the plane's threads only look.

    `on_started` (the first byte of a read is on its way) and `on_served` (it is over: what was sent, and why it failed,
    for people; "": all was sent) are called on the plane's threads.
    """

    worker_id: WorkerId
    incarnation: str
    arena: KVArena
    shape: ArenaShape
    memory: MemoryT
    credentials: HolderCredentials
    make_server: MakeServer
    on_started: Callable[[Grant], None]
    on_served: Callable[[Grant, TransferStats, str], None]
    telemetry: Telemetry = field(default_factory=lambda: Telemetry(""))
    leases: LeaseTable = field(default_factory=LeaseTable)
    lock: threading.Lock = field(default_factory=threading.Lock)
    plane: PlaneServer | None = None
    num_orphaned: int = 0
    """Blocks that are in use and nobody's, when they were last counted."""
    _unread: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last lease has ended."""

    def __post_init__(self) -> None:
        self.ledger = BlockLedger(self.worker_id, self.incarnation)
        self.contents = contents_of(self.arena, self.shape, self.credentials)

    def renew(self, incarnation: str) -> None:
        """Go on as a new incarnation. What is held stays: it is content, and still right."""
        self.incarnation = incarnation
        self.ledger.renew(incarnation)

    def serve_reads(self, config: WorkerConfig, times: PlaneTimes) -> None:
        """Serve reads. Raises UserError where the address cannot be had."""
        advertise_host = config.advertise_host
        if not advertise_host and config.plane_host in EVERYWHERE:
            advertise_host = socket.gethostname()  # nobody can connect to "everywhere"; containers resolve this name
        options = ServerOptions(
            carriers=self.arena.offered(config.carrier),
            host=config.plane_host,
            ports=ports_of(config.plane_ports),
            advertise_host=advertise_host,
            digests=config.digests,
            encryption=config.plane_encryption,
            times=times,
        )
        self.plane = self.make_server(self.arena, self.shape, self, self.credentials.secrets, options)
        try:
            self.plane.serve_streams()
        except OSError as error:
            ports = f"ports {config.plane_ports}: each worker and store needs one" if config.plane_ports else "any port"
            raise UserError(f"KV cannot be served at {config.plane_host}, {ports} ({error.strerror})") from error

    def stop_serving(self) -> None:
        """End every stream, and wait for their threads. Idempotent."""
        for grant in self.leases:
            grant.progress.fail("the holder is stopping")
        if self.plane is not None:
            self.plane.close()

    def close(self) -> None:
        """Stop serving, then give the memory back."""
        self.stop_serving()
        self.arena.close()

    def counts(self, owned: Iterable[BlockTables] | None = None) -> BlockCounts:
        """Return the conservation law's terms: total = free + cached + running + leased. `owned`: the tables of all who
        hold references here, leases aside; None: that is not known, and no block is looked for as an orphan."""
        total, free, cached = self.memory.num_blocks, self.memory.num_free, self.memory.num_cached
        leased = self.leases.num_leased_blocks
        orphaned = 0
        if owned is not None:
            known = num_distinct_blocks(chain(owned, (grant.tables for grant in self.leases)))
            orphaned = total - free - cached - known
        if orphaned and not self.num_orphaned:
            log.warning("%s: %d blocks are in use and nobody's", self.worker_id, orphaned)
        self.num_orphaned = orphaned
        running = total - free - cached - leased
        return BlockCounts(total=total, free=free, cached=cached, running=running, leased=leased, orphaned=orphaned)

    def events(self) -> list[BlocksStored | BlocksEvicted]:
        """Return what the directory has to know of what came and went since the last call."""
        changes = self.memory.take_changes()
        return [event for tier, changed in changes for event in self.ledger.events(changed, tier)]

    def inventory(self, offset: int, max_bytes: int) -> Inventory:
        """Return a page of what is held, from the `offset`-th block on, for a message of so many bytes."""
        return self.ledger.inventory(self.memory.contents, offset, max_bytes)

    # Leases, for the event loop.

    def start_computing(self, grant: Grant, num_present_tokens: int) -> KVProgress:
        """What is in place already may be read; return who is notified of the rest."""
        if num_present_tokens:
            for layer in range(self.shape.layout.num_layers):
                grant.progress.advance(layer, num_present_tokens)
        return grant.progress

    def offer(self, grant: Grant, request: RunAttempt, lease_ms: int, traceparent: str) -> KVOffered:
        """Return the signed offer of a hand-over's lease, which belongs to this trace."""
        assert self.plane is not None, "a holder that does not serve cannot offer"
        grant.traceparent = traceparent
        return KVOffered(
            **handoff_fields(request, self.worker_id),
            lease_id=grant.lease_id,
            epoch=grant.epoch,
            lease_ms=lease_ms,
            ticket=self.credentials.secrets.sign(grant.ticket(self.incarnation)),
            incarnation=self.incarnation,
            arena_nonce=self.arena.nonce,
            fingerprint=self.shape.layout.fingerprint,
            num_tokens=grant.num_tokens,
        )

    def sign_lease(self, grant: Grant, request: RequestLease, traceparent: str) -> LeaseGranted:
        """Return the signed terms of a lease on what is all here, which belongs to this trace."""
        assert self.plane is not None, "a holder that does not serve cannot lend"
        grant.traceparent, grant.readable_ns = traceparent, time.monotonic_ns()
        return LeaseGranted(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            worker_id=self.worker_id,
            lease_id=grant.lease_id,
            epoch=grant.epoch,
            lease_ms=grant.expires_at_ms - now_ms(),
            ticket=self.credentials.secrets.sign(grant.ticket(self.incarnation)),
            incarnation=self.incarnation,
            arena_nonce=self.arena.nonce,
            first_token=grant.first_token,
            num_tokens=grant.num_tokens,
        )

    def finish_lease(self, grant: Grant, first: FirstToken) -> None:
        """All is computed: the stream may end."""
        grant.readable_ns = first.computed_ns
        dated = msgspec.structs.replace(first, computed_ns=self.telemetry.clock.date_ns(first.computed_ns))
        grant.progress.complete(msgspec.json.encode(dated))

    def close_lease(self, grant: Grant) -> None:
        """The lease has ended: fail a stream that is still open on it."""
        grant.progress.fail(grant.outcome)
        if not len(self.leases):
            self._unread.set()

    async def until_unread(self, timeout_s: float) -> None:
        """Return once no lease is active, also those that are granted meanwhile, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while len(self.leases):
                    self._unread.clear()
                    await self._unread.wait()

    # The plane's `LeaseGate`, for its threads.

    def open(self, ticket: Ticket) -> "StreamLease[MemoryT]":
        """Return the lease of a ticket, for one stream. Raises LeaseRefusedError."""
        with self.lock:
            grant = self.leases.lease_of(ticket, self.incarnation, now_ms())
            return StreamLease(self, grant, self.telemetry.child_of(grant.traceparent))


@dataclass(slots=True, frozen=True)
class StreamLease(Generic[MemoryT]):
    """A lease as one stream reads under it: the plane's `OpenLease`. For the plane's threads."""

    holder: LentBlocks[MemoryT]
    kv: Grant
    traceparent: str

    def content_macs(self) -> bytes:
        """Return the tags of what is lent, joined; those that are missing are made."""
        contents = self.holder.contents
        if contents is None:
            return b""
        blocks = block_ids(self.kv.tables[0].segments)
        known = zip(self.kv.content, blocks, self.kv.tags, strict=False)
        tags = tuple(tag or contents.tag(content, block) for content, block, tag in known)
        with self.holder.lock:
            self.kv.tags = tags
        return b"".join(tags)

    def give_back(self) -> None:
        with self.holder.lock:
            self.kv.is_opened = False

    def still_valid(self) -> bool:
        """Return whether the leased blocks are still what they were. If so, the stream got on, and keeps its lease."""
        with self.holder.lock:
            is_valid = self.kv.is_valid(now_ms())
            self.kv.has_moved |= is_valid
            return is_valid

    def started(self) -> None:
        self.holder.on_started(self.kv)

    def served(self, stats: TransferStats, error: str) -> None:
        self.holder.on_served(self.kv, stats, error)


def contents_of(arena: KVArena, shape: ArenaShape, credentials: HolderCredentials) -> BlockContents | None:
    """Return what makes and checks the tags of this arena's blocks; None where the host cannot read them, or blocks are
    of no use by themselves, as layers have windows."""
    if arena.host_array is None or shape.layout.is_windowed:
        return None
    return BlockContents(arena, shape, credentials.content_secrets)
