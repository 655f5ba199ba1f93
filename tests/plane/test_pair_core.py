"""A pair's decisions, both ends of it, with nothing but values between them: no thread, no clock."""

from collections import deque

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.cards.limits import INIT_TIMEOUT_S, MAX_ORDERED, SLOT_TIMEOUT_S
from dataplane.cards.nccl.pair_core import (
    NUM_BUFFERS,
    End,
    HolderCore,
    Make,
    Move,
    PairBrokenError,
    PairCore,
    PairState,
    ReaderCore,
    Tell,
)
from dataplane.protocol.stream import ProtocolError
from tests.share import examples

MAX_BYTES = 1000


def ready_holder() -> HolderCore:
    core = HolderCore(1, 0.0)
    core.opened(0.0)
    core.made(1.0)
    assert core.take_actions() == [Make()]
    return core


def ready_reader() -> ReaderCore:
    core = ReaderCore(1, 0.0, MAX_BYTES)
    core.opened(0.0)
    core.made(1.0)
    assert core.take_actions() == [Make()]
    return core


def posted(core: HolderCore, read_id: int, num_bytes: int = 8, now: float = 2.0) -> int:
    buffer = core.begin(read_id)
    assert buffer is not None
    return core.post(buffer, num_bytes, now)


def test_a_slot_is_told_before_it_is_sent() -> None:
    core = ready_holder()
    core.enter(7)
    posted(core, 7, 24)
    assert core.take_actions() == [Tell(1, 7, 24), Move(1, 0, 24)]


def test_what_is_posted_while_it_is_made_goes_once_it_is() -> None:
    core = HolderCore(1, 0.0)
    core.opened(0.0)
    core.enter(1)
    posted(core, 1, now=INIT_TIMEOUT_S - 1)
    core.made(INIT_TIMEOUT_S - 0.5)
    core.tick(INIT_TIMEOUT_S - 0.5 + SLOT_TIMEOUT_S - 0.1)
    assert core.state is PairState.READY
    core.tick(INIT_TIMEOUT_S - 0.5 + SLOT_TIMEOUT_S)
    assert core.state is PairState.BROKEN


def test_making_it_is_bounded_and_too_late_is_never() -> None:
    core = HolderCore(1, 0.0)
    core.opened(5.0)
    core.tick(5.0 + INIT_TIMEOUT_S - 0.01)
    assert core.state is PairState.INITIALIZING
    core.tick(5.0 + INIT_TIMEOUT_S)
    assert core.state is PairState.BROKEN and "was not made" in core.failure
    core.made(5.0 + INIT_TIMEOUT_S + 1)
    assert core.state is PairState.BROKEN


@pytest.mark.parametrize("make", [ready_holder, ready_reader])
def test_nothing_runs_out_while_nothing_is_under_way(make) -> None:
    core: PairCore = make()
    core.tick(1e9)
    assert core.state is PairState.READY


def test_the_limit_is_of_the_oldest_slot_and_starts_anew_with_each() -> None:
    core = ready_holder()
    core.enter(1)
    posted(core, 1, now=10.0)
    posted(core, 1, now=10.0)
    core.moved(1, 10.0 + SLOT_TIMEOUT_S - 1)
    core.tick(10.0 + SLOT_TIMEOUT_S)
    assert core.state is PairState.READY
    core.tick(10.0 + 2 * SLOT_TIMEOUT_S)
    assert "slot 2 did not cross" in core.failure


@pytest.mark.parametrize("end", ["holder", "reader"])
def test_a_slot_that_does_not_cross(end: str) -> None:
    """No other has to cross for the limit to be set."""
    core: HolderCore | ReaderCore
    if end == "holder":
        core = ready_holder()
        core.enter(1)
        posted(core, 1, now=100.0)
    else:
        core = ready_reader()
        core.ordered(Tell(1, 1, 8), 100.0)
    core.tick(100.0 + SLOT_TIMEOUT_S - 0.01)
    assert core.state is PairState.READY
    core.tick(100.0 + SLOT_TIMEOUT_S)
    assert "slot 1 did not cross" in core.failure


def test_it_ends_once_with_the_first_reason() -> None:
    core = ready_reader()
    core.fail("first")
    core.fail("second")
    assert core.take_actions() == [End()]
    assert core.failure == "first"
    for use in (core.next_read, lambda: core.take(1, 1, 8), lambda: core.enter(5)):
        with pytest.raises(PairBrokenError, match="first"):
            use()


def test_a_slot_that_ends_with_the_pair_has_not_arrived() -> None:
    """An abort ends the kernels under way, and their events with them."""
    core = ready_reader()
    read_id = core.next_read()
    core.ordered(Tell(1, read_id, 8), 2.0)
    core.fail("aborted")
    core.moved(1, 3.0)
    with pytest.raises(PairBrokenError):
        core.take(read_id, 1, 8)


