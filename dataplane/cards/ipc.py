"""The carrier between two arenas on one card, or on two that see each other's memory: the reader copies from the
holder's arena to its own, on the card, with one kernel a frame.

Frames are announced as soon as the engine has put their layers on its stream: each names the arena's mark behind which
it is there. The reader opens the holder's memory and marks by the names that came with the answer to its ticket, once
a peer; it asks for a mark until it is reached, and only then puts its kernel on a stream of its own. A kernel behind
another process's event would stand there with its target's address for ever, were that process to die.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from dataplane.cards import limits
from dataplane.cards.device import DeviceError, DeviceMemory, DigestSlot, Stream
from dataplane.cards.device_arena import DeviceArena, DeviceHandles, PeerArena
from dataplane.cards.moves import gather_moves, pair_moves
from dataplane.cards.side import SideStream, WorkPiece, check_peer, wait_done, wait_peer_gone
from dataplane.carriers.carrier import Access
from dataplane.memory.arena import SHM_DIR
from dataplane.memory.checksum import FrameHash
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Digest, Header, ProtocolError, TransferStats, encode_header
from dataplane.protocol.wire import Wire, WireTimeoutError

ArenaKey = tuple[str, str]
"""Name and nonce, as the endpoint has them."""

_numbers = itertools.count(1)


class SourceArena(Protocol):
    """The holder's arena, as the reader reaches it: another process's that is open, or its own process's."""

    memory: DeviceMemory

    def wait_ready(self, mark: int, timeout_s: float) -> bool:
        """Wait until a mark is reached; say whether it is. Raises DeviceError, and ValueError for no mark of its."""
        ...


class CudaHolder:
    """Announces frames, and digests them behind their marks while the reader copies."""

    needs_ack = True
    frame_bytes = limits.CUDA_FRAME_BYTES
    max_begun = 1

    @property
    def ahead(self) -> "CudaHolder":
        """It digests frames as they are announced."""
        return self

    def __init__(self, arena: DeviceArena, source: SequenceRuns, frame_hash: FrameHash) -> None:
        self.access = Access(by_tables=True, names=msgspec.to_builtins(arena.handles()))
        self._arena = arena
        self._source = source
        self._begun: deque[tuple[int, WorkPiece | None]] = deque()
        self._side: SideStream | None = None
        if frame_hash.kind is not None:
            self._side = SideStream(arena.device, f"out-{next(_numbers)}", digests=True, writes=False)

    def begin(self, data: Header, mark: int) -> None:
        """Digest the frame once the card has reached the mark. Raises DeviceError."""
        piece = None
        if self._side is not None:
            moves, arena = gather_moves(self._source, data), self._arena

            def work(stream: Stream, digest: DigestSlot | None) -> None:
                arena.order(stream, mark)
                arena.device.move(stream, moves, arena.memory, None, digest)

            piece = self._side.put(work)
        self._begun.append((mark, piece))

    def send(self, wire: Wire, head: bytes, data: Header, stats: TransferStats, timeout_s: float) -> Digest:
        """Send `head` and the frame's header. Raises WireClosedError, WireTimeoutError."""
        mark, piece = self._begun.popleft()
        started = time.perf_counter_ns()
        wire.send([head + encode_header(data._replace(at=mark))], timeout_s)
        stats.copy_ns += time.perf_counter_ns() - started
        return lambda: 0 if piece is None else self._settle(piece, wire, stats, timeout_s)

    def acked(self, sequence: int) -> None:
        """The reader has finished with all frames up to this one."""

    def close(self) -> None:
        """Wait until nothing is digested any more. Raises DeviceError."""
        if self._side is not None:
            self._side.close()

    def _settle(self, piece: WorkPiece, wire: Wire, stats: TransferStats, timeout_s: float) -> int:
        assert self._side is not None, "a piece was put on it"
        started = time.perf_counter_ns()
        if not wait_done(piece, wire, timeout_s):
            raise DeviceError("digest", f"not computed within {timeout_s:.1f} s")
        value = self._side.settle(piece)
        stats.verify_ns += time.perf_counter_ns() - started
        return value


