"""The fake card is as late as a real one and as easily broken, and notices what a real one would not say."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from dataplane.cards.device import DeviceError, Moves
from dataplane.cards.fakes.fake_device import FakeDevice
from tests.plane.test_device import DEADLINE_S, Bench, one_run, random_bytes


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(FakeDevice(max_delay_s=0.002))
    yield made
    fake(made).resume()
    made.close()
    assert not +fake(made).opened, f"left open: {+fake(made).opened}"


def fake(bench: Bench) -> FakeDevice:
    assert isinstance(bench.device, FakeDevice)
    return bench.device


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_nobody_waited_for_is_seen_as_wrong_bytes() -> None:
    """Over many orders: a stream that does not wait for another one's upload reads what was there before."""
    wrong = 0
    for seed in range(20):
        bench = Bench(FakeDevice(seed=seed, max_delay_s=0.0005))
        memory, written, read, other = bench.allocate(64), bench.host(64), bench.host(64), bench.new_stream()
        written[:] = 1
        bench.device.upload(bench.stream, written, memory, 0)
        bench.device.download(other, memory, 0, read)
        bench.finish(other)
        wrong += not (read == 1).all()
        bench.finish()
        bench.close()
    assert 2 <= wrong <= 18


def test_memory_that_is_written_again_too_early_goes_up_wrong(bench: Bench) -> None:
    memory, host = bench.allocate(64), bench.host(64)
    fake(bench).stall(bench.stream.handle)
    host[:] = 1
    bench.device.upload(bench.stream, host, memory, 0)
    host[:] = 2
    fake(bench).resume()
    bench.finish()
    assert (bench.read(memory) == 2).all()


def test_a_stalled_stream_holds_up_only_itself(bench: Bench) -> None:
    other, event = bench.new_stream(), bench.event()
    fake(bench).stall(bench.stream.handle)
    event.record(bench.stream)
    bench.finish(other)
    assert not event.is_done() and not event.wait(0.01)
    fake(bench).resume()
    assert event.wait(DEADLINE_S)


def test_a_wait_is_for_the_last_record_before_it(bench: Bench) -> None:
    """What is recorded after the wait was queued is not waited for."""
    other, event, done = bench.new_stream(), bench.event(), bench.event()
    event.record(bench.stream)
    assert event.wait(DEADLINE_S)
    other.wait_for(event)
    fake(bench).stall(bench.stream.handle)
    event.record(bench.stream)
    done.record(other)
    assert done.wait(DEADLINE_S) and not event.is_done()
    other.wait_for(event)
    done.record(other)
    assert not done.wait(0.02)
    fake(bench).resume()
    assert done.wait(DEADLINE_S) and event.is_done()


def test_an_event_that_is_recorded_again_is_not_done_again(bench: Bench) -> None:
    event = bench.event(shared=True)
    event.record(bench.stream)
    assert event.wait(DEADLINE_S)
    fake(bench).stall()
    event.record(bench.stream)
    assert not event.is_done()


def test_calls_fail_when_they_are_told_to(bench: Bench) -> None:
    memory, host, event = bench.allocate(64), bench.host(64), bench.event()
    calls: dict[str, Callable[[], object]] = {
        "allocate": lambda: bench.device.allocate(8),
        "new_stream": bench.device.new_stream,
        "foreign_stream": lambda: bench.device.foreign_stream(0),
        "new_event": bench.device.new_event,
        "new_digest": bench.device.new_digest,
        "pin": lambda: bench.device.pin(np.zeros(8, np.uint8)),
        "upload": lambda: bench.device.upload(bench.stream, host, memory, 0),
        "download": lambda: bench.device.download(bench.stream, memory, 0, host),
        "move": lambda: bench.device.move(bench.stream, one_run(1, 64), memory, None, None),
        "record": lambda: event.record(bench.stream),
        "is_done": event.is_done,
        "wait_for": lambda: bench.stream.wait_for(event),
        "export_memory": lambda: bench.device.export_memory(memory),
        "export_event": lambda: bench.device.export_event(event),
        "open_memory": lambda: bench.device.open_memory(b"", 8),
        "open_event": lambda: bench.device.open_event(b""),
    }
    for what, call in calls.items():
        fake(bench).fail_next(what)
        with pytest.raises(DeviceError, match="as it was told to") as raised:
            call()
        assert raised.value.what == what
    bench.finish()


def test_a_dead_card_raises_everywhere_and_finishes_nothing(bench: Bench) -> None:
    event, memory = bench.event(), bench.allocate(64)
    fake(bench).stall()
    event.record(bench.stream)
    waiting: list[BaseException] = []

    def wait() -> None:
        try:
            event.wait(DEADLINE_S)
        except DeviceError as error:
            waiting.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    fake(bench).die("it is gone")
    thread.join(DEADLINE_S)
    assert [str(error) for error in waiting] == ["is_done: it is gone"]
    for call in (
        lambda: bench.device.allocate(8),
        event.is_done,
        lambda: event.record(bench.stream),
        lambda: bench.device.move(bench.stream, one_run(1, 64), memory, None, None),
    ):
        with pytest.raises(DeviceError, match="it is gone"):
            call()


@pytest.mark.parametrize("num_operations", range(5))
def test_a_card_dies_after_so_much_work(bench: Bench, num_operations: int) -> None:
    done: list[int] = []
    fake(bench).die_after(num_operations)
    stream = fake(bench).new_stream()
    for number in range(4):
        with suppress(DeviceError):  # it may have died by now
            stream.run(lambda number=number: done.append(number))
    until(lambda: len(done) == min(num_operations, 4))
    if num_operations < 4:
        until(lambda: _is_dead(fake(bench)))
    stream.close()
    assert done == list(range(min(num_operations, 4)))


