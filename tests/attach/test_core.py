"""Which blocks attached servers may load and save, without a socket, a server or a clock."""

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from schemas.attach import (
    PROTOCOL,
    Ask,
    BlockRefused,
    Compared,
    Counted,
    Half,
    HelloRefused,
    NotSaved,
    Off,
    Proven,
    Release,
    Use,
    WeightsChanged,
)
from schemas.block import join_hashes
from services.attach.core import (
    Bring,
    BringEnded,
    CanaryEnded,
    EndHalf,
    GiveBlocks,
    HalfSent,
    Proof,
    Refuse,
    RunCanary,
    SendHalf,
    Sharing,
    TurnedOff,
    Welcomed,
)
from services.attach.limits import MAX_PINS, MAX_SERVERS, PURSES_SHARE
from services.holder.core.actions import Action
from services.holder.core.events import TimePassed
from services.times import AttachTimes
from tests.attach.core_rig import CANARY_MS, IDENTITY, CoreRig, of_type
from tests.share import examples
from tests.store.rig import hashes_of

NUM_BLOCKS = 64
PIN_MS, RETRY_MS = round(1000 * AttachTimes().pin_s), round(1000 * AttachTimes().canary_retry_s)
A, B = "server-a", "server-b"


@pytest.fixture
def rig() -> CoreRig:
    rig = CoreRig(NUM_BLOCKS)
    for server in (A, B):
        rig.join(server)
        rig.prove(server)
    return rig


# Who is here.


def test_a_server_shares_once_its_canary_has_proven_it() -> None:
    rig = CoreRig()
    assert [type(action) for action in rig.join(A, Half.SCHEDULER)] == [Welcomed], "a canary needs both halves"
    assert rig.join(A, Half.WORKER)[1:] == [RunCanary(A)]
    assert rig.core.servers[A].sharing is Sharing.PROVING
    assert [(each.half, each.message) for each in of_type(rig.prove(A), SendHalf)] == [
        (half, Proven()) for half in sorted(Half)
    ]
    assert rig.core.servers[A].sharing is Sharing.ON


def test_a_server_whose_canary_fails_never_shares_in_this_life(rig: CoreRig) -> None:
    where = rig.fill(A, 1, 2)
    actions = rig.prove(A, Proof.WRONG)
    assert [type(each.message) for each in of_type(actions, SendHalf)] == [Off, Off]
    assert of_type(actions, TurnedOff)[0].num_dropped == len(where)
    assert rig.ask(A, 1, 1) == () and rig.want(A, 1) == ()
    assert rig.prove(A) == [], "a late word of its canary changes nothing"
    rig.leave(A)
    assert of_type(rig.join(A, off="it was found wrong"), RunCanary) == [], "it says so where it attaches anew"
    assert rig.core.servers[A].sharing is Sharing.OFF


def test_of_a_server_whose_one_half_has_gone_the_other_attaches_anew_too(rig: CoreRig) -> None:
    slots = rig.want(A, 2)
    assert of_type(rig.leave(A, Half.WORKER), EndHalf) == [EndHalf(A, Half.SCHEDULER, "")]
    (refused,) = of_type(rig.join(A, Half.WORKER), Refuse)
    assert not refused.answer.is_final, "it tries again"
    rig.leave(A, Half.SCHEDULER)
    assert of_type(rig.join(A), RunCanary) == [RunCanary(A)], "it proves itself again"
    assert rig.core.num_given_up == 2, "a copy into them may be under way"
    rig.now_ms += round(1000 * AttachTimes().purse_s)
    rig.step(TimePassed())
    assert rig.core.num_given_up == 0 and rig.save(A, slots, [1, 2]), "and they are its no more"


def test_a_server_that_cannot_be_reached_is_asked_again() -> None:
    rig = CoreRig()
    rig.join(A)
    rig.prove(A, Proof.UNREACHABLE)
    assert rig.core.servers[A].why == "as the test has it"
    assert rig.step(TimePassed()) == []
    rig.now_ms += RETRY_MS
    assert rig.step(TimePassed()) == [RunCanary(A)] and rig.step(TimePassed()) == [], "one at a time"