class CudaReader:
    """Copies frames on the card, each once its mark is reached; several may be under way. `runs`: where the sequence is
    in the holder's arena. `give_back`: called once that is not used any more."""

    needs_ack = True

    def __init__(
        self,
        source: SourceArena,
        runs: SequenceRuns,
        arena: DeviceArena,
        target: SequenceRuns,
        frame_hash: FrameHash,
        give_back: Callable[[], None],
    ) -> None:
        self._source = source
        self._give_back = give_back
        self._runs = runs
        self._arena = arena
        self._target = target
        self._copying: deque[tuple[int, WorkPiece]] = deque()
        self._copying_since = 0
        self._digests: dict[int, int] = {}
        self._num_finished = 0
        self._stats = TransferStats()
        digests = frame_hash.kind is not None
        self._side = SideStream(arena.device, f"in-{next(_numbers)}", digests=digests, writes=True)

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> Digest:
        """Begin to copy the frame, once it is there. Raises DeviceError, WireClosedError, WireTimeoutError,
        ProtocolError."""
        self._stats = stats
        self._wait_mark(wire, data, deadline)
        if not self._copying:
            self._copying_since = time.perf_counter_ns()
        moves, arena, memory = pair_moves(self._runs, self._target, data), self._arena, self._source.memory
        piece = self._side.put(lambda stream, digest: arena.device.move(stream, moves, memory, arena.memory, digest))
        self._copying.append((data.sequence, piece))
        return lambda: self._digest(data.sequence, deadline)

    def finished(self) -> int:
        """Return up to which frame the holder's memory is not needed any more. Raises DeviceError."""
        while self._copying and self._copying[0][1].event.is_done():
            self._settle_oldest()
        return self._num_finished

    def wait_finished(self, deadline: float) -> int:
        """Return the same once there is one more. Raises DeviceError, WireTimeoutError."""
        self._wait_oldest(deadline)
        return self.finished()

    def finish(self, deadline: float) -> None:
        """Wait until all that has landed is in place. Raises DeviceError, WireTimeoutError."""
        while self._copying:
            self._wait_oldest(deadline)

    def close(self) -> None:
        """Wait until the card writes to the arena no more, and give the holder's back, which else it may still read.
        Raises CardStuckError."""
        self._side.close()
        self._give_back()

    def _wait_mark(self, wire: Wire, data: Header, deadline: float) -> None:
        started = time.perf_counter_ns()
        try:
            while not self._source.wait_ready(data.at, min(limits.MARK_LOOK_S, max(0.0, deadline - time.monotonic()))):
                check_peer(wire)
                self.finished()
                if time.monotonic() >= deadline:
                    raise WireTimeoutError(f"the holder's mark {data.at} was not reached by the deadline")
        except ValueError as error:
            raise ProtocolError(f"frame {data.sequence}: {error}") from error
        except DeviceError:
            wait_peer_gone(
                wire, limits.PEER_DEATH_S
            )  # a holder's death voids its names before its connection is closed
            raise
        finally:
            self._stats.wait_ns += time.perf_counter_ns() - started

    def _wait_oldest(self, deadline: float) -> None:
        if not wait_done(self._copying[0][1], None, deadline - time.monotonic()):
            raise WireTimeoutError("the card has not copied a frame by the deadline")
        self._settle_oldest()

    def _settle_oldest(self) -> None:
        sequence, piece = self._copying.popleft()
        started = time.perf_counter_ns()
        # While a frame is copied this thread does something else: the time counts in which any copy is under way.
        self._stats.copy_ns += started - self._copying_since
        self._copying_since = started
        self._digests[sequence] = self._side.settle(piece)
        if piece.digest is not None:
            self._stats.verify_ns += time.perf_counter_ns() - started
        self._num_finished = sequence

    def _digest(self, sequence: int, deadline: float) -> int:
        while sequence not in self._digests:
            self._wait_oldest(deadline)
        return self._digests.pop(sequence)


class OpenedArenas:
    """The holders' arenas on cards that this process has opened: once each. Bounded. Thread-safe.

    An arena that is in use stays open until its last user has given it back.
    """

    def __init__(self, arena: DeviceArena) -> None:
        self._device = arena.device
        self._lock = threading.Lock()
        self._opened: dict[ArenaKey, _OpenedArena] = {}
        self._is_closed = False

    def take(self, key: ArenaKey, handles: DeviceHandles) -> tuple[PeerArena, Callable[[], None]]:
        """Return a holder's arena, and what to call once when it is not used any more. Raises DeviceError."""
        with self._lock:
            if self._is_closed:
                raise DeviceError("open memory", "the reader is closing")
            opened = self._opened.pop(key, None) or _OpenedArena(PeerArena(self._device, handles))
            opened.num_users += 1
            self._opened[key] = opened  # the one used last is at the end
            for other in [other for other, each in self._opened.items() if not each.num_users]:
                if len(self._opened) <= limits.MAX_OPENED:
                    break
                self._opened.pop(other).arena.close()
        return opened.arena, lambda: self._give_back(opened)

    def release_unlinked(self) -> None:
        """Close those whose holders have ended: their staging memory has no name any more."""
        self._let_go(lambda key: not (SHM_DIR / key[0]).exists())

    def _let_go(self, has_ended: Callable[[ArenaKey], bool]) -> None:
        with self._lock:
            for key in [key for key in self._opened if has_ended(key)]:
                opened = self._opened.pop(key)
                opened.is_let_go = True
                opened.close_unused()

    def close(self) -> None:
        """Close all that nobody uses, the others once they are given back."""
        with self._lock:
            self._is_closed = True
        self._let_go(lambda _: True)

    def _give_back(self, opened: "_OpenedArena") -> None:
        with self._lock:
            opened.num_users -= 1
            opened.close_unused()


class _OpenedArena:
    def __init__(self, arena: PeerArena) -> None:
        self.arena = arena
        self.num_users = 0
        self.is_let_go = False

    def close_unused(self) -> None:
        if self.is_let_go and not self.num_users:
            self.arena.close()
