"""The carrier between hosts: a frame's bytes follow its header on the socket.

Where an arena's rows are asked for whole they leave it, and are received into it, without a copy. Parts of rows, and
what is compressed, go through a staging buffer.
"""

import time

from dataplane import limits
from dataplane.carriers.packing import FramePacking
from dataplane.memory import frames
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, Hasher
from dataplane.memory.extent import Extent
from dataplane.memory.frames import FrameRows, Memory, Staging, packed_rows
from dataplane.protocol.stream import Header, TransferStats, encode_header
from dataplane.protocol.wire import Wire

NAME = "tcp"
RECEIVE_BYTES = 1 << 20
"""At most this is received before it is digested: a part of the core's cache, and yet few system calls."""


class TcpHolder:
    """Sends frames. When `send_frame` returns the bytes have left the arena: there is no Ack to wait for."""

    needs_ack = False
    frame_bytes = limits.TCP_FRAME_BYTES
    names = None

    def __init__(self, source: Memory, extent: Extent, frame_hash: FrameHash) -> None:
        self._source = source
        self._hash = frame_hash
        self._packing = FramePacking(extent)
        self._ciphertext = Staging()

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head`, the frame's header and its bytes. Raises WireClosedError, WireTimeoutError, and
        KVNotFiniteError, before anything is sent."""
        packed = self._packing.pack(self._source.rows(data), data, stats)
        payload, data = self._encrypted(packed, data, stats)
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data), *payload.pieces()], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        return data.tag or frames.digest(payload, stats, self._hash.new(data.sequence))

    def close(self) -> None:
        """Give back what frames were staged in, where that is anybody's."""
        self._source.close()

    def _encrypted(self, payload: FrameRows, data: Header, stats: TransferStats) -> tuple[FrameRows, Header]:
        """Return what crosses for these bytes, and its header: encrypted if that is wanted."""
        if not self._hash.encrypts:
            return payload, data
        started = time.perf_counter_ns()
        target = self._ciphertext.borrow(data.length)
        tag = self._hash.encrypted(data.sequence, payload.pieces(), target)
        stats.verify_ns += time.perf_counter_ns() - started
        return packed_rows(target, data.length), data._replace(tag=tag)


class TcpReader:
    """Receives frames into the reader's arena."""

    needs_ack = False

    def __init__(self, target: Memory, extent: Extent, frame_hash: FrameHash) -> None:
        self._target = target
        self._hash = frame_hash
        self._packing = FramePacking(extent)

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Put the frame's bytes in place and return the digest of what came. Raises WireClosedError, WireTimeoutError,
        and ProtocolError when it cannot be unpacked."""
        rows, hasher = self._target.rows(data), self._hash.opening(data.sequence, data.tag)
        for target in self._packing.targets(rows, data):
            _receive(wire, target, hasher, stats, deadline)
        self._packing.unpack(rows, data, stats)
        self._target.written(data)
        return 0 if hasher is None else hasher.intdigest()

    def close(self) -> None:
        """Wait for what is still on its way into the memory, if anything is."""
        self._target.close()


def _receive(wire: Wire, target: ByteArray, hasher: Hasher | None, stats: TransferStats, deadline: float) -> None:
    """Fill `target` from the wire and digest what comes. Raises WireClosedError, WireTimeoutError."""
    clock = time.perf_counter_ns
    started, verify_ns, view = clock(), 0, target.data
    while view:
        received = wire.receive_into(view[:RECEIVE_BYTES], deadline)
        if hasher is not None:  # now, while it is in the cache
            arrived = clock()
            hasher.update(view[:received])
            verify_ns += clock() - arrived
        view = view[received:]
    stats.verify_ns += verify_ns
    stats.copy_ns += clock() - started - verify_ns