def test_a_server_that_shares_proves_itself_again_and_again(rig: CoreRig) -> None:
    rig.now_ms += CANARY_MS
    assert rig.step(TimePassed()) == [RunCanary(A), RunCanary(B)]
    assert rig.prove(A) == [], "it shares already"
    rig.prove(B, Proof.UNREACHABLE)
    assert rig.core.servers[B].sharing is Sharing.ON, "it has answered nothing wrong"


OTHERS = {
    "weights": "other", "kv_format": "other", "dtype": "other", "num_layers": 99, "num_kv_heads": 99, "head_dim": 99,
    "block_size": 99,
}  # fmt: skip


@pytest.mark.parametrize("field", IDENTITY.__struct_fields__)
def test_a_server_with_another_identity_is_refused_for_good(field: str) -> None:
    rig = CoreRig()
    identity = msgspec.structs.replace(IDENTITY, **{field: OTHERS[field]})
    (refused,) = rig.join(A, Half.SCHEDULER, identity=identity)
    assert isinstance(refused, Refuse) and refused.answer.is_final
    assert f"its {field} is {OTHERS[field]}" in refused.answer.reason and not rig.core.servers


def test_a_connector_of_another_version_is_refused_for_good() -> None:
    (refused,) = CoreRig().join(A, Half.SCHEDULER, protocol=PROTOCOL + 1)
    assert isinstance(refused, Refuse) and refused.answer.is_final and "version" in refused.answer.reason


def test_of_one_name_there_is_one_server_at_a_time(rig: CoreRig) -> None:
    (refused,) = rig.join(A, Half.WORKER)
    assert refused == Refuse(HelloRefused(f"a server {A} is attached already", is_final=False))


def test_there_are_only_so_many_servers() -> None:
    rig = CoreRig()
    for number in range(MAX_SERVERS):
        rig.join(f"server-{number}")
    (refused,) = rig.join(A, Half.SCHEDULER)
    assert isinstance(refused, Refuse) and not refused.answer.is_final
    rig.leave("server-0")
    assert of_type(rig.join(A), Welcomed)


# Saving and loading.


def test_what_one_server_saves_another_loads(rig: CoreRig) -> None:
    where = rig.fill(A, 1, 2, 3)
    assert rig.ask(B, 1, 1, 2, 4) == (where[1], where[2]), "the leading run that is here"
    assert rig.num_held == 2
    rig.send(B, Release(1))
    assert rig.num_held == 0


def test_what_is_pinned_stays_until_it_is_released_or_its_time_is_over(rig: CoreRig) -> None:
    where = rig.fill(A, 1)
    rig.ask(B, 1, 1)
    for number in range(100, 100 + NUM_BLOCKS, 4):  # fills the arena over and over
        rig.fill(A, *range(number, number + 4))
    assert rig.ask(B, 2, 1) == (where[1],)
    rig.now_ms += PIN_MS
    rig.step(TimePassed())
    assert rig.num_held == 0


