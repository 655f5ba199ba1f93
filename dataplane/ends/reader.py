"""Reads KV into an arena: over which carrier, on which connection, into what memory. A thread for each read.

`PlaneReader.read_kv` → `_run` (tries the carriers, best first) → `_read_on` (one connection) → `Read` in `read.py`,
which speaks the stream protocol and is where a frame is verified. The arena (`KVArena` in `carriers/carrier.py`) says
which carriers lead to it and makes this end of them; `carriers/__init__.py` says how to add one.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers import loopback, shm
from dataplane.carriers.carrier import CarrierBrokenError, KVArena, MemoryFailedError, ReaderEnd
from dataplane.ends.choice import BrokenCarriers, CarrierChoice, CarrierImpossibleError, choices
from dataplane.ends.connections import Cancellation, IdleConnections, connect_near, connect_tcp
from dataplane.ends.read import Landed, NotAnsweredError, Read, ReadRequest
from dataplane.memory.arena import ArenaMissingError
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Names, ProtocolError, TransferFailedError
from dataplane.protocol.wire import SocketWire, Thread, Wire, WireClosedError, WireTimeoutError
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd

__all__ = ["Landed", "PlaneReader", "ReadRequest"]

log = logging.getLogger(__name__)


class PlaneReader:
    """Reads KV into an arena of this shape. Any number of reads may run at once, each into blocks of its own.

    `is_stuck`: what a read had begun did not come to an end, and may still write to its blocks. Nobody may use them,
    and nothing but the end of this process helps. `secrets`: the holders', by which a holder proves what it sends.
    """

    def __init__(
        self,
        arena: KVArena,
        shape: ArenaShape,
        secrets: TicketSecrets,
        times: PlaneTimes | None = None,
    ) -> None:
        self.is_stuck = False
        self._arena = arena
        self._shape = shape
        self._secrets = secrets
        times = times or PlaneTimes()
        self._connect_timeout_s = times.connect_s
        self._idle = IdleConnections(times.max_idle_s)
        self._broken = BrokenCarriers(times.broken_s)

    async def read_kv(self, request: ReadRequest, on_started: Callable[[str], None] = lambda _: None) -> Landed:
        """Return once all is in place. `on_started(carrier)` is called on the loop at the first frame.

        Raises TransferFailedError, and ValueError when `tables` have not all these tokens, or a block that is only
        whole of use would be cut.
        When it is cancelled, the thread has ended before CancelledError comes out: the blocks may be given to somebody
        else.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Landed] = loop.create_future()
        cancellation = Cancellation()

        # The read blocks a thread of its own, which reports through the loop: a Future is not thread-safe.
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
            # Do not await `done` itself: a cancellation would cancel it, and the thread could not report its end.
            await asyncio.wait([done])
        except asyncio.CancelledError:
            # Cut the read and wait for its end: the thread may write to the blocks until then.
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
        """Do the read on this thread. `on_started` is called on it. Raises as `read_kv`."""
        # Refuse tables that do not fit before anything is connected: the caller is wrong, and no transfer has failed.
        layout = self._shape.layout
        target = SequenceRuns(self._shape, request.tables)
        wanted = Extent(layout, request.first_token, request.num_tokens)
        if not 0 <= request.first_token <= request.num_tokens or not target.covers(wanted, request.num_tokens):
            tokens = f"tokens {request.first_token} to {request.num_tokens}"
            raise ValueError(f"the tables have no slot for each of {tokens}: {request.tables}")
        if reason := wanted.over_wire(request.wire_dtype).refusal():
            raise ValueError(reason)
        # From here on each failure becomes a TransferFailedError, with its code and the tokens that have landed.
        run = Read(request, wanted, self._secrets, cancellation or Cancellation(), on_started)
        try:
            return self._run(run, target)
        except (WireClosedError, ConnectionError) as error:
            code = ReadEnd.CANCELLED if run.cancellation.is_cancelled else ReadEnd.CLOSED
            raise run.failed(code, str(error)) from error
        except (WireTimeoutError, TimeoutError) as error:
            raise run.failed(ReadEnd.DEADLINE, str(error)) from error
        except ProtocolError as error:
            raise run.failed(ReadEnd.PROTOCOL, str(error)) from error
        except (ArenaMissingError, CarrierImpossibleError, CarrierBrokenError) as error:
            raise run.failed(ReadEnd.CARRIER, str(error)) from error
        except MemoryFailedError as error:
            self.is_stuck |= error.may_still_write
            raise run.failed(ReadEnd.MEMORY, str(error)) from error
        except TransferFailedError as error:
            raise run.failed(error.code, error.detail) from error
        except OSError as error:
            # This case comes last: ConnectionError and TimeoutError are OSErrors too, and have their own codes above.
            raise run.failed(ReadEnd.CONNECT, str(error)) from error

    def release_ended(self) -> None:
        """Let go of what is kept of holders that have ended. To be called now and then; may take its time."""
        self._arena.release_ended()

    def close(self) -> None:
        """Close the connections to holders. What is mapped of them is the arena's."""
        self._idle.close()

    def _run(self, run: Read, target: SequenceRuns) -> Landed:
        """Read over the best carrier that can be set up."""
        endpoint = run.request.endpoint
        found = self._broken.without(endpoint.arena_nonce, self._choices(run.request.carrier, endpoint))
        for choice in found[:-1]:
            try:
                return self._run_over(choice, run, target)
            except CarrierBrokenError as error:
                log.warning("from %s:%d: %s; trying another carrier", endpoint.host, endpoint.port, error)
                self._broken.note_broken(endpoint.arena_nonce, choice.carrier)
        return self._run_over(found[-1], run, target)

    def _run_over(self, choice: CarrierChoice, run: Read, target: SequenceRuns) -> Landed:
        """Read over this carrier, on a connection that is there or a new one. Raises CarrierBrokenError."""
        carrier, run.stats.reason = choice
        endpoint = run.request.endpoint
        with self._arena.opening(carrier, endpoint, run.deadline) as names:
            while (wire := self._idle.reuse(carrier, endpoint)) is not None:
                try:
                    return self._read_on(wire, carrier, names, run, target)
                except NotAnsweredError:
                    continue  # the holder had just closed it: nothing has been asked of it yet
            return self._read_on(self._connect(carrier, run), carrier, names, run, target)

    def _read_on(self, wire: Wire, carrier: str, names: Names | None, run: Read, target: SequenceRuns) -> Landed:
        """Read on this connection; it is kept if the stream ends well. Raises NotAnsweredError, and what ends it."""
        landed, endpoint, layout = None, run.request.endpoint, self._shape.layout
        self._begin(wire)
        try:
            run.cancellation.watch(wire)
            accepted, frame_hash = run.open(wire, carrier, names, layout.fingerprint)
            try:
                end = self._end(endpoint, accepted, target, run.extent, frame_hash)
            except CarrierBrokenError:
                wire.finish_sending()  # the ticket opens a stream over another carrier once this one has ended
                raise
            try:
                landed = run.take_frames(wire, end)
            finally:
                end.close()
            return landed
        finally:
            run.cancellation.unwatch(wire)
            if landed is not None:
                self._idle.keep_idle(carrier, endpoint, wire)
            else:
                wire.close()

    def _connect(self, carrier: str, run: Read) -> Wire:
        timeout_s = min(self._connect_timeout_s, run.deadline - time.monotonic())
        if timeout_s <= 0:
            raise TimeoutError("the deadline has passed")
        return self._dial(carrier, run.request.endpoint, timeout_s, run.cancellation)

    # What the simulator does in its own way.

    def _start_thread(self, run: Callable[[], None]) -> Thread:
        thread = threading.Thread(target=run, name="kv-read", daemon=True)
        thread.start()
        return thread

    def _choices(self, wanted: str, endpoint: Endpoint) -> list[CarrierChoice]:
        """Return the carriers that lead there, best first. Raises CarrierImpossibleError."""
        return choices(wanted, endpoint, self._arena)

    def _dial(self, carrier: str, endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> Wire:
        if carrier != loopback.NAME:
            # Beside a holder in another container there may be its memory, and yet no such socket.
            near = connect_near(shm.address_of(endpoint.arena_nonce, endpoint.port)) if carrier == shm.NAME else None
            return SocketWire(near or connect_tcp(endpoint, timeout_s, cancellation))
        server = loopback.find(endpoint.arena_nonce)
        if server is None:
            raise ConnectionRefusedError("the holder has closed")
        return server.connect()

    def _begin(self, wire: Wire) -> None:
        """A read begins on this wire."""

    def _end(
        self, endpoint: Endpoint, accepted: Accepted, target: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> ReaderEnd:
        """Return this end of the carrier. Raises as `KVArena.reader_end`."""
        return self._arena.reader_end(endpoint, accepted, self._shape, target, extent, frame_hash)


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed under a read that nobody awaits any more
        loop.call_soon_threadsafe(callback)
