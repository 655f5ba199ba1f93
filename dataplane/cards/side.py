"""A stream beside the engine's, for one transfer's work on a card, and an event behind each piece of it.

Nothing that is put here waits for another process, so all of it ends: who closes it can wait for that.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from dataplane.cards import limits
from dataplane.cards.device import Device, DeviceError, DigestSlot, Event, Stream
from dataplane.protocol.wire import Wire, WireClosedError

log = logging.getLogger(__name__)


class CardStuckError(DeviceError):
    """The card is not known to come to the end of what was put on a stream: it may still write to the arena."""

    may_still_write = True


class WorkPiece(NamedTuple):
    """A piece of work. All that was put on the stream for it comes before `event`."""

    event: Event
    digest: DigestSlot | None


class SideStream:
    """For one thread. `name`: what messages call it. `writes`: what is put here writes to an arena."""

    def __init__(self, device: Device, name: str, *, digests: bool, writes: bool) -> None:
        self._device = device
        self._writes = writes
        self._name = name
        self._digests = digests
        self._idle: list[Event] = []
        self._pieces: dict[Event, WorkPiece] = {}
        self._digest_slots: list[DigestSlot] = []
        self._has_loose_work = False
        """Something may have been put on the stream that no event stands behind."""
        self._drained = device.new_event()
        try:
            self._stream = device.new_stream()
        except DeviceError:
            self._drained.close()
            raise
        self._is_closed = False
        self._was_drained = False

    def put(self, work: Callable[[Stream, DigestSlot | None], None]) -> WorkPiece:
        """Let `work` put something on the stream, which the digest is of where there are digests. Raises what it
        raises, and DeviceError."""
        digest = self._new_digest()
        event = self._idle.pop() if self._idle else self._device.new_event()
        try:
            work(self._stream, digest)
            event.record(self._stream)
        except BaseException:
            self._idle.append(event)
            self._has_loose_work = True
            raise
        piece = self._pieces[event] = WorkPiece(event, digest)
        return piece

    def settle(self, piece: WorkPiece) -> int:
        """Return the digest of a piece that is done (0 without digests)."""
        del self._pieces[piece.event]
        self._idle.append(piece.event)
        if piece.digest is None:
            return 0
        value = piece.digest.value()
        self._digest_slots.remove(piece.digest)
        piece.digest.close()
        return value

    def close(self) -> bool:
        """Wait until nothing is under way any more, and give everything back; say whether that has come, which of a
        card that has failed is not known. Raises CardStuckError. Idempotent."""
        if self._is_closed:
            return self._was_drained
        self._is_closed = True
        try:
            self._was_drained = self._is_drained()
            if self._was_drained:  # else a kernel may still write to them
                for digest in self._digest_slots:
                    digest.close()
            return self._was_drained
        finally:
            for event in (self._drained, *self._idle, *self._pieces):
                event.close()
            self._stream.close()

    def _new_digest(self) -> DigestSlot | None:
        if not self._digests:
            return None
        self._digest_slots.append(self._device.new_digest())
        return self._digest_slots[-1]

    def _is_drained(self) -> bool:
        """Wait for the stream's end; say whether it is known to have come. Raises CardStuckError when it does not."""
        if not self._pieces and not self._has_loose_work:
            return True
        try:
            self._drained.record(self._stream)
            is_done = self._drained.wait(limits.DRAIN_S)
        except DeviceError as error:
            reason = str(error)  # its frames hold memory that is to go
            if self._writes:
                raise CardStuckError("drain", f"{self._name} is not known to have ended: {reason}") from None
            log.warning("%s: not known to have ended: %s", self._name, reason)
            return False
        if not is_done:
            raise CardStuckError("drain", f"what {self._name} has begun has not ended within {limits.DRAIN_S:.0f} s")
        return True


def wait_done(piece: WorkPiece, wire: Wire | None, timeout_s: float) -> bool:
    """Wait until a piece is done; say whether it is. Raises DeviceError, and WireClosedError when the peer has gone,
    where there is a `wire` to look at."""
    deadline = time.monotonic() + timeout_s
    while not piece.event.wait(max(0.0, min(limits.PEER_LOOK_S, deadline - time.monotonic()))):
        if wire is not None:
            check_peer(wire)
        if time.monotonic() >= deadline:
            return False
    return True


def check_peer(wire: Wire) -> None:
    """Raise WireClosedError when the peer has gone, or this end was cut."""
    if wire.has_ended:
        raise WireClosedError("the peer has gone")


def wait_peer_gone(wire: Wire, timeout_s: float) -> None:
    """Return after so long, if the peer is still there. Raises WireClosedError when it goes."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        check_peer(wire)
        time.sleep(limits.PEER_PAUSE_S)
