"""One end of a pair, acting: `pair_core.py` decides. Three threads, none of them the event loop's, touch a pair:

- whoever listens to the pair's wire (`listen`): hears of slots, of the peer's end, and that time passes;
- the library's thread, which alone makes the communicator, sends and receives. It polls what is under way: an event,
  and the communicator's own error;
- an abort's thread, once.

The last two may be stuck in the library for good. Then they are left, and with them the buffers: the library may still
write there.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from dataplane.cards import limits
from dataplane.cards.device import Device, DeviceError, DeviceMemory, Event
from dataplane.cards.nccl.communicator import Communicator, CommunicatorError, CommunicatorLibrary, LibraryThreads
from dataplane.cards.nccl.pair_core import NUM_BUFFERS, End, Make, Move, PairCore, PairState, ReaderCore, Tell
from dataplane.protocol.stream import Header, Kind, ProtocolError, encode_header
from dataplane.protocol.wire import Wire, WireClosedError, WireTimeoutError

BUFFER_BYTES = 8 << 20
"""Of a buffer, and of the largest frame: enough for a link to be busy most of the time (at 50 GB/s 160 us, and some
20 us to begin), little enough for a pair's buffers to be small beside an arena."""
HOLDER_RANK, READER_RANK, NUM_RANKS = 0, 1, 2

CoreT = TypeVar("CoreT", bound=PairCore)
ResultT = TypeVar("ResultT")


@dataclass(slots=True, frozen=True)
class PairParts:
    """What all pairs of a process share."""

    device: Device
    library: CommunicatorLibrary
    threads: LibraryThreads

    def refusal(self) -> str | None:
        """Return why no pair can be made now, if so."""
        return self.library.refusal() or self.threads.refusal()


class _OverError(Exception):
    """The pair is over: its communicator is not to be used any more."""


