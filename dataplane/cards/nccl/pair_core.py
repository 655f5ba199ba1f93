"""One pair of workers with a communicator between them, as decisions: who may use which buffer, what goes when, and
when it is over. Pure: what has happened comes in with the time, what is to be done goes out (`take_actions`).

A *slot* is one frame on its way. The holder numbers slots and tells each to the reader, on the pair's own wire; both
ends move them in that order, whatever becomes of the read that one belongs to. So the two ends never fall out of step,
and a communicator need not be given up for a read that was cancelled: its slots are received and thrown away.

Whoever has something to wait for is bounded: the making of the communicator by INIT_TIMEOUT_S, the oldest slot under
way by SLOT_TIMEOUT_S. What runs over it breaks the pair, for good: another one has another id and a higher generation.
"""

import abc
import enum
from collections import deque
from typing import NamedTuple

from dataplane.cards import limits
from dataplane.protocol.stream import ProtocolError
from dataplane.protocol.wire import WireClosedError

NUM_BUFFERS = 4
"""At each end: one is filled, one crosses, one is emptied, and one is to spare for a second read."""


class PairState(enum.StrEnum):
    NEW = "new"
    INITIALIZING = "initializing"
    READY = "ready"
    BROKEN = "broken"


class PairBrokenError(WireClosedError):
    """The pair has ended, and with it what was on its way: as if the peer had gone, which it may have."""


class Make(NamedTuple):
    """Make the communicator."""


class Tell(NamedTuple):
    """Say to the reader what comes next."""

    slot: int
    read_id: int
    num_bytes: int


class Move(NamedTuple):
    """Send the buffer's first bytes, or receive into it: behind all earlier slots."""

    slot: int
    buffer: int
    num_bytes: int


class End(NamedTuple):
    """Abort the communicator, close the wire."""


Action = Make | Tell | Move | End


class PairCore(abc.ABC):
    """What both ends have in common. `failure`: why it is broken. `idle_since`: when its last read ended, None while
    there is one."""

    def __init__(self, generation: int, now: float) -> None:
        self.generation = generation
        self.state = PairState.NEW
        self.failure = ""
        self.idle_since: float | None = now
        self._free = deque(range(NUM_BUFFERS))
        self._under_way: deque[Move] = deque()
        self._deadline: float | None = None
        self._reads: set[int] = set()
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return what is to be done, in this order."""
        actions, self._actions = self._actions, []
        return actions

    def opened(self, now: float) -> None:
        """Both ends have the pair's wire."""
        if self.state is PairState.NEW:
            self.state = PairState.INITIALIZING
            self._deadline = now + limits.INIT_TIMEOUT_S
            self._actions.append(Make())

    def made(self, now: float) -> None:
        """The communicator is there. Too late is as never."""
        if self.state is PairState.INITIALIZING:
            self.state = PairState.READY
            self._arm(now)

    def fail(self, reason: str) -> None:
        """It is over, at whatever point. The first reason counts."""
        if self.state is not PairState.BROKEN:
            self.state = PairState.BROKEN
            self.failure = reason
            self._deadline = None
            self._actions.append(End())

    def tick(self, now: float) -> None:
        """Time passes."""
        if self._deadline is None or now < self._deadline:
            return
        if self.state is PairState.INITIALIZING:
            self.fail(f"the communicator was not made within {limits.INIT_TIMEOUT_S:.0f} s")
        else:
            self.fail(f"slot {self._under_way[0].slot} did not cross within {limits.SLOT_TIMEOUT_S:.0f} s")

    @property
    @abc.abstractmethod
    def is_settled(self) -> bool:
        """No read has a buffer."""

    def moved(self, slot: int, now: float) -> None:
        """The oldest slot under way has crossed, or was ended by an abort: once it is over nothing is taken."""
        move = self._under_way.popleft()
        assert move.slot == slot, f"slot {slot} before {move.slot}"
        self._arm(now)
        self._crossed(move, now)

    def check(self) -> None:
        """Raises PairBrokenError once it is over."""
        if self.state is PairState.BROKEN:
            raise PairBrokenError(f"the nccl pair has ended: {self.failure}")

    def enter(self, read_id: int) -> None:
        """A read begins to use the pair. Raises PairBrokenError, ProtocolError when there is such a read."""
        self.check()
        if read_id in self._reads:
            raise ProtocolError(f"read {read_id} is under way")
        self._reads.add(read_id)
        self.idle_since = None

    def leave(self, read_id: int, now: float) -> None:
        """The read has ended, in whatever way, and nothing of it uses a buffer any more. Idempotent."""
        self._reads.discard(read_id)
        if not self._reads:
            self.idle_since = now

    def _start(self, move: Move, now: float) -> None:
        self._under_way.append(move)
        self._actions.append(move)
        if len(self._under_way) == 1:
            self._arm(now)

    @abc.abstractmethod
    def _crossed(self, move: Move, now: float) -> None:
        """This slot has."""

    def _arm(self, now: float) -> None:
        if self.state is PairState.READY:
            self._deadline = now + limits.SLOT_TIMEOUT_S if self._under_way else None


