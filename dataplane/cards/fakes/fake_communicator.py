"""Communicators between fake cards of one process, which stall, fail and die as they are told to. They have NCCL's own
manners: making one waits for the other rank, so does the first group, an operation waits for the peer's of its place in
the order, and if their sizes differ it waits for ever.
"""

import contextlib
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from dataplane.cards.device import DeviceError, DeviceMemory, Stream
from dataplane.cards.fakes.fake_device import FakeDevice, FakeMemory
from dataplane.cards.nccl.communicator import UNIQUE_ID_BYTES, CommunicatorError
from dataplane.memory.arena import ByteArray

Call = Literal["new_id", "make", "group", "abort"]
_POLL_S = 0.001


class FakeFabric:
    """What connects the ranks: who has come, by id. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ranks: dict[bytes, dict[int, FakeCommunicator]] = {}


@dataclass(eq=False)
class _Operation:
    """`has_started`: it is the first of its stream. `payload`: what is sent, as it was then."""

    is_send: bool
    memory: FakeMemory
    first_byte: int
    num_bytes: int
    stream: Stream
    has_started: bool = False
    is_done: bool = False
    payload: bytes = b""


class FakeLibrary:
    """The library as one process has it, on a fake card. `refused`: why it makes nothing. `made`: the communicators
    that were; `num_alive`: those that were not aborted."""

    def __init__(self, fabric: FakeFabric, device: FakeDevice) -> None:
        self.fabric = fabric
        self.device = device
        self.refused: str | None = None
        self.made: list[FakeCommunicator] = []
        self.num_alive = 0
        self._failing: Counter[str] = Counter()
        self._stalling: Counter[str] = Counter()
        self._delaying: Counter[str] = Counter()
        self._num_releases = 0
        self._is_shut = False

    def refusal(self) -> str | None:
        return self.refused

    def new_id(self) -> bytes:
        self.enter("new_id")
        return secrets.token_bytes(UNIQUE_ID_BYTES)

    def make(self, unique_id: bytes, num_ranks: int, rank: int) -> "FakeCommunicator":
        self.enter("make")
        communicator = FakeCommunicator(self, num_ranks - 1 - rank)
        changed = self.fabric.changed
        with changed:
            ranks = self.fabric.ranks.setdefault(unique_id, {})
            if rank in ranks:
                raise CommunicatorError("make", f"rank {rank} has come already")
            ranks[rank] = communicator
            changed.notify_all()
            self.wait_for("make", lambda: len(ranks) == num_ranks)
            communicator.peer = ranks[num_ranks - 1 - rank]
            self.num_alive += 1
            self.made.append(communicator)
        return communicator

    # What tests do to it.

    def fail_next(self, call: Call) -> None:
        """The next such call raises."""
        self._failing[call] += 1

    def stall_next(self, call: Call) -> None:
        """The next such call does not return before `release`."""
        self._stalling[call] += 1

    def delay_next(self, call: Call) -> None:
        """The next such call does nothing before `release`, and then what it should."""
        self._delaying[call] += 1

    def release(self) -> None:
        """Let the calls that wait end, with an error."""
        with self.fabric.changed:
            self._num_releases += 1
            self.fabric.changed.notify_all()

    def shut(self) -> None:
        """Let nothing wait any more."""
        self._is_shut = True
        self.release()

    # What communicators do.

    def enter(self, call: Call) -> None:
        """Raises CommunicatorError."""
        with self.fabric.changed:
            fails, stalls, delays = (what[call] > 0 for what in (self._failing, self._stalling, self._delaying))
            self._failing[call] -= fails
            self._stalling[call] -= stalls
            self._delaying[call] -= delays
        if delays:
            with contextlib.suppress(CommunicatorError):
                self.wait_for(call, lambda: False)
        if stalls:
            self.wait_for(call, lambda: False)
        if fails:
            raise CommunicatorError(call, "failed as it was told to")

    def wait_for(self, call: Call, is_there: Callable[[], bool]) -> None:
        """Raises CommunicatorError when it is released before."""
        with self.fabric.changed:
            num_releases = self._num_releases
            while not is_there():
                if self._is_shut or self._num_releases > num_releases:
                    raise CommunicatorError(call, "nobody has come")
                self.fabric.changed.wait(_POLL_S)


class FakeCommunicator:
    """One rank. `is_lost`: the process has died, as others see it: nothing of it moves any more. `error`: asynchronous,
    found by `failure`."""

    def __init__(self, library: FakeLibrary, peer_rank: int) -> None:
        self.peer: FakeCommunicator = self
        self.is_lost = False
        self.error: str | None = None
        self.is_aborted = False
        self.num_groups = 0
        self._library = library
        self._changed = library.fabric.changed
        self._peer_rank = peer_rank
        self._group_of: list[_Operation] | None = None
        self.sent: list[_Operation] = []
        self.received: list[_Operation] = []

    def group(self) -> AbstractContextManager[None]:
        return self._group()

    def send(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        self._add(True, memory, first_byte, num_bytes, stream)

    def receive(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        self._add(False, memory, first_byte, num_bytes, stream)

    def failure(self) -> str | None:
        return self.error

    def abort(self) -> None:
        with self._changed:
            assert not self.is_aborted, "freed twice"
            self.is_aborted = True  # what is under way ends at once, whatever else the library waits for
            self._library.num_alive -= 1
            self._changed.notify_all()
        with contextlib.suppress(CommunicatorError):
            self._library.enter("abort")

    @contextlib.contextmanager
    def _group(self) -> Generator[None]:
        assert self._group_of is None, "a group inside a group, or on two threads"
        self._group_of = []
        try:
            yield
            operations = self._group_of
        finally:
            self._group_of = None
        self._library.enter("group")
        self._connect()
        for operation in operations:
            self._enqueue(operation)

    def _connect(self) -> None:
        """Wait for the peer's first group, at the first."""
        with self._changed:
            self.num_groups += 1
            self._changed.notify_all()
            self._library.wait_for("group", lambda: self.peer.num_groups > 0 or self.is_aborted)
            if self.is_aborted:
                raise CommunicatorError("group", "aborted")

    def _add(self, is_send: bool, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        assert self._group_of is not None, "outside a group"
        if not 0 < num_bytes <= memory.num_bytes - first_byte or first_byte < 0:
            raise CommunicatorError("add", f"bytes {first_byte}+{num_bytes} of {memory.num_bytes}")
        self._group_of.append(_Operation(is_send, cast(FakeMemory, memory), first_byte, num_bytes, stream))

    def _enqueue(self, operation: _Operation) -> None:
        with self._changed:
            own = self.sent if operation.is_send else self.received
            own.append(operation)
            place = len(own) - 1
        what = "nccl-send" if operation.is_send else "nccl-receive"

        def can_run() -> bool:
            return self._can_end_send(operation) if operation.is_send else self._can_receive(operation, place)

        def run() -> None:
            if operation.is_send:
                self._end_send(operation)
            else:
                self.receive_now(operation, place)

        try:
            self._library.device.enqueue(what, operation.stream, run, can_run)
        except DeviceError as error:
            raise CommunicatorError(what, str(error)) from error

    def _can_end_send(self, operation: _Operation) -> bool:
        with self._changed:
            if not operation.has_started:
                operation.has_started = True
                first = operation.first_byte
                operation.payload = operation.memory.array[first : first + operation.num_bytes].tobytes()
            return operation.is_done or self.is_aborted

    def _end_send(self, operation: _Operation) -> None:
        if operation.is_done:
            operation.payload = b""

    def _can_receive(self, operation: _Operation, place: int) -> bool:
        with self._changed:
            if self.is_aborted:
                return True
            if self.is_lost or self.peer.is_lost or self.peer.is_aborted or place >= len(self.peer.sent):
                return False
            sent = self.peer.sent[place]
            return sent.has_started and sent.num_bytes == operation.num_bytes

    def receive_now(self, operation: _Operation, place: int) -> ByteArray:
        """Put in place what was sent, on the card's thread; return it."""
        target = operation.memory.array[operation.first_byte : operation.first_byte + operation.num_bytes]
        with self._changed:
            if self.is_aborted:
                target[:] = 0xDE  # undefined: nobody may take it for what was sent
                return target
            sent = self.peer.sent[place]
            payload = sent.payload
        target[:] = np.frombuffer(payload, np.uint8)
        with self._changed:
            sent.is_done = True
        return target
