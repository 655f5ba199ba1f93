"""A card that is none: numpy, and a thread for each stream, which runs late. It fails and stalls on request.

Its memory is a file in /dev/shm, which other processes map. Communicators are of one process (`Fabric`).
"""

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from dataplane.cards.card import WORD_BYTES, CardError, CardMemory, CardStream, Rows
from dataplane.memory.arena import Arena, ArenaMissingError, ArenaTooLargeError, ByteArray
from dataplane.memory.checksum import sum64

JOIN_POLL_S = 0.01


def crossed(data: ByteArray) -> None:
    """These bytes come from another card, by a copy or over a communicator: who tests what damage does changes them."""


class FakeMemory:
    """`array`: the bytes."""

    def __init__(self, card: "FakeCard", file: Arena, num_bytes: int) -> None:
        self.card = card
        self.file = file
        self.num_bytes = num_bytes
        self._is_closed = False
        card.opened["memory"] += 1
        card.memories.append(self)

    @property
    def array(self) -> ByteArray:
        return self.file.array[: self.num_bytes]

    @property
    def exported(self) -> ByteArray:
        return self.array

    def cells(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return the memory as words, and which of them are the rows', `[row, word]`."""
        words = self.array[: self.num_bytes // WORD_BYTES * WORD_BYTES].view(np.uint64)
        at = rows.starts[:, None] + np.arange(rows.num_words)
        assert not at.size or (at.min() >= 0 and at.max() < len(words)), "rows outside the memory"
        return words, at

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self.card.opened["memory"] -= 1
            self.file.close()


class FakeSum:
    result: int | None = None

    def value(self) -> int:
        assert self.result is not None, "nobody has waited for it"
        return self.result


class FakeStream:
    """Runs what it is given on a thread of its own, each a little later."""

    def __init__(self, card: "FakeCard") -> None:
        self._card = card
        self.handle = next(card.handles)
        self._given: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._num_left = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="fake-stream", daemon=True)
        self._thread.start()
        card.opened["stream"] += 1
        card.streams[self.handle] = self

    def run(self, work: Callable[[], None]) -> None:
        """Do this in its turn."""
        self._card.check()
        self._num_left += 1
        self._given.put(work)

    def copy(self, source: CardMemory, source_rows: Rows, target: CardMemory, target_rows: Rows) -> None:
        assert source_rows.total_bytes == target_rows.total_bytes
        (words, at), (target_words, target_at) = _of(source).cells(source_rows), _of(target).cells(target_rows)

        is_between = _of(source).card is not _of(target).card

        def work() -> None:
            moved = words[at]
            if is_between:
                crossed(moved.view(np.uint8))
            if self._card.damages == "copy":
                moved.reshape(-1)[-1] ^= np.uint64(1)
            target_words[target_at] = moved

        self.run(work)

    def sum64(self, memory: CardMemory, rows: Rows) -> FakeSum:
        words, at = _of(memory).cells(rows)
        pending = FakeSum()

        def work() -> None:
            pending.result = sum64(words[at].view(np.uint8).reshape(-1))

        self.run(work)
        return pending

    def download(self, memory: CardMemory, target: ByteArray) -> None:
        source = _of(memory).array

        def work() -> None:
            target[:] = source[: target.nbytes]
            if self._card.damages == "download":
                target[-1] ^= 1

        self.run(work)

    def upload(self, source: ByteArray, memory: CardMemory) -> None:
        target = _of(memory).array
        self.run(lambda: np.copyto(target[: source.nbytes], source))

    def is_done(self) -> bool:
        self._card.check()
        return not self._num_left

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._card.opened["stream"] -= 1
            self._given.put(None)

    def _run(self) -> None:
        while (work := self._given.get()) is not None:
            time.sleep(self._card.delay_s())
            while self._card.is_stalled and self._card.died_of is None and not self._is_closed:
                time.sleep(JOIN_POLL_S)
            if self._card.is_stalled or self._card.died_of is not None:
                return
            work()
            self._num_left -= 1


class Fabric:
    """What joins cards' communicators. Two ends that join belong together: who comes once more waits for the other to
    do so too."""

    def __init__(self) -> None:
        self.sent: dict[tuple[bytes, int], list[queue.Queue[bytes]]] = {}
        self.lock = threading.Lock()

    def come(self, unique_id: bytes, rank: int) -> int:
        """Return how often this end has come before."""
        with self.lock:
            comings = self.sent.setdefault((unique_id, rank), [])
            comings.append(queue.Queue())
            return len(comings) - 1

    def has_come(self, unique_id: bytes, rank: int, number: int) -> bool:
        with self.lock:
            return len(self.sent.get((unique_id, rank), [])) > number


class FakeCommunicator:
    def __init__(self, card: "FakeCard", inbox: "queue.Queue[bytes]", outbox: "queue.Queue[bytes]") -> None:
        self._card = card
        self._inbox, self._outbox = inbox, outbox
        self.is_aborted = False
        card.opened["communicator"] += 1

    def send(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        assert isinstance(stream, FakeStream)
        source = _of(memory).array
        stream.run(lambda: self._outbox.put(bytes(source[:num_bytes])))

    def receive(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        assert isinstance(stream, FakeStream)
        target = _of(memory).array

        def work() -> None:
            while not self.is_aborted and self._card.died_of is None:
                try:
                    arrived = self._inbox.get(timeout=JOIN_POLL_S)
                except queue.Empty:
                    continue
                assert len(arrived) == num_bytes, "the two ends do not do the same"
                taken = np.frombuffer(bytearray(arrived), np.uint8)
                crossed(taken)
                target[:num_bytes] = taken
                return

        stream.run(work)

    def abort(self) -> None:
        assert not self.is_aborted
        self.is_aborted = True
        self._card.opened["communicator"] -= 1


class FakeCard:
    """`peers`: the cards whose memory it maps. `opened`: what is not closed. `died_of`: why every call fails.
    `is_stalled`: nothing that was put on a stream goes on. `damages`: "copy", "download", or nothing."""

    def __init__(
        self, uuid: str = "GPU-0", *, seed: int = 0, peers: tuple[str, ...] = (), fabric: Fabric | None = None
    ) -> None:
        self.uuid = uuid
        self.name = "a fake card"
        self.peers = peers
        self.fabric = fabric or Fabric()
        self.refusal: str | None = None if fabric else "there is no fabric"
        self.opened: Counter[str] = Counter()
        self.memories: list[FakeMemory] = []
        self.streams: dict[int, FakeStream] = {}
        self.handles = iter(range(1, 1 << 30))
        self.died_of: str | None = None
        self.is_stalled = False
        self.damages = ""
        self.max_delay_s = 0.002
        self._random = random.Random(seed)

    def check(self) -> None:
        """Raises CardError once it has died."""
        if self.died_of is not None:
            raise CardError("the card", self.died_of)

    def delay_s(self) -> float:
        return self._random.uniform(0, self.max_delay_s)

    def allocate(self, num_bytes: int) -> FakeMemory:
        self.check()
        try:
            return FakeMemory(self, Arena.create_bytes(num_bytes), num_bytes)
        except ArenaTooLargeError as error:
            raise CardError(f"allocate {num_bytes} bytes", str(error)) from error

    def pinned(self, num_bytes: int) -> ByteArray:
        self.check()
        return np.empty(num_bytes, np.uint8)

    def stream(self) -> FakeStream:
        self.check()
        return FakeStream(self)

    def mark(self, stream_handle: int) -> Callable[[], bool]:
        reached = threading.Event()
        self.streams[stream_handle].run(reached.set)

        def is_reached() -> bool:
            self.check()
            return reached.is_set()

        return is_reached

    def can_map(self, uuid: str) -> bool:
        return uuid == self.uuid or uuid in self.peers

    def export(self, memory: CardMemory) -> bytes:
        file = _of(memory).file
        return f"{file.name} {file.nonce}".encode()

    def map_memory(self, name: bytes, num_bytes: int) -> FakeMemory:
        self.check()
        try:
            file, nonce = name.decode().split(" ")
            return FakeMemory(self, Arena.attach(file, nonce), num_bytes)
        except (ValueError, ArenaMissingError) as error:
            raise CardError("open memory", str(error)) from error

    def no_communicators(self) -> str | None:
        return self.refusal

    def new_id(self) -> bytes:
        self.check()
        return self._random.randbytes(128)

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> FakeCommunicator:
        number, peer = self.fabric.come(unique_id, rank), num_ranks - 1 - rank
        while not self.fabric.has_come(unique_id, peer, number):
            time.sleep(JOIN_POLL_S)
            self.check()
        sent = self.fabric.sent
        return FakeCommunicator(self, sent[unique_id, rank][number], sent[unique_id, peer][number])

    def close(self) -> None:
        """End what waits, and remove what was left because the card had died."""
        self.died_of = self.died_of or "it is closed"
        for memory in self.memories:
            memory.close()


def _of(memory: CardMemory) -> FakeMemory:
    assert isinstance(memory, FakeMemory), "memory of another kind of card"
    return memory
