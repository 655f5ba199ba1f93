"""The carrier on one host: frames name tokens only, and the reader copies them out of the holder's arena, once.

The holder learns by the reader's Ack when the reader has finished with a frame, and only then looks at the lease and
commits. While the reader copies, the holder digests the same bytes.
"""

import time

from dataplane import limits
from dataplane.blocks.layout import ArenaShape, shape_of
from dataplane.memory import frames
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Header, ProtocolError, TransferStats, encode_header
from dataplane.protocol.wire import Wire

NAME = "shm"


def address_of(arena_nonce: str, port: int) -> str:
    """Return where a server is found by readers of its network namespace, beside this port: a socket of the machine
    has a third of the round trip of one of the network (unix(7), the abstract namespace: it ends with its owner)."""
    return f"\0kvmesh-{arena_nonce}-{port}"


class SharedHolder:
    """Announces frames; the bytes stay where they are until the reader's Ack. Also the loopback carrier's holder."""

    needs_ack = True
    frame_bytes = limits.SHM_FRAME_BYTES
    names = None

    def __init__(self, source: SequenceMemory, frame_hash: FrameHash) -> None:
        self._source = source
        self._hash = frame_hash

    def send_frame(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> int:
        """Send `head` and the frame's header; digest while the reader copies. Raises WireClosedError,
        WireTimeoutError."""
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data)], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        return frames.digest(self._source.rows(data), stats, self._hash.new(data.sequence))

    def close(self) -> None:
        """Nothing is held."""


class SharedReader:
    """Copies frames from the holder's memory to the reader's. Also the loopback carrier's reader."""

    needs_ack = True

    def __init__(self, source: SequenceMemory, target: SequenceMemory, frame_hash: FrameHash) -> None:
        self._source = source
        self._target = target
        self._hash = frame_hash

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Copy the frame's bytes and return the digest of what arrived."""
        hasher = self._hash.new(data.sequence)
        return frames.copy(self._source.rows(data), self._target.rows(data), stats, hasher)

    def close(self) -> None:
        """Nothing is under way."""


def holder_memory(array: ByteArray, accepted: Accepted, shape: ArenaShape, extent: Extent) -> SequenceMemory:
    """Return where the sequence lies in the holder's arena, which is this array. Raises ProtocolError."""
    try:
        return SequenceMemory(array, holder_runs(accepted, shape, extent, array.nbytes))
    except ValueError as error:
        raise ProtocolError(f"blocks outside the holder's arena: {error}") from error


def holder_runs(accepted: Accepted, shape: ArenaShape, extent: Extent, arena_bytes: int) -> SequenceRuns:
    """Return where the sequence lies in the holder's arena, which has `arena_bytes`, as the holder has sent it.
    `shape`: the reader's. Raises ProtocolError."""
    layout = shape.layout
    if len(accepted.num_blocks) != len(layout.groups):
        raise ProtocolError(f"the holder names {len(accepted.num_blocks)} cache groups")
    try:
        holder_shape = shape_of(layout, accepted.num_blocks)
        if min(accepted.num_blocks) < 0 or holder_shape.arena_bytes > arena_bytes:  # before any table is looked at
            raise ProtocolError(f"the holder names {accepted.num_blocks} blocks in {arena_bytes} bytes")
        source = SequenceRuns(holder_shape, accepted.tables)
    except ValueError as error:
        raise ProtocolError(f"blocks outside the holder's arena: {error}") from error
    if not source.covers(extent, extent.num_tokens):
        raise ProtocolError("the holder's tables do not have all that it accepted")
    return source
