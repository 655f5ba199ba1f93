"""Reads KV into an arena: over which carrier, on which connection, into what memory. A thread for each read."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from dataplane.blocks.layout import ArenaShape, BlockTables
from dataplane.cards import staged
from dataplane.cards.device import DeviceError
from dataplane.cards.device_arena import DeviceArena, KVArena
from dataplane.cards.ipc import CudaReader, OpenedArenas, SourceArena
from dataplane.cards.nccl.pair_core import PairBrokenError
from dataplane.cards.nccl.paired import PairedReader
from dataplane.cards.nccl.pairs import PairRefusedError, ReaderPairs
from dataplane.cards.side import CardStuckError
from dataplane.cards.staged import SharedStagedReader, StagedFrames, StagedReader
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import ReaderCarrier
from dataplane.carriers.shm import ArenaFrames, AttachedArenas, FrameSource, SharedReader
from dataplane.carriers.tcp import TcpReader
from dataplane.ends.choice import (
    CUDA,
    NCCL,
    BrokenWays,
    CarrierBrokenError,
    CarrierImpossibleError,
    Choice,
    ReaderPlace,
    choices,
)
from dataplane.ends.dial import Cancellation, connect_tcp
from dataplane.ends.idle import IdleConnections, Way, way_to
from dataplane.ends.read import Landed, NotAnsweredError, Read, ReadRequest
from dataplane.memory.arena import Arena, ArenaMissingError, ByteArray
from dataplane.memory.checksum import DigestKind
from dataplane.memory.codec import WireDtype
from dataplane.memory.extent import Extent, HeadRange, heads_of
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.reasons import FailureCode
from dataplane.protocol.stream import (
    MAX_FRAME_BYTES,
    Accepted,
    PairRead,
    ProtocolError,
    TransferFailedError,
    TransferStats,
)
from dataplane.protocol.wire import SocketWire, Thread, Wire, WireClosedError, WireTimeoutError
from schemas.handoff import Endpoint

__all__ = ["Landed", "PlaneReader", "ReadRequest"]

log = logging.getLogger(__name__)


class PlaneReader:
    """Reads KV into an arena of this shape. Any number of reads may run at once, each into memory of its own: blocks,
    or heads.

    `is_stuck`: the card did not come to the end of a read, and may still write to its blocks. Nobody may use them, and
    nothing but the end of this process helps.
    """

    def __init__(self, arena: KVArena, shape: ArenaShape, *, connect_timeout_s: float = 5.0) -> None:
        self.is_stuck = False
        self._arena = arena
        self._shape = shape
        self._fingerprint = shape.layout.fingerprint
        self._connect_timeout_s = connect_timeout_s
        self._attached = AttachedArenas()
        self._idle = IdleConnections()
        self._broken = BrokenWays()
        self._opened = OpenedArenas(arena) if isinstance(arena, DeviceArena) else None
        self._pairs = None if arena.pair_parts is None else ReaderPairs(arena.pair_parts)
        self._place = ReaderPlace(self._attached.can_attach)
        if isinstance(arena, DeviceArena):
            has_nccl = self._pairs is not None and self._pairs.refusal() is None
            self._place = ReaderPlace(self._attached.can_attach, arena.card, arena.device.can_map, has_nccl)

    async def read(
        self,
        endpoint: Endpoint,
        ticket: str,
        *,
        carrier: str,
        tables: BlockTables,
        first_token: int = 0,
        num_tokens: int,
        deadline_s: float,
        heads: tuple[int, int] | None = None,
        wire_dtype: WireDtype = "same",
        stats: TransferStats | None = None,
        on_started: Callable[[str], None] = lambda _: None,
    ) -> Landed:
        """Return once all is in place. `on_started(carrier)` is called on the loop at the first frame; `stats` are
        filled as it goes on.

        Raises TransferFailedError, and ValueError when the arena has no such heads or `tables` not all these tokens.
        When it is cancelled, the thread has ended before CancelledError comes out: the blocks may be given to somebody
        else.
        """
        request = ReadRequest(
            endpoint, ticket, carrier, tables, first_token, num_tokens, deadline_s, heads, wire_dtype,
            stats or TransferStats(),
        )  # fmt: skip
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Landed] = loop.create_future()
        cancellation = Cancellation()

        def run() -> None:
            try:
                landed = self.read_blocking(
                    request, cancellation, lambda name: _call_soon(loop, lambda: on_started(name))
                )
            except BaseException as error:  # noqa: BLE001 - it is raised where the read is awaited
                failure = error
                _call_soon(loop, lambda: done.set_exception(failure))
            else:
                _call_soon(loop, lambda: done.set_result(landed))

        thread = self._start_thread(run)
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            cancellation.cancel()
            while not done.done():
                with contextlib.suppress(asyncio.CancelledError):  # cancelled again: the thread must end all the same
                    await asyncio.wait([done])
            done.exception()  # taken note of
            raise
        finally:
            thread.join()
        return done.result()

    def read_blocking(
        self,
        request: ReadRequest,
        cancellation: Cancellation | None = None,
        on_started: Callable[[str], None] = lambda _: None,
    ) -> Landed:
        """Do the read on this thread. `on_started` is called on it. Raises as `read`."""
        layout = self._shape.layout
        heads = heads_of(layout) if request.heads is None else HeadRange(*request.heads)
        target = SequenceRuns(self._shape, request.tables, heads)
        wanted = Extent(layout, request.first_token, request.num_tokens, heads)
        if not 0 <= request.first_token <= request.num_tokens or not target.covers(wanted, request.num_tokens):
            tokens = f"tokens {request.first_token} to {request.num_tokens}"
            raise ValueError(f"the tables have no slot for each of {tokens}: {request.tables}")
        run = Read(request, wanted, cancellation or Cancellation(), on_started)
        if isinstance(self._arena, DeviceArena):
            run.digest_kind = "sum64"
        try:
            return self._run(run, target)
        except (WireClosedError, ConnectionError) as error:
            code = FailureCode.CANCELLED if run.cancellation.is_cancelled else FailureCode.CLOSED
            raise run.failed(code, str(error)) from error
        except (WireTimeoutError, TimeoutError) as error:
            raise run.failed(FailureCode.DEADLINE, str(error)) from error
        except ProtocolError as error:
            raise run.failed(FailureCode.PROTOCOL, str(error)) from error
        except (ArenaMissingError, CarrierImpossibleError, CarrierBrokenError) as error:
            raise run.failed(FailureCode.CARRIER, str(error)) from error
        except DeviceError as error:
            self.is_stuck |= isinstance(error, CardStuckError)
            raise run.failed(FailureCode.MEMORY, str(error)) from error
        except TransferFailedError as error:
            raise run.failed(error.code, error.detail) from error
        except OSError as error:
            raise run.failed(FailureCode.CONNECT, str(error)) from error

    def release_ended(self) -> None:
        """Let go of the memory of holders that have ended, and of pairs that are not used. To be called now and
        then."""
        self._attached.release_unlinked()
        if self._opened is not None:
            self._opened.release_unlinked()
        if self._pairs is not None:
            self._pairs.release_idle()

    def close(self) -> None:
        """Unmap the holders' arenas, close the connections to them."""
        self._attached.close()
        if self._opened is not None:
            self._opened.close()
        self._idle.close()
        if self._pairs is not None:
            self._pairs.close()

    def _run(self, run: Read, target: SequenceRuns) -> Landed:
        """Read over the best carrier that can be set up."""
        endpoint = run.request.endpoint
        found = self._broken.without(endpoint.arena_nonce, self._choices(run.request.carrier, endpoint))
        for choice in found[:-1]:
            try:
                return self._run_over(choice, run, target)
            except CarrierBrokenError as error:
                log.warning("from %s:%d: %s; reading in another way", endpoint.host, endpoint.port, error)
                self._broken.add(endpoint.arena_nonce, choice.carrier)
        return self._run_over(found[-1], run, target)

    def _run_over(self, choice: Choice, run: Read, target: SequenceRuns) -> Landed:
        """Read over this carrier, on a connection that is there or a new one. Raises CarrierBrokenError."""
        carrier, run.stats.reason = choice
        run.max_frame_bytes = MAX_FRAME_BYTES
        if isinstance(self._arena, DeviceArena) and carrier in (shm.NAME, tcp.NAME):
            run.max_frame_bytes = min(staged.FRAME_BYTES, self._arena.ring.frame_bytes)
        if carrier == NCCL:
            return self._run_paired(run, target)
        return self._run_on(carrier, run, partial(self._carrier, carrier, run, target))

    def _run_paired(self, run: Read, target: SequenceRuns) -> Landed:
        """Read over the pair with this holder, which is made now if need be. Raises CarrierBrokenError."""
        if self._pairs is None or not isinstance(arena := self._arena, DeviceArena):
            raise CarrierBrokenError(NCCL, "this reader makes no communicators")
        endpoint, cancellation = run.request.endpoint, run.cancellation
        try:
            pair = self._pairs.join(
                endpoint,
                run.request.ticket,
                lambda: self._dial(NCCL, endpoint, self._connect_timeout_s, Cancellation()),
                run.deadline,
                lambda: cancellation.is_cancelled,
            )
            read_id = pair.decide(lambda core: core.next_read())
        except (PairRefusedError, PairBrokenError) as error:
            raise CarrierBrokenError(NCCL, str(error)) from error
        run.pair = PairRead(generation=pair.generation, read_id=read_id)
        try:
            return self._run_on(
                NCCL, run, lambda accepted: PairedReader(pair, read_id, arena, target, digests=accepted.digests)
            )
        finally:
            run.pair = None
            pair.leave(read_id)

    def _run_on(self, carrier: str, run: Read, make_end: Callable[[Accepted], ReaderCarrier]) -> Landed:
        """Read on a connection that is there or a new one. Raises CarrierBrokenError."""
        way = way_to(carrier, run.request.endpoint)
        while (wire := self._idle.take(way)) is not None:
            try:
                return self._read_on(wire, way, carrier, run, make_end)
            except NotAnsweredError:
                continue  # the holder had just closed it: nothing has been asked of it yet
        return self._read_on(self._connect(carrier, run), way, carrier, run, make_end)

    def _read_on(
        self, wire: Wire, way: Way, carrier: str, run: Read, make_end: Callable[[Accepted], ReaderCarrier]
    ) -> Landed:
        """Read on this connection; it is kept if the stream ends well. Raises NotAnsweredError, and what ends it."""
        landed = None
        wire.reads_ahead = carrier != tcp.NAME
        self._begin(wire)
        try:
            run.cancellation.watch(wire)
            accepted = run.open(wire, carrier, self._fingerprint)
            landing = make_end(accepted)
            try:
                landed = run.land(wire, landing)
            finally:
                landing.close()
            return landed
        finally:
            run.cancellation.unwatch(wire)
            if landed is not None and wire.is_silent:
                self._idle.put(way, wire)
            else:
                wire.close()

    def _connect(self, carrier: str, run: Read) -> Wire:
        timeout_s = min(self._connect_timeout_s, run.deadline - time.monotonic())
        if timeout_s <= 0:
            raise TimeoutError("the deadline has passed")
        return self._dial(carrier, run.request.endpoint, timeout_s, run.cancellation)

    def _carrier(self, carrier: str, run: Read, target: SequenceRuns, accepted: Accepted) -> ReaderCarrier:
        """Return this end of the carrier. Raises ArenaMissingError, ProtocolError, CarrierBrokenError."""
        kind = accepted.digest_kind if accepted.digests else None
        arena = self._arena
        if isinstance(arena, DeviceArena):
            if carrier == CUDA:
                return self._cuda_reader(arena, run, accepted, target)
            if carrier == tcp.NAME:
                return StagedReader(arena, target, run.extent, kind)
            return SharedStagedReader(self._frames(carrier, run, accepted), arena, target, run.extent, kind)
        memory = SequenceMemory(arena.array, target)
        if carrier == tcp.NAME:
            return TcpReader(memory, run.extent, kind)
        return self._shared_reader(self._frames(carrier, run, accepted), memory, kind)

    def _cuda_reader(self, arena: DeviceArena, run: Read, accepted: Accepted, target: SequenceRuns) -> ReaderCarrier:
        source = self._source(accepted, run.extent)
        try:
            holder, give_back = self._open_on_card(run.request.endpoint, accepted)
            try:
                if source.shape.num_bytes > holder.memory.num_bytes:
                    raise ProtocolError(f"{source.shape.num_blocks} blocks in {holder.memory.num_bytes} bytes")
                kind = accepted.digest_kind if accepted.digests else None
                return CudaReader(holder, source, arena, target, kind, give_back)
            except BaseException:
                give_back()
                raise
        except DeviceError as error:
            raise CarrierBrokenError(CUDA, str(error)) from error

    def _open_on_card(self, endpoint: Endpoint, accepted: Accepted) -> tuple[SourceArena, Callable[[], None]]:
        """Return the holder's arena and what to call when it is not used any more. Raises DeviceError,
        ProtocolError."""
        server = loopback.find(endpoint.arena_nonce)
        if server is not None and isinstance(server.arena, DeviceArena):
            return server.arena, server.arena.use()
        if accepted.device is None or self._opened is None:
            raise ProtocolError("the holder does not name its memory")
        return self._opened.take((endpoint.arena, endpoint.arena_nonce), accepted.device)

    def _frames(self, carrier: str, run: Read, accepted: Accepted) -> FrameSource:
        """Return where a reader that copies for itself finds the holder's frames. Raises ArenaMissingError,
        ProtocolError."""
        array = self._memory(carrier, run.request.endpoint)
        if accepted.staged:
            return StagedFrames(array, run.extent)
        source = self._source(accepted, run.extent)
        try:
            return ArenaFrames(SequenceMemory(array, source))
        except ValueError as error:
            raise ProtocolError(f"blocks outside the holder's arena: {error}") from error

    def _source(self, accepted: Accepted, extent: Extent) -> SequenceRuns:
        """Return where the sequence lies in the holder's arena. Raises ProtocolError."""
        layout = self._shape.layout
        if accepted.heads != heads_of(layout):
            layout = replace(layout, first_head=accepted.heads.first, num_kv_heads=accepted.heads.num_heads)
        if len(accepted.num_blocks) != len(layout.groups) or not accepted.heads.holds(extent.heads):
            raise ProtocolError(f"the holder names {accepted.heads} and {len(accepted.num_blocks)} cache groups")
        try:
            shape = ArenaShape(layout=layout, num_blocks=accepted.num_blocks)
            source = SequenceRuns(shape, accepted.tables, extent.heads)
        except ValueError as error:
            raise ProtocolError(f"blocks outside the holder's arena: {error}") from error
        if not source.covers(extent, extent.num_tokens):
            raise ProtocolError("the holder's tables do not have all that it accepted")
        return source

    # What the simulator does in its own way.

    def _start_thread(self, run: Callable[[], None]) -> Thread:
        thread = threading.Thread(target=run, name="kv-read", daemon=True)
        thread.start()
        return thread

    def _choices(self, wanted: str, endpoint: Endpoint) -> list[Choice]:
        """Return the carriers that lead there, best first. Raises CarrierImpossibleError."""
        return choices(wanted, endpoint, self._place)

    def _dial(self, carrier: str, endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> Wire:
        if carrier != loopback.NAME:
            return SocketWire(connect_tcp(endpoint, timeout_s, cancellation))
        server = loopback.find(endpoint.arena_nonce)
        if server is None:
            raise ConnectionRefusedError("the holder has closed")
        return server.connect()

    def _begin(self, wire: Wire) -> None:
        """A read begins on this wire."""

    def _memory(self, carrier: str, endpoint: Endpoint) -> ByteArray:
        """Return the holder's arena. Raises ArenaMissingError."""
        if carrier == shm.NAME:
            return self._attached.attach(endpoint)
        server = loopback.find(endpoint.arena_nonce)
        if server is None or not isinstance(server.arena, Arena):
            raise ArenaMissingError(endpoint.arena, "the holder has closed")
        return server.arena.array

    def _shared_reader(
        self, source: FrameSource, target: SequenceMemory, digest_kind: DigestKind | None
    ) -> ReaderCarrier:
        return SharedReader(source, target, digest_kind)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed under a read that nobody awaits any more
        loop.call_soon_threadsafe(callback)