def test_an_arena_full_of_pinned_blocks_gives_no_slots_and_loses_none(rig: CoreRig) -> None:
    for number in range(NUM_BLOCKS // 4):
        blocks = range(4 * number, 4 * number + 4)
        rig.fill(A, *blocks)
        rig.ask(A, number, *blocks)
    assert rig.want(A, 4) == () and rig.num_held == NUM_BLOCKS
    rig.send(A, Release(0))
    assert len(rig.want(B, 8)) == 4


def test_a_question_that_is_asked_twice_pins_once(rig: CoreRig) -> None:
    rig.fill(A, 1, 2)
    rig.ask(A, 7, 1, 2)
    assert len(rig.ask(A, 7, 1)) == 1 and rig.num_held == 1


def test_a_server_pins_only_for_so_many_questions(rig: CoreRig) -> None:
    rig.fill(A, 1)
    for number in range(MAX_PINS):
        assert rig.ask(A, number, 1)
    assert rig.ask(A, MAX_PINS, 1) == ()
    rig.send(A, Release(0))
    assert rig.ask(A, MAX_PINS, 1)


def test_all_purses_together_have_a_share_of_the_arena(rig: CoreRig) -> None:
    most = NUM_BLOCKS // PURSES_SHARE
    assert len(rig.want(A, NUM_BLOCKS)) == len(rig.want(B, NUM_BLOCKS)) == most // 2, "each its own"
    assert rig.want(A, 1) == rig.want(B, 1) == ()


def test_a_server_saves_only_into_its_own_slots(rig: CoreRig) -> None:
    own, others = rig.want(A, 2), rig.want(B, 1)
    wrong = [
        (others, [1]), ([own[0], own[0]], [1, 2]), (own, [1]), ([NUM_BLOCKS], [1]), ([own[0]], [1, 2]),
    ]  # fmt: skip
    for slots, numbers in wrong:
        (ended,) = rig.save(A, slots, numbers)
        assert isinstance(ended, EndHalf) and (ended.server, ended.half) == (A, Half.WORKER)
    assert not any(rig.is_kept(number) for number in (1, 2)) and rig.num_held == 3


def test_a_canary_s_third_block_has_the_first_one_s_bytes(rig: CoreRig) -> None:
    where = rig.fill(A, 1, 2, 3)
    assert rig.ask(A, 1, 1, 2, 3, use=Use.CONFUSED) == (where[1], where[2], where[1])
    assert rig.num_held == 3
    assert rig.ask(A, 2, 1, 2, use=Use.CONFUSED) == (where[1], where[2]), "too short to confuse"


# Ends.


def test_the_end_of_a_scheduler_gives_back_its_pins_and_of_both_halves_the_purse(rig: CoreRig) -> None:
    rig.fill(A, 1)
    rig.ask(A, 1, 1)
    slots = rig.want(A, 3)
    rig.leave(A, Half.SCHEDULER)
    assert rig.num_held == len(slots), "the worker may be writing into them"
    rig.leave(A, Half.WORKER)
    assert rig.num_held == 0 and A not in rig.core.servers
    assert rig.ask(B, 1, 1), "what it has saved stays"


def test_what_comes_after_an_end_is_nobody_s(rig: CoreRig) -> None:
    (slot,) = rig.want(A, 1)
    rig.leave(A)
    assert rig.save(A, [slot], [1]) == [] and rig.leave(A) == []
    assert rig.prove(A) == [] and not rig.is_kept(1)


# Blocks that are wrong.


def test_a_block_with_another_digest_is_given_up(rig: CoreRig) -> None:
    where = rig.fill(A, 1, 2)
    rig.ask(B, 1, 1, 2)
    rig.send(B, BlockRefused(where[2], hashes_of(2)[0]))
    assert rig.is_kept(1) and not rig.is_kept(2) and rig.num_held == 2
    assert rig.ask(B, 2, 1, 2) == (where[1],)
    rig.send(B, BlockRefused(where[1], hashes_of(2)[0]))
    assert rig.is_kept(1), "another block lies there"


def test_whose_blocks_differ_and_who_finds_it_share_no_more(rig: CoreRig) -> None:
    rig.join("server-c")
    rig.prove("server-c")
    rig.fill(A, 1, 2)
    rig.fill(B, 3)
    rig.fill("server-c", 4)
    assert rig.send(B, Compared(hashes_of(1)[0], 1e-6, is_same=True)) == []
    turned = of_type(rig.send(B, Compared(hashes_of(1)[0], 0.5, is_same=False)), TurnedOff)
    assert [(each.server, each.num_dropped) for each in turned] == [(A, 1), (B, 1)]
    assert [rig.is_kept(number) for number in (1, 2, 3, 4)] == [False, False, False, True]
    assert rig.core.servers["server-c"].sharing is Sharing.ON


def test_a_saver_that_has_ended_is_not_believed_either(rig: CoreRig) -> None:
    rig.fill(A, 1, 2)
    rig.leave(A)
    rig.send(B, Compared(hashes_of(1)[0], 0.5, is_same=False))
    assert not rig.is_kept(1) and not rig.is_kept(2)


def test_a_server_with_other_weights_shares_no_more(rig: CoreRig) -> None:
    rig.fill(A, 1)
    rig.send(A, WeightsChanged())
    assert rig.core.servers[A].sharing is Sharing.OFF and not rig.is_kept(1)


def test_a_message_of_what_was_saved_that_comes_twice_ends_the_connection(rig: CoreRig) -> None:
    (slot,) = rig.want(A, 1)
    message = rig.saved(A, [slot], [1])
    rig.send(A, message, (b"tag",))
    assert rig.is_kept(1)
    (ended,) = of_type(rig.send(A, message, (b"tag",)), EndHalf)
    assert (ended.server, ended.half) == (A, Half.WORKER) and "twice" in ended.reason


def test_what_was_purged_while_a_server_wrote_it_is_not_kept(rig: CoreRig) -> None:
    slots = rig.want(A, 1)
    rig.memory.forget()
    rig.save(A, slots, [1])
    assert not rig.is_kept(1) and rig.num_held == 0


def test_counts_add_up(rig: CoreRig) -> None:
    for _ in range(2):
        rig.send(A, Counted(10, 5, {NotSaved.NO_ROOM: 1}))
    server = rig.core.servers[A]
    assert (server.num_asked_tokens, server.num_loaded_tokens, server.not_saved) == (20, 10, {NotSaved.NO_ROOM: 2})


# Blocks that are yet to come.


def waiting_rig() -> CoreRig:
    rig = CoreRig(NUM_BLOCKS, brings=True)
    for server in (A, B):
        rig.join(server)
        rig.prove(server)
    return rig


def given(actions: list[Action]) -> list[tuple[str, int, int, bool]]:
    """Return whom each answer is for, its number, how many blocks it has, and whether more comes."""
    return [(each.server, each.number, len(each.blocks), each.has_more) for each in of_type(actions, GiveBlocks)]


def ask_more(rig: CoreRig, server: str, number: int, *blocks: int, **fields: object) -> list[Action]:
    return rig.send(server, Ask(number, join_hashes(hashes_of(*blocks)), Use.LOAD, **fields))  # type: ignore[arg-type]


def test_what_is_not_here_is_brought_and_the_question_answered_again() -> None:
    rig = waiting_rig()
    rig.fill(A, 1)
    actions = ask_more(rig, B, 7, 1, 2, 3, hint="attach-1")
    assert given(actions) == [(B, 7, 1, True)]
    assert of_type(actions, Bring) == [Bring(B, 7, tuple(hashes_of(2, 3)), "attach-1", 0)]
    rig.fill(A, 2)
    assert given(rig.step(BringEnded(B, 7, 0))) == [(B, 7, 2, False)]
    assert rig.step(BringEnded(B, 7, 1)) == [], "once"
    assert rig.core.servers[B].num_brought_blocks == 1
    rig.send(B, Release(7))
    assert rig.core.servers[B].num_pinned == 0


def test_what_another_server_is_about_to_save_is_waited_for() -> None:
    rig = waiting_rig()
    ask_more(rig, B, 7, 1, 2, wait_ms=1_000)
    assert given(rig.step(BringEnded(B, 7, 0))) == [], "it may still be saved"
    (slot,) = rig.want(A, 1)
    assert given(rig.save(A, [slot], [1])) == []
    (slot,) = rig.want(A, 1)
    assert given(rig.save(A, [slot], [2])) == [(B, 7, 2, False)]


def test_a_wait_is_over_by_its_time() -> None:
    rig = waiting_rig()
    ask_more(rig, B, 7, 1, wait_ms=10_000_000)
    rig.step(BringEnded(B, 7, 0))
    rig.now_ms += round(1000 * AttachTimes().handoff_wait_max_s)
    assert given(rig.step(TimePassed())) == [(B, 7, 0, False)]


def test_what_ends_is_waited_for_no_more() -> None:
    rig = waiting_rig()
    ask_more(rig, A, 1, 1)
    ask_more(rig, B, 1, 1)
    rig.send(A, Release(1))
    rig.leave(B, Half.SCHEDULER)
    assert rig.step(BringEnded(A, 1, 0)) == rig.step(BringEnded(B, 1, 0)) == []


def test_a_server_that_is_yet_to_prove_itself_has_only_what_is_to_be_compared_brought() -> None:
    rig = waiting_rig()
    rig.join("server-c")
    for use, has_more in ((Use.LOAD, False), (Use.CONFUSED, False), (Use.COMPARE, True)):
        actions = rig.send("server-c", Ask(1, join_hashes(hashes_of(1)), use))
        assert given(actions) == [("server-c", 1, 0, has_more)]
        assert len(of_type(actions, Bring)) == has_more


def test_a_block_from_elsewhere_that_differs_ends_all_that_is_from_elsewhere() -> None:
    rig = waiting_rig()
    rig.fill(A, 1)
    for number in (2, 3):
        rig.take_in(number)
    turned = of_type(rig.send(B, Compared(hashes_of(2)[0], 0.5, is_same=False)), TurnedOff)
    assert [each.server for each in turned] == [B] and "elsewhere" in turned[0].reason
    assert [rig.is_kept(number) for number in (1, 2, 3)] == [True, False, False]
    assert given(ask_more(rig, A, 1, 1, 2)) == [(A, 1, 1, False)], "nothing more is brought"


# Whatever comes, in whatever order.

SERVERS = st.sampled_from([A, B, "server-c"])
HALVES = st.sampled_from(list(Half))
BLOCKS = st.integers(0, 30)
RUNS = st.lists(BLOCKS, min_size=1, max_size=6, unique=True)


class AnyOrder(RuleBasedStateMachine):
    """`CoreRig.step` asserts after each event that every block is free, cached, pinned or in a purse."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = CoreRig(32, brings=True)

    @rule(server=SERVERS, half=HALVES)
    def join(self, server: str, half: Half) -> None:
        self.rig.join(server, half)

    @rule(server=SERVERS, half=HALVES)
    def leave(self, server: str, half: Half) -> None:
        self.rig.leave(server, half)

    @rule(server=SERVERS, proof=st.sampled_from([Proof.RIGHT, *Proof]))
    def canary(self, server: str, proof: Proof) -> None:
        self.rig.step(CanaryEnded(server, proof, ""))

    @rule(server=SERVERS, num_slots=st.integers(-1, 40))
    def want(self, server: str, num_slots: int) -> None:
        if server in self.rig.core.servers and Half.SCHEDULER in self.rig.core.servers[server].halves:
            self.rig.want(server, num_slots)

    @rule(server=SERVERS, run=RUNS, data=st.data())
    def save(self, server: str, run: list[int], data: st.DataObject) -> None:
        own = sorted(self.rig.core.servers[server].purse) if server in self.rig.core.servers else []
        slots = data.draw(st.lists(st.sampled_from(own or [0]) | st.integers(-1, 33), min_size=1, max_size=len(run)))
        tags = tuple(b"tag" for _ in slots)
        saved = self.rig.saved(server, slots, run[: len(slots)])
        self.rig.step(HalfSent(server, Half.WORKER, saved, tags))

    @rule(server=SERVERS, number=st.integers(0, 5), run=RUNS, use=st.sampled_from(list(Use)))
    def ask(self, server: str, number: int, run: list[int], use: Use) -> None:
        if server in self.rig.core.servers and Half.SCHEDULER in self.rig.core.servers[server].halves:
            self.rig.ask(server, number, *run, use=use)

    @rule(server=SERVERS, number=st.integers(0, 5))
    def brought(self, server: str, number: int) -> None:
        self.rig.step(BringEnded(server, number, 0))

    @rule(server=SERVERS, number=st.integers(0, 5))
    def release(self, server: str, number: int) -> None:
        self.rig.send(server, Release(number))

    @rule(server=SERVERS, block=BLOCKS, slot=st.integers(-1, 33))
    def refuse(self, server: str, block: int, slot: int) -> None:
        self.rig.send(server, BlockRefused(slot, hashes_of(block)[0]))

    @rule(server=SERVERS, block=BLOCKS, is_same=st.booleans())
    def compare(self, server: str, block: int, is_same: bool) -> None:
        self.rig.send(server, Compared(hashes_of(block)[0], 0.1, is_same))

    @rule(ms=st.sampled_from([1, 1_000, PIN_MS, CANARY_MS]))
    def wait(self, ms: int) -> None:
        self.rig.now_ms += ms
        self.rig.step(TimePassed())

    @rule()
    def purge(self) -> None:
        self.rig.memory.forget()

    def teardown(self) -> None:
        for server in list(self.rig.core.servers):
            self.rig.leave(server)
        assert self.rig.num_held == 0 and not self.rig.core.servers


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=40)
