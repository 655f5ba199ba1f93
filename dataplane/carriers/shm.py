"""The carrier on one host: frames name tokens only, and the reader copies them out of the holder's arena, once.

The holder learns by the reader's Ack when the reader has finished with a frame, and only then looks at the lease and
commits. While the reader copies, the holder digests the same bytes.
"""

import contextlib
import threading
import time
from typing import Protocol

from dataplane.carriers.carrier import Access
from dataplane.memory import frames
from dataplane.memory.arena import SHM_DIR, Arena, ArenaMissingError, ByteArray
from dataplane.memory.checksum import DigestKind
from dataplane.memory.frames import Rows, SequenceMemory
from dataplane.protocol.stream import Digest, Header, TransferStats, check_no_place, encode_header
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint

NAME = "shm"
FRAME_BYTES = 16 << 20
MAX_ATTACHED = 16


class FrameSource(Protocol):
    """The holder's memory, as a reader sees it that copies from it."""

    def views(self, data: Header) -> list[Rows]:
        """Return the frame's bytes, in its order. Raises ProtocolError."""
        ...


class ArenaFrames:
    """A holder's arena: a frame lies where its tokens do."""

    def __init__(self, memory: SequenceMemory) -> None:
        self._memory = memory

    def views(self, data: Header) -> list[Rows]:
        """Return the frame's bytes. Raises ProtocolError when it is said to lie elsewhere."""
        check_no_place(data)
        return self._memory.views(data)


class SharedHolder:
    """Announces frames; the bytes stay where they are until the reader's Ack. Also the loopback carrier's holder."""

    needs_ack = True
    access = Access(by_tables=True)
    frame_bytes = FRAME_BYTES
    max_begun = 1

    def __init__(self, source: SequenceMemory, digest_kind: DigestKind | None) -> None:
        self._source = source
        self._digest_kind: DigestKind | None = digest_kind

    def begin(self, data: Header, mark: int) -> None:
        """Nothing is to be done before: what is announced is there."""

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the frame's header; digest while the reader copies. Raises WireClosedError,
        WireTimeoutError."""
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data)], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        digest = frames.digest(self._source.views(data), stats, self._digest_kind)
        return lambda: digest

    def acked(self, sequence: int) -> None:
        """The reader has finished with all frames up to this one."""

    def close(self) -> None:
        """Nothing is held."""


class SharedReader:
    """Copies frames from the holder's memory to the reader's. Also the loopback carrier's reader."""

    needs_ack = True

    def __init__(self, source: FrameSource, target: SequenceMemory, digest_kind: DigestKind | None) -> None:
        self._source = source
        self._target = target
        self._digest_kind: DigestKind | None = digest_kind
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
        return frames.copy(self._source.views(data), self._target.views(data), stats, self._digest_kind)


class AttachedArenas:
    """The holders' arenas that this process has mapped, kept: a mapping's first touch of each page is dear.

    Bounded. Thread-safe.
    """

    def __init__(self, max_attached: int = MAX_ATTACHED) -> None:
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
