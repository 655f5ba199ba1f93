"""Pairs with their threads, over communicators that stall, fail and die: nothing hangs, nothing is left, no byte is
wrong, and the next offer is as good as new."""

import contextlib
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

from dataplane.cards import limits
from dataplane.cards.device import DeviceMemory
from dataplane.cards.nccl import pair, pairs
from dataplane.cards.nccl.communicator import CommunicatorError, LibraryThreads
from dataplane.cards.nccl.pair import PairEnd
from dataplane.cards.nccl.pair_core import HolderCore, PairBrokenError, PairState, ReaderCore
from dataplane.carriers.kv_arena import PairRefusedError
from dataplane.protocol.stream import ProtocolError
from dataplane.protocol.wire import WireClosedError, WireTimeoutError
from schemas.ids import WorkerId
from tests.plane.pair_world import DEADLINE_S, PairWorld, open_read, receive, send, wait_until

READER = WorkerId("decode-0")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_again(monkeypatch)


def quick_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers are small; whoever watches the time looks at it often."""
    monkeypatch.setattr(limits, "WATCH_S", 0.05)
    monkeypatch.setattr(pair, "BUFFER_BYTES", 4096)
    monkeypatch.setattr("tests.plane.pair_world.BUFFER_BYTES", 4096)
    monkeypatch.setattr(pairs, "BUFFER_BYTES", 4096)


@pytest.fixture
def world() -> Iterator[PairWorld]:
    made = PairWorld()
    made.add_reader()
    yield made
    made.close()
    for card in (made.holder, *made.readers.values()):
        card.assert_nothing_left()


def pair_in_time(world: PairWorld) -> tuple[PairEnd[HolderCore], PairEnd[ReaderCore]]:
    """Return both ends of a new pair; the holder may hear a moment later than the reader that the last has ended."""
    made: list[tuple[PairEnd[HolderCore], PairEnd[ReaderCore]]] = []

    def is_made() -> bool:
        with contextlib.suppress(PairRefusedError):
            made.append(world.pair())
        return bool(made)

    assert wait_until(is_made)
    return made[0]


def exchange(holder: PairEnd[HolderCore], reader: PairEnd[ReaderCore], num_frames: int, seed: int = 0) -> None:
    """Send frames in a read of their own and look at each."""
    rng = random.Random(seed)
    read_id = open_read(holder, reader)
    try:
        for _ in range(num_frames):
            payload = rng.randbytes(rng.randint(1, 4096))
            slot = send(holder, read_id, payload)
            assert receive(reader, read_id, slot, len(payload)) == payload
    finally:
        holder.leave(read_id)
        reader.leave(read_id)


def test_bytes_cross_more_often_than_there_are_buffers(world: PairWorld) -> None:
    exchange(*world.pair(), num_frames=25)


def test_the_pair_is_made_once(world: PairWorld) -> None:
    first = world.pair()
    assert world.pair() == first
    assert len(world.holder.library.made) == 1 and len(world.wires) == 1


def test_many_that_want_it_at_once_make_one(world: PairWorld) -> None:
    endpoint, joined = world.endpoint(), list[object]()
    threads = [threading.Thread(target=lambda: joined.append(world.join(endpoint=endpoint))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(set(joined)) == 1 and len(joined) == 5
    assert len(world.wires) == 1


def test_reads_beside_each_other(world: PairWorld) -> None:
    holder, reader = world.pair()
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            exchange(holder, reader, 15, seed)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "reads wait for each other"
    assert not failures, failures


def test_several_pairs_and_both_ways(world: PairWorld) -> None:
    """The holder of one pair is the reader of another: its card sends and receives at once."""
    back = PairWorld()
    try:
        back.add_reader("prefill-0")
        for name in ("decode-1", "decode-2"):
            world.add_reader(name)
        ends = [world.pair(name) for name in world.readers] + [back.pair("prefill-0")]
        threads = [threading.Thread(target=exchange, args=(*both, 12, at)) for at, both in enumerate(ends)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert len({both[0].generation for both in ends[:3]}) == 3
    finally:
        back.close()


@pytest.mark.parametrize("end", ["holder", "reader", "both"])
@pytest.mark.parametrize("num_sent", [0, 1, 3])
def test_a_read_that_is_given_up_leaves_the_pair_in_step(world: PairWorld, end: str, num_sent: int) -> None:
    """What it had under way is received and thrown away; what comes behind it is right."""
    holder, reader = world.pair()
    given_up = open_read(holder, reader)
    for _ in range(num_sent):
        send(holder, given_up, b"nobody wants this")
    holder.wait(lambda core: core.begin(given_up), time.monotonic() + DEADLINE_S, lambda: False)
    if end in ("holder", "both"):
        holder.leave(given_up)
    if end in ("reader", "both"):
        reader.leave(given_up)
    if end == "holder":  # its reader hears of it by its own wire, and gives up as well
        exchange(holder, reader, 1, seed=8)
        reader.leave(given_up)
    if end == "reader":
        holder.leave(given_up)
    exchange(holder, reader, 10, seed=9)
    assert holder.state is reader.state is PairState.READY


def test_a_read_waits_no_longer_than_it_may(world: PairWorld) -> None:
    holder, reader = world.pair()
    read_id = open_read(holder, reader)
    with pytest.raises(WireTimeoutError):
        reader.wait(lambda core: core.take(read_id, 1, 8), time.monotonic() + 0.05, lambda: False)
    with pytest.raises(WireClosedError):
        reader.wait(lambda core: core.take(read_id, 1, 8), time.monotonic() + DEADLINE_S, lambda: True)
    holder.leave(read_id)
    reader.leave(read_id)


# What goes wrong, at every point. Each says to both ends what is to happen, before the pair is made or once it is.

Fault = Callable[[PairWorld], object]
MAKING: dict[str, Fault] = {
    "the holder's library fails": lambda world: world.holder.library.fail_next("make"),
    "the reader's library fails": lambda world: world.readers[READER].library.fail_next("make"),
    "the holder's library stalls": lambda world: world.holder.library.stall_next("make"),
    "the reader's library stalls": lambda world: world.readers[READER].library.stall_next("make"),
    "the holder's card is full": lambda world: world.holder.device.fail_next("allocate"),
    "the reader's card is full": lambda world: world.readers[READER].device.fail_next("allocate"),
    "the holder has no event": lambda world: world.holder.device.fail_next("new_event"),
    "the reader has no stream": lambda world: world.readers[READER].device.fail_next("new_stream"),
    "the holder refuses": lambda world: setattr(world.holder.library, "refused", "no more"),
    "the reader refuses": lambda world: setattr(world.readers[READER].library, "refused", "no more"),
}


@pytest.mark.parametrize("fault", MAKING)
def test_a_pair_that_cannot_be_made(world: PairWorld, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(limits, "INIT_TIMEOUT_S", 0.3)
    endpoint = world.endpoint()
    MAKING[fault](world)
    with pytest.raises(PairRefusedError):
        world.join(endpoint=endpoint)
    monkeypatch.undo()
    quick_again(monkeypatch)
    for card in (world.holder, world.readers[READER]):
        card.library.refused = None
        # Again and again: it may only now be on its way to wait for the other rank.
        assert wait_until(lambda card=card: card.library.release() or card.threads.num_abandoned == 0)
    exchange(*pair_in_time(world), num_frames=5)


CROSSING: dict[str, Fault] = {
    "the pair's wire is cut": lambda world: world.wires[0].cut(),
    "the holder's next group fails": lambda world: world.holder.library.fail_next("group"),
    "the reader's next group fails": lambda world: world.readers[READER].library.fail_next("group"),
    "the holder's next group stalls": lambda world: world.holder.library.stall_next("group"),
    "the reader's next group stalls": lambda world: world.readers[READER].library.stall_next("group"),
    "an asynchronous error at the holder": lambda world: setattr(world.holder.library.made[0], "error", "a link"),
    "an asynchronous error at the reader": lambda world: setattr(
        world.readers[READER].library.made[0], "error", "a link"
    ),
    "the reader moves nothing any more": lambda world: setattr(world.readers[READER].library.made[0], "is_lost", True),
    "the holder's card dies": lambda world: world.holder.device.die(),
    "the reader's card dies": lambda world: world.readers[READER].device.die(),
}


@pytest.mark.parametrize("fault", CROSSING)
@pytest.mark.parametrize("num_before", [0, 3])
def test_what_is_under_way_when_it_breaks(
    world: PairWorld, monkeypatch: pytest.MonkeyPatch, fault: str, num_before: int
) -> None:
    """Both ends hear of it in bounded time, every read fails, and another pair is as good as new."""
    monkeypatch.setattr(limits, "SLOT_TIMEOUT_S", 0.5)
    holder, reader = world.pair()
    exchange(holder, reader, num_before)
    reads = [open_read(holder, reader) for _ in range(2)]
    CROSSING[fault](world)
    with pytest.raises(PairBrokenError):
        for _ in range(1000):
            for read_id in reads:
                payload = bytes([read_id]) * 100
                assert receive(reader, read_id, send(holder, read_id, payload), 100) == payload
    assert wait_until(lambda: holder.state is reader.state is PairState.BROKEN)
    assert not holder.is_freed or world.holder.device.opened["memory"] == 0, "freed under a read"
    for read_id in reads:
        holder.leave(read_id)
        reader.leave(read_id)
    if "card dies" not in fault:
        assert "stalls" in fault or wait_until(lambda: holder.is_freed and reader.is_freed)
        monkeypatch.undo()
        quick_again(monkeypatch)
        exchange(*pair_in_time(world), num_frames=5)
        assert world.pair()[0].generation > holder.generation


def test_an_abort_that_does_not_come_back_is_left_and_counted(
    world: PairWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffers stay, as the library may write there; with too many of them this process makes no more pairs."""
    world.holder.threads = world.holder_pairs._parts.threads
    for number in range(limits.MAX_ABANDONED // 2):
        holder, reader = world.pair()
        exchange(holder, reader, 2)
        world.holder.library.stall_next("abort")
        holder.fail("the test")
        assert wait_until(lambda reader=reader: reader.is_freed)
        assert wait_until(lambda: not any(thread.is_alive() for thread in world._threads)), "it is listened to"
        assert not holder.is_freed
        assert world.holder.threads.num_abandoned == 2 * (number + 1), "the abort, and the library's own thread"
    assert world.holder_pairs.offer(READER) is None
    assert "do not come back" in (world.holder_pairs.refusal() or "")
    world.holder.library.release()
    assert wait_until(lambda: world.holder.threads.num_abandoned == 0)
    assert wait_until(lambda: world.holder_pairs.offer(READER) is not None)


def test_what_comes_back_late_is_aborted(world: PairWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pair has ended while its communicator was being made: at both ends, as one rank was late."""
    monkeypatch.setattr(limits, "JOIN_S", 0.1)
    world.readers[READER].library.delay_next("make")
    endpoint = world.endpoint()
    with pytest.raises(PairRefusedError, match="not made within"):
        world.join(endpoint=endpoint)
    holder = world.holder_pairs.find(READER, endpoint.pair.generation if endpoint.pair else 0)
    holder.fail("the test")
    world.readers[READER].library.release()
    assert wait_until(lambda: holder.is_freed)
    assert len(world.holder.library.made) == len(world.readers[READER].library.made) == 1, "it was made, and too late"


def test_reads_stop_waiting_for_a_pair_when_they_are_cancelled(world: PairWorld) -> None:
    world.readers[READER].library.stall_next("make")
    started = time.monotonic()
    with pytest.raises(WireClosedError):
        world.reader_pairs[READER].join(
            world.endpoint(), "ticket", world.dial, time.monotonic() + DEADLINE_S, lambda: True
        )
    assert time.monotonic() - started < DEADLINE_S


@pytest.mark.parametrize("end", ["holder", "reader"])
def test_the_peer_hears_at_once(world: PairWorld, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """By the pair's wire, not when it next looks at the time."""
    monkeypatch.setattr(limits, "WATCH_S", 10 * DEADLINE_S)
    holder, reader = world.pair()
    (holder if end == "holder" else reader).fail("the test")
    assert wait_until(lambda: holder.state is reader.state is PairState.BROKEN)
    assert wait_until(lambda: holder.is_freed and reader.is_freed)


# Offers.


def test_an_offer_stands_until_its_pair_has_ended(world: PairWorld) -> None:
    first = world.endpoint().pair
    assert world.endpoint().pair == first
    holder, _ = world.pair()
    assert world.endpoint().pair == first
    holder.fail("the test")
    second = world.endpoint().pair
    assert first is not None and second is not None
    assert second.generation > first.generation and second.unique_id != first.unique_id


def test_an_old_offer_reads_over_the_pair_that_is_there(world: PairWorld) -> None:
    old = world.endpoint()
    world.pair()[0].fail("the test")
    _, reader = world.pair()
    assert world.join(endpoint=old) is reader, "offers may overtake each other"


def test_an_offer_is_opened_once(world: PairWorld) -> None:
    """Who opens it again has lost what he had: the first is of no use to anybody."""
    holder, _ = world.pair()
    with pytest.raises(PairRefusedError, match="opened before"):
        world.holder_pairs.open(READER, holder.generation)
    assert holder.state is PairState.BROKEN


@pytest.mark.parametrize("meanwhile", ["nothing", "opened again", "ended"])
def test_offers_do_not_wait_for_the_card(world: PairWorld, monkeypatch: pytest.MonkeyPatch, meanwhile: str) -> None:
    """They are made on the event loop, while a pair takes the driver's time on a thread."""
    offer = world.endpoint().pair
    assert offer is not None
    device, is_asked, goes_on = world.holder.device, threading.Event(), threading.Event()
    allocate, ended = device.allocate, list[object]()

    def slowly(num_bytes: int) -> DeviceMemory:
        is_asked.set()
        assert goes_on.wait(DEADLINE_S)
        return allocate(num_bytes)

    monkeypatch.setattr(device, "allocate", slowly)

    def open_it() -> None:
        try:
            ended.append(world.holder_pairs.open(READER, offer.generation))
        except PairRefusedError as error:
            ended.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    assert is_asked.wait(DEADLINE_S)
    assert world.holder_pairs.offer(READER) == offer
    assert world.endpoint("another").pair is not None
    with pytest.raises(PairRefusedError):
        world.holder_pairs.find(READER, offer.generation)
    if meanwhile == "opened again":
        with pytest.raises(PairRefusedError, match="opened before"):
            world.holder_pairs.open(READER, offer.generation)
    if meanwhile == "ended":
        world.holder_pairs.close()
    goes_on.set()
    thread.join(DEADLINE_S)
    if meanwhile == "nothing":
        made = world.holder_pairs.find(READER, offer.generation)
        assert made is ended[0]
        made.fail("the test")
        made.free_if_settled()
    else:
        assert isinstance(ended[0], PairRefusedError)
        assert not +device.opened, "all of it is given back"


@pytest.mark.parametrize("generation", [0, 2, 99])
def test_offers_that_were_never_made(world: PairWorld, generation: int) -> None:
    world.endpoint()
    for name in (READER, WorkerId("somebody")):
        with pytest.raises(PairRefusedError):
            world.holder_pairs.open(name, generation)
        with pytest.raises(PairRefusedError):
            world.holder_pairs.find(name, generation)


def test_a_reader_that_never_opens_costs_no_id(world: PairWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAIRS", 3)
    ids = set[bytes]()
    for number in range(20):
        offer = world.endpoint(f"reader-{number}").pair
        assert offer is not None
        ids.add(offer.unique_id)
    assert len(ids) == 3
    with pytest.raises(PairRefusedError):
        world.holder_pairs.open(WorkerId("reader-0"), 1)


@pytest.mark.parametrize("max_pairs", [1, 2])
def test_the_longest_idle_makes_room(world: PairWorld, monkeypatch: pytest.MonkeyPatch, max_pairs: int) -> None:
    monkeypatch.setattr(limits, "MAX_PAIRS", max_pairs)
    names = [f"reader-{number}" for number in range(max_pairs + 1)]
    made = []
    for name in names:
        world.add_reader(name)
        made.append(world.pair(name))
    assert wait_until(lambda: made[0][0].is_freed and made[0][1].is_freed)
    assert all(both[0].state is PairState.READY for both in made[1:])
    exchange(*made[-1], num_frames=2)


def test_pairs_in_use_make_no_room(world: PairWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAIRS", 1)
    holder, reader = world.pair()
    read_id = open_read(holder, reader)
    assert world.holder_pairs.offer(WorkerId("another")) is None
    assert holder.state is PairState.READY
    holder.leave(read_id)
    reader.leave(read_id)


def test_idle_pairs_are_ended_by_the_reader(world: PairWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, reader = world.pair()
    world.reader_pairs[READER].release_idle()
    assert reader.state is PairState.READY
    monkeypatch.setattr(limits, "PAIR_IDLE_S", -1.0)
    world.reader_pairs[READER].release_idle()
    assert wait_until(lambda: holder.is_freed and reader.is_freed)


def test_pairs_that_were_replaced_are_forgotten(world: PairWorld) -> None:
    replaced = weakref.WeakSet[object]()
    for _ in range(3):
        holder, reader = world.pair()
        replaced.add(reader)
        holder.fail("the test")
        assert wait_until(lambda reader=reader: reader.is_freed)
        del reader
    world.pair()

    def is_forgotten() -> bool:
        world.reader_pairs[READER].release_idle()
        gc.collect()
        return not replaced

    assert wait_until(is_forgotten)


def test_ids_that_cannot_be_made_are_not_asked_for_all_the_time() -> None:
    threads = LibraryThreads()

    class Broken:
        num_asked = 0

        def refusal(self) -> None:
            return None

        def new_id(self) -> bytes:
            self.num_asked += 1
            raise CommunicatorError("making an id", "no interface")

    library = Broken()
    offered = pairs.HolderPairs(pair.PairParts(None, library, threads))  # pyright: ignore[reportArgumentType]
    assert wait_until(lambda: library.num_asked == 1)
    for _ in range(10):
        assert offered.offer(READER) is None
    assert library.num_asked == 1


def test_a_slot_that_was_never_told(world: PairWorld) -> None:
    """A peer that says what cannot be is cut off."""
    holder, reader = world.pair()
    read_id = open_read(holder, reader)
    with pytest.raises(ProtocolError):
        slot = send(holder, read_id, b"x" * 8)
        receive(reader, read_id, slot, 8)
        receive(reader, read_id, slot, 8)
    holder.leave(read_id)
    reader.leave(read_id)
