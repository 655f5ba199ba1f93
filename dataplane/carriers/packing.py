"""How a frame's bytes cross a socket: as they lie in an arena, or compressed block by block (`memory/codec.py`), by way
of a buffer."""

import time
from collections.abc import Iterable

from dataplane.memory.arena import ByteArray
from dataplane.memory.codec import KVNotFiniteError
from dataplane.memory.extent import Extent
from dataplane.memory.frames import FrameRows, Rows, Staging, gather, packed_rows, scatter
from dataplane.protocol.stream import Header, ProtocolError, TransferStats


class FramePacking:
    """Of one end of a stream, for its frames in turn. For one thread."""

    def __init__(self, extent: Extent) -> None:
        self._extent = extent
        self._codec = extent.codec
        self._buffer = Staging()
        self._rows = Staging()

    def pack(self, rows: FrameRows, data: Header, stats: TransferStats) -> FrameRows:
        """Return the frame's bytes as they cross; the next call may void them. Raises KVNotFiniteError."""
        if self._codec is None:
            return rows
        started, payload = time.perf_counter_ns(), self._buffer.borrow(data.length)
        parts = _parts_in_place(rows)
        if parts is None:
            staged = self._borrow_rows(data)
            gather(rows, staged)
            parts = _parts(staged, data)
        for part, packed in zip(parts, self._packed_parts(payload, data), strict=True):
            self._codec.encode(part, data.first_token, packed)
        stats.codec_ns += time.perf_counter_ns() - started
        return packed_rows(payload, data.length)

    def targets(self, rows: FrameRows, data: Header) -> Iterable[ByteArray]:
        """Return where a frame's bytes are to be received, in turn: in their place, or where `unpack` takes them."""
        return rows.pieces() if self._codec is None else [self._buffer.borrow(data.length)]

    def unpack(self, rows: FrameRows, data: Header, stats: TransferStats) -> None:
        """Put what was received in its place, if it is not there. Raises ProtocolError."""
        if self._codec is None:
            return
        started, payload = time.perf_counter_ns(), self._buffer.borrow(data.length)
        parts, staged = _parts_in_place(rows), self._borrow_rows(data)
        for part, packed in zip(parts or _parts(staged, data), self._packed_parts(payload, data), strict=True):
            try:
                self._codec.decode(packed, data.first_token, part)
            except KVNotFiniteError as error:
                raise ProtocolError(f"frame {data.sequence}: {error}") from error
        if parts is None:
            scatter(staged, rows)
        stats.codec_ns += time.perf_counter_ns() - started

    def _borrow_rows(self, data: Header) -> ByteArray:
        return self._rows.borrow(self._extent.memory_bytes(data.num_layers, data.num_tokens))

    def _packed_parts(self, payload: ByteArray, data: Header) -> list[ByteArray]:
        """Return the frame's compressed keys and values, layer by layer."""
        return list(payload.reshape(2 * data.num_layers, -1))


def _parts_in_place(rows: FrameRows) -> list[Rows] | None:
    """Return the frame's keys and values, layer by layer, or None: they do not lie in a piece each."""
    is_whole = all(len(spans) == 1 for _, spans in rows.parts)
    return rows.views() if is_whole else None


def _parts(packed: ByteArray, data: Header) -> list[Rows]:
    """Return the same of rows that follow each other."""
    return list(packed.reshape(2 * data.num_layers, data.num_tokens, -1))
