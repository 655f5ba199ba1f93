"""Communicators between two cards: one for each reader and holder, used by one read at a time.

The reader makes the id and sends it in its Open; both join once the holder has accepted, which of the two ranks waits
for the other. After a read that has not ended well the ends may not agree on what has crossed: its reader aborts the
communicator and names another id the next time, whatever the holder still does over the one before. By NCCL's documents
and its makers' answers joining waits for the peer without any limit, and so may an abort: both run on threads that
nobody waits for without one.
"""

import contextlib
import threading
import time
from collections.abc import Generator

from dataplane.cards import limits
from dataplane.cards.card import Card, CardError, CardMemory, Communicator
from dataplane.carriers.carrier import CarrierBrokenError
from dataplane.protocol.wire import WireTimeoutError

NCCL = "nccl"


class Pair:
    """One communicator, and the buffer through which its frames go. `busy`: held by the read that uses it.
    `is_joined`: the other end has come. `is_used`: something of this read may have gone over it."""

    def __init__(self, card: Card, unique_id: bytes, rank: int) -> None:
        self.unique_id = unique_id
        self.busy = threading.Lock()
        self.is_broken = False
        self.is_used = False
        self._card = card
        self._rank = rank
        self._communicator: Communicator | None = None
        self._failure: CardError | None = None
        self._joining: threading.Thread | None = None
        self._buffer: CardMemory | None = None

    @property
    def is_joined(self) -> bool:
        return self._communicator is not None

    @property
    def is_joining(self) -> bool:
        """A thread is in the library's hands."""
        return self._joining is not None and self._joining.is_alive()

    def connect_once(self) -> None:
        """Begin to make the communicator, if that has not been done."""
        if self._joining is None:
            self._joining = threading.Thread(target=self._join, name="nccl-join", daemon=True)
            self._joining.start()

    def communicator(self) -> Communicator:
        """Return it once it is made. Raises CardError."""
        self.is_used = True
        self.connect_once()
        assert self._joining is not None, "just begun"
        self._joining.join(limits.JOIN_S)
        if self._communicator is None:
            self.is_broken = True
            reason = f"the other end has not come within {limits.JOIN_S:.0f} s"
            raise self._failure or CardError("join a communicator", reason)
        return self._communicator

    def buffer(self, num_bytes: int) -> CardMemory:
        """Return memory for a frame of this size, until the next call."""
        if self._buffer is None or self._buffer.num_bytes < num_bytes:
            if self._buffer is not None:
                self._buffer.close()
            self._buffer = self._card.allocate(max(num_bytes, limits.NCCL_FRAME_BYTES))
        return self._buffer

    def close(self) -> None:
        """Abort it; who is still in it sees that it has failed."""
        self.is_broken = True
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            abort = threading.Thread(target=communicator.abort, name="nccl-abort", daemon=True)
            abort.start()
            abort.join(limits.JOIN_S)
        if self._buffer is not None:
            self._buffer.close()

    def _join(self) -> None:
        try:
            made = self._card.join(self.unique_id, self._rank)
        except CardError as error:
            self._failure = error
            return
        if self.is_broken:  # nobody waits for it any more
            made.abort()
        else:
            self._communicator = made


class Pairs:
    """The pairs of one arena, by what the other end is called there. Thread-safe."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._pairs: dict[str, Pair] = {}
        self._lost: list[Pair] = []

    def refusal(self) -> str | None:
        """Return why no communicator can be made, if so."""
        self._lost = [pair for pair in self._lost if pair.is_joining]
        if len(self._lost) >= limits.MAX_LOST_CALLS:
            return f"{len(self._lost)} calls of NCCL do not come back"
        return self._card.no_communicators()

    def is_busy(self, peer: str) -> bool:
        """Return whether a read is under way over the pair with this peer."""
        with self._lock:
            pair = self._pairs.get(peer)
            return pair is not None and pair.busy.locked()

    @contextlib.contextmanager
    def of_reader(self, peer: str, deadline: float) -> Generator[Pair]:
        """Keep the reader's end of the pair with this holder, which may be a new one, for one read: it is over if the
        read uses it and does not end well. Raises CarrierBrokenError, WireTimeoutError."""
        pair = self._free(peer, deadline)
        try:
            yield pair
            pair.is_used = False
        except CarrierBrokenError:
            pair.is_used = True  # the holder has no other end of it
            raise
        finally:
            if pair.is_used:
                self.drop(pair)
            pair.busy.release()

    def in_use(self, peer: str) -> Pair:
        """Return the pair that is kept for a read from this holder. Raises CarrierBrokenError."""
        with self._lock:
            pair = self._pairs.get(peer)
        if pair is None:
            raise CarrierBrokenError(NCCL, "this end of the pair has been given up")
        return pair

    def of_holder(self, peer: str, unique_id: bytes, *, is_joined: bool) -> Pair:
        """Return the holder's end of the pair that this reader names, for one stream. `is_joined`: the reader's end is
        made, it will not join again. Raises CarrierBrokenError."""
        with self._lock:
            pair = self._pairs.get(peer)
            if pair is None or pair.is_broken or pair.unique_id != unique_id:
                self._check()
                if is_joined:
                    raise CarrierBrokenError(NCCL, "this end of the pair has been given up")
                pair = Pair(self._card, unique_id, 0)
            if not pair.busy.acquire(blocking=False):
                raise CarrierBrokenError(NCCL, "another read is under way over this pair")
            self._keep(peer, pair)
        return pair

    def drop(self, pair: Pair) -> None:
        """Abort a pair whose state is not known, if that has not been done."""
        with self._lock:
            for peer in [peer for peer, kept in self._pairs.items() if kept is pair]:
                self._drop(self._pairs.pop(peer))

    def close(self) -> None:
        """Abort all."""
        with self._lock:
            pairs, self._pairs = list(self._pairs.values()), {}
            for pair in pairs:
                self._drop(pair)

    def _free(self, peer: str, deadline: float) -> Pair:
        """Return the reader's end of a whole pair once nobody reads over it. It is busy from here on."""
        while True:
            with self._lock:
                pair = self._pairs.get(peer)
                if pair is None or pair.is_broken:
                    self._check()
                    try:
                        pair = Pair(self._card, self._card.new_id(), 1)
                    except CardError as error:
                        raise CarrierBrokenError(NCCL, str(error)) from error
                self._keep(peer, pair)
            if not pair.busy.acquire(timeout=max(0.0, deadline - time.monotonic())):
                raise WireTimeoutError("the pair with this holder was in use all the time")
            if not pair.is_broken:
                return pair
            pair.busy.release()  # the read before has ended it

    def _check(self) -> None:
        if (refusal := self.refusal()) is not None:
            raise CarrierBrokenError(NCCL, refusal)

    def _keep(self, peer: str, pair: Pair) -> None:
        before = self._pairs.pop(peer, pair)
        self._pairs[peer] = pair  # the one used last is at the end
        idle = [peer for peer, other in self._pairs.items() if not other.busy.locked() and other is not pair]
        if len(self._pairs) > limits.MAX_PAIRS and idle:
            self._drop(self._pairs.pop(idle[0]))
        if before is not pair:
            self._drop(before)

    def _drop(self, pair: Pair) -> None:
        pair.close()
        if pair.is_joining:
            self._lost.append(pair)
