"""The carrier across cards: a frame's rows are gathered into a buffer of the pair's, cross by its communicator, and are
scattered into place. One kernel at each end, which digests as well.

A frame has left the arena when it has been gathered: the lease is looked at then, and the Commit may overtake the
bytes.
The kernels here wait for nothing but this process's own engine. What waits for the peer is the library's.
"""

import itertools
import time
from collections import deque
from dataclasses import dataclass

from dataplane.cards.device import DeviceError, DigestSlot, Stream
from dataplane.cards.device_arena import DeviceArena
from dataplane.cards.moves import gather_moves, scatter_moves
from dataplane.cards.nccl.pair import BUFFER_BYTES, PairEnd
from dataplane.cards.nccl.pair_core import HolderCore, ReaderCore
from dataplane.cards.side import SideStream, WorkPiece, wait_done
from dataplane.carriers.carrier import Access
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Digest, Header, TransferStats, encode_header
from dataplane.protocol.wire import Wire, WireTimeoutError

_numbers = itertools.count(1)


@dataclass(slots=True)
class _Begun:
    """A frame that is to be sent. `gathered`: where it is, and when; None while there was no buffer free."""

    data: Header
    mark: int
    gathered: tuple[int, WorkPiece] | None = None


class PairedHolder:
    """Sends frames over a pair. Raises PairBrokenError, ProtocolError when the pair has a read of this name."""

    needs_ack = False
    access = Access()
    frame_bytes = BUFFER_BYTES
    max_begun = 2

    @property
    def ahead(self) -> "PairedHolder":
        """It gathers frames into the pair's buffers."""
        return self

    def __init__(
        self, pair: PairEnd[HolderCore], read_id: int, arena: DeviceArena, source: SequenceRuns, *, digests: bool
    ) -> None:
        self._pair = pair
        self._read_id = read_id
        self._arena = arena
        self._source = source
        self._digests = digests
        self._begun: deque[_Begun] = deque()
        pair.decide(lambda core: core.enter(read_id))
        try:
            self._side = SideStream(arena.device, f"out-{next(_numbers)}", digests=digests, writes=False)
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
        if begun.gathered is None:
            buffer = self._pair.wait(lambda core: core.begin(self._read_id), deadline, lambda: wire.has_ended)
            begun.gathered = self._gather(begun, buffer)
        buffer, piece = begun.gathered
        _wait(piece, wire, deadline)
        gathered = time.perf_counter_ns()
        digest = self._side.settle(piece)
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
        """Wait for what gathers, give the buffers back. Raises CardStuckError."""
        self._side.close()
        self._pair.leave(self._read_id)

    def _gather_begun(self) -> None:
        """Gather what there are buffers for, in the frames' order: a read that waits for a buffer has none, else reads
        could wait for each other's."""
        for begun in self._begun:
            if begun.gathered is None:
                buffer = self._pair.decide(lambda core: core.begin(self._read_id))
                if buffer is None:
                    return
                begun.gathered = self._gather(begun, buffer)

    def _gather(self, begun: _Begun, buffer: int) -> tuple[int, WorkPiece]:
        moves, arena, pair = gather_moves(self._source, begun.data, buffer * BUFFER_BYTES), self._arena, self._pair

        def work(stream: Stream, digest: DigestSlot | None) -> None:
            arena.order(stream, begun.mark)
            arena.device.move(stream, moves, arena.memory, pair.memory, digest)
            pair.used[buffer].record(stream)

        return buffer, self._side.put(work)


class PairedReader:
    """Receives frames over a pair, for the read that the pair calls `read_id`. Raises DeviceError."""

    needs_ack = False

    def __init__(
        self, pair: PairEnd[ReaderCore], read_id: int, arena: DeviceArena, target: SequenceRuns, *, digests: bool
    ) -> None:
        self._pair = pair
        self._read_id = read_id
        self._arena = arena
        self._target = target
        self._digests = digests
        self._landings: deque[WorkPiece] = deque()
        self._side = SideStream(arena.device, f"in-{next(_numbers)}", digests=digests, writes=True)

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Scatter the frame once it has come. Raises DeviceError, ProtocolError, WireClosedError, WireTimeoutError."""
        started = time.perf_counter_ns()
        pair, slot = self._pair, data.at
        # That the holder has closed the read's own wire says nothing: the slot was told before the frame was.
        buffer = pair.wait(lambda core: core.take(self._read_id, slot, data.length), deadline, lambda: wire.is_cut)
        arrived = time.perf_counter_ns()
        stats.wait_ns += arrived - started
        moves, arena = scatter_moves(self._target, data, buffer * BUFFER_BYTES), self._arena

        def work(stream: Stream, digest: DigestSlot | None) -> None:
            arena.device.move(stream, moves, pair.memory, arena.memory, digest)
            pair.used[buffer].record(stream)

        landing = self._side.put(work)
        self._landings.append(landing)
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
            _wait(self._landings[-1], None, deadline)

    def close(self) -> None:
        """Wait for what is being scattered, give everything back. Raises CardStuckError."""
        self._side.close()
        self._pair.leave(self._read_id)

    def _digest(self, landing: WorkPiece, stats: TransferStats, deadline: float) -> int:
        started = time.perf_counter_ns()
        _wait(landing, None, deadline)
        value = self._side.settle(landing)
        self._landings.remove(landing)
        stats.verify_ns += time.perf_counter_ns() - started if self._digests else 0
        return value


def _wait(piece: WorkPiece, wire: Wire | None, deadline: float) -> None:
    """Wait for this process's own card. Raises DeviceError, WireTimeoutError, WireClosedError when `wire` has ended."""
    if not wait_done(piece, wire, deadline - time.monotonic()):
        raise WireTimeoutError("the card has not come to it within the time allowed")