class HolderCore(PairCore):
    """The end that sends. A buffer is free, begun by a read that gathers into it, or under way in a slot."""

    def __init__(self, generation: int, now: float) -> None:
        super().__init__(generation, now)
        self._begun: dict[int, int] = {}
        """By buffer, whose it is."""
        self._last_slot = 0

    @property
    def is_settled(self) -> bool:
        return not self._begun

    def begin(self, read_id: int) -> int | None:
        """Return a buffer to gather a frame into, or None while there is none. Raises PairBrokenError."""
        self.check()
        if not self._free:
            return None
        buffer = self._free.popleft()
        self._begun[buffer] = read_id
        return buffer

    def leave(self, read_id: int, now: float) -> None:
        """The read has ended: what it has begun and not posted is not sent."""
        super().leave(read_id, now)
        for buffer in [buffer for buffer, owner in self._begun.items() if owner == read_id]:
            del self._begun[buffer]
            self._free.append(buffer)

    def post(self, buffer: int, num_bytes: int, now: float) -> int:
        """Send a buffer that has been filled; return its slot. Raises PairBrokenError."""
        self.check()
        read_id = self._begun.pop(buffer)
        self._last_slot += 1
        self._actions.append(Tell(self._last_slot, read_id, num_bytes))
        self._start(Move(self._last_slot, buffer, num_bytes), now)
        return self._last_slot

    def _crossed(self, move: Move, now: float) -> None:
        self._free.append(move.buffer)


class _Arrival:
    """A slot that has been told. `buffer`: None while it waits for one."""

    __slots__ = ("buffer", "has_arrived", "is_taken", "num_bytes", "read_id")

    def __init__(self, read_id: int, num_bytes: int) -> None:
        self.read_id = read_id
        self.num_bytes = num_bytes
        self.buffer: int | None = None
        self.has_arrived = False
        self.is_taken = False


class ReaderCore(PairCore):
    """The end that receives. A buffer is free, under way in a slot, holds what its read has not taken yet, or is taken:
    being emptied.

    The oldest slot that waits to be taken never waits for a buffer, and its frame is announced without any further
    slot: so reads that share the buffers do not wait for each other in a ring.
    """

    def __init__(self, generation: int, now: float, max_bytes: int) -> None:
        super().__init__(generation, now)
        self._max_bytes = max_bytes
        self._arrivals: dict[int, _Arrival] = {}
        self._waiting: deque[int] = deque()
        self._last_slot = 0
        self._last_read = 0

    @property
    def is_settled(self) -> bool:
        return not any(arrival.is_taken for arrival in self._arrivals.values())

    def next_read(self) -> int:
        """Return the name of a new read, which then uses the pair. Raises PairBrokenError."""
        self._last_read += 1
        self.enter(self._last_read)
        return self._last_read

    def leave(self, read_id: int, now: float) -> None:
        """The read has ended: what has come for it, or will, is thrown away."""
        super().leave(read_id, now)
        for slot in [slot for slot, a in self._arrivals.items() if a.read_id == read_id and a.has_arrived]:
            self._release(slot, now)

    def ordered(self, told: Tell, now: float) -> None:
        """The holder has told a slot. Raises ProtocolError."""
        if self.state is PairState.BROKEN:
            return
        if told.slot != self._last_slot + 1 or not 0 < told.num_bytes <= self._max_bytes:
            raise ProtocolError(f"slot {told.slot} of {told.num_bytes} bytes after slot {self._last_slot}")
        if len(self._waiting) >= limits.MAX_ORDERED:
            raise ProtocolError(f"{limits.MAX_ORDERED} slots that nobody has a buffer for")
        self._last_slot = told.slot
        self._arrivals[told.slot] = _Arrival(told.read_id, told.num_bytes)
        self._waiting.append(told.slot)
        self._receive(now)

    def take(self, read_id: int, slot: int, num_bytes: int) -> int | None:
        """Return the buffer in which the read's slot has arrived, or None while it has not. Raises PairBrokenError, and
        ProtocolError when there can be no such slot."""
        self.check()
        arrival = self._arrivals.get(slot)
        if arrival is None:
            if slot <= self._last_slot:
                raise ProtocolError(f"slot {slot} has gone")
            return None  # the other wire is quicker
        if (arrival.read_id, arrival.num_bytes) != (read_id, num_bytes) or arrival.is_taken:
            raise ProtocolError(f"slot {slot} is not read {read_id}'s, of {num_bytes} bytes")
        if not arrival.has_arrived:
            return None
        arrival.is_taken = True
        return arrival.buffer

    def buffer_of(self, slot: int) -> int | None:
        """Return the buffer of a slot that was taken; None: it has been emptied."""
        arrival = self._arrivals.get(slot)
        return None if arrival is None else arrival.buffer

    def emptied(self, slot: int, now: float) -> None:
        """Nothing reads the taken buffer any more. Idempotent."""
        if slot in self._arrivals:
            self._release(slot, now)

    def _crossed(self, move: Move, now: float) -> None:
        arrival = self._arrivals[move.slot]
        arrival.has_arrived = True
        if arrival.read_id not in self._reads:
            self._release(move.slot, now)

    def _release(self, slot: int, now: float) -> None:
        buffer = self._arrivals.pop(slot).buffer
        assert buffer is not None
        self._free.append(buffer)
        if self.state is not PairState.BROKEN:
            self._receive(now)

    def _receive(self, now: float) -> None:
        while self._waiting and self._free:
            slot = self._waiting.popleft()
            arrival = self._arrivals[slot]
            arrival.buffer = self._free.popleft()
            self._start(Move(slot, arrival.buffer, arrival.num_bytes), now)
