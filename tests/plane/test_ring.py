"""The staging ring: no two slots overlap, none is lost, everybody moves; under any pressure."""

import itertools
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane.cards.staging_ring import (
    ALIGNMENT,
    HIGH_SHARE,
    LOW_SHARE,
    MIN_FRAMES,
    RingClosedError,
    RingCore,
    RingFullError,
    Slot,
    StagingRing,
)
from tests.plane.harness import DEADLINE_S, start_thread
from tests.share import examples

UNIT = ALIGNMENT
FRAME = 4 * UNIT
RING = MIN_FRAMES * FRAME


def take(core: RingCore, owner: str, num_bytes: int = FRAME) -> Slot | None:
    """Ask, and ask no more if nothing comes of it at once."""
    asked = core.ask(owner, num_bytes)
    granted = core.grant()
    core.withdraw(asked.number)
    core.check_integrity()
    assert len(granted) <= 1
    return granted[0] if granted else None


def have(core: RingCore, owner: str, num_bytes: int = FRAME) -> Slot:
    slot = take(core, owner, num_bytes)
    assert slot is not None, "there is room"
    return slot


# The core.


def test_slots_follow_each_other_and_what_is_free_longest_comes_first() -> None:
    core = RingCore(RING, FRAME)
    slots = [have(core, f"s{i}") for i in range(4)]
    assert [slot.first_byte for slot in slots] == [0, FRAME, 2 * FRAME, 3 * FRAME]
    assert take(core, "s4") is None, "it is full"
    for index in (2, 0):  # in any order
        core.release(slots[index])
    assert have(core, "s4").first_byte == 0, "from the start, having come to the end"
    assert have(core, "s5").first_byte == 2 * FRAME
    core.release(slots[1])
    assert have(core, "s6").first_byte == FRAME


def test_a_place_that_has_just_come_back_is_not_the_next_one() -> None:
    core = RingCore(RING, FRAME)
    core.release(have(core, "a"))
    assert have(core, "b").first_byte == FRAME


def test_places_are_aligned_and_sizes_as_asked_for() -> None:
    core = RingCore(RING, FRAME)
    first, second = have(core, "a", 1), have(core, "b", UNIT + 1)
    assert (first.first_byte, first.num_bytes, first.end_byte) == (0, 1, 1)
    assert (second.first_byte, second.num_bytes) == (UNIT, UNIT + 1)
    assert core.used_bytes == 3 * UNIT


def test_a_slot_comes_back_once() -> None:
    core = RingCore(RING, FRAME)
    slot = have(core, "a")
    core.release(slot)
    again = have(core, "b")
    core.release(slot)
    core.check_integrity()
    assert core.slots == (again,), "an old slot's name frees nothing"


def test_no_second_slot_while_somebody_waits_for_a_first() -> None:
    core = RingCore(RING, FRAME)
    slots = [have(core, f"s{i}") for i in range(4)]
    core.ask("s0", FRAME)  # a second one, and asked for before:
    waiting = core.ask("s9", FRAME)
    core.release(slots[1])
    assert [slot.number for slot in core.grant()] == [waiting.number]


