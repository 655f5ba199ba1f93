"""The pairs of a process: those it offers to its readers, and those it has joined to read over. Bounded at both ends.

An offer is the communicator's id and a generation. The holder makes it and says it in the endpoint that it sends anyway
(over the bus). It can be opened once; when its pair has ended, the next endpoint carries another.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar
from weakref import WeakKeyDictionary

from dataplane.cards import limits
from dataplane.cards.device import DeviceError
from dataplane.cards.nccl.communicator import CommunicatorError
from dataplane.cards.nccl.pair import BUFFER_BYTES, CoreT, PairEnd, PairParts
from dataplane.cards.nccl.pair_core import HolderCore, PairBrokenError, PairState, ReaderCore
from dataplane.carriers.kv_arena import PairRefusedError
from dataplane.protocol.reasons import RefusalCode
from dataplane.protocol.stream import (
    Kind,
    PairOpen,
    ProtocolError,
    StreamRefused,
    TransferFailedError,
    decode_body,
    encode_frame,
)
from dataplane.protocol.wire import Wire, WireClosedError, WireTimeoutError
from schemas.handoff import Endpoint, PairOffer
from schemas.ids import WorkerId
from schemas.kv import ReadEnd

log = logging.getLogger(__name__)

_MADE_ROOM = "it has made room for another"

NameT = TypeVar("NameT")


@dataclass(slots=True, eq=False)
class _Offered:
    """What a reader was offered. `is_taken`: it has opened it. `pair`: once that is made."""

    offer: PairOffer
    is_taken: bool = False
    is_spent: bool = False
    pair: PairEnd[HolderCore] | None = None

    @property
    def is_over(self) -> bool:
        return self.is_spent or (self.pair is not None and self.pair.state is PairState.BROKEN)


class HolderPairs:
    """What this process offers, a pair to each reader. Thread-safe.

    An id costs the library a thread and a port until it is used, and making one takes time: so one is always made
    ahead, off the event loop, and one that nobody has opened is offered to somebody else when there are MAX_PAIRS.
    """

    def __init__(self, parts: PairParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._offered: dict[WorkerId, _Offered] = {}
        self._generation = 0
        self._spare: bytes | None = None
        self._is_making = False
        self._retry_at = 0.0
        self._is_closed = False
        with self._lock:
            self._make_spare()

    def refusal(self) -> str | None:
        """Return why no pair can be offered now, if so."""
        return self._parts.refusal()

    def offer(self, reader: WorkerId) -> PairOffer | None:
        """Return what this reader may open, the same again while it is of use, or None: it must do without. Does not
        wait."""
        with self._lock:
            offered = self._offered.get(reader)
            if offered is not None and not offered.is_over:
                return offered.offer
            self._offered.pop(reader, None)
            if self._is_closed or self._parts.refusal() is not None:
                return None
            unique_id = self._take_id()
            if unique_id is None:
                return None
            self._generation += 1
            offered = self._offered[reader] = _Offered(PairOffer(unique_id=unique_id, generation=self._generation))
            return offered.offer

    def open(self, reader: WorkerId, generation: int) -> PairEnd[HolderCore]:
        """Return this end of what the reader was offered, to be listened to. Raises PairRefusedError."""
        with self._lock:
            offered = self._offered.get(reader)
            if offered is None or offered.offer.generation != generation or self._is_closed:
                raise PairRefusedError("no such pair is offered any more")
            if offered.is_taken:
                offered.is_spent = True
                if offered.pair is not None:
                    offered.pair.fail("its reader opens it again")
                raise PairRefusedError("the pair was opened before")
            if (refusal := self._parts.refusal()) is not None:
                raise PairRefusedError(refusal)
            offered.is_taken = True
        try:  # a driver's time, for which no offer waits
            pair = PairEnd(HolderCore(generation, time.monotonic()), self._parts, offered.offer.unique_id)
        except DeviceError as error:
            offered.is_spent = True
            raise PairRefusedError(str(error)) from error
        with self._lock:
            offered.pair = pair
            is_over = offered.is_spent or self._offered.get(reader) is not offered
        if is_over:
            pair.fail("its offer is over")
            pair.free_if_settled()
            raise PairRefusedError("no such pair is offered any more")
        return pair

    def find(self, reader: WorkerId, generation: int) -> PairEnd[HolderCore]:
        """Return the pair that the reader has opened. Raises PairRefusedError."""
        with self._lock:
            offered = self._offered.get(reader)
            if offered is None or offered.pair is None or offered.offer.generation != generation:
                raise PairRefusedError("no such pair is open")
            return offered.pair

    def close(self) -> None:
        """End all of them."""
        with self._lock:
            self._is_closed = True
            pairs = [offered.pair for offered in self._offered.values() if offered.pair is not None]
            self._offered.clear()
        _close_all(pairs)

    def _take_id(self) -> bytes | None:
        """Return an id that nobody uses: a fresh one, or at the bound one that nobody has opened."""
        for reader in [reader for reader, offered in self._offered.items() if offered.is_over]:
            del self._offered[reader]
        if len(self._offered) >= limits.MAX_PAIRS:
            for reader, offered in self._offered.items():
                if not offered.is_taken:
                    del self._offered[reader]
                    return offered.offer.unique_id
            pairs = {reader: offered.pair for reader, offered in self._offered.items() if offered.pair is not None}
            if (reader := _longest_idle(pairs)) is None:
                return None
            del self._offered[reader]
            pairs[reader].fail(_MADE_ROOM)
        unique_id, self._spare = self._spare, None
        self._make_spare()
        return unique_id

    def _make_spare(self) -> None:
        if self._is_making or self._parts.refusal() is not None or time.monotonic() < self._retry_at:
            return
        self._is_making = True
        self._parts.threads.start(self._make_id, "kv-nccl-id")

    def _make_id(self) -> None:
        unique_id = None
        try:
            unique_id = self._parts.library.new_id()
        except CommunicatorError as error:
            log.warning("nccl is not offered for %.0f s: %s", limits.ID_RETRY_S, error)
        with self._lock:
            self._is_making = False
            self._spare = unique_id
            if unique_id is None:
                self._retry_at = time.monotonic() + limits.ID_RETRY_S


class ReaderPairs:
    """The pairs over which this process reads, one to each holder that has offered one. Thread-safe."""

    def __init__(self, parts: PairParts) -> None:
        self._parts = parts
        self._lock = threading.Lock()
        self._pairs: dict[str, PairEnd[ReaderCore]] = {}
        """By the nonce of the holder's arena."""
        self._threads: dict[PairEnd[ReaderCore], threading.Thread] = {}
        self._refused: WeakKeyDictionary[PairEnd[ReaderCore], StreamRefused] = WeakKeyDictionary()
        """What holders have said no to."""
        self._is_closed = False

    def refusal(self) -> str | None:
        """Return why no pair can be made here, if so."""
        return self._parts.refusal()

    def join(
        self,
        endpoint: Endpoint,
        ticket: str,
        dial: Callable[[], Wire],
        deadline: float,
        is_over: Callable[[], bool],
    ) -> PairEnd[ReaderCore]:
        """Return the pair with this holder, made now if need be, once it is ready. `dial` connects to the holder.

        Raises PairRefusedError when there can be none or it is not ready in time, TransferFailedError when the ticket
        is no good, WireTimeoutError at the deadline and WireClosedError when whoever waits is over.
        """
        pair = self._pair(endpoint, ticket, dial)
        patience = time.monotonic() + limits.JOIN_S
        try:
            pair.wait(_ready, min(deadline, patience), is_over)
        except PairBrokenError as error:
            refused = self._refused.get(pair)
            if refused is not None and refused.code is not RefusalCode.CARRIER:
                raise TransferFailedError(ReadEnd(refused.code), refused.detail) from error
            raise PairRefusedError(str(error)) from error
        except WireTimeoutError as error:
            if patience > deadline:
                raise
            raise PairRefusedError(f"not made within {limits.JOIN_S:.0f} s") from error
        return pair

    def release_idle(self) -> None:
        """End the pairs that nobody has read over for long. Does not wait."""
        now = time.monotonic()
        with self._lock:
            for nonce, pair in list(self._pairs.items()):
                if pair.idle_since is not None and pair.idle_since < now - limits.PAIR_IDLE_S:
                    pair.fail("idle")
                if pair.is_freed:
                    del self._pairs[nonce]
            self._threads = {pair: each for pair, each in self._threads.items() if each.is_alive() or not pair.is_freed}

    def close(self) -> None:
        """End all of them, and what still reads."""
        with self._lock:
            self._is_closed = True
            threads = list(self._threads.values())
            pairs = list(self._threads)
            self._pairs.clear()
            self._threads.clear()
        _close_all(pairs)
        for thread in threads:
            thread.join()

    def _pair(self, endpoint: Endpoint, ticket: str, dial: Callable[[], Wire]) -> PairEnd[ReaderCore]:
        offer = endpoint.pair
        with self._lock:
            known = self._pairs.get(endpoint.arena_nonce)
            if known is not None and known.state is not PairState.BROKEN:
                if offer is None or offer.generation <= known.generation:
                    return known
                known.fail("its holder offers another")
            if offer is None:
                raise PairRefusedError("no pair is offered")
            if (refusal := self._parts.refusal()) is not None or self._is_closed:
                raise PairRefusedError(refusal or "the reader is closing")
            self._make_room()
            try:
                core = ReaderCore(offer.generation, time.monotonic(), BUFFER_BYTES)
                pair = PairEnd(core, self._parts, offer.unique_id)
            except DeviceError as error:
                raise PairRefusedError(str(error)) from error
            self._pairs[endpoint.arena_nonce] = pair
            opening = PairOpen(ticket=ticket, generation=offer.generation)
            thread = threading.Thread(
                target=self._open_and_listen, args=(pair, opening, dial), name="kv-pair", daemon=True
            )
            self._threads[pair] = thread
            thread.start()
            return pair

    def _open_and_listen(self, pair: PairEnd[ReaderCore], opening: PairOpen, dial: Callable[[], Wire]) -> None:
        """Connect the pair's wire, and listen until the pair is over."""
        wire = None
        try:
            wire = dial()
            wire.reads_ahead = True
            refused = _ask(wire, opening)
            if refused is not None:
                self._refused[pair] = refused
                raise PairRefusedError(refused.detail)
            pair.listen(wire)
        except (
            OSError, TransferFailedError, PairRefusedError, WireClosedError, WireTimeoutError, ProtocolError,
        ) as error:  # fmt: skip
            pair.fail(f"opening it: {error}")
            pair.free_if_settled()
        finally:
            if wire is not None:
                wire.close()

    def _make_room(self) -> None:
        if len(self._pairs) < limits.MAX_PAIRS:
            return
        if (nonce := _longest_idle(self._pairs)) is None:
            raise PairRefusedError(f"{limits.MAX_PAIRS} pairs are in use")
        self._pairs.pop(nonce).fail(_MADE_ROOM)


def _ask(wire: Wire, opening: PairOpen) -> StreamRefused | None:
    """Open the pair, or return why not. Raises WireClosedError, WireTimeoutError, ProtocolError."""
    wire.send([encode_frame(Kind.PAIR_OPEN, opening)], limits.PAIR_OPEN_S)
    deadline = time.monotonic() + limits.PAIR_OPEN_S
    header = wire.receive_header(deadline, Kind.PAIR_ACCEPTED, Kind.REFUSED)
    if header.kind is Kind.REFUSED:
        return decode_body(wire.receive(header.length, deadline), StreamRefused)
    return None


def _ready(core: ReaderCore) -> bool | None:
    core.check()
    return True if core.state is PairState.READY else None


def _longest_idle(pairs: Mapping[NameT, PairEnd[CoreT]]) -> NameT | None:
    """Return whose pair may best be done without, or None: all are in use."""
    idle = {name: pair.idle_since for name, pair in pairs.items()}
    since = {name: at for name, at in idle.items() if at is not None}
    return min(since, key=lambda name: since[name]) if since else None


def _close_all(pairs: Sequence[PairEnd[CoreT]]) -> None:
    for pair in pairs:
        pair.fail("this process ends it")
    for pair in pairs:
        pair.close("this process ends it")
