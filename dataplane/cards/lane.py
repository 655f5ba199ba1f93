"""The way of one transfer's frames between an arena on a card and host memory: a side stream, slots of the arena's
staging ring, and behind each frame an event.

Out: one kernel packs a frame's rows into the slot on the card, and digests them; one copy brings the slot to the host.
In: one copy brings the host's slot to the card, one kernel puts its rows where they belong, and digests them. Nothing
of it waits for another process, so all of it ends; and a slot is lent again only once what uses it has ended.
"""

import itertools
import logging
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from dataplane.cards import limits
from dataplane.cards.device import DeviceError, DigestSlot, Stream
from dataplane.cards.device_arena import DeviceArena
from dataplane.cards.moves import gather_moves, scatter_moves
from dataplane.cards.side import SideStream, WorkPiece, check_peer
from dataplane.cards.staging_ring import Claim, RingClosedError, Slot
from dataplane.memory.arena import ByteArray
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Header
from dataplane.protocol.wire import Wire

log = logging.getLogger(__name__)


_numbers = itertools.count(1)


class Passage(NamedTuple):
    """A frame on its way."""

    slot: Slot
    piece: WorkPiece


class Lane:
    """For one thread. `name`: which way it goes."""

    def __init__(self, arena: DeviceArena, name: Literal["in", "out"], *, digests: bool) -> None:
        self._arena = arena
        self._ring = arena.ring
        self._owner = f"{name}-{next(_numbers)}"
        self._slots: dict[int, Slot] = {}
        self._passing: dict[int, Passage] = {}
        self._side = SideStream(arena.device, self._owner, digests=digests, writes=name == "in")

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
        moves, arena = gather_moves(source, data, slot.first_byte), self._arena

        def work(stream: Stream, digest: DigestSlot | None) -> None:
            arena.order(stream, mark)
            arena.device.move(stream, moves, arena.memory, arena.mirror, digest)
            arena.device.download(stream, arena.mirror, slot.first_byte, self.host(slot))

        return self._put(slot, work)

    def bring_in(self, slot: Slot, target: SequenceRuns, data: Header) -> Passage:
        """Bring the frame in the host's slot to its place in the arena. Raises DeviceError."""
        moves, arena = scatter_moves(target, data, slot.first_byte), self._arena

        def work(stream: Stream, digest: DigestSlot | None) -> None:
            arena.device.upload(stream, self.host(slot), arena.mirror, slot.first_byte)
            arena.device.move(stream, moves, arena.mirror, arena.memory, digest)

        return self._put(slot, work)

    def settle(self, passage: Passage) -> int:
        """Return the digest of a frame that has passed (0 without digests). The slot is still lent."""
        del self._passing[passage.slot.number]
        return self._side.settle(passage.piece)

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
        if self._side.close():
            self._passing.clear()
            for slot in list(self._slots.values()):
                self.release(slot)
        elif self._slots:
            log.warning("%s: %d slots of the staging ring are not lent again", self._owner, len(self._slots))

    def _have(self, slot: Slot | None) -> Slot | None:
        if slot is not None:
            self._slots[slot.number] = slot
        return slot

    def _await(self, claim: Claim, wire: Wire, timeout_s: float) -> Slot:
        deadline = time.monotonic() + timeout_s
        try:
            while (left := deadline - time.monotonic()) > limits.PEER_LOOK_S:
                if (slot := self._have(claim.poll(limits.PEER_LOOK_S))) is not None:
                    return slot
                check_peer(wire)
            slot = claim.wait(max(0.0, left))
            self._slots[slot.number] = slot
            return slot
        finally:
            claim.cut()

    def _put(self, slot: Slot, work: Callable[[Stream, DigestSlot | None], None]) -> Passage:
        passage = self._passing[slot.number] = Passage(slot, self._side.put(work))
        return passage