def test_under_pressure_no_second_slot_until_use_is_low() -> None:
    core = RingCore(64 * UNIT, FRAME)
    high, low = int(64 * UNIT * HIGH_SHARE), int(64 * UNIT * LOW_SHARE)
    slots = [have(core, "greedy", UNIT) for _ in range(high // UNIT)]
    slots.append(have(core, "greedy", UNIT))  # at the mark it may, and goes above it
    assert core.is_pressed and take(core, "greedy", UNIT) is None
    while core.used_bytes > low:
        core.release(slots.pop())
        assert take(core, "greedy", UNIT) is None, "not yet low"
    assert have(core, "modest", UNIT), "a first one it always is"
    core.release(slots.pop())
    core.release(slots.pop())
    assert not core.is_pressed and have(core, "greedy", UNIT)


def test_nobody_is_overtaken_by_one_who_asks_for_less() -> None:
    core = RingCore(RING, FRAME)
    slots = [have(core, f"s{i}") for i in range(4)]
    large, small = core.ask("large", FRAME), core.ask("small", UNIT)
    core.release(slots[0])
    assert [slot.number for slot in core.grant()] == [large.number]
    core.release(slots[3])
    assert [slot.number for slot in core.grant()] == [small.number]


def test_who_asks_no_more_holds_up_nobody() -> None:
    core = RingCore(RING, FRAME)
    slots = [have(core, f"s{i}") for i in range(4)]
    large, small = core.ask("large", FRAME), core.ask("small", UNIT)
    core.withdraw(large.number)
    core.withdraw(large.number)
    core.release(slots[0])
    assert [slot.number for slot in core.grant()] == [small.number] and not core.num_asked


@pytest.mark.parametrize("num_bytes", [0, FRAME + 1])
def test_only_frames_are_asked_for(num_bytes: int) -> None:
    with pytest.raises(AssertionError, match="a frame has at most"):
        RingCore(RING, FRAME).ask("a", num_bytes)


@pytest.mark.parametrize("sizes", [(RING, FRAME + 1), (RING, 0), (RING + 1, FRAME)])
def test_a_frame_is_a_small_part_of_the_ring(sizes: tuple[int, int]) -> None:
    with pytest.raises(AssertionError):
        RingCore(*sizes)


class Streams(RuleBasedStateMachine):
    """Many streams, each with a few slots, at whatever moment."""

    def __init__(self) -> None:
        super().__init__()
        self.core = RingCore(RING, FRAME)
        self.waiting: dict[int, str] = {}
        self.lent: dict[int, Slot] = {}

    def grant(self) -> None:
        for slot in self.core.grant():
            have_one = {lent.owner for lent in self.lent.values()}
            waiting_first = [number for number, owner in self.waiting.items() if owner not in have_one]
            assert slot.number == next(iter(waiting_first or self.waiting)), "first slots first, in the order of asking"
            assert self.waiting.pop(slot.number) == slot.owner
            self.lent[slot.number] = slot

    @rule(owner=st.sampled_from("abcdefgh"), num_bytes=st.integers(1, FRAME))
    def ask(self, owner: str, num_bytes: int) -> None:
        self.waiting[self.core.ask(owner, num_bytes).number] = owner
        self.grant()

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = self.lent.pop(data.draw(st.sampled_from(sorted(self.lent))))
        self.core.release(slot)
        self.core.release(slot)
        self.grant()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[number]
        self.core.withdraw(number)
        self.grant()

    @invariant()
    def holds_together(self) -> None:
        self.core.check_integrity()
        assert {slot.number: slot for slot in self.core.slots} == self.lent, "nothing is lost, nothing is lent twice"
        assert self.core.num_asked == len(self.waiting)
        placed = sorted((slot.first_byte, slot.end_byte) for slot in self.lent.values())
        assert all(end <= first for (_, end), (first, _) in itertools.pairwise(placed))

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        assert self.lent or not self.waiting, "an empty ring has room for everybody"

    def teardown(self) -> None:
        """Each stream finishes with the slots that it has: all who wait get theirs, and all is free again."""
        while self.lent or self.waiting:
            assert self.lent, "somebody waits while nobody has anything"
            self.core.release(self.lent.pop(min(self.lent)))
            self.grant()
        assert not self.core.used_bytes and not self.core.is_pressed


TestStreams = Streams.TestCase
TestStreams.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 1 << 30), num_streams=st.integers(1, 40))
def test_every_stream_moves_in_any_order_of_ends(seed: int, num_streams: int) -> None:
    """Each has frames to bring through, asks for a second slot while it has one, and ends frames when it likes."""
    rng, core = random.Random(seed), RingCore(RING, FRAME)
    left = {f"s{i}": rng.randint(1, 6) for i in range(num_streams)}
    waiting: set[str] = set()
    lent: list[Slot] = []
    for _ in range(100 * num_streams):
        for owner in sorted(left):
            if owner not in waiting and left[owner] > core.num_of(owner):
                core.ask(owner, rng.randint(1, FRAME))
                waiting.add(owner)
        granted = core.grant()
        waiting -= {slot.owner for slot in granted}
        lent += granted
        core.check_integrity()
        if not lent:
            break
        ended = lent.pop(rng.randrange(len(lent)))
        core.release(ended)
        left[ended.owner] -= 1
        if not left[ended.owner]:
            del left[ended.owner]
    assert not left, f"did not come to their ends: {left}"


# The shell.


