"""A holder and readers on fake cards of their own, with communicators between them that fail as they are told to."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from dataplane.cards.fakes.fake_communicator import FakeFabric, FakeLibrary
from dataplane.cards.fakes.fake_device import FakeDevice, FakeMemory
from dataplane.cards.nccl.communicator import LibraryThreads
from dataplane.cards.nccl.pair import BUFFER_BYTES, PairEnd, PairParts
from dataplane.cards.nccl.pair_core import HolderCore, ReaderCore
from dataplane.cards.nccl.pairs import HolderPairs, ReaderPairs
from dataplane.carriers.kv_arena import PairRefusedError
from dataplane.protocol.reasons import RefusalCode
from dataplane.protocol.stream import Header, Kind, PairOpen, StreamRefused, decode_body, encode_frame, encode_header
from dataplane.protocol.wire import SocketWire, Wire
from schemas.handoff import Endpoint
from schemas.ids import WorkerId

DEADLINE_S = 60.0


class Card:
    """A process with a card, as far as pairs go."""

    def __init__(self, fabric: FakeFabric, name: str, seed: int = 0) -> None:
        self.device = FakeDevice(name, seed=seed)
        self.library = FakeLibrary(fabric, self.device)
        self.threads = LibraryThreads()
        self.parts = PairParts(self.device, self.library, self.threads)

    def assert_nothing_left(self) -> None:
        assert wait_until(lambda: not any(self.device.opened.values())), f"left open: {self.device.opened}"
        assert wait_until(lambda: self.threads.num_abandoned == 0)
        assert self.library.num_alive == 0, "a communicator that nobody aborted"


def wait_until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


class PairWorld:
    """One holder, any number of readers. `wires`: the holder's ends of the pairs' wires, as they were opened."""

    def __init__(self) -> None:
        self.fabric = FakeFabric()
        self.holder = Card(self.fabric, "GPU-holder")
        self.holder_pairs = HolderPairs(self.holder.parts)
        self.readers: dict[str, Card] = {}
        self.reader_pairs: dict[str, ReaderPairs] = {}
        self.wires: list[Wire] = []
        self._threads: list[threading.Thread] = []

    def add_reader(self, name: str = "decode-0") -> ReaderPairs:
        self.readers[name] = Card(self.fabric, f"GPU-{name}", seed=len(self.readers) + 1)
        self.reader_pairs[name] = ReaderPairs(self.readers[name].parts)
        return self.reader_pairs[name]

    def endpoint(self, name: str = "decode-0") -> Endpoint:
        """Return what the holder sends to this reader. Waits for an offer, as the one after the next has it."""
        assert wait_until(lambda: self.holder_pairs.offer(WorkerId(name)) is not None), "no pair is offered"
        return Endpoint(
            host="", port=0, carriers=("nccl",), arena="", arena_nonce="nonce", card="GPU-holder",
            pair=self.holder_pairs.offer(WorkerId(name)),
        )  # fmt: skip

    def dial(self, name: str = "decode-0") -> Wire:
        ours, theirs = socket.socketpair()
        wire = SocketWire(ours, reads_ahead=True)
        self.wires.append(wire)
        thread = threading.Thread(target=self._serve, args=(wire, WorkerId(name)), name="test-serve")
        self._threads.append(thread)
        thread.start()
        return SocketWire(theirs, reads_ahead=True)

    def _serve(self, wire: Wire, reader: WorkerId) -> None:
        deadline = time.monotonic() + DEADLINE_S
        with contextlib.closing(wire):
            header = wire.receive_header(deadline, Kind.PAIR_OPEN)
            opening = decode_body(wire.receive(header.length, deadline), PairOpen)
            try:
                pair = self.holder_pairs.open(reader, opening.generation)
            except PairRefusedError as error:
                wire.send(
                    [encode_frame(Kind.REFUSED, StreamRefused(code=RefusalCode.CARRIER, detail=error.reason))],
                    DEADLINE_S,
                )
                return
            wire.send([encode_header(Header(Kind.PAIR_ACCEPTED))], DEADLINE_S)
            pair.listen(wire)

    def join(self, name: str = "decode-0", endpoint: Endpoint | None = None) -> PairEnd[ReaderCore]:
        return self.reader_pairs[name].join(
            endpoint or self.endpoint(name),
            "ticket",
            lambda: self.dial(name),
            time.monotonic() + DEADLINE_S,
            lambda: False,
        )

    def pair(self, name: str = "decode-0") -> tuple[PairEnd[HolderCore], PairEnd[ReaderCore]]:
        """Return both ends of a pair that is ready at both."""
        reader = self.join(name)
        holder = self.holder_pairs.find(WorkerId(name), reader.generation)
        assert wait_until(lambda: holder.state == "ready"), holder.failure
        return holder, reader

    def close(self) -> None:
        for card in (self.holder, *self.readers.values()):
            card.library.shut()
        for pairs in (self.holder_pairs, *self.reader_pairs.values()):
            pairs.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a pair is listened to for ever"
        for card in (self.holder, *self.readers.values()):
            with contextlib.suppress(AssertionError):
                card.device.resume()
            card.device.close()


def open_read(holder: PairEnd[HolderCore], reader: PairEnd[ReaderCore]) -> int:
    read_id = reader.decide(lambda core: core.next_read())
    holder.decide(lambda core: core.enter(read_id))
    return read_id


def send(holder: PairEnd[HolderCore], read_id: int, payload: bytes) -> int:
    """Send bytes as a frame, and return the slot."""
    deadline = time.monotonic() + DEADLINE_S
    buffer = holder.wait(lambda core: core.begin(read_id), deadline, lambda: False)
    array = memory(holder).array
    array[buffer * BUFFER_BYTES : buffer * BUFFER_BYTES + len(payload)] = list(payload)
    return holder.decide(lambda core: core.post(buffer, len(payload), time.monotonic()))


def receive(reader: PairEnd[ReaderCore], read_id: int, slot: int, num_bytes: int) -> bytes:
    """Return the bytes that came in the slot."""
    deadline = time.monotonic() + DEADLINE_S
    buffer = reader.wait(lambda core: core.take(read_id, slot, num_bytes), deadline, lambda: False)
    received = memory(reader).array[buffer * BUFFER_BYTES : buffer * BUFFER_BYTES + num_bytes].tobytes()
    reader.emptying(slot)
    return received


def memory(pair: PairEnd[HolderCore] | PairEnd[ReaderCore]) -> FakeMemory:
    assert isinstance(pair.memory, FakeMemory)
    return pair.memory
