"""One read: opens a stream to a holder and puts what it sends in place. On a thread of its own."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from dataplane import loopback, shm, tcp
from dataplane.arena import Arena, ArenaMissingError, ByteArray
from dataplane.carriers import ReaderCarrier
from dataplane.codec import WireDtype
from dataplane.connect import BrokenWays, CarrierBrokenError, CarrierImpossibleError, Choice, ReaderPlace, choices
from dataplane.device import DeviceError
from dataplane.dial import Cancellation, connect_tcp
from dataplane.extent import Extent, HeadRange, heads_of
from dataplane.frames import SequenceMemory
from dataplane.idle import IdleConnections, Way, way_to
from dataplane.layout import ArenaShape, BlockTables
from dataplane.shm import AttachedArenas, SharedReader
from dataplane.stream import (
    Accepted,
    Digest,
    DigestKind,
    Fail,
    FailureCode,
    Header,
    Kind,
    Landing,
    Open,
    ProtocolError,
    Refused,
    TransferFailedError,
    TransferStats,
    decode_body,
    encode_frame,
    encode_header,
)
from dataplane.tcp import TcpReader
from dataplane.wire import SocketWire, Thread, Wire, WireClosedError, WireTimeoutError
from schemas.handoff import Endpoint

log = logging.getLogger(__name__)

_MAX_FRAMES_PER_ACK = 4
_FRAME_KINDS = (Kind.DATA, Kind.COMMIT, Kind.END, Kind.FAIL)


@dataclass(slots=True, frozen=True)
class Landed:
    """All `num_tokens` tokens are in place and verified. `trailer` is what the holder sent behind them."""

    num_tokens: int
    trailer: bytes
    stats: TransferStats


@dataclass(slots=True, frozen=True)
class ReadRequest:
    """Tokens [first_token, num_tokens) of what `ticket` names, to be put where `tables` have these positions.

    `carrier`: "auto" or one by name. `deadline_s`: seconds from now to the end of it all. `heads`: the first and how
    many, counted over all shards; None: all that the reader's arena has. `wire_dtype`: how the bytes cross over tcp.
    `stats` are filled as the read goes on, however it ends; their `traceparent` is told to the holder.
    """

    endpoint: Endpoint
    ticket: str
    carrier: str
    tables: BlockTables
    first_token: int
    num_tokens: int
    deadline_s: float
    heads: tuple[int, int] | None = None
    wire_dtype: WireDtype = "same"
    stats: TransferStats = field(default_factory=TransferStats)


class _NotAnsweredError(WireClosedError):
    """The holder closed the connection without a word."""


class PlaneReader:
    """Reads KV into an arena of this shape. Any number of reads may run at once, each into memory of its own: blocks,
    or heads."""

    def __init__(self, arena: Arena, shape: ArenaShape, *, connect_timeout_s: float = 5.0) -> None:
        self._arena = arena
        self._shape = shape
        self._fingerprint = shape.layout.fingerprint
        self._connect_timeout_s = connect_timeout_s
        self._attached = AttachedArenas()
        self._idle = IdleConnections()
        self._broken = BrokenWays()
        self._place = ReaderPlace(self._attached.can_attach)

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
        target = SequenceMemory(self._arena.array, self._shape, request.tables, heads)
        wanted = Extent(layout, request.first_token, request.num_tokens, heads)
        if not 0 <= request.first_token <= request.num_tokens or not target.covers(wanted, request.num_tokens):
            tokens = f"tokens {request.first_token} to {request.num_tokens}"
            raise ValueError(f"the tables have no slot for each of {tokens}: {request.tables}")
        run = _Read(request, wanted, cancellation or Cancellation(), on_started)
        try:
            return self._run(run, target)
        except (WireClosedError, ConnectionError) as error:
            code: FailureCode = "cancelled" if run.cancellation.is_cancelled else "closed"
            raise run.failed(code, str(error)) from error
        except (WireTimeoutError, TimeoutError) as error:
            raise run.failed("deadline", str(error)) from error
        except ProtocolError as error:
            raise run.failed("protocol", str(error)) from error
        except (ArenaMissingError, CarrierImpossibleError, CarrierBrokenError) as error:
            raise run.failed("carrier", str(error)) from error
        except DeviceError as error:
            raise run.failed("device", str(error)) from error
        except TransferFailedError as error:
            raise run.failed(error.code, error.detail) from error
        except OSError as error:
            raise run.failed("connect", str(error)) from error

    def release_ended(self) -> None:
        """Let go of the memory of holders that have ended. To be called now and then."""
        self._attached.release_unlinked()

    def close(self) -> None:
        """Unmap the holders' arenas, close the connections to them."""
        self._attached.close()
        self._idle.close()

    def _run(self, run: "_Read", target: SequenceMemory) -> Landed:
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

    def _run_over(self, choice: Choice, run: "_Read", target: SequenceMemory) -> Landed:
        """Read over this carrier, on a connection that is there or a new one. Raises CarrierBrokenError."""
        carrier, run.stats.reason = choice
        way = way_to(carrier, run.request.endpoint)
        while (wire := self._idle.take(way)) is not None:
            try:
                return self._read_on(wire, way, carrier, run, target)
            except _NotAnsweredError:
                continue  # the holder had just closed it: nothing has been asked of it yet
        return self._read_on(self._connect(carrier, run), way, carrier, run, target)

    def _read_on(self, wire: Wire, way: Way, carrier: str, run: "_Read", target: SequenceMemory) -> Landed:
        """Read on this connection; it is kept if the stream ends well. Raises _NotAnsweredError, and what ends it."""
        landed = None
        wire.reads_ahead = carrier != tcp.NAME
        self._begin(wire)
        try:
            run.cancellation.watch(wire)
            accepted = run.open(wire, carrier, self._fingerprint)
            landing = self._carrier(carrier, run, accepted, target)
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

    def _connect(self, carrier: str, run: "_Read") -> Wire:
        timeout_s = min(self._connect_timeout_s, run.deadline - time.monotonic())
        if timeout_s <= 0:
            raise TimeoutError("the deadline has passed")
        return self._dial(carrier, run.request.endpoint, timeout_s, run.cancellation)

    def _carrier(self, carrier: str, run: "_Read", accepted: Accepted, target: SequenceMemory) -> ReaderCarrier:
        """Return this end of the carrier. Raises ArenaMissingError, ProtocolError, CarrierBrokenError."""
        kind = accepted.digest_kind if accepted.digests else None
        if carrier == tcp.NAME:
            return TcpReader(target, run.extent, kind)
        source = self._source(carrier, run.request.endpoint, accepted, run.extent)
        return self._shared_reader(source, target, kind)

    def _source(self, carrier: str, endpoint: Endpoint, accepted: Accepted, extent: Extent) -> SequenceMemory:
        """Return the holder's memory. Raises ArenaMissingError, ProtocolError."""
        array = self._memory(carrier, endpoint)
        layout = self._shape.layout
        if accepted.heads != heads_of(layout):
            layout = replace(layout, first_head=accepted.heads.first, num_kv_heads=accepted.heads.num_heads)
        if len(accepted.num_blocks) != len(layout.groups) or not accepted.heads.holds(extent.heads):
            raise ProtocolError(f"the holder names {accepted.heads} and {len(accepted.num_blocks)} cache groups")
        try:
            shape = ArenaShape(layout=layout, num_blocks=accepted.num_blocks)
            source = SequenceMemory(array, shape, accepted.tables, extent.heads)
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
        if (server := loopback.find(endpoint.arena_nonce)) is None:
            raise ArenaMissingError(endpoint.arena, "the holder has closed")
        return server.arena.array

    def _shared_reader(
        self, source: SequenceMemory, target: SequenceMemory, digest_kind: DigestKind | None
    ) -> ReaderCarrier:
        return SharedReader(source, target, digest_kind)


