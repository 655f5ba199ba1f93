"""What the plane needs of a graphics card. `cupy_card.py` has the real one; tests have one of numpy and threads, whose
streams run late as a card's do. Both pass tests/plane/test_card.py.

Work that is put on a stream is done in its order, some time later. Nothing of it waits for another process, but for
what crosses a communicator: so all of it ends, and a stream can be waited for.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from dataplane.blocks.layout import ITEM_BYTES, KVLayout
from dataplane.carriers.carrier import MemoryFailedError
from dataplane.memory.arena import ByteArray
from dataplane.memory.extent import Frame
from dataplane.memory.rows import Int64s, SequenceRuns

WORD_BYTES = 8
"""Cards copy and digest whole words (`sum64` in `memory/checksum.py`)."""
FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 1e-3
"""Who waits for a card looks again after the first, then after half as long again, up to the last."""


class CardError(MemoryFailedError):
    """The card, its driver or its library failed. `what` was being done."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what


class CardStuckError(CardError):
    """The card is not known to come to the end of what was begun: it may still write to the arena."""

    may_still_write = True


class Rows(NamedTuple):
    """Where a frame's rows lie in a card's memory, in the frame's order. `starts`: of each row its first word, `[row]`.
    `num_words`: of a row."""

    starts: Int64s
    num_words: int

    @property
    def total_bytes(self) -> int:
        return len(self.starts) * self.num_words * WORD_BYTES

    @property
    def packed(self) -> "Rows":
        """The same rows one behind the other, from a memory's start on."""
        return Rows(np.arange(len(self.starts)) * self.num_words, self.num_words)


def rows_of(runs: SequenceRuns, frame: Frame) -> Rows:
    """Return where the frame's rows lie in an arena."""
    slots: dict[int, Int64s] = {}
    starts = [np.empty(0, np.int64)]
    for first_byte, spans in runs.parts(frame):
        if id(spans) not in slots:
            ranges = [np.arange(slot, slot + count) for slot, count in spans]
            slots[id(spans)] = np.concatenate([np.empty(0, np.int64), *ranges]) * runs.row_bytes
        starts.append((first_byte + slots[id(spans)]) // WORD_BYTES)
    return Rows(np.concatenate(starts), runs.row_bytes // WORD_BYTES)


def unsuited(layout: KVLayout) -> str | None:
    """Return why KV of this layout cannot live on a card, or None: it can."""
    head_bytes = layout.head_dim * ITEM_BYTES[layout.dtype]
    if head_bytes % WORD_BYTES:
        return f"a head of {layout.head_dim} {layout.dtype} has {head_bytes} bytes, not a multiple of {WORD_BYTES}"
    return None


class CardMemory(Protocol):
    """Memory of a card, or another process's that is mapped here."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def exported(self) -> object:
        """The same bytes as torch takes them over without a copy (DLPack). Not to be used once this is closed."""
        ...

    def close(self) -> None:
        """Free or unmap it: nothing uses it any more. Idempotent."""
        ...


class PendingSum(Protocol):
    """A digest that a stream computes."""

    def value(self) -> int:
        """Return it. Only once the stream has been waited for."""
        ...


class CardStream(Protocol):
    """Work that is done in order. For one thread. All but `close` raise CardError."""

    def copy(self, source: CardMemory, source_rows: Rows, target: CardMemory, target_rows: Rows) -> None:
        """Copy rows from one memory to another."""
        ...

    def sum64(self, memory: CardMemory, rows: Rows) -> PendingSum:
        """Digest rows."""
        ...

    def download(self, memory: CardMemory, target: ByteArray) -> None:
        """Copy a memory's first bytes to pinned host memory."""
        ...

    def upload(self, source: ByteArray, memory: CardMemory) -> None:
        """Copy pinned host memory to a memory's start."""
        ...

    def is_done(self) -> bool:
        """Return whether all that was put on it is done."""
        ...

    def close(self) -> None:
        """Give it back. Nothing is under way. Idempotent."""
        ...


class Communicator(Protocol):
    """One of two ranks of NCCL, or the only one, which is its own peer. Both must do the same, in the same order."""

    def send(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        """Send a memory's first bytes to the peer, on the stream. Raises CardError."""
        ...

    def receive(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        """Receive what the peer's `send` in the same place of its order has. Raises CardError."""
        ...

    def abort(self) -> None:
        """End whatever is under way and free it; may block. There is no gentler end: an orderly one waits for a peer
        who may have died."""
        ...


class Card(Protocol):
    """One card. Thread-safe. All but `close` raise CardError."""

    @property
    def uuid(self) -> str:
        """The card's name, the same in every process that sees it."""
        ...

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def allocate(self, num_bytes: int) -> CardMemory:
        """Return zeroed memory."""
        ...

    def pinned(self, num_bytes: int) -> ByteArray:
        """Return host memory that a stream copies to and from while the host goes on."""
        ...

    def stream(self) -> CardStream: ...

    def mark(self, stream_handle: int) -> Callable[[], bool]:
        """Return what says whether all is done that the stream of this handle, another library's, was given so far."""
        ...

    # Between processes of one host.

    def can_map(self, uuid: str) -> bool:
        """Return whether this card reads the memory of the card of this name: itself, or a peer that is seen here."""
        ...

    def export(self, memory: CardMemory) -> bytes:
        """Return the name by which another process opens memory that `allocate` returned."""
        ...

    def map_memory(self, name: bytes, num_bytes: int) -> CardMemory:
        """Map another process's memory."""
        ...

    # Between cards.

    def no_communicators(self) -> str | None:
        """Return why none can be made here, if so."""
        ...

    def new_id(self) -> bytes:
        """Return the name of a communicator to be."""
        ...

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> Communicator:
        """Return this rank's end once all ranks have come, which has no limit of time."""
        ...

    def close(self) -> None:
        """Nothing of it is used any more."""
        ...


def wait_until(is_done: Callable[[], bool], has_ended: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a card, other threads running; return whether it is done. Returns early when `has_ended`."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while not is_done():
        if time.monotonic() >= deadline or has_ended():
            return False
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LAST_PAUSE_S)
    return True
