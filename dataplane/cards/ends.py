"""The ends of the carriers from and to a card: `cuda` copies between cards that see each other's memory, `nccl` sends
from card to card, and over `tcp` frames stop in host memory (`Staged…`).

A holder waits until its engine's card has written a frame before it is announced (`KVArena.wait_written`), and every
end waits for its own card before it reports that it is done with a frame: nothing is under way between two frames.
"""

import time
from collections.abc import Callable

from dataplane.cards import limits
from dataplane.cards.card import Card, CardError, CardMemory, CardStream, CardStuckError, Rows, rows_of, wait_until
from dataplane.cards.pairs import Pair, Pairs
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, sum64
from dataplane.memory.extent import Frame
from dataplane.memory.frames import FrameRows, packed_rows
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Header, Names, TransferStats, encode_header
from dataplane.protocol.wire import Wire, WireClosedError, WireTimeoutError


class CardLane:
    """What one stream of frames uses of a card. For one thread. `writes`: to an arena."""

    def __init__(self, card: Card, frame_hash: FrameHash, *, writes: bool) -> None:
        self.stream: CardStream = card.stream()
        self._digests = frame_hash.kind == "sum64"
        self._writes = writes

    def run(
        self,
        work: Callable[[CardStream], None],
        digested: tuple[CardMemory, Rows],
        stats: TransferStats,
        wire: Wire,
        timeout_s: float,
    ) -> int:
        """Do the work, wait for it, and return the digest of these rows behind it (0 without digests). Raises
        CardError, WireClosedError, WireTimeoutError."""
        # Queue the work and behind it the digest: the stream runs in order, so the digest covers what was written.
        started = time.perf_counter_ns()
        work(self.stream)
        pending = self.stream.sum64(*digested) if self._digests else None
        # Wait for the card, but no longer than the peer is there.
        if not wait_until(self.stream.is_done, lambda: wire.has_ended, timeout_s):
            if not wire.has_ended:
                raise WireTimeoutError("the card has not moved a frame in time")
            # A holder that has sent its last message has sent this frame before: it counts, and so does that message.
            if not (self._writes and wait_until(self.stream.is_done, lambda: wire.is_cut, limits.LAST_FRAME_S)):
                raise WireClosedError("the peer has gone")
        # The stream is done: count the time, and read the digest, which may only be read from here on.
        copied = time.perf_counter_ns()
        stats.copy_ns += copied - started
        if pending is None:
            return 0
        value = pending.value()
        stats.verify_ns += time.perf_counter_ns() - copied
        return value

    def close(self) -> None:
        """Wait for what is under way, if anything is. Raises CardStuckError where that may still write to the arena."""
        try:
            is_done = wait_until(self.stream.is_done, lambda: False, limits.CARD_S)
            reason = "" if is_done else f"the card has not ended within {limits.CARD_S:.0f} s"
        except CardError as error:
            reason = f"the card is not known to have ended: {error}"
        self.stream.close()
        if reason and self._writes:
            raise CardStuckError("drain", reason)


