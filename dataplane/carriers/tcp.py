"""The carrier between hosts: a frame's bytes follow its header on the socket.

Where an arena's rows are asked for whole they leave it, and are received into it, without a copy. Parts of rows, and
what is compressed, go through a staging buffer.
"""

import time

from dataplane import limits
from dataplane.memory import frames
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, Hasher
from dataplane.memory.codec import BlockCodec, KVNotFiniteError
from dataplane.memory.extent import Extent
from dataplane.memory.frames import FrameRows, Memory, Rows, Staging, gather, packed_rows, scatter
from dataplane.protocol.stream import Header, ProtocolError, TransferStats, encode_header
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
        self._extent = extent
        self._hash = frame_hash
        self._staging = Staging()
        self._rows = Staging()
        self._ciphertext = Staging()

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head`, the frame's header and its bytes. Raises WireClosedError, WireTimeoutError, and
        KVNotFiniteError, before anything is sent."""
        payload, data = self._encrypted(self._load(data, stats), data, stats)
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data), *payload.pieces()], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        return data.tag or frames.digest(payload, stats, self._hash.new(data.sequence))

    def close(self) -> None:
        """Give back what frames were staged in, where that is anybody's."""
        self._source.close()

    def _load(self, data: Header, stats: TransferStats) -> FrameRows:
        """Return the frame's bytes as they cross; the next call may void them. Raises KVNotFiniteError."""
        rows, codec = self._source.rows(data), self._extent.codec
        if codec is None and rows.is_contiguous:
            return rows
        started = time.perf_counter_ns()
        payload = self._staging.borrow(data.length)
        if codec is None:
            gather(rows, payload)
            stats.copy_ns += time.perf_counter_ns() - started
        else:
            self._pack(codec, data, rows, payload)
            stats.codec_ns += time.perf_counter_ns() - started
        return packed_rows(payload, data.length)

    def _encrypted(self, payload: FrameRows, data: Header, stats: TransferStats) -> tuple[FrameRows, Header]:
        """Return what crosses for these bytes, and its header: encrypted if that is wanted."""
        if not self._hash.encrypts:
            return payload, data
        started = time.perf_counter_ns()
        target = self._ciphertext.borrow(data.length)
        tag = self._hash.encrypted(data.sequence, payload.pieces(), target)
        stats.verify_ns += time.perf_counter_ns() - started
        return packed_rows(target, data.length), data._replace(tag=tag)

    def _pack(self, codec: BlockCodec, data: Header, rows: FrameRows, payload: ByteArray) -> None:
        parts = _parts_in_place(rows)
        if parts is None:
            staged = self._rows.borrow(self._extent.memory_bytes(data.num_layers, data.num_tokens))
            gather(rows, staged)
            parts = _parts(staged, data)
        size = codec.wire_bytes(data.first_token, data.num_tokens)
        for index, part in enumerate(parts):
            codec.encode(part, data.first_token, payload[index * size : (index + 1) * size])


class TcpReader:
    """Receives frames into the reader's arena."""

    needs_ack = False

    def __init__(self, target: Memory, extent: Extent, frame_hash: FrameHash) -> None:
        self._target = target
        self._extent = extent
        self._hash = frame_hash
        self._staging = Staging()
        self._rows = Staging()

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Put the frame's bytes in place and return the digest of what came. Raises WireClosedError, WireTimeoutError,
        and ProtocolError when it cannot be unpacked."""
        rows, codec = self._target.rows(data), self._extent.codec
        hasher = self._hash.opening(data.sequence, data.tag)
        if codec is None and rows.is_contiguous:
            for target in rows.pieces():
                _receive(wire, target, hasher, stats, deadline)
            self._target.written(data)
            return 0 if hasher is None else hasher.intdigest()
        payload = self._staging.borrow(data.length)
        _receive(wire, payload, hasher, stats, deadline)
        started = time.perf_counter_ns()
        if codec is None:
            scatter(payload, rows)
            stats.copy_ns += time.perf_counter_ns() - started
        else:
            self._unpack(codec, data, payload, rows)
            stats.codec_ns += time.perf_counter_ns() - started
        self._target.written(data)
        return 0 if hasher is None else hasher.intdigest()

    def close(self) -> None:
        """Wait for what is still on its way into the memory, if anything is."""
        self._target.close()

    def _unpack(self, codec: BlockCodec, data: Header, payload: ByteArray, rows: FrameRows) -> None:
        parts = _parts_in_place(rows)
        staged = self._rows.borrow(self._extent.memory_bytes(data.num_layers, data.num_tokens))
        size = codec.wire_bytes(data.first_token, data.num_tokens)
        for index, part in enumerate(_parts(staged, data) if parts is None else parts):
            try:
                codec.decode(payload[index * size : (index + 1) * size], data.first_token, part)
            except KVNotFiniteError as error:
                raise ProtocolError(f"frame {data.sequence}: {error}") from error
        if parts is None:
            scatter(staged, rows)


def _parts_in_place(rows: FrameRows) -> list[Rows] | None:
    """Return the frame's keys and values, layer by layer, or None: they do not lie in a piece each."""
    is_whole = rows.is_contiguous and all(len(spans) == 1 for _, spans in rows.parts)
    return rows.views() if is_whole else None


def _parts(packed: ByteArray, data: Header) -> list[Rows]:
    """Return the same of rows that follow each other."""
    return list(packed.reshape(2 * data.num_layers, data.num_tokens, -1))


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
