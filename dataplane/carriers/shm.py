"""The carrier on one host: frames name tokens only, and the reader copies them out of the holder's arena, once.

The holder learns by the reader's Ack when the reader has finished with a frame, and only then looks at the lease and
commits. While the reader copies, the holder digests the same bytes.
"""

import contextlib
import threading
import time
from typing import Protocol

from msgspec.structs import replace

from dataplane import limits
from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import Access
from dataplane.memory import frames
from dataplane.memory.arena import SHM_DIR, Arena, ArenaMissingError, ByteArray
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent, heads_of
from dataplane.memory.frames import FrameRows, SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import (
    Accepted,
    Digest,
    Header,
    ProtocolError,
    TransferStats,
    check_no_place,
    encode_header,
)
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint

NAME = "shm"


class FrameSource(Protocol):
    """The holder's memory, as a reader sees it that copies from it."""

    def rows(self, data: Header) -> FrameRows:
        """Return where the frame's bytes are. Raises ProtocolError."""
        ...


class ArenaFrames:
    """A holder's arena: a frame lies where its tokens do."""

    def __init__(self, memory: SequenceMemory) -> None:
        self._memory = memory

    def rows(self, data: Header) -> FrameRows:
        """Return where the frame's bytes are. Raises ProtocolError when it is said to lie elsewhere."""
        check_no_place(data)
        return self._memory.rows(data)


class PackedFrames:
    """A holder's shared memory that frames lie in one by one, packed, each at the offset that its header names."""

    def __init__(self, array: ByteArray, extent: Extent) -> None:
        self._array = array
        self._row_bytes = extent.row_bytes

    def rows(self, data: Header) -> FrameRows:
        """Return where the frame's bytes are. Raises ProtocolError when they lie outside."""
        if data.at + data.length > self._array.nbytes:
            raise ProtocolError(f"frame {data.sequence} is said to lie at {data.at} of {self._array.nbytes} bytes")
        packed = self._array[data.at : data.at + data.length]
        return frames.packed_rows(packed, self._row_bytes, 2 * data.num_layers)


class SharedHolder:
    """Announces frames; the bytes stay where they are until the reader's Ack. Also the loopback carrier's holder."""

    needs_ack = True
    access = Access(by_tables=True)
    frame_bytes = limits.SHM_FRAME_BYTES
    ahead = None

    def __init__(self, source: SequenceMemory, frame_hash: FrameHash) -> None:
        self._source = source
        self._hash = frame_hash

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the frame's header; digest while the reader copies. Raises WireClosedError,
        WireTimeoutError."""
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data)], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        digest = frames.digest(self._source.rows(data), stats, self._hash.new(data.sequence))
        return lambda: digest

    def acked(self, sequence: int) -> None:
        """The reader has finished with all frames up to this one."""

    def close(self) -> None:
        """Nothing is held."""


class SharedReader:
    """Copies frames from the holder's memory to the reader's. Also the loopback carrier's reader."""

    needs_ack = True

    def __init__(self, source: FrameSource, target: SequenceMemory, frame_hash: FrameHash) -> None:
        self._source = source
        self._target = target
        self._hash = frame_hash
        self._num_landed = 0

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Copy the frame's bytes and return the digest of what arrived. Raises ProtocolError."""
        digest = self._copy(wire, data, stats)
        self._num_landed = data.sequence
        return lambda: digest

    def finished(self) -> int:
        """Return up to which frame the holder's memory is not needed any more."""
        return self._num_landed

    def wait_finished(self, deadline: float) -> int:
        """Return the same, once there is one more."""
        return self._num_landed

    def finish(self, deadline: float) -> None:
        """All that has landed is in place already."""

    def close(self) -> None:
        """Nothing is under way."""

    def _copy(self, wire: Wire, data: Header, stats: TransferStats) -> int:
        hasher = self._hash.new(data.sequence)
        return frames.copy(self._source.rows(data), self._target.rows(data), stats, hasher)


def holder_frames(array: ByteArray, accepted: Accepted, shape: ArenaShape, extent: Extent) -> FrameSource:
    """Return where a reader that copies for itself finds the frames of `extent` in the holder's shared memory, as the
    holder has said it. `shape`: the reader's. Raises ProtocolError."""
    if accepted.staged:
        return PackedFrames(array, extent)
    try:
        return ArenaFrames(SequenceMemory(array, holder_runs(accepted, shape, extent, array.nbytes)))
    except ValueError as error:
        raise ProtocolError(f"blocks outside the holder's arena: {error}") from error


def holder_runs(accepted: Accepted, shape: ArenaShape, extent: Extent, arena_bytes: int) -> SequenceRuns:
    """Return where the sequence lies in the holder's arena, which has `arena_bytes`. `shape`: the reader's. Raises
    ProtocolError."""
    layout = shape.layout
    if accepted.heads != heads_of(layout):
        layout = replace(layout, first_head=accepted.heads.first, num_kv_heads=accepted.heads.num_heads)
    if len(accepted.num_blocks) != len(layout.groups) or not accepted.heads.holds(extent.heads):
        raise ProtocolError(f"the holder names {accepted.heads} and {len(accepted.num_blocks)} cache groups")
    try:
        holder_shape = ArenaShape(layout=layout, num_blocks=accepted.num_blocks)
        if min(accepted.num_blocks) < 0 or holder_shape.num_bytes > arena_bytes:  # before any table is looked at
            raise ProtocolError(f"the holder names {accepted.num_blocks} blocks in {arena_bytes} bytes")
        source = SequenceRuns(holder_shape, accepted.tables, extent.heads)
    except ValueError as error:
        raise ProtocolError(f"blocks outside the holder's arena: {error}") from error
    if not source.covers(extent, extent.num_tokens):
        raise ProtocolError("the holder's tables do not have all that it accepted")
    return source


class AttachedArenas:
    """The holders' arenas that this process has mapped, kept: a mapping's first touch of each page is dear.

    Bounded. Thread-safe.
    """

    def __init__(self, max_attached: int = limits.MAX_ATTACHED) -> None:
        self._max_attached = max_attached
        self._lock = threading.Lock()
        self._arenas: dict[tuple[str, str], Arena] = {}

    def attach(self, endpoint: Endpoint) -> ByteArray:
        """Return the KV of the endpoint's arena, read-only. Raises ArenaMissingError."""
        key = (endpoint.arena, endpoint.arena_nonce)
        with self._lock:
            arena = self._arenas.pop(key, None) or Arena.attach(*key)
            self._arenas[key] = arena  # the one used last is at the end
            while len(self._arenas) > self._max_attached:
                self._arenas.pop(next(iter(self._arenas))).close()
            return arena.array

    def release_unlinked(self) -> None:
        """Let go of the arenas whose owners have ended: what is mapped here, nobody else can have."""
        with self._lock:
            for gone in [key for key in self._arenas if not (SHM_DIR / key[0]).exists()]:
                self._arenas.pop(gone).close()

    def can_attach(self, endpoint: Endpoint) -> bool:
        """Say whether the endpoint's arena is on this host."""
        with contextlib.suppress(ArenaMissingError):
            self.attach(endpoint)
            return True
        return False

    def close(self) -> None:
        """Unmap all. Copies that run keep what they use."""
        with self._lock:
            while self._arenas:
                self._arenas.popitem()[1].close()
