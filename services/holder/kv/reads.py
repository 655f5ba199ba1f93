"""Carries out reads of KV, a task each: a hand-over that was offered, a prefix that another worker holds, what a store
keeps. Where there is no offer, the holder is asked for a lease first.

A lease that nobody reads under is given back: it is not left to its time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import msgspec

from dataplane.blocks.kept import Content, KeptBlocks
from dataplane.blocks.layout import block_ids
from dataplane.ends.reader import Landed, PlaneReader, ReadRequest
from dataplane.memory.codec import WireDtype
from dataplane.memory.content_macs import BlockContents, ExpectedContent
from dataplane.protocol.stream import TransferFailedError, TransferStats
from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.handoff import Endpoint, FirstToken, KVOffered
from schemas.ids import WorkerId
from schemas.kv import LeaseGranted, ReadEnd, RequestLease, ReturnLease, is_as_asked
from schemas.request import RefusalReason, Refused
from services.bus.base import BusError
from services.bus.typed import TypedBus
from services.holder.core.attempt import KVRead
from services.holder.core.content import ReadOutcome
from services.holder.core.events import ReadEnded, ReadStarted
from services.holder.kv.peers import Peers
from services.holder.limits import DUPLICATE_WAIT_SHARE
from services.holder.observe.transfers import TransferSpan
from services.holder.outbox import Outbox
from services.runtime import logging_failures, now_ms
from services.telemetry import Telemetry
from services.times import WorkerTimes
from services.trust.credentials import HolderCredentials

log = logging.getLogger(__name__)


class NotGrantedError(Exception):
    """The holder does not lend these blocks, or does not answer. `reason`: as it refused; None: it did not."""

    def __init__(self, text: str, reason: RefusalReason | None = None, end: ReadEnd = ReadEnd.REFUSED) -> None:
        super().__init__(text)
        self.reason: RefusalReason | None = reason
        self.end = end


@dataclass(frozen=True, kw_only=True)
class ReaderSettings:
    """How one reader reads. `carrier`: which one is asked for, or "auto". A read under a lease may take `base_s` and
    `token_s` a token, and no longer than its deadline."""

    reader_id: WorkerId
    block_size: int
    carrier: str
    base_s: float
    times: WorkerTimes
    token_s: float = 0.0


@dataclass
class KVReads:
    """The reads of one worker, or of a store. A read's task ends only when its thread writes no more.

    `on_event` is called for what happens to reads that `begin_read` has started; `record` for every read that has
    ended.
    """

    settings: ReaderSettings
    bus: TypedBus
    outbox: Outbox
    reader: PlaneReader
    peers: Peers
    credentials: HolderCredentials
    telemetry: Telemetry
    tasks: asyncio.TaskGroup
    record: Callable[[ReadEnded, TransferSpan, Landed | None], None]
    contents: BlockContents | None
    """By which lent blocks prove themselves here; None: they cannot."""
    kept: KeptBlocks
    """Where their tags are kept."""
    on_event: Callable[[ReadStarted | ReadEnded], object] = lambda _: None
    wire_dtype: Callable[[WorkerId], WireDtype] = lambda _: "same"
    """How a holder is asked for its KV."""
    _running: dict[KVRead, asyncio.Task[ReadEnded]] = field(default_factory=dict[KVRead, "asyncio.Task[ReadEnded]"])
    _closed: bool = False

    def begin_read(self, read: KVRead) -> None:
        """Begin a read in a task of its own; `ReadEnded` follows, in a later turn of the loop."""
        if self._closed:
            asyncio.get_running_loop().call_soon(self.on_event, _stopped(read))
            return
        task = self._running[read] = self.tasks.create_task(self._carry_out_all(read), name=f"read {read.key[0]}")
        task.add_done_callback(lambda task: self._ended(read, task))

    def end_reads(self, read: KVRead) -> None:
        """End a read; `ReadEnded` follows once its thread has ended."""
        if task := self._running.get(read):
            task.cancel()

    async def close(self) -> None:
        """End every read and wait for its thread. What is started from now on brings nothing."""
        self._closed = True
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _carry_out_all(self, read: KVRead) -> ReadEnded:
        """Carry out a read, and then that of the rest as long as the holder answers that it comes: for as long without
        a block as a read of all may take, or, where it is being computed, for a part of the time that the request has.
        What has come of a read that is stopped during its rest counts."""
        # A hand-over is one read: its stream waits for the computation, and has no rest.
        lease = read.lease
        ended = await self.carry_out(read)
        if isinstance(lease, KVOffered):
            return ended
        # Two bounds for the rest: a share of the request's time, and a time without progress while blocks come.
        until_ms = now_ms() + max(0, lease.deadline_ms - now_ms()) // DUPLICATE_WAIT_SHARE
        num_blocks, block_size = len(lease.block_hashes) // BLOCK_HASH_BYTES, self.settings.block_size
        limit_s = self.settings.base_s + num_blocks * block_size * self.settings.token_s
        latest, moved_s = ended, time.monotonic()
        while (is_in_flight := latest.end is ReadEnd.IN_FLIGHT) or latest.outcome.has_more:
            if now_ms() >= until_ms or (not is_in_flight and time.monotonic() - moved_s > limit_s):
                break
            # Ask for what follows the landed prefix.
            before = ended.outcome
            num_read = max(0, before.num_landed_tokens // block_size - lease.first_block)
            left = lease.block_hashes[num_read * BLOCK_HASH_BYTES :]
            rest = msgspec.structs.replace(lease, first_block=lease.first_block + num_read, block_hashes=left)
            first_token = max(before.num_landed_tokens, read.first_token)
            # Ask a computing holder again after a pause. A stop keeps what has landed, unless all reads are closed.
            try:
                if is_in_flight:
                    await asyncio.sleep(self.settings.times.coming_again_s)
                latest = await self.carry_out(replace(read, lease=rest, first_token=first_token))
            except asyncio.CancelledError:
                if self._closed or not before.num_landed_tokens:
                    raise
                break
            # Add what this round has brought. A round that brought nothing counts only while nothing has landed at all.
            if latest.outcome.num_landed_tokens:
                moved_s = time.monotonic()
                outcome = replace(
                    latest.outcome,
                    num_bytes=before.num_bytes + latest.outcome.num_bytes,
                    carrier=latest.outcome.carrier or before.carrier,
                )
                ended = replace(latest, read=read, outcome=outcome)
            elif not before.num_landed_tokens:
                ended = replace(latest, read=read)
        return ended

    async def carry_out(self, read: KVRead) -> ReadEnded:
        """Read, record it, and return how it ended."""
        # A cancellation sets no other result, so a read that is cancelled is recorded as stopped.
        span = TransferSpan(self.telemetry, self.settings.reader_id, read.traceparent)
        landed, ended = None, _stopped(read)
        try:
            async with self._terms(read, span) as (request, has_more):
                try:
                    landed = await self.reader.read_kv(request, lambda carrier: self._started(read, carrier))
                finally:  # also of what landed of a read that broke
                    if (content := request.content) is not None:
                        self.kept.tags |= dict(zip(content.blocks, content.tags, strict=False))
            # All has landed. At the end of a hand-over's stream comes the first token, which must be decoded.
            outcome = ReadOutcome(
                landed.num_tokens,
                landed.stats.num_bytes,
                landed.stats.carrier,
                is_whole=True,
                has_more=has_more,
            )
            first_token = self._first_token(landed.trailer) if read.is_hand_over else None
            ended = ReadEnded(read, outcome, first_token=first_token)
        # Each failure keeps what it left usable: nothing without a lease, else the verified prefix.
        except NotGrantedError as error:
            ended = ReadEnded(read, ReadOutcome(0), error.end, str(error), error.reason)
        except TransferFailedError as error:
            ended = ReadEnded(read, ReadOutcome(error.num_landed_tokens), error.code, str(error))
        except msgspec.DecodeError as error:
            assert landed is not None, "only what has landed is decoded"
            detail = f"the stream's end is unreadable: {error}"
            ended = ReadEnded(read, ReadOutcome(landed.num_tokens), ReadEnd.OTHER, detail)
        except Exception as error:  # noqa: BLE001  (one bad holder must not take the other requests along)
            log.warning("a read of %s from %s failed: %r", read.key[0], read.holder, error)
            ended = ReadEnded(read, ReadOutcome(0), ReadEnd.OTHER, f"{type(error).__name__}: {error}")
        finally:  # also where it is cancelled: the thread has ended then
            span.holder_role = self.peers.role_of(read.holder)
            with logging_failures(f"recording the read of {read.key[0]}"):
                self.record(ended, span, landed)
        return ended

    def _first_token(self, trailer: bytes) -> FirstToken:
        """Return what a stream's end reports, by this process's clock. Raises msgspec.DecodeError."""
        first = msgspec.json.decode(trailer, type=FirstToken)
        return msgspec.structs.replace(first, computed_ns=self.telemetry.clock.at_ns(first.computed_ns))

    def _ended(self, read: KVRead, task: "asyncio.Task[ReadEnded]") -> None:
        """Called by the task's end, as a task that is cancelled before its first step runs none of its code."""
        del self._running[read]
        with logging_failures(f"what follows the read of {read.key[0]}"):
            self.on_event(_stopped(read) if task.cancelled() else task.result())

    @asynccontextmanager
    async def _terms(self, read: KVRead, span: TransferSpan) -> AsyncGenerator[tuple[ReadRequest, bool]]:
        """Acquire the right to read (the peer's offer, or a lease requested from the holder); give it back on exit.
        Yields what the plane is to read, and whether the holder will have more. Raises NotGrantedError."""
        lease = read.lease
        if isinstance(lease, KVOffered):
            endpoint = await self._endpoint(read.holder, lease)
            yield self._to_read(read, endpoint, lease.ticket, (read.first_token, lease.num_tokens), span.stats), False
            return
        if not await self.peers.is_known(read.holder):  # a made-up name is not waited for
            raise NotGrantedError(f"no worker {read.holder} has joined", end=ReadEnd.UNKNOWN)
        within_ms = min(lease.deadline_ms - now_ms(), self.settings.times.lease_answer_ms)
        request = msgspec.structs.replace(lease, answer_within_ms=within_ms)
        if lease.is_copy:
            request = self.credentials.sign_copy(request, read.holder)
        async with self.lease(request, read.holder, span.story) as granted:
            endpoint, tokens = await self._endpoint(read.holder, granted), (granted.first_token, granted.num_tokens)
            yield self._to_read(read, endpoint, granted.ticket, tokens, span.stats), granted.has_more

    async def _endpoint(self, holder: WorkerId, terms: KVOffered | LeaseGranted) -> Endpoint:
        """Return where the incarnation that has made these terms serves. Raises NotGrantedError."""
        endpoint = await self.peers.endpoint(holder, terms.incarnation)
        if endpoint is None:
            raise NotGrantedError(
                f"no incarnation {terms.incarnation[:32]!r} of {holder} has joined", end=ReadEnd.UNKNOWN
            )
        return msgspec.structs.replace(endpoint, arena_nonce=terms.arena_nonce)

    def _to_read(
        self, read: KVRead, endpoint: Endpoint, ticket: str, tokens: tuple[int, int], stats: TransferStats
    ) -> ReadRequest:
        """Return what the plane is to read of a holder: tokens [first, end) of the sequence."""
        first_token, num_tokens = tokens
        left_s = max(0.0, (read.lease.deadline_ms - now_ms()) / 1000)
        # A hand-over's stream takes as long as its prompt's computation.
        most_s = self.settings.base_s + max(0, num_tokens - first_token) * self.settings.token_s
        return ReadRequest(
            endpoint,
            ticket,
            carrier=self.settings.carrier,
            tables=read.tables,
            first_token=first_token,
            num_tokens=num_tokens,
            deadline_s=left_s if read.is_hand_over else min(most_s, left_s),
            wire_dtype=self.wire_dtype(read.holder),
            content=self._expected(read, first_token),
            stats=stats,
        )

    def _expected(self, read: KVRead, first_token: int) -> ExpectedContent | None:
        """Return what lent blocks must be; None of a hand-over, which was computed just now."""
        lease = read.lease
        if isinstance(lease, KVOffered) or self.contents is None:
            return None
        table, first_block = read.tables[0], first_token // self.settings.block_size
        blocks = block_ids(table.segments)[first_block - table.first_block :]
        content = [Content(lease.tenant, block_hash) for block_hash in split_hashes(lease.block_hashes)]
        return ExpectedContent(self.contents, content, blocks)

    def _started(self, read: KVRead, carrier: str) -> None:
        if read.is_hand_over:
            self.on_event(ReadStarted(read, carrier))

    # Leases, asked for and given back.

    @asynccontextmanager
    async def lease(
        self, request: RequestLease, holder: WorkerId, traceparent: str = ""
    ) -> AsyncGenerator[LeaseGranted]:
        """Hold a lease for the time of one read, which ends it; one that is left by an error or by a cancellation is
        given back. Raises NotGrantedError."""
        nobody_waits = asyncio.Event()
        asked = self._ask(request, holder, traceparent, nobody_waits)
        asking = self.tasks.create_task(asked, name=f"lease {request.request_id}")
        try:
            granted = await asyncio.shield(asking)
        except asyncio.CancelledError:
            nobody_waits.set()
            if asking.done() and not asking.cancelled() and isinstance(granted := asking.result(), LeaseGranted):
                self._give_back(holder, request, granted)
            raise
        if isinstance(granted, NotGrantedError):
            raise granted
        try:
            if not is_as_asked(request, granted, self.settings.block_size):
                detail = f"{holder} granted tokens {granted.first_token} to {granted.num_tokens}, unasked"
                raise NotGrantedError(detail, end=ReadEnd.OTHER)
            yield granted
        except BaseException:
            self._give_back(holder, request, granted)
            raise

    async def _ask(
        self, request: RequestLease, holder: WorkerId, traceparent: str, nobody_waits: asyncio.Event
    ) -> LeaseGranted | NotGrantedError:
        """Return the lease, or why there is none: a task of the service's group that raised would end the service. What
        is granted when `nobody_waits` any more is given back."""
        timeout_s = max(0.001, request.answer_within_ms / 1000)
        try:
            reply = await self.bus.ask(subjects.LEASE, (holder, request.reader), request, timeout_s, traceparent)
        except BusError as error:
            return NotGrantedError(f"{holder} did not answer: {error.reason}")
        except Exception as error:  # noqa: BLE001  (one bad holder must not end the service)
            return NotGrantedError(f"{type(error).__name__}: {error}", end=ReadEnd.OTHER)
        if isinstance(reply, Refused):
            end = ReadEnd.IN_FLIGHT if reply.reason is RefusalReason.IN_FLIGHT else ReadEnd.REFUSED
            return NotGrantedError(f"{reply.reason}: {reply.detail}", reply.reason, end)
        if nobody_waits.is_set():
            self._give_back(holder, request, reply)
        return reply

    def _give_back(self, holder: WorkerId, request: RequestLease, granted: LeaseGranted) -> None:
        """Report that nobody reads under this lease. Whoever wanted to read does not wait until that is sent; where it
        is lost the lease's time ends it."""
        returned = ReturnLease(
            request_id=request.request_id,
            attempt=request.attempt,
            deadline_ms=request.deadline_ms,
            reader=request.reader,
            lease_id=granted.lease_id,
        )
        self.outbox.put(subjects.RETURNED, (holder, returned.reader), returned)


def _stopped(read: KVRead) -> ReadEnded:
    """Return the end of a read that its worker has ended."""
    return ReadEnded(read, ReadOutcome(0), ReadEnd.STOPPED)