@pytest.mark.parametrize("told", [Tell(2, 1, 8), Tell(0, 1, 8), Tell(1, 1, 0), Tell(1, 1, MAX_BYTES + 1)])
def test_slots_that_cannot_be(told: Tell) -> None:
    with pytest.raises(ProtocolError):
        ready_reader().ordered(told, 2.0)


def test_slots_that_nobody_has_a_buffer_for_are_bounded() -> None:
    core = ready_reader()
    for slot in range(1, NUM_BUFFERS + MAX_ORDERED + 1):
        core.ordered(Tell(slot, 1, 8), 2.0)
    with pytest.raises(ProtocolError, match="nobody has a buffer"):
        core.ordered(Tell(NUM_BUFFERS + MAX_ORDERED + 1, 1, 8), 2.0)


def test_a_read_takes_only_what_is_its_own_and_once() -> None:
    core = ready_reader()
    mine, other = core.next_read(), core.next_read()
    core.ordered(Tell(1, mine, 8), 2.0)
    assert core.take(mine, 1, 8) is None, "under way"
    assert core.take(mine, 2, 8) is None, "not told yet"
    core.moved(1, 3.0)
    for read_id, slot, num_bytes in [(other, 1, 8), (mine, 1, 16)]:
        with pytest.raises(ProtocolError):
            core.take(read_id, slot, num_bytes)
    assert core.take(mine, 1, 8) == 0
    with pytest.raises(ProtocolError):
        core.take(mine, 1, 8)
    core.emptied(1, 4.0)
    core.emptied(1, 4.0)
    with pytest.raises(ProtocolError, match="has gone"):
        core.take(mine, 1, 8)


def test_two_reads_of_one_name() -> None:
    core = ready_holder()
    core.enter(3)
    with pytest.raises(ProtocolError):
        core.enter(3)


def test_it_is_idle_since_its_last_read() -> None:
    core = ready_reader()
    assert core.idle_since == 0.0
    first, second = core.next_read(), core.next_read()
    core.leave(first, 5.0)
    assert core.idle_since is None
    core.leave(second, 6.0)
    assert core.idle_since == 6.0


def buffers_of(core: HolderCore | ReaderCore) -> list[int]:
    """Return all buffers, each as often as somebody has it."""
    if isinstance(core, HolderCore):
        return [*core._free, *core._begun, *(move.buffer for move in core._under_way)]
    return [*core._free, *(a.buffer for a in core._arrivals.values() if a.buffer is not None)]


