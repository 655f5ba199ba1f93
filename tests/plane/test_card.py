"""What a card does, a fake one and a real one; and the communicators between two."""

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.cards import limits, pairs
from dataplane.cards.arena import CardArena
from dataplane.cards.card import Card, CardError, CardMemory, CardStuckError, Rows, wait_until
from dataplane.cards.ends import CardLane, NcclHolder
from dataplane.carriers.carrier import CarrierBrokenError
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash, sum64
from tests.gpu import GPU_MARKS, card
from tests.plane.corruption import BitFlip, tapped
from tests.plane.fake_card import Fabric, FakeCard, FakeStream
from tests.plane.harness import DEADLINE_S, Holder, Target, fails, running, use_ends

NUM_BYTES = 1 << 16
ROWS = Rows(np.array([8, 0, 4096, 128, 72]), 8)
OTHER_ROWS = Rows(np.array([0, 640, 8, 320, 100]), 8)


@pytest.fixture(params=["fake", pytest.param("gpu", marks=GPU_MARKS)])
def one(request: pytest.FixtureRequest) -> Iterator[Card]:
    made = FakeCard(fabric=Fabric()) if request.param == "fake" else card()
    yield made
    made.close()


def done(stream) -> None:
    assert wait_until(stream.is_done, lambda: False, DEADLINE_S)


def filled(one: Card, seed: int) -> tuple[CardMemory, ByteArray]:
    """Return memory of random bytes, and these."""
    memory, host, stream = one.allocate(NUM_BYTES), one.pinned(NUM_BYTES), one.stream()
    host[:] = np.random.default_rng(seed).integers(0, 256, NUM_BYTES, np.uint8)
    stream.upload(host, memory)
    done(stream)
    stream.close()
    return memory, host.copy()


def content(one: Card, memory: CardMemory) -> ByteArray:
    stream, host = one.stream(), one.pinned(memory.num_bytes)
    stream.download(memory, host)
    done(stream)
    stream.close()
    return host.copy()


def test_new_memory_is_empty_and_of_any_size(one: Card) -> None:
    for num_bytes in (8, 1000 * 8, NUM_BYTES):
        memory = one.allocate(num_bytes)
        assert memory.num_bytes == num_bytes and not content(one, memory).any()
        memory.close()
        memory.close()


def test_rows_go_where_they_belong_and_nowhere_else(one: Card) -> None:
    (source, theirs), (target, ours) = filled(one, 1), filled(one, 2)
    stream = one.stream()
    stream.copy(source, ROWS, target, OTHER_ROWS)
    pending = stream.sum64(target, OTHER_ROWS)
    done(stream)
    moved = theirs.view(np.uint64)[ROWS.starts[:, None] + np.arange(8)]
    ours.view(np.uint64)[OTHER_ROWS.starts[:, None] + np.arange(8)] = moved
    assert np.array_equal(content(one, target), ours) and np.array_equal(content(one, source), theirs)
    assert pending.value() == sum64(moved.view(np.uint8).reshape(-1)), "the host's digest of the same rows"
    stream.close()
    source.close()
    target.close()


def test_a_stream_is_in_order(one: Card) -> None:
    """Packed, put back elsewhere, and digested, without a wait between."""
    source, _ = filled(one, 3)
    packed, stream = one.allocate(ROWS.total_bytes), one.stream()
    stream.copy(source, ROWS, packed, ROWS.packed)
    stream.copy(packed, ROWS.packed, source, OTHER_ROWS)
    sums = [stream.sum64(source, rows) for rows in (OTHER_ROWS,)] + [stream.sum64(packed, ROWS.packed)]
    done(stream)
    assert sums[0].value() == sums[1].value()
    stream.close()
    packed.close()
    source.close()


