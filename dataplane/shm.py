"""The carrier on one host: frames name tokens only, and the reader copies them out of the holder's arena, once.

The holder learns by the reader's Ack when the reader has finished with a frame, and only then looks at the lease and
commits. While the reader copies, the holder digests the same bytes.
"""

import contextlib
import threading
from collections.abc import Sequence

from dataplane import frames
from dataplane.arena import SHM_DIR, Arena, ArenaMissingError, ByteArray
from dataplane.frames import Rows, SequenceMemory
from dataplane.stream import Header, TransferStats, encode_header
from dataplane.wire import Wire
from schemas.handoff import Endpoint

NAME = "shm"
FRAME_BYTES = 16 << 20
MAX_ATTACHED = 16


class SharedHolder:
    """Announces frames; the bytes stay where they are until the reader's Ack. Also the loopback carrier's holder."""

    needs_ack = True
    frame_bytes = FRAME_BYTES

    def __init__(self, source: SequenceMemory) -> None:
        self._source = source

    def load(self, data: Header, stats: TransferStats) -> list[Rows]:
        """Return the frame's bytes, where they lie."""
        return self._source.views(data)

    def send(self, wire: Wire, head: bytes, data: Header, payload: Sequence[Rows], timeout_s: float) -> None:
        """Send `head` and the frame's header. Raises WireClosedError, WireTimeoutError."""
        wire.send([head + encode_header(data)], timeout_s)


class SharedReader:
    """Copies frames from the holder's memory to the reader's. Also the loopback carrier's reader."""

    needs_ack = True

    def __init__(self, source: SequenceMemory, target: SequenceMemory, *, digests: bool) -> None:
        self._source = source
        self._target = target
        self._digests = digests

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Copy the frame's bytes and return the digest of what arrived."""
        return frames.copy(self._source.views(data), self._target.views(data), stats, digests=self._digests)


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
