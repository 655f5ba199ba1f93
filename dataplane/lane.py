"""The way of one transfer's frames between an arena on a card and host memory: a side stream, slots of the arena's
staging ring, and behind each frame an event.

Out: one kernel packs a frame's rows into the slot on the card, and digests them; one copy brings the slot to the host.
In: one copy brings the host's slot to the card, one kernel puts its rows where they belong, and digests them. Nothing
of it waits for another process, so all of it ends; and a slot is lent again only once what uses it has ended.
"""

import contextlib
import itertools
import logging
import time
from typing import NamedTuple

from dataplane.arena import ByteArray
from dataplane.device import DeviceError, DigestSlot, Event
from dataplane.device_arena import DeviceArena
from dataplane.ring import Claim, RingClosedError, Slot
from dataplane.runs import SequenceRuns, gather_moves, scatter_moves
from dataplane.stream import Header
from dataplane.wire import Wire, WireClosedError

log = logging.getLogger(__name__)

DRAIN_S = 30.0
"""A card that has not done by then what was put on a side stream is taken for broken."""
_LOOK_S = 0.05
"""Who waits for the card, or for a slot, looks so often whether the peer is still there."""

_numbers = itertools.count(1)


class Passage(NamedTuple):
    """A frame on its way. All that is put on the stream for it comes before `event`."""

    slot: Slot
    event: Event
    digest: DigestSlot | None


class Lane:
    """For one thread. `name`: what the ring's messages call it."""

    def __init__(self, arena: DeviceArena, name: str, *, digests: bool) -> None:
        self._arena = arena
        self._device = arena.device
        self._ring = arena.ring
        self._owner = f"{name}-{next(_numbers)}"
        self._has_digests = digests
        self._digests: list[DigestSlot] = []
        """Those that a kernel may still write to."""
        self._slots: dict[int, Slot] = {}
        self._events: list[Event] = []
        """Those that nobody uses now."""
        self._passing: dict[int, Passage] = {}
        self._stream = self._device.new_stream()
        self._is_closed = False

    @property
    def has_slots(self) -> bool:
        return bool(self._slots)

    def host(self, slot: Slot) -> ByteArray:
        """Return the slot's bytes in host memory."""
        return self._arena.staging[slot.first_byte : slot.end_byte]

    def take_now(self, num_bytes: int) -> Slot | None:
        """Return a slot if there is one at once. Raises DeviceError when the arena is being closed."""
        try:
            return self._have(self._ring.take_now(self._owner, num_bytes))
        except RingClosedError as error:
            raise DeviceError("staging", str(error)) from error

    def take(self, num_bytes: int, wire: Wire, timeout_s: float) -> Slot:
        """Return a slot. Raises RingFullError when there is none in time, WireClosedError when the peer has gone, and
        DeviceError when the arena is being closed.

        Only without a slot: what one who waits here holds would come back to nobody.
        """
        assert not self._slots, "who has a slot waits for no other"
        try:
            claim = self._ring.claim(self._owner, num_bytes)
            return self._await(claim, wire, timeout_s)
        except RingClosedError as error:
            raise DeviceError("staging", str(error)) from error

    def bring_out(self, slot: Slot, source: SequenceRuns, data: Header, mark: int) -> Passage:
        """Bring a frame to the host's slot, once the arena's `mark` is reached. Raises DeviceError."""
        digest = self._new_digest()
        self._arena.order(self._stream, mark)
        moves = gather_moves(source, data, slot.first_byte)
        self._device.move(self._stream, moves, self._arena.memory, self._arena.mirror, digest)
        self._device.download(self._stream, self._arena.mirror, slot.first_byte, self.host(slot))
        return self._record(slot, digest)

    def bring_in(self, slot: Slot, target: SequenceRuns, data: Header) -> Passage:
        """Bring the frame in the host's slot to its place in the arena. Raises DeviceError."""
        digest = self._new_digest()
        self._device.upload(self._stream, self.host(slot), self._arena.mirror, slot.first_byte)
        moves = scatter_moves(target, data, slot.first_byte)
        self._device.move(self._stream, moves, self._arena.mirror, self._arena.memory, digest)
        return self._record(slot, digest)

    def settle(self, passage: Passage) -> int:
        """Return the digest of a frame that has passed (0 without digests). The slot is still lent."""
        del self._passing[passage.slot.number]
        self._events.append(passage.event)
        if passage.digest is None:
            return 0
        value = passage.digest.value()
        self._digests.remove(passage.digest)
        passage.digest.close()
        return value

    def release(self, slot: Slot) -> None:
        """Give back a slot that nothing passes through any more. Idempotent."""
        assert slot.number not in self._passing, "the card still uses it"
        if self._slots.pop(slot.number, None) is not None:
            self._ring.release(slot)

    def close(self) -> None:
        """Wait until nothing passes any more, and give everything back. Idempotent.

        Raises DeviceError when the card does not come to an end. Slots of which it is not known that the card has done
        with them are not lent again.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._is_drained():
                self._give_back()
        finally:
            for event in (*self._events, *(passage.event for passage in self._passing.values())):
                event.close()
            self._stream.close()

    def _give_back(self) -> None:
        for digest in self._digests:
            digest.close()
        self._events += [passage.event for passage in self._passing.values()]
        self._passing.clear()
        for slot in list(self._slots.values()):
            self.release(slot)

    def _have(self, slot: Slot | None) -> Slot | None:
        if slot is not None:
            self._slots[slot.number] = slot
        return slot

    def _await(self, claim: Claim, wire: Wire, timeout_s: float) -> Slot:
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > _LOOK_S:
                if (slot := self._have(claim.poll(_LOOK_S))) is not None:
                    return slot
                _check_peer(wire)
            slot = claim.wait(max(0.0, left))
            self._slots[slot.number] = slot
            return slot
        finally:
            claim.cut()

    def _new_digest(self) -> DigestSlot | None:
        if not self._has_digests:
            return None
        self._digests.append(self._device.new_digest())
        return self._digests[-1]

    def _record(self, slot: Slot, digest: DigestSlot | None) -> Passage:
        event = self._events.pop() if self._events else self._device.new_event()
        try:
            event.record(self._stream)
        except BaseException:
            self._events.append(event)
            raise
        passage = self._passing[slot.number] = Passage(slot, event, digest)
        return passage

    def _is_drained(self) -> bool:
        """Wait for the stream's end; say whether it is known to have come. Raises DeviceError when it does not come."""
        if not self._slots:
            return True
        try:
            with contextlib.closing(self._device.new_event()) as event:
                event.record(self._stream)
                is_done = event.wait(DRAIN_S)
        except DeviceError as error:
            reason = str(error)  # its frames hold memory that is to go
            log.warning(
                "%s: %d slots of the staging ring are not lent again: %s", self._owner, len(self._slots), reason
            )
            return False
        if not is_done:
            raise DeviceError("drain", f"what {self._owner} has begun has not ended within {DRAIN_S:.0f} s")
        return True


def wait_done(passage: Passage, wire: Wire | None, timeout_s: float) -> bool:
    """Wait until a frame has passed; say whether it has. Raises DeviceError, and WireClosedError when the peer has
    gone, where there is a `wire` to look at."""
    deadline = time.monotonic() + timeout_s
    while not passage.event.wait(max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        if wire is not None:
            _check_peer(wire)
        if time.monotonic() >= deadline:
            return False
    return True


def _check_peer(wire: Wire) -> None:
    if wire.has_ended:
        raise WireClosedError("the peer has gone")