class BothEnds(RuleBasedStateMachine):
    """Two cores, the wire between them, and a library that moves what is at the same place of both orders. A buffer's
    content is the name of what was put there: wrong bytes are wrong names."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.holder, self.reader = HolderCore(1, 0.0), ReaderCore(1, 0.0, MAX_BYTES)
        self.wire: deque[Tell] = deque()
        self.sends: deque[Move] = deque()
        self.receives: deque[Move] = deque()
        self.arrived: deque[Move] = deque()
        self.left: deque[Move] = deque()
        self.at_holder: dict[int, str] = {}
        self.at_reader: dict[int, str] = {}
        self.begun: dict[int, list[int]] = {}
        self.announced: dict[int, deque[tuple[int, int, str]]] = {}
        self.taken: dict[int, list[tuple[int, int, str]]] = {}
        self.num_named = 0
        self.num_ends = {id(self.holder): 0, id(self.reader): 0}

    @initialize()
    def open(self) -> None:
        for core in (self.holder, self.reader):
            core.opened(self.now)
        self.act()

    def act(self) -> None:
        for core, moves in ((self.holder, self.sends), (self.reader, self.receives)):
            for action in core.take_actions():
                match action:
                    case Tell():
                        self.wire.append(action)
                    case Move():
                        moves.append(action)
                    case End():
                        self.num_ends[id(core)] += 1
                    case Make():
                        pass

    def name(self) -> str:
        self.num_named += 1
        return f"content {self.num_named}"

    @rule()
    def make(self) -> None:
        for core in (self.holder, self.reader):
            core.made(self.now)

    @rule()
    def begin_read(self) -> None:
        try:
            read_id = self.reader.next_read()
        except PairBrokenError:
            return
        self.taken[read_id] = []
        try:
            self.holder.enter(read_id)
        except PairBrokenError:
            return
        self.begun[read_id], self.announced[read_id] = [], deque()

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def begin_frame(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.begun)))
        try:
            buffer = self.holder.begin(read_id)
        except PairBrokenError:
            return
        if buffer is not None:
            self.at_holder[buffer] = self.name()
            self.begun[read_id].append(buffer)

    @precondition(lambda self: any(self.begun.values()))
    @rule(data=st.data(), num_bytes=st.integers(1, MAX_BYTES))
    def post_frame(self, data: st.DataObject, num_bytes: int) -> None:
        read_id = data.draw(st.sampled_from(sorted(read for read, begun in self.begun.items() if begun)))
        buffer = self.begun[read_id][0]
        try:
            slot = self.holder.post(buffer, num_bytes, self.now)
        except PairBrokenError:
            return
        self.begun[read_id].pop(0)
        self.announced[read_id].append((slot, num_bytes, self.at_holder[buffer]))
        self.act()

    @precondition(lambda self: self.wire)
    @rule()
    def hear(self) -> None:
        self.reader.ordered(self.wire.popleft(), self.now)
        self.act()

    @precondition(lambda self: self.sends and self.receives and not self.is_broken())
    @rule()
    def cross(self) -> None:
        sent, received = self.sends.popleft(), self.receives.popleft()
        assert (sent.slot, sent.num_bytes) == (received.slot, received.num_bytes), "the ends are out of step"
        self.at_reader[received.buffer] = self.at_holder[sent.buffer]
        self.left.append(sent)
        self.arrived.append(received)

    @precondition(lambda self: self.left)
    @rule()
    def notice_left(self) -> None:
        move = self.left.popleft()
        self.at_holder[move.buffer] = "overwritten"
        self.holder.moved(move.slot, self.now)
        self.act()

    @precondition(lambda self: self.arrived)
    @rule()
    def notice_arrived(self) -> None:
        self.reader.moved(self.arrived.popleft().slot, self.now)
        self.act()

    @precondition(lambda self: any(self.announced.values()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        reads = sorted(read for read, frames in self.announced.items() if frames and read in self.taken)
        if not reads:
            return
        read_id = data.draw(st.sampled_from(reads))
        slot, num_bytes, content = self.announced[read_id][0]
        try:
            buffer = self.reader.take(read_id, slot, num_bytes)
        except PairBrokenError:
            return
        if buffer is not None:
            self.announced[read_id].popleft()
            assert self.at_reader[buffer] == content
            self.taken[read_id].append((slot, buffer, content))

    @precondition(lambda self: any(self.taken.values()))
    @rule(data=st.data())
    def empty(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(read for read, taken in self.taken.items() if taken)))
        slot, buffer, content = self.taken[read_id].pop(0)
        assert self.at_reader[buffer] == content, "overwritten while it was being emptied"
        self.at_reader[buffer] = "overwritten"
        self.reader.emptied(slot, self.now)
        self.act()

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def end_at_holder(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.begun)))
        self.holder.leave(read_id, self.now)
        del self.begun[read_id]
        self.act()

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def end_at_reader(self, data: st.DataObject) -> None:
        read_id = data.draw(st.sampled_from(sorted(self.taken)))
        for _, buffer, content in self.taken.pop(read_id):
            assert self.at_reader[buffer] == content
        self.reader.leave(read_id, self.now)
        self.act()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 1.0, SLOT_TIMEOUT_S / 2]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for core in (self.holder, self.reader):
            core.tick(self.now)
        self.act()

    @precondition(lambda self: self.num_named > 12)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from((self.holder, self.reader))).fail("a fault")
        self.act()

    def is_broken(self) -> bool:
        return PairState.BROKEN in (self.holder.state, self.reader.state)

    @invariant()
    def each_buffer_is_in_one_place(self) -> None:
        for core in (self.holder, self.reader):
            assert sorted(buffers_of(core)) == list(range(NUM_BUFFERS))

    @invariant()
    def an_end_that_is_over_is_over_once(self) -> None:
        for core in (self.holder, self.reader):
            assert self.num_ends[id(core)] == (core.state is PairState.BROKEN)

    def teardown(self) -> None:
        """Whatever has happened: once its reads have ended and what is under way has crossed, nothing is held."""
        for read_id in list(self.begun):
            self.holder.leave(read_id, self.now)
        for read_id in list(self.taken):
            self.reader.leave(read_id, self.now)
        self.act()
        if self.is_broken():
            for core in (self.holder, self.reader):
                assert core.is_settled
            return
        while self.wire or self.sends or self.left or self.arrived:
            for step in (self.hear, self.cross, self.notice_left, self.notice_arrived):
                ready = {
                    self.hear: self.wire,
                    self.cross: self.sends and self.receives,
                    self.notice_left: self.left,
                    self.notice_arrived: self.arrived,
                }[step]
                if ready:
                    step()
        for core in (self.holder, self.reader):
            assert core.is_settled and core.idle_since is not None
            assert len(core._free) == NUM_BUFFERS


TestBothEnds = BothEnds.TestCase
TestBothEnds.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)