class PairEnd(Generic[CoreT]):
    """One end. `core` is only used inside `deciding`.

    `memory`: of the buffers, one behind the other. `filled`: an event per buffer, recorded by a read behind its last
    use of the buffer that it has begun or taken. Raises DeviceError when the card has no room for it.
    """

    def __init__(self, core: CoreT, parts: PairParts, unique_id: bytes) -> None:
        self._unique_id = unique_id
        self._rank = READER_RANK if isinstance(core, ReaderCore) else HOLDER_RANK
        self._core = core
        self._parts = parts
        self._changed = threading.Condition()
        self._wire: Wire | None = None
        self._communicator: Communicator | None = None
        self._moves: deque[Move] = deque()
        self._emptying: deque[int] = deque()
        self._library_thread: threading.Thread | None = None
        self._abort_thread: threading.Thread | None = None
        self._is_in_use = False
        self._is_inside = False
        """The library has the buffers."""
        self._is_freed = False
        device = parts.device
        with contextlib.ExitStack() as undo:
            self.memory: DeviceMemory = device.allocate(NUM_BUFFERS * BUFFER_BYTES)
            undo.callback(self.memory.close)
            self._stream = device.new_stream()
            undo.callback(self._stream.close)
            self._crossed = self._new_events(undo)
            self.used = self._new_events(undo)
            self._undo = undo.pop_all()

    def _new_events(self, undo: contextlib.ExitStack) -> list[Event]:
        events: list[Event] = []
        for _ in range(NUM_BUFFERS):
            events.append(self._parts.device.new_event())
            undo.callback(events[-1].close)
        return events

    # What may be done on any thread.

    @property
    def state(self) -> PairState:
        return self._core.state

    @property
    def failure(self) -> str:
        """Why it is broken."""
        return self._core.failure

    @property
    def generation(self) -> int:
        return self._core.generation

    @property
    def idle_since(self) -> float | None:
        """When its last read ended, by the monotonic clock; None while there is one."""
        return self._core.idle_since

    @property
    def is_freed(self) -> bool:
        """Its memory has been given back."""
        return self._is_freed

    def decide(self, decision: Callable[[CoreT], ResultT]) -> ResultT:
        """Let the core decide, do what it says, and wake who waits. Raises what the core raises."""
        with self._changed:
            try:
                return decision(self._core)
            finally:
                self._act()

    def wait(
        self, decision: Callable[[CoreT], ResultT | None], deadline: float, is_over: Callable[[], bool]
    ) -> ResultT:
        """Ask the core again and again until it says something. Raises WireTimeoutError, WireClosedError when
        whoever waits is over, and what the core raises."""
        while True:
            with self._changed:
                try:
                    result = decision(self._core)
                finally:
                    self._act()
                if result is not None:
                    return result
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise WireTimeoutError("the pair has not come to it within the time allowed")
                self._changed.wait(min(remaining, limits.PAIR_PEER_POLL_S))
            if is_over():
                raise WireClosedError("closed while a frame was on its way")

    def fail(self, reason: str) -> None:
        """End it. Idempotent; does not wait."""
        self.decide(lambda core: core.fail(reason))

    def close(self, reason: str) -> None:
        """End it and give the library a moment to come back. Reads that go on fail."""
        self.fail(reason)
        deadline = time.monotonic() + limits.CLOSE_S
        for thread in (self._library_thread, self._abort_thread):
            if thread is not None:
                thread.join(max(0.0, deadline - time.monotonic()))

    def accept(self, wire: Wire) -> None:
        """Say to the peer that it has opened the pair, and `listen`. Raises nothing either."""
        try:
            wire.send([encode_header(Header(Kind.PAIR_ACCEPTED))], limits.TELL_S)
        except (WireClosedError, WireTimeoutError) as error:
            self.fail(f"the peer: {error}")
        self.listen(wire)

    def listen(self, wire: Wire) -> None:
        """Open the pair on its wire, which both ends now have, and listen until it is over. Raises nothing: what goes
        wrong breaks the pair."""
        with self._changed:
            self._wire = wire
        self.decide(lambda core: core.opened(time.monotonic()))
        while self.state is not PairState.BROKEN:
            try:
                told = wire.receive_header(time.monotonic() + limits.WATCH_S, Kind.SLOT)
                self._hear(Tell(told.at, told.tag, told.length))
            except WireTimeoutError:
                self.decide(lambda core: core.tick(time.monotonic()))
            except (WireClosedError, ProtocolError) as error:
                self.fail(f"the peer: {error}")
        self.free_if_settled()

    def leave(self, read_id: int) -> None:
        """A read has ended; its own work on the card is done."""
        self.decide(lambda core: core.leave(read_id, time.monotonic()))
        self.free_if_settled()

    def emptying(self, slot: int) -> None:
        """The reader's kernel that empties the slot's buffer is enqueued, `used` recorded behind it."""
        with self._changed:
            self._emptying.append(slot)
            self._changed.notify_all()

    def free_if_settled(self) -> None:
        """Give back the memory, once it is over and nobody uses it any more: the library, or a read."""
        with self._changed:
            over = self._core.state is PairState.BROKEN and self._core.is_settled
            if self._is_freed or not over or self._is_in_use:
                return
            self._is_freed = True
        self._undo.close()

    # What the core says is to be done.

    def _hear(self, told: Tell) -> None:
        def ordered(core: CoreT) -> None:
            if not isinstance(core, ReaderCore):
                raise ProtocolError("a slot from the reader")
            core.ordered(told, time.monotonic())

        self.decide(ordered)

    def _act(self) -> None:
        while actions := self._core.take_actions():
            for action in actions:
                match action:
                    case Make():
                        self._is_in_use = True
                        self._library_thread = self._parts.threads.start(self._run_library, "kv-nccl")
                    case Tell():
                        self._tell(action)
                    case Move():
                        self._moves.append(action)
                    case End():
                        self._end()
        self._changed.notify_all()

    def _tell(self, told: Tell) -> None:
        assert self._wire is not None, "a slot before the pair was opened"
        header = Header(Kind.SLOT, length=told.num_bytes, tag=told.read_id, at=told.slot)
        try:
            self._wire.send([encode_header(header)], limits.TELL_S)
        except (WireClosedError, WireTimeoutError) as error:
            self._core.fail(f"the peer: {error}")

    def _end(self) -> None:
        self._moves.clear()
        if self._wire is not None:
            self._wire.cut()
        if self._communicator is not None:
            communicator = self._communicator
            self._abort_thread = self._parts.threads.start(lambda: self._abort(communicator), "kv-nccl-abort")
            self._parts.threads.give_up(self._abort_thread)
        if self._library_thread is not None:
            self._parts.threads.give_up(self._library_thread)

    def _abort(self, communicator: Communicator) -> None:
        """End the communicator, and with it what its thread may hang in; nobody goes in any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_inside, limits.OUT_S)
        communicator.abort()

    # The library's thread.

    @contextlib.contextmanager
    def _inside(self) -> Generator[None]:
        """Use the communicator, which is not ended meanwhile unless this takes too long. Raises _OverError."""
        with self._changed:
            if self._core.state is PairState.BROKEN:
                raise _OverError
            self._is_inside = True
        try:
            yield
        finally:
            with self._changed:
                self._is_inside = False
                self._changed.notify_all()

    def _run_library(self) -> None:
        try:
            communicator = self._parts.library.make(self._unique_id, NUM_RANKS, self._rank)
        except CommunicatorError as error:
            self.fail(str(error))
        else:
            self._use(communicator)
        with self._changed:
            self._is_in_use = False
        self.free_if_settled()

    def _use(self, communicator: Communicator) -> None:
        with self._changed:
            is_late = self._core.state is PairState.BROKEN
            if not is_late:
                self._communicator = communicator
        if is_late:
            communicator.abort()
            return
        self.decide(lambda core: core.made(time.monotonic()))
        under_way: deque[Move] = deque()
        try:
            while self._await_work(under_way):
                self._start_moves(communicator, under_way)
                self._poll(communicator, under_way)
        except _OverError:
            pass
        except (CommunicatorError, DeviceError) as error:
            self.fail(str(error))
        self._leave(under_way)

    def _await_work(self, under_way: deque[Move]) -> bool:
        """Wait for something to do; say whether the pair goes on."""
        with self._changed:
            while self._core.state is not PairState.BROKEN and not (self._moves or self._emptying or under_way):
                self._changed.wait()
            return self._core.state is not PairState.BROKEN

    def _start_moves(self, communicator: Communicator, under_way: deque[Move]) -> None:
        """Begin what the core has said, each slot in a group of its own: the groups of both ends must be alike."""
        while True:
            with self._changed:
                if not self._moves:
                    return
                move = self._moves.popleft()
            under_way.append(move)
            first_byte = move.buffer * BUFFER_BYTES
            with self._inside(), communicator.group():
                if self._rank == HOLDER_RANK:
                    communicator.send(self.memory, first_byte, move.num_bytes, self._stream)
                else:
                    communicator.receive(self.memory, first_byte, move.num_bytes, self._stream)
            self._crossed[move.buffer].record(self._stream)

    def _poll(self, communicator: Communicator, under_way: deque[Move]) -> None:
        """Tell the core of what has crossed and what has been emptied; wait a little where that was nothing."""
        crossed = self._crossed[under_way[0].buffer] if under_way else None
        has_crossed = crossed is not None and crossed.is_done()
        with self._inside():
            failure = communicator.failure()
        if failure is not None:  # asked after the event: a failure may have ended it
            raise CommunicatorError("an operation under way", failure)
        emptied = self._first_emptying()
        if has_crossed:
            slot = under_way.popleft().slot
            self.decide(lambda core: core.moved(slot, time.monotonic()))
        elif emptied is not None and emptied.is_done():
            with self._changed:
                slot = self._emptying.popleft()
            self.decide(lambda core: cast(ReaderCore, core).emptied(slot, time.monotonic()))
        elif (awaited := crossed or emptied) is not None:
            awaited.wait(limits.CROSSED_POLL_S)

    def _first_emptying(self) -> Event | None:
        """Return the event behind the kernel that empties the first of these buffers."""
        with self._changed:
            while self._emptying:
                buffer = cast(ReaderCore, self._core).buffer_of(self._emptying[0])
                if buffer is not None:
                    return self.used[buffer]
                self._emptying.popleft()
        return None

    def _leave(self, under_way: deque[Move]) -> None:
        """The pair is over: wait for the abort and for what it ends, however long. Nobody waits for this thread."""
        with self._changed:
            abort_thread = self._abort_thread
        if abort_thread is not None:
            abort_thread.join()
        with contextlib.suppress(DeviceError):
            for move in under_way:
                while not self._crossed[move.buffer].wait(limits.WATCH_S):
                    pass