def _is_dead(device: FakeDevice) -> bool:
    try:
        device.new_event().close()
    except DeviceError:
        return True
    return False


@pytest.mark.parametrize("what", ["move", "upload", "download"])
def test_one_bit_is_written_wrong(bench: Bench, what: str) -> None:
    source, target, content = bench.allocate(640), bench.allocate(640), random_bytes(640)
    digests = [bench.digest(), bench.digest()]
    fake(bench).corrupt_next(what)
    host, back = bench.host(640), bench.host(640)
    host[:] = content
    bench.device.upload(bench.stream, host, source, 0)
    bench.device.move(bench.stream, one_run(10, 64), source, target, digests[0])
    bench.device.download(bench.stream, target, 0, back)
    bench.finish()
    assert np.unpackbits(back ^ content).sum() == 1
    bench.device.move(bench.stream, one_run(10, 64), target, None, digests[1])
    bench.finish()
    assert digests[0].value() == digests[1].value(), "the digest is of what was written"
    assert np.array_equal(host, content)


def test_a_digest_that_is_read_too_early_is_said(bench: Bench) -> None:
    memory, digest = bench.allocate(64), bench.digest()
    fake(bench).stall()
    bench.device.move(bench.stream, one_run(1, 64), memory, None, digest)
    with pytest.raises(AssertionError, match="before its kernel"):
        digest.value()
    fake(bench).resume()
    bench.finish()
    digest.value()


MISUSES: dict[str, Callable[[Bench], object]] = {
    "memory": lambda b: _close_behind(b, b.device.allocate(64)),
    "mapped memory": lambda b: _close_behind(b, _mapped(b)),
    "a digest": lambda b: _close_digest_behind(b),
}


def _mapped(bench: Bench):
    owner = FakeDevice(owner="another")
    memory = owner.allocate(64)
    mapped = bench.device.open_memory(owner.export_memory(memory), 64)
    memory.close()
    owner.close()
    return mapped


def _close_behind(bench: Bench, memory) -> None:
    bench.device.move(bench.stream, one_run(1, 64), memory, None, None)
    memory.close()


def _close_digest_behind(bench: Bench) -> None:
    digest = bench.device.new_digest()
    bench.device.move(bench.stream, one_run(1, 64), bench.allocate(64), None, digest)
    digest.close()


@pytest.mark.parametrize("misuse", MISUSES)
def test_what_is_closed_too_early_kills_the_card_and_fails_the_test(misuse: str) -> None:
    device = FakeDevice()
    bench = Bench(device)
    device.stall()
    MISUSES[misuse](bench)
    device.resume()
    until(lambda: _is_dead(device))
    with pytest.raises(AssertionError, match="move: "):
        bench.close()


def test_closed_things_are_not_used(bench: Bench) -> None:
    stream, event = bench.device.new_stream(), bench.device.new_event()
    handle = stream.handle
    stream.close()
    event.close()
    with pytest.raises(DeviceError, match="closed"):
        bench.event().record(stream)
    with pytest.raises(DeviceError, match="closed"):
        event.is_done()
    bench.finish()
    until(lambda: fake(bench).work.queue(handle) is None)
    with pytest.raises(DeviceError, match="no stream"):
        bench.device.foreign_stream(handle)


def test_a_closed_card_is_not_used() -> None:
    device = FakeDevice()
    device.close()
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.allocate(8)


def test_a_stream_of_another_card_is_not_taken(bench: Bench) -> None:
    other = FakeDevice()
    streams = [other.new_stream() for _ in range(3)]
    with pytest.raises(DeviceError, match="another card's"):
        bench.event().record(streams[-1])
    other.close()


def test_peers_map_each_other_and_strangers_do_not() -> None:
    cards = [FakeDevice("A", owner="a", peers=("B",)), FakeDevice("B", owner="b"), FakeDevice("C", owner="c")]
    memories = [card.allocate(64) for card in cards]
    assert [cards[0].can_map(card.uuid) for card in cards] == [True, True, False]
    cards[0].open_memory(cards[1].export_memory(memories[1]), 64).close()
    with pytest.raises(DeviceError, match="no peer"):
        cards[0].open_memory(cards[2].export_memory(memories[2]), 64)
    with pytest.raises(DeviceError, match="65 bytes of 64"):
        cards[0].open_memory(cards[1].export_memory(memories[1]), 65)
    for thing in (*memories, *cards):
        thing.close()


def test_a_handle_does_not_open_what_came_after_it() -> None:
    """Descriptors are used again at once; names are not."""
    owner, other = FakeDevice(owner="a"), FakeDevice(owner="b")
    memory = owner.allocate(64)
    handle = owner.export_memory(memory)
    memory.close()
    for later in [owner.allocate(64) for _ in range(4)]:
        with pytest.raises(DeviceError):
            other.open_memory(handle, 64)
        later.close()
    owner.close()
    other.close()


def test_memory_of_a_stranger_of_this_process_kills_the_card() -> None:
    cards = [FakeDevice("A"), FakeDevice("B")]
    memory, stream = cards[1].allocate(64), cards[0].new_stream()
    cards[0].move(stream, Moves(np.zeros((1, 3), np.int64), 1, 64, 64, 64), memory, None, None)
    until(lambda: _is_dead(cards[0]))
    with pytest.raises(AssertionError, match="memory of B"):
        cards[0].close()
    cards[1].close()
