"""The staging ring: page-locked memory between the card and everything else, lent in slots to many streams at once.

`RingCore` decides, without threads or clocks; `StagingRing` lets threads wait for it. Who has a slot can finish with
that one alone, and asks for another only if it can be had at once (`take_now`), or having given back what it had: so
every slot comes back, and whoever waits for a first one gets it. A second slot only makes a stream quicker: nobody
gets one while another waits for a first, nor under pressure (use went above the high mark and not yet below the low).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 256
"""Slots begin at a multiple of it: what a card copies best, and whole words of a digest."""
MIN_FRAMES = 4
"""A frame is at most this part of the ring."""
HIGH_SHARE, LOW_SHARE = 0.75, 0.5


class RingFullError(Exception):
    """No slot was free in time."""

    def __init__(self, owner: str, num_bytes: int, timeout_s: float) -> None:
        super().__init__(f"no {num_bytes} bytes of the staging ring for {owner} within {timeout_s:.1f} s")
        self.owner = owner
        self.num_bytes = num_bytes


class RingClosedError(Exception):
    """The arena is being closed, or the one who waits was cut."""


class Slot(NamedTuple):
    """A part of the ring. `num_bytes`: as asked for. `number`: never used twice."""

    number: int
    owner: str
    first_byte: int
    num_bytes: int

    @property
    def end_byte(self) -> int:
        return self.first_byte + self.num_bytes


class Asked(NamedTuple):
    """A question for a slot."""

    number: int
    owner: str
    num_bytes: int


class RingCore:
    """Which part of a ring is whose. Slots come back in any order; what has been free longest is lent first."""

    def __init__(self, num_bytes: int, frame_bytes: int) -> None:
        assert 0 < frame_bytes <= num_bytes // MIN_FRAMES, f"frames of {frame_bytes} in a ring of {num_bytes} bytes"
        assert num_bytes % ALIGNMENT == 0, f"a ring of {num_bytes} bytes"
        self.num_bytes = num_bytes
        self.frame_bytes = frame_bytes
        self.used_bytes = 0
        """Of what is lent, with what alignment takes."""
        self.is_pressed = False
        self._high_bytes = int(num_bytes * HIGH_SHARE)
        self._low_bytes = int(num_bytes * LOW_SHARE)
        self._lent: list[Slot] = []
        """By place."""
        self._num_of: Counter[str] = Counter()
        self._asked: deque[Asked] = deque()
        self._next_number = 1
        self._head = 0
        """Where the last slot that was lent ends."""

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is lent, by place."""
        return tuple(self._lent)

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def num_of(self, owner: str) -> int:
        """Return how many slots an owner has."""
        return self._num_of[owner]

    def ask(self, owner: str, num_bytes: int) -> Asked:
        """Ask for a slot, which `grant` gives under the same number. Asserts that it is a frame's."""
        assert 0 < num_bytes <= self.frame_bytes, f"{num_bytes} bytes; a frame has at most {self.frame_bytes}"
        asked = Asked(self._next_number, owner, num_bytes)
        self._next_number += 1
        self._asked.append(asked)
        return asked

    def withdraw(self, number: int) -> None:
        """Ask no more: what was asked for and not granted. Idempotent."""
        self._asked = deque(asked for asked in self._asked if asked.number != number)

    def grant(self) -> list[Slot]:
        """Lend what can be lent now: first slots as they were asked for, then second ones. Nobody is overtaken by one
        of his kind, however little that one asks for."""
        granted: list[Slot] = []
        while (asked := self._next_asked()) is not None and (first_byte := self._room(asked.num_bytes)) is not None:
            self._asked.remove(asked)
            granted.append(self._lend(asked, first_byte))
        return granted

    def release(self, slot: Slot) -> None:
        """Take a slot back. Idempotent."""
        if slot not in self._lent:
            return
        self._lent.remove(slot)
        self._num_of[slot.owner] -= 1
        if not self._num_of[slot.owner]:
            del self._num_of[slot.owner]
        self.used_bytes -= _aligned(slot.num_bytes)
        if self.used_bytes < self._low_bytes:
            self.is_pressed = False

    def check_integrity(self) -> None:
        """Assert that no two slots overlap, that all lie in the ring, and that the counts are right."""
        end = 0
        for slot in self._lent:
            assert slot.first_byte % ALIGNMENT == 0 and slot.first_byte >= end, f"{slot} begins before {end}"
            end = slot.end_byte
        assert end <= self.num_bytes, "all lie in the ring"
        assert self.used_bytes == sum(_aligned(slot.num_bytes) for slot in self._lent), "what is used is lent"
        assert self._num_of == Counter(slot.owner for slot in self._lent), "owners have what is lent"

    def _next_asked(self) -> Asked | None:
        """Return what is to be granted next, whether there is room for it or not."""
        first = next((asked for asked in self._asked if not self._num_of[asked.owner]), None)
        if first is not None or self.is_pressed:
            return first
        return self._asked[0] if self._asked else None

    def _lend(self, asked: Asked, first_byte: int) -> Slot:
        slot = Slot(asked.number, asked.owner, first_byte, asked.num_bytes)
        self._lent.append(slot)
        self._lent.sort(key=lambda lent: lent.first_byte)
        self._num_of[slot.owner] += 1
        self._head = first_byte + _aligned(slot.num_bytes)
        self.used_bytes += _aligned(slot.num_bytes)
        if self.used_bytes > self._high_bytes:
            self.is_pressed = True
        return slot

    def _room(self, num_bytes: int) -> int | None:
        """Return where so many bytes are free: the first such place from the head on, and then from the start."""
        gaps: list[tuple[int, int]] = []
        end = 0
        for slot in self._lent:
            gaps.append((end, slot.first_byte))
            end = slot.first_byte + _aligned(slot.num_bytes)
        gaps.append((end, self.num_bytes))
        for first, last in gaps:
            at = max(first, self._head)
            if at + num_bytes <= last:
                return at
        return next((first for first, last in gaps if first + num_bytes <= last), None)


