"""The carrier across cards: a frame's rows are gathered into a buffer of the pair's, cross by its communicator, and are
scattered into place. One kernel at each end, which digests as well.

A frame has left the arena when it has been gathered: the lease is looked at then, and the Commit may overtake the
bytes.
The kernels here wait for nothing but this process's own engine. What waits for the peer is the library's.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass

from dataplane.carrier import Access
from dataplane.device import Device, DeviceError, DigestSlot, Event
from dataplane.device_arena import DeviceArena
from dataplane.pair import BUFFER_BYTES, Pair
from dataplane.pair_core import HolderCore, ReaderCore
from dataplane.runs import SequenceRuns, gather_moves, scatter_moves
from dataplane.side import DRAIN_S, CardStuckError
from dataplane.stream import Digest, Header, TransferStats, encode_header
from dataplane.wire import Wire, WireClosedError, WireTimeoutError

log = logging.getLogger(__name__)

_SLICE_S = 0.05
"""How long a wait for this process's own card goes on before it asks whether anybody still wants it."""


@dataclass(slots=True)
class _Begun:
    """A frame that is to be sent. `buffer`: None while there was none free."""

    data: Header
    mark: int
    buffer: int | None = None
    digest: DigestSlot | None = None


class PairedHolder:
    """Sends frames over a pair. Raises PairBrokenError, ProtocolError when the pair has a read of this name."""

    needs_ack = False
    access = Access()
    frame_bytes = BUFFER_BYTES
    max_begun = 2

    def __init__(
        self, pair: Pair[HolderCore], read_id: int, arena: DeviceArena, source: SequenceRuns, *, digests: bool
    ) -> None:
        self._pair = pair
        self._read_id = read_id
        self._arena = arena
        self._source = source
        self._digests = digests
        self._begun: deque[_Begun] = deque()
        pair.decide(lambda core: core.enter(read_id))
        try:
            self._stream = arena.device.new_stream()
        except DeviceError:
            pair.leave(read_id)
            raise

    def begin(self, data: Header, mark: int) -> None:
        """Gather the frame into a buffer, if there is one. Raises DeviceError, PairBrokenError."""
        self._begun.append(_Begun(data, mark))
        self._gather_begun()

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send the oldest frame that was begun, once it is gathered. Raises DeviceError, WireClosedError,
        WireTimeoutError."""
        started = time.perf_counter_ns()
        deadline = time.monotonic() + timeout_s
        begun = self._begun[0]
        buffer = begun.buffer
        if buffer is None:
            buffer = self._pair.wait(lambda core: core.begin(self._read_id), deadline, lambda: wire.has_ended)
            self._gather(begun, buffer)
        _await(self._pair.used[buffer], deadline, wire)
        gathered = time.perf_counter_ns()
        digest = _take(begun.digest)
        taken = time.perf_counter_ns()
        slot = self._pair.decide(lambda core: core.post(buffer, data.length, time.monotonic()))
        self._begun.popleft()
        self._gather_begun()
        wire.send([head + encode_header(data._replace(at=slot))], timeout_s)
        stats.wait_ns += gathered - started
        stats.verify_ns += taken - gathered if self._digests else 0
        stats.copy_ns += time.perf_counter_ns() - taken
        return lambda: digest

    def acked(self, sequence: int) -> None:
        """There are no Acks."""

    def close(self) -> None:
        """Wait for what gathers, give the buffers back."""
        deadline = time.monotonic() + DRAIN_S
        try:
            for begun in self._begun:
                if begun.buffer is not None and not self._pair.used[begun.buffer].wait(deadline - time.monotonic()):
                    raise CardStuckError("drain", f"what is gathered has not ended within {DRAIN_S:.0f} s")
        except CardStuckError:
            raise
        except DeviceError as error:
            log.warning("a card that has failed reads nothing any more: %s", error)
        for begun in self._begun:
            if begun.digest is not None:
                begun.digest.close()
        self._begun.clear()
        self._stream.close()
        self._pair.leave(self._read_id)

    def _gather_begun(self) -> None:
        """Gather what there are buffers for, in the frames' order: a read that waits for a buffer has none, else reads
        could wait for each other's."""
        for begun in self._begun:
            if begun.buffer is None:
                buffer = self._pair.decide(lambda core: core.begin(self._read_id))
                if buffer is None:
                    return
                self._gather(begun, buffer)

    def _gather(self, begun: _Begun, buffer: int) -> None:
        begun.buffer = buffer
        device, stream = self._arena.device, self._stream
        self._arena.order(stream, begun.mark)
        begun.digest = device.new_digest() if self._digests else None
        moves = gather_moves(self._source, begun.data, buffer * BUFFER_BYTES)
        device.move(stream, moves, self._arena.memory, self._pair.memory, begun.digest)
        self._pair.used[buffer].record(stream)