class CudaHolder:
    """Announces frames, and digests them while the reader copies."""

    needs_ack = True
    frame_bytes = limits.CUDA_FRAME_BYTES

    def __init__(self, card: Card, memory: CardMemory, source: SequenceRuns, frame_hash: FrameHash, names: Names):
        self.names = names
        self._memory = memory
        self._source = source
        self._lane = CardLane(card, frame_hash, writes=False)

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head` and the frame's header. Raises WireClosedError, WireTimeoutError, CardError."""
        wire.send([head + encode_header(data)], timeout_s)
        digested = self._memory, rows_of(self._source, data)
        return self._lane.run(lambda _: None, digested, stats, wire, timeout_s)

    def close(self) -> None:
        """Wait until nothing is digested any more."""
        self._lane.close()


class CudaReader:
    """Copies frames from the holder's memory. `source`: where the sequence is there. `give_back`: called once that is
    not used any more."""

    needs_ack = True

    def __init__(
        self,
        card: Card,
        theirs: tuple[CardMemory, SequenceRuns],
        ours: tuple[CardMemory, SequenceRuns],
        frame_hash: FrameHash,
        give_back: Callable[[], None],
    ) -> None:
        self._theirs = theirs
        self._ours = ours
        self._give_back = give_back
        self._lane = CardLane(card, frame_hash, writes=True)

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Copy the frame; return the digest of what arrived. Raises CardError, WireClosedError, WireTimeoutError."""
        (source, source_runs), (target, target_runs) = self._theirs, self._ours
        source_rows, rows = rows_of(source_runs, data), rows_of(target_runs, data)
        return self._lane.run(
            lambda stream: stream.copy(source, source_rows, target, rows),
            (target, rows), stats, wire, deadline - time.monotonic(),
        )  # fmt: skip

    def close(self) -> None:
        """Wait until the card writes to the arena no more. Raises CardStuckError."""
        self._lane.close()
        self._give_back()


class _NcclEnd:
    """One end of a pair, for one stream. It gives the pair back if all that was begun has ended, else that is over."""

    needs_ack = False
    frame_bytes = limits.NCCL_FRAME_BYTES
    names = None
    _writes: bool

    def __init__(
        self, card: Card, arena: tuple[CardMemory, SequenceRuns], pairs: Pairs, pair: Pair, frame_hash: FrameHash
    ) -> None:
        self._memory, self._runs = arena
        self._pairs = pairs
        self._pair = pair
        self._lane = CardLane(card, frame_hash, writes=self._writes)
        self._is_midway = False
        pair.connect_once()

    def _cross(
        self,
        data: Header,
        work: Callable[[CardStream, CardMemory, Rows], None],
        stats: TransferStats,
        wire: Wire,
        timeout_s: float,
    ) -> int:
        """Do the work over the pair's buffer, digest that, and wait for it."""
        rows = rows_of(self._runs, data)
        buffer = self._pair.buffer(rows.total_bytes)
        self._is_midway = True
        packed = buffer, rows.packed
        digest = self._lane.run(lambda stream: work(stream, buffer, rows), packed, stats, wire, timeout_s)
        self._is_midway = False
        return digest

    def close(self) -> None:
        """Wait until nothing of the arena is used any more. Raises CardStuckError."""
        if self._is_midway:
            self._pairs.drop(self._pair)
        self._lane.close()


class NcclHolder(_NcclEnd):
    """Sends frames, packed, over the pair's communicator."""

    _writes = False

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head` and the frame. Raises WireClosedError, WireTimeoutError, CardError."""
        wire.send([head], timeout_s)  # the reader joins once it knows that this end has accepted
        communicator = self._pair.communicator()

        def work(stream: CardStream, buffer: CardMemory, rows: Rows) -> None:
            stream.copy(self._memory, rows, buffer, rows.packed)
            communicator.send(buffer, rows.total_bytes, stream)

        wire.send([encode_header(data)], timeout_s)
        return self._cross(data, work, stats, wire, timeout_s)

    def close(self) -> None:
        """Give the pair back."""
        super().close()
        self._pair.busy.release()


class NcclReader(_NcclEnd):
    """Receives frames over the pair's communicator."""

    _writes = True

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Receive the frame and put it in place. Raises WireClosedError, WireTimeoutError, CardError."""
        communicator = self._pair.communicator()

        def work(stream: CardStream, buffer: CardMemory, rows: Rows) -> None:
            communicator.receive(buffer, rows.total_bytes, stream)
            stream.copy(buffer, rows.packed, self._memory, rows)

        return self._cross(data, work, stats, wire, deadline - time.monotonic())


class _Staging:
    """Room for a frame on the card, packed, and in pinned host memory. It grows to the largest.

    The card digests each frame where it lies in the arena, and the host what it has of it: whatever goes wrong between
    the two is seen.
    """

    def __init__(
        self, card: Card, arena: tuple[CardMemory, SequenceRuns], frame_hash: FrameHash, *, writes: bool
    ) -> None:
        self._card = card
        self._memory, self._runs = arena
        self._digests = frame_hash.kind is not None
        self._lane = CardLane(card, FrameHash(), writes=writes)
        self._packed: CardMemory | None = None
        self._host: ByteArray | None = None

    def close(self) -> None:
        """Wait for what is under way. Raises CardStuckError."""
        self._lane.close()
        if self._packed is not None:
            self._packed.close()

    def _room(self, num_bytes: int) -> tuple[CardMemory, ByteArray]:
        if self._packed is None or self._host is None or self._packed.num_bytes < num_bytes:
            if self._packed is not None:
                self._packed.close()
            self._packed, self._host = self._card.allocate(num_bytes), self._card.pinned(num_bytes)
        return self._packed, self._host[:num_bytes]

    def _frame(self, host: ByteArray, frame: Frame) -> FrameRows:
        return packed_rows(host, self._runs.row_bytes, 2 * frame.num_layers)

    def _finish(self, rows: Rows, host: ByteArray) -> None:
        """Wait for the card, and compare. Raises CardError."""
        stream = self._lane.stream
        pending = stream.sum64(self._memory, rows) if self._digests else None
        if not wait_until(stream.is_done, lambda: False, limits.CARD_S):
            raise CardError("stage a frame", f"the card has not done it within {limits.CARD_S:.0f} s")
        if pending is not None and pending.value() != sum64(host):
            raise CardError("stage a frame", "the card and the host do not have the same bytes")


class StagedSource(_Staging):
    """A sequence's rows on a card, as the host reads them (`frames.Memory`)."""

    def rows(self, frame: Frame) -> FrameRows:
        """Bring the frame to the host. Raises CardError."""
        rows = rows_of(self._runs, frame)
        packed, host = self._room(rows.total_bytes)
        self._lane.stream.copy(self._memory, rows, packed, rows.packed)
        self._lane.stream.download(packed, host)
        self._finish(rows, host)
        return self._frame(host, frame)

    def written(self, frame: Frame) -> None:
        """Nothing is written to a source."""


class StagedTarget(_Staging):
    """A sequence's rows on a card, as the host writes them (`frames.Memory`)."""

    def rows(self, frame: Frame) -> FrameRows:
        """Return room for the frame. Raises CardError."""
        _, host = self._room(rows_of(self._runs, frame).total_bytes)
        return self._frame(host, frame)

    def written(self, frame: Frame) -> None:
        """Bring the frame from the host to its place. Raises CardError."""
        rows = rows_of(self._runs, frame)
        packed, host = self._room(rows.total_bytes)
        self._lane.stream.upload(host, packed)
        self._lane.stream.copy(packed, rows.packed, self._memory, rows)
        self._finish(rows, host)
