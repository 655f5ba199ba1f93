"""The carrier between hosts: a frame's bytes follow its header on the socket.

Where an arena's rows are asked for whole they leave it, and are received into it, without a copy. Parts of rows, and
what is compressed, go through a staging buffer.
"""

import time
from collections.abc import Sequence

import numpy as np

from dataplane import limits
from dataplane.carriers.carrier import Access
from dataplane.memory import frames
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, Hasher
from dataplane.memory.codec import BlockCodec, KVNotFiniteError
from dataplane.memory.extent import Extent
from dataplane.memory.frames import Rows, SequenceMemory, Staging, gather, scatter
from dataplane.protocol.stream import Digest, Header, ProtocolError, TransferStats, check_no_place, encode_header
from dataplane.protocol.wire import Wire

NAME = "tcp"
_RECEIVE_BYTES = 1 << 20
"""At most this is received before it is digested: a part of the core's cache, and yet few system calls."""


class TcpHolder:
    """Sends frames. When `send` returns the bytes have left the arena: there is no Ack to wait for."""

    needs_ack = False
    access = Access()
    frame_bytes = limits.TCP_FRAME_BYTES
    ahead = None

    def __init__(self, source: SequenceMemory, extent: Extent, frame_hash: FrameHash) -> None:
        self._source = source
        self._extent = extent
        self._hash = frame_hash
        self._staging = Staging()
        self._rows = Staging()
        self._ciphertext = Staging()

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head`, the frame's header and its bytes. Raises WireClosedError, WireTimeoutError, and
        KVNotFiniteError, before anything is sent."""
        payload, data = encrypted(self._load(data, stats), data, self._hash, self._ciphertext, stats)
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data), *(rows.reshape(-1) for rows in payload)], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        digest = data.tag or frames.digest(payload, stats, self._hash.new(data.sequence))
        return lambda: digest

    def acked(self, sequence: int) -> None:
        """There are no Acks."""

    def close(self) -> None:
        """Nothing is held."""

    def _load(self, data: Header, stats: TransferStats) -> list[Rows]:
        """Return the frame's bytes as they cross; the next call may void them. Raises KVNotFiniteError."""
        codec = self._extent.codec
        if codec is None and self._source.is_contiguous:
            return self._source.views(data)
        started = time.perf_counter_ns()
        payload = self._staging.take(data.length)
        if codec is None:
            gather(self._source.views(data), payload)
            stats.copy_ns += time.perf_counter_ns() - started
        else:
            self._pack(codec, data, payload)
            stats.codec_ns += time.perf_counter_ns() - started
        return [payload.reshape(1, -1)]

    def _pack(self, codec: BlockCodec, data: Header, payload: ByteArray) -> None:
        size = codec.num_bytes(data.first_token, data.num_tokens)
        for index, part in enumerate(self._source.parts(data)):
            rows = part[0] if len(part) == 1 and self._source.is_contiguous else self._gathered(part, data.num_tokens)
            codec.encode(rows, data.first_token, payload[index * size : (index + 1) * size])

    def _gathered(self, part: Sequence[Rows], num_tokens: int) -> Rows:
        rows = self._rows.take(num_tokens * self._extent.row_bytes)
        gather(part, rows)
        return rows.reshape(num_tokens, -1)


class TcpReader:
    """Receives frames into the reader's arena."""

    needs_ack = False

    def __init__(self, target: SequenceMemory, extent: Extent, frame_hash: FrameHash) -> None:
        self._target = target
        self._extent = extent
        self._hash = frame_hash
        self._staging = Staging()
        self._rows = Staging()

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Put the frame's bytes in place and return the digest of what came. Raises WireClosedError, WireTimeoutError,
        and ProtocolError when it cannot be unpacked."""
        check_no_place(data)
        codec = self._extent.codec
        hasher = self._hash.opening(data.sequence, data.tag)
        if codec is None and self._target.is_contiguous:
            for target in self._target.views(data):
                receive(wire, target.reshape(-1), hasher, stats, deadline)
            return _digest_of(hasher)
        payload = self._staging.take(data.length)
        receive(wire, payload, hasher, stats, deadline)
        started = time.perf_counter_ns()
        if codec is None:
            scatter(payload, self._target.views(data))
            stats.copy_ns += time.perf_counter_ns() - started
        else:
            self._unpack(codec, data, payload)
            stats.codec_ns += time.perf_counter_ns() - started
        return _digest_of(hasher)

    def finished(self) -> int:
        """There are no Acks."""
        return 0

    def wait_finished(self, deadline: float) -> int:
        """There are no Acks."""
        return 0

    def finish(self, deadline: float) -> None:
        """All that has landed is in place already."""

    def close(self) -> None:
        """Nothing is under way."""

    def _unpack(self, codec: BlockCodec, data: Header, payload: ByteArray) -> None:
        size = codec.num_bytes(data.first_token, data.num_tokens)
        rows: Rows = self._rows.take(data.num_tokens * self._extent.row_bytes).reshape(data.num_tokens, -1)
        for index, part in enumerate(self._target.parts(data)):
            wire_bytes = payload[index * size : (index + 1) * size]
            in_place = len(part) == 1 and self._target.is_contiguous
            try:
                codec.decode(wire_bytes, data.first_token, part[0] if in_place else rows)
            except KVNotFiniteError as error:
                raise ProtocolError(f"frame {data.sequence}: {error}") from error
            if not in_place:
                scatter(np.ravel(rows), part)


def encrypted(
    payload: Sequence[Rows], data: Header, frame_hash: FrameHash, staging: Staging, stats: TransferStats
) -> tuple[Sequence[Rows], Header]:
    """Return what crosses for these bytes, each contiguous, and its header: encrypted if that is wanted, until the next
    call."""
    if not frame_hash.encrypts:
        return payload, data
    started = time.perf_counter_ns()
    target = staging.take(data.length)
    tag = frame_hash.encrypted(data.sequence, (rows.reshape(-1) for rows in payload), target)
    stats.verify_ns += time.perf_counter_ns() - started
    return [target.reshape(1, -1)], data._replace(tag=tag)


def receive(wire: Wire, target: ByteArray, hasher: Hasher | None, stats: TransferStats, deadline: float) -> None:
    """Fill `target` from the wire and digest what comes. Raises WireClosedError, WireTimeoutError."""
    clock = time.perf_counter_ns
    view = target.data
    while view:
        started = clock()
        received = wire.receive_into(view[:_RECEIVE_BYTES], deadline)
        arrived = clock()
        stats.copy_ns += arrived - started
        if hasher is not None:  # now, while it is in the cache
            hasher.update(view[:received])
            stats.verify_ns += clock() - arrived
        view = view[received:]


def _digest_of(hasher: Hasher | None) -> Digest:
    value = 0 if hasher is None else hasher.intdigest()
    return lambda: value
