"""Carriers from and to arenas on cards by way of host memory: `tcp` and `shm`, where an end is on a card.

A holder on a card brings frames out ahead of sending them, each as soon as the card has computed it; a reader on a card
brings one frame in while the next is being received. The card digests each frame with the copy out of the holder's
arena and with the copy into the reader's. What crosses a network is digested on the host besides, which checks what the
card has found: whatever goes wrong between the two arenas is seen.
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from dataplane.cards import limits
from dataplane.cards.device import DeviceError
from dataplane.cards.device_arena import DeviceArena
from dataplane.cards.lane import Lane, Passage
from dataplane.cards.side import wait_done
from dataplane.cards.staging_ring import RingFullError, Slot
from dataplane.carriers.carrier import Access, HeldUpError
from dataplane.carriers.shm import FrameSource
from dataplane.carriers.tcp import encrypted, receive
from dataplane.memory import frames
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, sum64
from dataplane.memory.codec import BlockCodec, KVNotFiniteError
from dataplane.memory.extent import Extent
from dataplane.memory.frames import Rows, Staging, packed_rows
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import (
    Digest,
    Header,
    ProtocolError,
    TransferFailedError,
    TransferStats,
    check_no_place,
    encode_header,
)
from dataplane.protocol.wire import Wire, WireTimeoutError
from schemas.kv import ReadEnd


@dataclass(slots=True, eq=False)
class _BegunFrame:
    data: Header
    mark: int
    passage: Passage | None = None


class StagedHolder:
    """Over tcp from a card. `send` waits for the card, and then sends what it has brought to the host."""

    needs_ack = False
    access = Access()
    max_begun = limits.MAX_BEGUN

    @property
    def ahead(self) -> "StagedHolder":
        """It brings frames out to the host."""
        return self

    def __init__(self, arena: DeviceArena, source: SequenceRuns, extent: Extent, frame_hash: FrameHash) -> None:
        self.frame_bytes = _frame_bytes(arena, extent)
        self._source = source
        self._extent = extent
        self._hash = frame_hash
        self._packed = Staging()
        self._ciphertext = Staging()
        self._begun: deque[_BegunFrame] = deque()
        self._lane = Lane(arena, "out", digests=frame_hash.kind is not None)

    def begin(self, data: Header, mark: int) -> None:
        """Bring the frame out once the card has reached the mark, if there is room for it now. Raises DeviceError."""
        self._begun.append(_BegunFrame(data, mark))
        self._bring_out()

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the oldest frame, once it is here. Raises DeviceError, WireClosedError, WireTimeoutError, and
        KVNotFiniteError, before anything is sent."""
        passage = self._arrived(wire, stats, timeout_s)
        digest = self._settled(passage, stats)
        header, payload, digest = self._frame(data, passage.slot, digest, stats)
        started = time.perf_counter_ns()
        wire.send([head + header, *payload], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        self._begun.popleft()
        self._sent(data, passage.slot)
        self._bring_out()
        return lambda: digest

    def acked(self, sequence: int) -> None:
        """There are no Acks."""

    def close(self) -> None:
        """Wait until the card reads the arena no more, give the slots back. Raises DeviceError."""
        self._lane.close()

    def _frame(
        self, data: Header, slot: Slot, digest: int, stats: TransferStats
    ) -> tuple[bytes, tuple[ByteArray, ...], int]:
        """Return the frame's header, what follows it, and the digest of that. Raises KVNotFiniteError."""
        payload, codec = self._lane.host(slot), self._extent.codec
        if self._hash.kind is not None and sum64(payload) != digest:
            raise DeviceError("staging", f"frame {data.sequence} has changed on its way from the card")
        if codec is not None:
            payload = self._pack(codec, data, payload, stats)
        rows, data = encrypted(packed_rows(payload, data.length), data, self._hash, self._ciphertext, stats)
        digest = data.tag or frames.digest(rows, stats, self._hash.new(data.sequence))
        return encode_header(data), (rows.array,), digest

    def _sent(self, data: Header, slot: Slot) -> None:
        self._lane.release(slot)

    def _bring_out(self) -> None:
        """Begin what there is room for, in the frames' order."""
        for begun in self._begun:
            if begun.passage is None:
                slot = self._lane.take_now(_memory_bytes(self._extent, begun.data))
                if slot is None:
                    return
                begun.passage = self._lane.bring_out(slot, self._source, begun.data, begun.mark)

    def _arrived(self, wire: Wire, stats: TransferStats, timeout_s: float) -> Passage:
        """Return the oldest frame's passage, once it is done."""
        started, oldest = time.perf_counter_ns(), self._begun[0]
        try:
            if oldest.passage is None:
                slot = self._lane.take(_memory_bytes(self._extent, oldest.data), wire, timeout_s)
                oldest.passage = self._lane.bring_out(slot, self._source, oldest.data, oldest.mark)
            if not wait_done(oldest.passage.piece, wire, timeout_s):
                raise DeviceError("staging", f"frame {oldest.data.sequence} is not there within {timeout_s:.1f} s")
            return oldest.passage
        except RingFullError as error:
            raise DeviceError("staging", str(error)) from error
        finally:
            stats.wait_ns += time.perf_counter_ns() - started

    def _settled(self, passage: Passage, stats: TransferStats) -> int:
        started = time.perf_counter_ns()
        digest = self._lane.settle(passage)
        if self._hash.kind is not None:
            stats.verify_ns += time.perf_counter_ns() - started
        return digest

    def _pack(self, codec: BlockCodec, data: Header, rows: ByteArray, stats: TransferStats) -> ByteArray:
        """Return the frame as it crosses; the next call voids it. Raises KVNotFiniteError."""
        started = time.perf_counter_ns()
        packed = self._packed.take(data.length)
        for part, target in _codec_parts(self._extent, codec, data, rows, packed):
            codec.encode(part, data.first_token, target)
        stats.codec_ns += time.perf_counter_ns() - started
        return packed


class StagedSharedHolder(StagedHolder):
    """Over shm from a card: a frame lies in the staging ring until the reader's Ack."""

    needs_ack = True
    access = Access(staged=True)

    def __init__(self, arena: DeviceArena, source: SequenceRuns, extent: Extent, frame_hash: FrameHash) -> None:
        super().__init__(arena, source, extent, frame_hash)
        self._unacked: deque[tuple[int, Slot]] = deque()

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """As over tcp. Raises HeldUpError when room for the frame comes only with an Ack."""
        self._bring_out()
        if self._begun[0].passage is None and self._unacked:
            raise HeldUpError(f"frame {data.sequence} has no room in the staging ring")
        return super().send(wire, head, data, stats, timeout_s)

    def acked(self, sequence: int) -> None:
        """The reader has copied all frames up to this one."""
        while self._unacked and self._unacked[0][0] <= sequence:
            self._lane.release(self._unacked.popleft()[1])

    def _frame(
        self, data: Header, slot: Slot, digest: int, stats: TransferStats
    ) -> tuple[bytes, tuple[ByteArray, ...], int]:
        return encode_header(data._replace(at=slot.first_byte)), (), digest

    def _sent(self, data: Header, slot: Slot) -> None:
        self._unacked.append((data.sequence, slot))


class _Passing:
    """A frame on its way into the arena. `host_digest`: what was digested as it came, None: nothing."""

    def __init__(self, passage: Passage, host_digest: int | None, expected: int | None) -> None:
        self.passage = passage
        self.host_digest = host_digest
        self.expected = expected
        """What the card must find."""
        self.found: int | None = None
        """What it has found: the frame is in place."""


class StagedReader:
    """Over tcp into a card: while one frame is on its way up the next one is received."""

    needs_ack = False

    def __init__(self, arena: DeviceArena, target: SequenceRuns, extent: Extent, frame_hash: FrameHash) -> None:
        self._target = target
        self._extent = extent
        self._hash = frame_hash
        self._packed = Staging()
        self._max_bytes = arena.ring.frame_bytes
        self._passing: deque[_Passing] = deque()
        self._lane = Lane(arena, "in", digests=frame_hash.kind is not None)

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Receive the frame and begin to bring it in; the digest is known once it is in place. Raises DeviceError,
        WireClosedError, WireTimeoutError, ProtocolError; the digest TransferFailedError too."""
        slot = self._take(wire, data, stats, deadline)
        rows = self._lane.host(slot)
        host_digest = self._receive(wire, data, rows, stats, deadline)
        expected = None if host_digest is None else sum64(rows)
        passing = _Passing(self._lane.bring_in(slot, self._target, data), host_digest, expected)
        self._passing.append(passing)
        return lambda: self._digest(passing, data, stats, deadline)

    def finished(self) -> int:
        """There are no Acks."""
        return 0

    def wait_finished(self, deadline: float) -> int:
        """There are no Acks."""
        return 0

    def finish(self, deadline: float) -> None:
        """Wait until all that has landed is in place. Raises WireTimeoutError, DeviceError."""
        while self._passing:
            self._settle_oldest(deadline)

    def close(self) -> None:
        """Wait until the card writes to the arena no more, give the slots back. Raises DeviceError."""
        self._lane.close()

    def _receive(self, wire: Wire, data: Header, rows: ByteArray, stats: TransferStats, deadline: float) -> int | None:
        """Put the frame's rows into the slot; return the digest where it is the host's to compute."""
        check_no_place(data)
        hasher = self._hash.opening(data.sequence, data.tag)
        codec = self._extent.codec
        if codec is None:
            receive(wire, rows, hasher, stats, deadline)
        else:
            packed = self._packed.take(data.length)
            receive(wire, packed, hasher, stats, deadline)
            self._unpack(codec, data, packed, rows, stats)
        return None if hasher is None else hasher.intdigest()

    def _unpack(
        self, codec: BlockCodec, data: Header, packed: ByteArray, rows: ByteArray, stats: TransferStats
    ) -> None:
        started = time.perf_counter_ns()
        try:
            for part, source in _codec_parts(self._extent, codec, data, rows, packed):
                codec.decode(source, data.first_token, part)
        except KVNotFiniteError as error:
            raise ProtocolError(f"frame {data.sequence}: {error}") from error
        stats.codec_ns += time.perf_counter_ns() - started

    def _take(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Slot:
        """Return a slot for the frame. Those that it has come back by themselves: it waits for other streams' only
        when it has none."""
        num_bytes = _memory_bytes(self._extent, data)
        if num_bytes > self._max_bytes:
            raise ProtocolError(f"frame {data.sequence} has {num_bytes} bytes; here fit {self._max_bytes}")
        while self._passing and self._passing[0].passage.piece.event.is_done():
            self._settle_oldest(deadline)
        while True:
            slot = self._lane.take_now(num_bytes) if len(self._passing) < limits.MAX_PASSING else None
            if slot is not None:
                return slot
            started = time.perf_counter_ns()
            if self._passing:
                self._settle_oldest(deadline)
            else:
                slot = self._take_first(num_bytes, wire, deadline)
            stats.wait_ns += time.perf_counter_ns() - started
            if slot is not None:
                return slot

    def _take_first(self, num_bytes: int, wire: Wire, deadline: float) -> Slot:
        try:
            return self._lane.take(num_bytes, wire, deadline - time.monotonic())
        except RingFullError as error:
            raise WireTimeoutError(str(error)) from error

    def _settle_oldest(self, deadline: float) -> None:
        oldest = self._passing[0]
        if not wait_done(oldest.passage.piece, None, deadline - time.monotonic()):
            raise WireTimeoutError("the card has not taken a frame in by the deadline")
        oldest.found = self._lane.settle(oldest.passage)
        self._lane.release(oldest.passage.slot)
        self._passing.popleft()

    def _digest(self, passing: _Passing, data: Header, stats: TransferStats, deadline: float) -> int:
        """Return the frame's digest, once it is in place."""
        started = time.perf_counter_ns()
        while passing.found is None:
            self._settle_oldest(deadline)
        if self._hash.kind is not None:
            stats.verify_ns += time.perf_counter_ns() - started
        if passing.host_digest is None:
            return passing.found
        if passing.found != passing.expected:
            raise TransferFailedError(ReadEnd.DIGEST, f"frame {data.sequence} has changed on its way to the card")
        return passing.host_digest


class SharedStagedReader(StagedReader):
    """Over shm into a card: copies frames from the holder's memory to the host's, and brings them in from there."""

    needs_ack = True

    def __init__(
        self,
        source: FrameSource,
        arena: DeviceArena,
        target: SequenceRuns,
        extent: Extent,
        frame_hash: FrameHash,
    ) -> None:
        super().__init__(arena, target, extent, frame_hash)
        self._source = source
        self._num_copied = 0

    def finished(self) -> int:
        """Return up to which frame the holder's memory is not needed any more."""
        return self._num_copied

    def wait_finished(self, deadline: float) -> int:
        """Return the same: what has landed is copied."""
        return self._num_copied

    def _receive(self, wire: Wire, data: Header, rows: ByteArray, stats: TransferStats, deadline: float) -> int | None:
        started = time.perf_counter_ns()
        frames.gather(self._source.rows(data), rows)
        stats.copy_ns += time.perf_counter_ns() - started
        self._num_copied = data.sequence
        if self._hash.kind != "xxh3":
            return None
        return frames.digest(packed_rows(rows, data.length), stats, self._hash.new(data.sequence))


def _frame_bytes(arena: DeviceArena, extent: Extent) -> int:
    """Return how large frames out of this arena are. Raises DeviceError when not the smallest fits."""
    if extent.least_bytes > arena.ring.frame_bytes:
        what = "block" if extent.layout.whole_blocks else "token"
        raise DeviceError("staging", f"{extent.least_bytes} bytes of a {what}; here fit {arena.ring.frame_bytes}")
    return min(limits.STAGED_FRAME_BYTES, arena.ring.frame_bytes)


def _memory_bytes(extent: Extent, data: Header) -> int:
    return extent.memory_bytes(data.num_layers, data.num_tokens)


def _codec_parts(
    extent: Extent, codec: BlockCodec, data: Header, rows: ByteArray, packed: ByteArray
) -> Iterator[tuple[Rows, ByteArray]]:
    """Yield the rows of each layer's keys, then values, and where they are as they cross."""
    size = codec.num_bytes(data.first_token, data.num_tokens)
    parts = rows.reshape(2 * data.num_layers, data.num_tokens, extent.row_bytes)
    for index, part in enumerate(parts):
        yield part, packed[index * size : (index + 1) * size]