@dataclass(slots=True)
class _Landing:
    """A frame that is being scattered. `landed`: recorded behind it."""

    landed: Event
    digest: DigestSlot | None


class PairedReader:
    """Receives frames over a pair, for the read that the pair calls `read_id`. Raises DeviceError."""

    needs_ack = False

    def __init__(
        self, pair: Pair[ReaderCore], read_id: int, arena: DeviceArena, target: SequenceRuns, *, digests: bool
    ) -> None:
        self._pair = pair
        self._read_id = read_id
        self._arena = arena
        self._target = target
        self._digests = digests
        self._landings: deque[_Landing] = deque()
        self._free_events: list[Event] = []
        self._device: Device = arena.device
        self._drained = self._device.new_event()
        try:
            self._stream = self._device.new_stream()
        except DeviceError:
            self._drained.close()
            raise

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Scatter the frame once it has come. Raises DeviceError, ProtocolError, WireClosedError, WireTimeoutError."""
        started = time.perf_counter_ns()
        pair, slot = self._pair, data.at
        # That the holder has closed the read's own wire says nothing: the slot was told before the frame was.
        buffer = pair.wait(lambda core: core.take(self._read_id, slot, data.length), deadline, lambda: wire.is_cut)
        arrived = time.perf_counter_ns()
        stats.wait_ns += arrived - started
        landing = _Landing(
            self._free_events.pop() if self._free_events else self._device.new_event(),
            self._device.new_digest() if self._digests else None,
        )
        self._landings.append(landing)
        moves = scatter_moves(self._target, data, buffer * BUFFER_BYTES)
        self._device.move(self._stream, moves, pair.memory, self._arena.memory, landing.digest)
        pair.used[buffer].record(self._stream)
        landing.landed.record(self._stream)
        pair.emptying(slot)
        stats.copy_ns += time.perf_counter_ns() - arrived
        return lambda: self._digest(landing, stats, deadline)

    def finished(self) -> int:
        """There are no Acks."""
        return 0

    def wait_finished(self, deadline: float) -> int:
        """There are no Acks."""
        return 0

    def finish(self, deadline: float) -> None:
        """Wait until all that has landed is in place. Raises DeviceError, WireTimeoutError."""
        if self._landings:  # the stream's last: the others come before it
            _await(self._landings[-1].landed, deadline, None)

    def close(self) -> None:
        """Wait for what is being scattered, give everything back. Raises CardStuckError."""
        if self._landings:
            try:
                self._drained.record(self._stream)
                is_done = self._drained.wait(DRAIN_S)
            except DeviceError as error:
                raise CardStuckError("drain", f"a frame is not known to have landed: {error}") from None
            if not is_done:
                raise CardStuckError("drain", f"what lands has not ended within {DRAIN_S:.0f} s")
        for landing in self._landings:
            self._let_go(landing)
        self._landings.clear()
        for event in (self._drained, *self._free_events):
            event.close()
        self._stream.close()
        self._pair.leave(self._read_id)

    def _digest(self, landing: _Landing, stats: TransferStats, deadline: float) -> int:
        started = time.perf_counter_ns()
        _await(landing.landed, deadline, None)
        value = 0 if landing.digest is None else landing.digest.value()
        self._landings.remove(landing)
        self._let_go(landing)
        stats.verify_ns += time.perf_counter_ns() - started
        return value

    def _let_go(self, landing: _Landing) -> None:
        if landing.digest is not None:
            landing.digest.close()
        self._free_events.append(landing.landed)


def _take(digest: DigestSlot | None) -> int:
    """Return the digest of a kernel that is done, and give its slot back."""
    if digest is None:
        return 0
    value = digest.value()
    digest.close()
    return value


def _await(event: Event, deadline: float, wire: Wire | None) -> None:
    """Wait for this process's own card. Raises DeviceError, WireTimeoutError, WireClosedError when `wire` has ended."""
    while not event.wait(min(_SLICE_S, max(0.0, deadline - time.monotonic()))):
        if time.monotonic() >= deadline:
            raise WireTimeoutError("the card has not come to it within the time allowed")
        if wire is not None and wire.has_ended:
            raise WireClosedError("closed while the card was at work")