class Claim:
    """One question for a slot, as long as it stands. Made by `StagingRing.claim`; its `poll` or `wait` takes the slot,
    which then is the caller's to give back."""

    def __init__(self, ring: "StagingRing", asked: Asked, on_granted: Callable[[], None]) -> None:
        self._ring = ring
        self._on_granted = on_granted
        self.asked = asked
        self.granted: Slot | None = None
        self.is_ended = False
        """Taken, withdrawn or cut: nothing comes of it any more."""

    def poll(self, timeout_s: float = 0.0) -> Slot | None:
        """Return the slot if it is granted in time. Raises RingClosedError when nothing will come any more."""
        return self._ring.wait(self, timeout_s)

    def wait(self, timeout_s: float) -> Slot:
        """Return the slot. Raises RingFullError, RingClosedError; then the question does not stand any more."""
        slot = self.poll(timeout_s)
        if slot is None:
            self.cut()
            raise RingFullError(self.asked.owner, self.asked.num_bytes, timeout_s)
        return slot

    def cut(self) -> None:
        """Ask no more; who waits is told. From any thread; idempotent; nothing once the slot is taken."""
        self._ring.withdraw(self)

    def grant(self, slot: Slot) -> None:
        """By the ring, under its lock."""
        self.granted = slot
        self._on_granted()


class StagingRing:
    """The ring as threads use it. Owners are streams, by a name of their own."""

    def __init__(self, num_bytes: int, frame_bytes: int) -> None:
        self._core = RingCore(num_bytes, frame_bytes)
        self._changed = threading.Condition()
        self._claims: dict[int, Claim] = {}
        """By number: what has been asked for and neither taken nor withdrawn."""
        self._closed = False

    @property
    def frame_bytes(self) -> int:
        """The most that a slot has."""
        return self._core.frame_bytes

    @property
    def used_bytes(self) -> int:
        with self._changed:
            return self._core.used_bytes

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is lent."""
        with self._changed:
            return self._core.slots

    def claim(self, owner: str, num_bytes: int, on_granted: Callable[[], None] = lambda: None) -> Claim:
        """Ask for a slot. `on_granted` is called once, here or on the thread that made room; it must be quick and not
        raise, nor call the ring. Raises RingClosedError."""
        with self._changed:
            if self._closed:
                raise RingClosedError("the staging ring is closed")
            asked = self._core.ask(owner, num_bytes)
            claim = self._claims[asked.number] = Claim(self, asked, on_granted)
            self._grant()
            return claim

    def take(self, owner: str, num_bytes: int, timeout_s: float) -> Slot:
        """Return a slot, within `timeout_s`. Raises RingFullError, RingClosedError.

        An owner that waits here has no slot that comes back only once this wait is over.
        """
        return self.claim(owner, num_bytes).wait(timeout_s)

    def take_now(self, owner: str, num_bytes: int) -> Slot | None:
        """Return a slot if there is one at once. Raises RingClosedError."""
        claim = self.claim(owner, num_bytes)
        try:
            return claim.poll()
        finally:
            claim.cut()

    def wait(self, claim: Claim, timeout_s: float) -> Slot | None:
        """Return a claim's slot once it is granted, None when it is not in time. Raises RingClosedError."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while claim.granted is None:
                if self._closed or claim.is_ended:
                    raise RingClosedError(f"{claim.asked.owner} waits for the staging ring no more")
                if (remaining := deadline - time.monotonic()) <= 0:
                    return None
                self._changed.wait(remaining)
            slot, claim.granted, claim.is_ended = claim.granted, None, True
            del self._claims[slot.number]
            return slot

    def withdraw(self, claim: Claim) -> None:
        """Leave nothing of a claim behind: neither the question nor a slot that nobody took. Idempotent."""
        with self._changed:
            if claim.is_ended:
                return
            claim.is_ended = True
            del self._claims[claim.asked.number]
            self._core.withdraw(claim.asked.number)
            if claim.granted is not None:
                self._core.release(claim.granted)
                claim.granted = None
            self._grant()
            self._changed.notify_all()

    def release(self, slot: Slot) -> None:
        """Give a slot back. From any thread; idempotent; also once the ring is closed."""
        with self._changed:
            self._core.release(slot)
            self._grant()

    def close(self) -> None:
        """Lend nothing any more; all who wait are told. Idempotent."""
        with self._changed:
            self._closed = True
            for claim in list(self._claims.values()):
                self.withdraw(claim)

    def check_integrity(self) -> None:
        with self._changed:
            self._core.check_integrity()

    def _grant(self) -> None:
        if self._closed:
            return
        for slot in self._core.grant():
            self._claims[slot.number].grant(slot)
            self._changed.notify_all()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
