"""What a pair of workers needs of NCCL, without NCCL: `library.py` has the real one, `fake_communicator.py` one of
threads that can stall, fail and die.

What may block, by NCCL's documents and its makers' answers, and what is done about it: making a communicator waits for
the other rank, without any limit of time; the end of the first group waits for it as well, as connections are made at
their first use; and an abort waits for the library's own threads, which have been seen never to end. So each of the
three runs on a thread that nobody waits for without a limit (`LibraryThreads`). Ranks must do their operations in the
same order, of the same sizes and in the same groups: whatever else is undefined.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from dataplane.cards import limits
from dataplane.cards.device import DeviceMemory, Stream

UNIQUE_ID_BYTES = 128


class CommunicatorError(Exception):
    """The library failed, or will not be asked any more. `what` was being done."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what


class Communicator(Protocol):
    """One of two ranks, or the only one, which is its own peer. All but `abort` on one thread at a time."""

    def group(self) -> AbstractContextManager[None]:
        """Let the operations inside begin together when it ends, which may wait for the peer. Raises
        CommunicatorError."""
        ...

    def send(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        """Send these bytes to the peer, on the stream. Raises CommunicatorError."""
        ...

    def receive(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        """Receive what the peer's `send` of the same place in its order has. Raises CommunicatorError."""
        ...

    def failure(self) -> str | None:
        """Return what has gone wrong since, if anything has. Does not wait."""
        ...

    def abort(self) -> None:
        """End whatever is under way, with what is in its target undefined, and free the communicator. From any thread,
        once; may block. There is no gentler end: an orderly one waits for a peer who may have died."""
        ...


class CommunicatorLibrary(Protocol):
    """Where communicators come from. Thread-safe."""

    def refusal(self) -> str | None:
        """Return why none can be made here, if so. Does not wait."""
        ...

    def new_id(self) -> bytes:
        """Return the name of a communicator to be, UNIQUE_ID_BYTES long. It costs a thread and a port of this process
        until all ranks have come. Raises CommunicatorError."""
        ...

    def make(self, unique_id: bytes, num_ranks: int, rank: int) -> Communicator:
        """Return this rank's end once all ranks have come: blocks. Raises CommunicatorError."""
        ...


class LibraryThreads:
    """The threads of this process that are in the library's hands. Thread-safe.

    One that is given up may never come back. It is left where it is, and counts until it ends.
    """

    def __init__(self, max_abandoned: int = limits.MAX_ABANDONED) -> None:
        self._max_abandoned = max_abandoned
        self._lock = threading.Lock()
        self._given_up: list[threading.Thread] = []

    @property
    def num_abandoned(self) -> int:
        with self._lock:
            self._given_up = [thread for thread in self._given_up if thread.is_alive()]
            return len(self._given_up)

    def refusal(self) -> str | None:
        """Return why the library should not be called any more, if so."""
        abandoned = self.num_abandoned
        return f"{abandoned} calls of the library do not come back" if abandoned >= self._max_abandoned else None

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run this on a thread that does not hold up the end of the process."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def give_up(self, thread: threading.Thread) -> None:
        """Nobody waits for this thread any more."""
        with self._lock:
            self._given_up.append(thread)