def test_memory_is_opened_by_another_process(one: Card) -> None:
    memory, theirs = filled(one, 4)
    kind = "fake" if isinstance(one, FakeCard) else "gpu"
    said = subprocess.run(
        [sys.executable, "-m", "tests.plane.card_process", kind, one.export(memory).hex(), str(NUM_BYTES)],
        capture_output=True, text=True, timeout=DEADLINE_S, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert said.stdout.split() == [str(sum64(theirs))], said.stderr
    with pytest.raises(CardError):
        one.map_memory(b"nobody's", NUM_BYTES)
    memory.close()


def test_a_communicator_brings_bytes_to_its_peer(one: Card) -> None:
    if (refusal := one.no_communicators()) is not None:
        pytest.skip(refusal)
    (source, theirs), (target, _) = filled(one, 5), filled(one, 6)
    to_itself, stream = one.join(one.new_id(), 0, 1), one.stream()
    if isinstance(stream, FakeStream):
        to_itself.send(source, NUM_BYTES, stream)
        to_itself.receive(target, NUM_BYTES, stream)
    else:
        from cupy.cuda import nccl

        nccl.groupStart()
        to_itself.send(source, NUM_BYTES, stream)
        to_itself.receive(target, NUM_BYTES, stream)
        nccl.groupEnd()
    done(stream)
    assert np.array_equal(content(one, target), theirs)
    to_itself.abort()
    stream.close()
    source.close()
    target.close()


# A card that fails, and one that stands still.


def test_a_card_that_has_died_says_so_in_every_call() -> None:
    one = FakeCard()
    memory, stream = one.allocate(NUM_BYTES), one.stream()
    one.died_of = "it has fallen off the bus"
    calls: list[Callable[[], object]] = [
        lambda: one.allocate(8), one.stream, lambda: one.mark(stream.handle), stream.is_done,
        lambda: stream.sum64(memory, ROWS), lambda: one.map_memory(b"", 8),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(CardError, match="fallen off the bus"):
            call()
    stream.close()
    memory.close()


@pytest.mark.parametrize("writes", [True, False])
def test_what_is_not_known_to_have_ended_may_still_write(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CARD_S", 0.05)
    one = FakeCard()
    memory = one.allocate(NUM_BYTES)
    stalled, failed = (CardLane(one, FrameHash("sum64"), writes=writes) for _ in range(2))
    one.is_stalled = True
    stalled.stream.sum64(memory, ROWS)

    for lane, why in ((stalled, None), (failed, "it has fallen off the bus")):
        one.died_of = why
        if writes:
            with pytest.raises(CardStuckError) as raised:
                lane.close()
            assert raised.value.may_still_write
        else:
            lane.close()
    memory.close()


@pytest.mark.parametrize("end", ["holder", "target"])
@pytest.mark.parametrize("param", ["card>card:cuda", "card>card:tcp", "apart>apart:nccl"])
def test_a_card_that_dies_in_mid_stream_ends_the_read(end: str, param: str) -> None:
    use_ends(param)
    carrier = param.rpartition(":")[2]
    holder, target = Holder((carrier,)), Target()
    started, errors = threading.Event(), list[str]()

    def attempt() -> None:
        errors.append(fails(lambda: target.read_from(holder, carrier, lambda _: started.set())).code)

    with running(attempt):
        holder.compute(300, end=20)
        assert started.wait(DEADLINE_S)
        (holder if end == "holder" else target).card.died_of = "it has fallen off the bus"
        if end == "target":
            holder.compute(300, start=20)
        else:
            holder.progress.advance(0, 40, 10**6)
    assert errors[0] in ("device", "closed")
    assert target.reader.is_stuck is (end == "target")
    for one in (holder, target):
        one.card.died_of = one.card.died_of or "the test is over"
        one.close()


# Communicators.


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


def _kept(kept: pairs.Pairs, peer: str) -> contextlib.AbstractContextManager[pairs.Pair]:
    return kept.of_reader(peer, time.monotonic() + DEADLINE_S)


def test_a_pair_whose_other_end_does_not_come_is_given_up(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_S", 0.05)
    monkeypatch.setattr(limits, "MAX_LOST_CALLS", 2)
    one = FakeCard(fabric=fabric)
    kept = pairs.Pairs(one)
    for number in range(2):
        with pytest.raises(CardError, match="has not come"), _kept(kept, f"holder-{number}") as pair:
            pair.communicator()
    with pytest.raises(CarrierBrokenError, match="2 calls of NCCL do not come back"), _kept(kept, "holder-2"):
        pass
    one.close()
    deadline = time.monotonic() + DEADLINE_S
    while kept.refusal() and time.monotonic() < deadline:
        time.sleep(limits.JOIN_S)
    kept.close()


def test_a_reader_s_next_id_ends_the_pair_before(fabric: Fabric) -> None:
    one = FakeCard(fabric=fabric)
    kept = pairs.Pairs(one)
    first = kept.of_holder("reader", b"a" * 128, is_joined=False)
    with pytest.raises(CarrierBrokenError, match="another read is under way"):
        kept.of_holder("reader", b"a" * 128, is_joined=True)
    first.busy.release()
    assert kept.of_holder("reader", b"a" * 128, is_joined=True) is first
    second = kept.of_holder("reader", b"b" * 128, is_joined=False)
    assert first.is_broken and not second.is_broken
    kept.close()
    assert second.is_broken


def test_who_waits_for_a_pair_that_ends_gets_another(fabric: Fabric) -> None:
    kept, got = pairs.Pairs(FakeCard(fabric=fabric)), list[pairs.Pair]()

    def wait() -> None:
        with _kept(kept, "holder") as pair:
            got.append(pair)

    with contextlib.ExitStack() as stack, pytest.raises(CarrierBrokenError), _kept(kept, "holder") as first:
        stack.enter_context(running(wait))
        raise CarrierBrokenError("nccl", "refused")
    assert got[0] is not first and first.is_broken and not got[0].is_broken
    kept.close()


def test_pairs_are_bounded_and_none_that_is_in_use_goes(fabric: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PAIRS", 2)
    kept = pairs.Pairs(FakeCard(fabric=fabric))
    used = kept.of_holder("reader-0", b"0" * 128, is_joined=False)
    with _kept(kept, "holder-1") as idle:
        pass
    with _kept(kept, "holder-2") as last:
        pass
    assert (used.is_broken, idle.is_broken, last.is_broken) == (False, True, False)
    kept.close()


def test_without_its_pair_a_read_goes_over_another_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder cannot join; and where the pair is in use, under "auto", at once."""
    use_ends("apart>apart:nccl")
    monkeypatch.setattr(limits, "JOIN_S", 0.2)
    holder, target = Holder(("nccl", "tcp")), Target()
    holder.compute_all()
    join = holder.card.join
    monkeypatch.setattr(holder.card, "join", lambda *_: (_ for _ in ()).throw(CardError("join", "no")))
    assert target.read_from(holder, "auto").stats.carrier == "tcp"
    assert np.array_equal(target.landed(300), holder.kv)
    monkeypatch.setattr(holder.card, "join", join)
    other = Target(name="decode-1")
    with other.arena.opening("nccl", holder.endpoint, time.monotonic() + 1):
        assert other.read_from(holder, "auto").stats.carrier == "tcp"
    assert other.read_from(holder, "auto").stats.carrier == "nccl"
    target.card.died_of = holder.card.died_of = "the test is over"
    for one in (other, target, holder):
        one.close()


def test_the_next_read_uses_the_pair_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use_ends("apart>apart:nccl")
    holder, target = Holder(("nccl",)), Target()
    holder.compute_all()
    for _ in range(3):
        target.memory.fill(0)
        target.read_from(holder, "nccl")
        assert np.array_equal(target.landed(300), holder.kv)
    assert len({unique_id for unique_id, _ in target.card.fabric.sent if unique_id in _ids(target)}) == 1
    target.close()
    holder.close()


@pytest.mark.parametrize("is_sending", [False, True])
def test_a_read_that_failed_takes_nothing_from_the_next_one(is_sending: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the holder's end does meanwhile: it has not ended, or waits in the midst of a frame."""
    use_ends("apart>apart:nccl")
    monkeypatch.setattr(limits, "JOIN_S", 5.0)
    holder, target = Holder(("nccl",)), Target()
    holder.compute_all()
    target.read_from(holder, "nccl")
    holder.gate.wait_outcome()
    may_end, closed, close = threading.Event(), list[NcclHolder](), NcclHolder.close

    def close_late(end: NcclHolder) -> None:
        closed.append(end)
        if end is closed[0]:
            end._is_midway = is_sending
            assert may_end.wait(DEADLINE_S)
        close(end)

    monkeypatch.setattr(NcclHolder, "close", close_late)
    with tapped(BitFlip(1)):
        assert fails(lambda: target.read_from(holder, "nccl")).code == "digest"
    try:
        target.memory.fill(0)
        target.read_from(holder, "nccl")
        assert np.array_equal(target.landed(300), holder.kv)
    finally:
        may_end.set()
        target.close()
        holder.close()


def test_a_pair_that_the_holder_has_given_up_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a reader that has joined before."""
    use_ends("apart>apart:nccl")
    holder, target = Holder(("nccl",)), Target()
    holder.compute_all()
    target.read_from(holder, "nccl")
    assert isinstance(holder.arena, CardArena)
    holder.arena.pairs.close()
    assert fails(lambda: target.read_from(holder, "nccl")).code == "carrier"
    target.read_from(holder, "nccl")
    assert np.array_equal(target.landed(300), holder.kv)
    target.close()
    holder.close()


def _ids(target: Target) -> set[bytes]:
    return {pair.unique_id for pair in target.arena.pairs._pairs.values()}