def test_waits_until_a_slot_comes_back() -> None:
    ring = StagingRing(RING, FRAME)
    held = [ring.take(f"s{i}", FRAME, 0.0) for i in range(4)]
    got: list[Slot] = []
    waiter = start_thread(lambda: got.append(ring.take("late", FRAME, DEADLINE_S)))
    ring.release(held[2])
    waiter.join(DEADLINE_S)
    assert [slot.first_byte for slot in got] == [held[2].first_byte]
    ring.check_integrity()


def test_a_wait_is_bounded_and_leaves_nothing_behind() -> None:
    ring = StagingRing(RING, FRAME)
    held = [ring.take(f"s{i}", FRAME, 0.0) for i in range(4)]
    with pytest.raises(RingFullError) as raised:
        ring.take("late", FRAME, 0.01)
    assert (raised.value.owner, raised.value.num_bytes) == ("late", FRAME)
    for slot in held:
        ring.release(slot)
        ring.release(slot)
    assert not ring.used_bytes, "who has given up is lent nothing"


def test_at_once_or_not_at_all() -> None:
    ring = StagingRing(RING, FRAME)
    held = [ring.take_now(f"s{i}", FRAME) for i in range(4)]
    assert None not in held and ring.take_now("s0", FRAME) is None and ring.take_now("late", FRAME) is None
    assert len(ring.slots) == 4
    for slot in ring.slots:
        ring.release(slot)
    assert not ring.used_bytes, "who did not get one at once does not get one later"


@pytest.mark.parametrize("close", [True, False])
def test_who_waits_is_told_of_the_end(close: bool) -> None:
    ring = StagingRing(RING, FRAME)
    held = [ring.take(f"s{i}", FRAME, 0.0) for i in range(4)]
    claim = ring.claim("late", FRAME)
    errors: list[RingClosedError] = []

    def wait() -> None:
        with pytest.raises(RingClosedError) as raised:
            claim.wait(DEADLINE_S)
        errors.append(raised.value)

    waiter = start_thread(wait)
    (ring.close if close else claim.cut)()
    waiter.join(DEADLINE_S)
    assert errors
    for slot in held:
        ring.release(slot)
    assert not ring.used_bytes
    if close:
        with pytest.raises(RingClosedError):
            ring.take("late", FRAME, 0.0)
        with pytest.raises(RingClosedError):
            ring.take_now("late", FRAME)


def test_a_claim_that_is_cut_once_it_was_granted_gives_its_slot_back() -> None:
    ring = StagingRing(RING, FRAME)
    calls: list[str] = []
    held = [ring.take(f"s{i}", FRAME, 0.0) for i in range(4)]
    claim, other = (ring.claim(name, FRAME, lambda name=name: calls.append(name)) for name in ("late", "other"))
    assert claim.poll() is None and not calls
    ring.release(held[0])
    assert calls == ["late"]
    claim.cut()
    assert calls == ["late", "other"], "the next one has it"
    with pytest.raises(RingClosedError):
        claim.poll()
    slot = other.poll()
    assert slot is not None
    other.cut()
    ring.check_integrity()
    assert slot in ring.slots, "what was taken is the taker's"


def test_many_threads_at_once() -> None:
    """Each writes its own mark through its slot and finds it again: nobody else had it meanwhile."""
    ring = StagingRing(RING, FRAME)
    memory = bytearray(RING)
    wrong: list[str] = []
    num_done = threading.Semaphore(0)

    def stream(mark: int) -> None:
        rng, owner = random.Random(mark), f"s{mark}"
        for _ in range(40):
            slots = [ring.take(owner, rng.randint(1, FRAME), DEADLINE_S)]
            if (second := ring.take_now(owner, rng.randint(1, FRAME))) is not None:
                slots.append(second)
            for slot in slots:
                memory[slot.first_byte : slot.end_byte] = bytes([mark]) * slot.num_bytes
            rng.shuffle(slots)
            for slot in slots:
                if memory[slot.first_byte : slot.end_byte] != bytes([mark]) * slot.num_bytes:
                    wrong.append(f"{owner}: {slot}")
                ring.release(slot)
        num_done.release()

    threads = [start_thread(lambda mark=mark: stream(mark)) for mark in range(1, 13)]
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(num_done.acquire(blocking=False) for _ in threads), "all came to their ends"
    assert not wrong and not ring.used_bytes
    ring.check_integrity()