class _Read:
    """The state of one read: how far it has come, whatever ends it."""

    def __init__(
        self,
        request: ReadRequest,
        extent: Extent,
        cancellation: Cancellation,
        on_started: Callable[[str], None],
    ) -> None:
        self.request = request
        self.extent = extent
        """What is wanted, and once a carrier is chosen how it crosses."""
        self.cancellation = cancellation
        self.deadline = time.monotonic() + request.deadline_s
        self.stats = request.stats
        self.stats.opened_ns = time.time_ns()
        self._on_started = on_started
        self._landing: Landing | None = None

    def failed(self, code: FailureCode, detail: str) -> TransferFailedError:
        """Return the error with which the read ends, with what has landed so far."""
        landed = self.request.first_token if self._landing is None else self._landing.num_landed_tokens
        return TransferFailedError(code, detail, landed)

    def open(self, wire: Wire, carrier: str, fingerprint: str) -> Accepted:
        """Ask, and return the holder's answer. Raises TransferFailedError when it says no."""
        request = self.request
        if carrier == tcp.NAME:  # on one host nothing is gained by making less of it
            self.extent = self.extent.over_wire(request.wire_dtype)
        self.stats.carrier, self.stats.wire_dtype = carrier, self.extent.wire_dtype
        opening = Open(
            ticket=request.ticket,
            fingerprint=fingerprint,
            carrier=carrier,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            heads=self.extent.heads,
            wire_dtype=self.extent.wire_dtype,
            traceparent=self.stats.traceparent,
        )
        with contextlib.suppress(WireClosedError):  # a holder that is busy says so and closes, without listening
            wire.send([encode_frame(Kind.OPEN, opening)], self.deadline - time.monotonic())
        try:
            header = wire.receive_header(self.deadline, Kind.ACCEPTED, Kind.REFUSED)
        except WireClosedError as error:
            self.cancellation.check()
            raise _NotAnsweredError(str(error)) from error
        body = wire.receive(header.length, self.deadline)
        if header.kind is Kind.REFUSED:
            refused = decode_body(body, Refused)
            if refused.code == "carrier":
                raise CarrierBrokenError(carrier, refused.detail)
            raise TransferFailedError(refused.code, refused.detail)
        accepted = decode_body(body, Accepted)
        if accepted.carrier != carrier:
            raise ProtocolError(f"asked for {carrier}, accepted as {accepted.carrier}")
        self.stats.accepted_ns = time.time_ns()
        self.stats.peer_traceparent = accepted.traceparent
        self._landing = Landing(self.extent, digests=accepted.digests)
        return accepted

    def land(self, wire: Wire, carrier: ReaderCarrier) -> Landed:
        """Take frames until the end. Raises whatever ends it early."""
        landing, stats = self._landing, self.stats
        assert landing is not None, "not opened"
        num_acked = 0
        while True:
            if carrier.needs_ack and stats.num_frames > num_acked:
                num_acked = self._acknowledge(wire, carrier, num_acked)
            started = time.perf_counter_ns()
            header = wire.receive_header(self.deadline, *_FRAME_KINDS)
            stats.wait_ns += time.perf_counter_ns() - started
            if header.kind is Kind.DATA:
                landing.expect(header)
                landing.received(header, self._land_frame(wire, carrier, header))
            elif header.kind is Kind.COMMIT:
                landing.commit(header)
            else:
                body = bytes(wire.receive(header.length, self.deadline))
                carrier.finish(self.deadline)
                return self._finish(landing, header, body)

    def _acknowledge(self, wire: Wire, carrier: ReaderCarrier, num_acked: int) -> int:
        """Tell the holder which frames are not needed any more, if it is time to; return how many it has been told.

        A word to the holder costs a switch of threads where cores are scarce: only where it would wait for it.
        """
        num_finished = carrier.finished()
        if num_finished - num_acked < _MAX_FRAMES_PER_ACK:
            if wire.has_unread():
                return num_acked
            if num_finished == num_acked:
                num_finished = carrier.wait_finished(self.deadline)
        wire.send([encode_header(Header(Kind.ACK, num_finished))], self.deadline - time.monotonic())
        return num_finished

    def _land_frame(self, wire: Wire, carrier: ReaderCarrier, data: Header) -> Digest:
        stats = self.stats
        if not stats.num_frames:
            stats.first_byte_ns = time.time_ns()
            self._on_started(stats.carrier)
        self.cancellation.check()
        digest = carrier.land(wire, data, stats, self.deadline)
        stats.num_frames += 1
        stats.num_bytes += self.extent.memory_bytes(data.num_layers, data.num_tokens)
        stats.num_wire_bytes += data.length
        stats.last_byte_ns = time.time_ns()
        return digest

    def _finish(self, landing: Landing, header: Header, body: bytes) -> Landed:
        if header.kind is Kind.FAIL:
            fail = decode_body(body, Fail)
            raise TransferFailedError(fail.code, fail.reason)
        landing.end(header, body)
        self.stats.landed_ns = time.time_ns()
        return Landed(self.request.num_tokens, body, self.stats)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed under a read that nobody awaits any more
        loop.call_soon_threadsafe(callback)
