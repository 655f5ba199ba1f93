"""Who is alive, who is only quiet, and who must not come back."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import WorkerId
from schemas.request import Placement, RefusalReason
from schemas.worker import LeftReason, WorkerBeat, WorkerDraining, WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad
from services.config import SchedulerConfig
from services.presence import BusConnected
from services.scheduler.core import SchedulerCore
from services.scheduler.events import (
    Action,
    BusProved,
    ConnectionEnded,
    FleetEvent,
    PingAnswered,
    PingUnanswered,
    PingUnserved,
    ProveBus,
    SendPing,
)
from services.times import PresenceTimes, Times
from tests.scheduler.test_scheduler import D0, P0, P1, ask, fleet, info, load, placed, refused, said_left
from tests.share import examples

BEAT_INTERVAL_MS = Times().presence.beat_interval_ms
LOAD_INTERVAL_MS = Times().presence.load_interval_ms
SETTLE_MS = Times().presence.recover_ms

W = WorkerId("w")
LIMITS = SchedulerConfig()
BEAT = WorkerBeat(worker_id=W, incarnation="a")


def pings_of(actions: list[Action]) -> list[SendPing]:
    return [action for action in actions if isinstance(action, SendPing)]


class Fleet:
    """A core that knows one worker, and what becomes of its pings."""

    def __init__(self, *, answers_first: bool = True) -> None:
        self.core = SchedulerCore(LIMITS, PresenceTimes())
        self.core.handle(load(info("w", "prefill")), 0)
        self.said: list[WorkerLeft] = []
        if answers_first:
            (ping,) = self.due(0)
            self.answer(ping, 0)

    def tick(self, now_ms: int) -> list[Action]:
        actions = self.core.tick(now_ms)
        self.said += said_left(actions)
        return actions

    def due(self, now_ms: int) -> list[SendPing]:
        return pings_of(self.tick(now_ms))

    def answer(self, ping: SendPing, now_ms: int, incarnation: str = "a") -> None:
        assert self.core.handle(PingAnswered(ping, W, incarnation), now_ms) == []

    def unserved(self, ping: SendPing, now_ms: int) -> bool:
        """Whether that proves the worker dead."""
        self.said += (said := said_left(self.core.handle(PingUnserved(ping), now_ms)))
        return bool(said)

    def prove(self, now_ms: int) -> None:
        self.core.handle(BusProved(works=True), now_ms)

    def is_suspect(self, now_ms: int) -> bool:
        return [standing.state for standing in self.core.standing(now_ms)] == ["suspect"]


def test_a_new_worker_is_pinged_at_once_then_every_interval_and_never_more_than_twice_unanswered() -> None:
    fleet = Fleet(answers_first=False)
    assert fleet.core.wake_ms == 0 and fleet.due(0) == [SendPing(W, "a", 0)]
    assert fleet.due(150) == [] and fleet.core.wake_ms == 200
    assert fleet.due(200) == [SendPing(W, "a", 200)]
    fleet.core.handle(load(info("w", "prefill")), 5_000)
    assert fleet.due(5_000) == [] and fleet.core.wake_ms == 5_200
    fleet.core.handle(PingUnanswered(SendPing(W, "a", 0)), 5_000)
    assert fleet.due(5_000) == [SendPing(W, "a", 5_000)]


def test_a_process_that_died_is_known_dead_by_two_pings_that_nobody_serves() -> None:
    fleet = Fleet()
    assert fleet.due(200) == [] and fleet.core.wake_ms == 400
    (ping,) = fleet.due(400)
    assert not fleet.unserved(ping, 401) and fleet.core.wake_ms == 501
    assert fleet.due(500) == [] and fleet.due(501) == [SendPing(W, "a", 501)], "the second one soon"
    assert fleet.unserved(SendPing(W, "a", 501), 502)
    assert [left.reason for left in fleet.said] == [LeftReason.DIED]


def test_where_the_broker_says_that_a_connection_has_ended_the_second_ping_comes_sooner() -> None:
    """Without its word the worker may be at a server that is cut off, of which we are told a moment later."""
    fleet = Fleet()
    fleet.core.handle(ConnectionEnded("w"), 10)
    (ping,) = fleet.due(10)
    assert not fleet.unserved(ping, 11) and fleet.core.wake_ms == 61
    (ping,) = fleet.due(61)
    assert fleet.unserved(ping, 62)


def test_who_speaks_is_not_asked() -> None:
    fleet = Fleet()
    for now_ms in range(100, 60_000, 100):
        if now_ms % BEAT_INTERVAL_MS == 0:
            message = BEAT if now_ms % LOAD_INTERVAL_MS else load(info("w", "prefill"))
            assert fleet.core.handle(message, now_ms) == []
        assert fleet.tick(now_ms) == [] and not fleet.is_suspect(now_ms)


def test_only_those_who_are_overdue_are_asked_however_many_there_are() -> None:
    core = SchedulerCore(LIMITS, PresenceTimes())
    workers = [info(f"w{number}", "prefill") for number in range(1_000)]
    for worker in workers:
        core.handle(load(worker), 0)
    for ping in pings_of(core.tick(0)):
        core.handle(PingAnswered(ping, ping.worker_id, "a"), 0)
    stopped = {WorkerId("w3"), WorkerId("w700")}
    asked = list[SendPing]()
    for now_ms in range(50, 1_000, 50):
        if now_ms % BEAT_INTERVAL_MS == 0:
            for worker in workers:
                if worker.worker_id not in stopped:
                    core.handle(WorkerBeat(worker_id=worker.worker_id, incarnation="a"), now_ms)
        core.handle(BusProved(works=True), now_ms)
        asked += pings_of(core.tick(now_ms))
    assert {ping.worker_id for ping in asked} == stopped
    assert len(asked) == 4 and {ping.sent_ms for ping in asked} == {400, 600}, "two each, and no third unanswered"


def test_whose_connection_has_ended_is_asked_at_once_and_the_questions_are_the_proof() -> None:
    fleet = Fleet()
    assert fleet.core.handle(ConnectionEnded("w"), 10) == [] and fleet.core.wake_ms == 10
    (ping,) = fleet.due(10)
    assert not fleet.unserved(ping, 11) and fleet.core.wake_ms == 61
    (ping,) = fleet.due(61)
    assert fleet.unserved(ping, 62)
    assert [left.reason for left in fleet.said] == [LeftReason.DIED]


def test_whose_connection_is_said_to_have_ended_and_who_answers_lives() -> None:
    """It has come back, or somebody else has used its name."""
    fleet = Fleet()
    fleet.core.handle(ConnectionEnded("w"), 10)
    (ping,) = fleet.due(10)
    assert not fleet.unserved(ping, 11)
    (ping,) = fleet.due(61)
    fleet.answer(ping, 62)
    assert fleet.due(300) == [] and fleet.said == []
    assert (
        fleet.core.handle(ConnectionEnded("somebody"), 310) == [] and fleet.core.handle(ConnectionEnded(""), 310) == []
    )
    assert fleet.due(310) == []


def test_a_last_word_that_comes_late_ends_no_doubt() -> None:
    """What a worker said before its end may be read after the broker's word."""
    fleet = Fleet()
    fleet.core.handle(ConnectionEnded("w"), 10)
    (ping,) = fleet.due(10)
    assert not fleet.unserved(ping, 11)
    fleet.core.handle(BEAT, 12)
    (ping,) = fleet.due(61)
    assert not fleet.unserved(ping, 62), "the first since it was heard"
    (ping,) = fleet.due(112)
    assert fleet.unserved(ping, 113)


def test_however_often_a_connection_ends_there_are_two_questions_at_a_time() -> None:
    fleet = Fleet()
    asked = list[SendPing]()
    for now_ms in range(10, 500, 10):
        fleet.core.handle(ConnectionEnded("w"), now_ms)
        asked += fleet.due(now_ms)
    assert len(asked) == 2


def test_a_beat_is_a_sign_of_life_of_its_own_incarnation_only() -> None:
    fleet = Fleet()
    assert fleet.core.handle(BEAT, 300) == []
    assert fleet.due(699) == [] and len(fleet.due(700)) == 1
    fleet.core.handle(WorkerBeat(worker_id=W, incarnation="b"), 750)
    fleet.core.handle(WorkerBeat(worker_id=WorkerId("stranger"), incarnation="a"), 750)
    fleet.prove(900)
    assert fleet.is_suspect(900) and fleet.core.incarnations() == {W: "a"}, "a beat names nobody new"


def test_what_has_left_and_beats_is_told_so() -> None:
    fleet = Fleet()
    fleet.core.handle(WorkerLeft(worker_id=W, incarnation="a", reason=LeftReason.SILENT), 0)
    assert fleet.core.handle(BEAT, 500) == []
    assert [left.reason for left in said_left(fleet.core.handle(BEAT, 1_000))] == ["silent"]
    assert fleet.core.incarnations() == {}


def test_two_pings_that_waited_for_the_same_broker_are_one_proof() -> None:
    fleet = Fleet()
    first, second = *fleet.due(400), *fleet.due(600)
    assert not fleet.unserved(first, 800) and not fleet.unserved(second, 800)
    (third,) = fleet.due(900)
    assert fleet.unserved(third, 901)


@pytest.mark.parametrize("between", ["load", "beat", "answer"])
def test_a_sign_of_life_between_two_pings_that_nobody_serves_is_life(between: str) -> None:
    fleet = Fleet()
    (ping,) = fleet.due(400)
    assert not fleet.unserved(ping, 401)
    if between == "load":
        fleet.core.handle(load(info("w", "prefill")), 430)
    elif between == "beat":
        fleet.core.handle(BEAT, 430)
    else:
        (ping,) = fleet.due(501)
        fleet.answer(ping, 502)
    (ping,) = fleet.due(950)
    assert not fleet.unserved(ping, 951)


def test_a_worker_that_serves_no_pings_is_judged_by_its_silence() -> None:
    fleet = Fleet(answers_first=False)
    for now_ms in range(0, 3_000, 100):
        if now_ms % 500 == 0:
            fleet.core.handle(load(info("w", "prefill")), now_ms)
        for ping in fleet.due(now_ms):
            assert not fleet.unserved(ping, now_ms)
        assert not fleet.is_suspect(now_ms) and fleet.said == []
    assert fleet.is_suspect(4_100)


def test_a_stopped_worker_is_suspect_then_silent_and_a_slow_one_neither() -> None:
    fleet, slow = Fleet(), Fleet()
    for now_ms in range(100, 3_000, 100):
        for each in (fleet, slow):
            each.prove(now_ms)
            each.tick(now_ms)
            assert each.is_suspect(now_ms) == (now_ms >= LIMITS.suspect_after_ms) and each.said == []
    slow.answer(SendPing(W, "a", 200), 2_999)
    fleet.tick(2_999), slow.tick(3_000)
    assert fleet.said == [] and not slow.is_suspect(3_000)
    fleet.prove(2_999)
    fleet.tick(3_000)
    assert [left.reason for left in fleet.said] == [LeftReason.SILENT] and slow.said == []


def test_an_answer_of_another_incarnation_is_no_sign_of_life_of_this_one() -> None:
    fleet = Fleet()
    (ping,) = fleet.due(700)
    fleet.prove(700)
    fleet.answer(ping, 700, "b")
    assert fleet.is_suspect(700)
    fleet.core.handle(load(info("w", "prefill", incarnation="b")), 700)
    assert fleet.due(700) == [SendPing(W, "b", 700)]
    fleet.prove(700)
    fleet.answer(SendPing(W, "a", 0), 2_000)
    assert fleet.is_suspect(2_200), "an outcome for the incarnation before"


def test_after_a_reconnection_nobody_is_dead_or_silent_before_there_was_time_to_come_back() -> None:
    fleet = Fleet()
    fleet.core.handle(BusConnected(1), 0)
    fleet.core.handle(BusConnected(2), 9_000)
    now_ms = 9_000
    assert not fleet.is_suspect(now_ms)
    while now_ms < 9_000 + SETTLE_MS:
        for ping in fleet.due(now_ms):
            assert not fleet.unserved(ping, now_ms)
        now_ms += 50
    dead = False
    while not dead:
        assert now_ms < 9_000 + SETTLE_MS + 500
        dead = any(fleet.unserved(ping, now_ms) for ping in fleet.due(now_ms))
        now_ms += 50
    assert [left.reason for left in fleet.said] == [LeftReason.DIED]


def test_who_left_unheard_behind_a_lost_server_is_notified_as_soon_as_that_is_back() -> None:
    core = Fleet().core
    core.handle(WorkerLeft(worker_id=W, incarnation="a", reason=LeftReason.SILENT), 5_000)
    core.handle(BusConnected(1, num_reroutes=1), 5_100)
    assert core.handle(BEAT, 5_200) == [], "the first word may be on its way"
    core.handle(BusConnected(1, num_reroutes=1, num_returns=1), 5_300)
    assert said_left(core.handle(BEAT, 5_400)) and core.handle(BEAT, 5_500) == []


def test_while_the_bus_is_away_nobody_is_silent_and_afterwards_the_clocks_start_anew() -> None:
    fleet = Fleet()
    assert ProveBus() in fleet.tick(700) and ProveBus() not in fleet.tick(800), "one proof at a time"
    fleet.core.handle(BusProved(works=False), 1_700)
    assert ProveBus() in fleet.tick(1_700)
    fleet.tick(60_000)
    assert fleet.said == [], "nothing at all has come: the bus, or we, were away"
    fleet.prove(60_000)
    assert not fleet.is_suspect(60_599) and fleet.is_suspect(60_600)
    fleet.prove(61_400), fleet.prove(62_800)
    fleet.tick(62_999)
    assert fleet.said == []
    fleet.prove(62_999)
    fleet.tick(63_000)
    assert [left.reason for left in fleet.said] == [LeftReason.SILENT]


def test_a_proof_that_was_lost_is_followed_by_another_though_everybody_speaks_meanwhile() -> None:
    """Else nobody's silence would count ever again."""
    fleet = Fleet()
    assert ProveBus() in fleet.tick(700)
    fleet.core.handle(BusConnected(1), 700)
    fleet.core.handle(BusProved(works=False), 800)
    fleet.core.handle(BusConnected(2), 5_000)
    fleet.core.handle(BEAT, 5_000)
    assert fleet.tick(5_000) == [ProveBus()]
    fleet.prove(5_001)
    assert not fleet.is_suspect(5_599) and fleet.is_suspect(5_600)


def test_while_our_own_proof_is_on_its_way_nobody_s_silence_grows() -> None:
    """Whatever else is heard: the load of one worker is no proof that the others could be heard."""
    fleet = Fleet()
    assert ProveBus() in fleet.tick(700)
    for now_ms in range(1_000, 9_000, 500):
        fleet.core.handle(load(D0), now_ms)
        fleet.tick(now_ms)
        assert fleet.said == []
    fleet.prove(9_000)
    fleet.tick(9_000)
    assert [left.reason for left in fleet.said] == [LeftReason.SILENT]


def test_after_a_deafness_nobody_is_dead_before_there_was_time_to_come_back() -> None:
    """The broker stood still for so long that others have left it, and we have not."""
    fleet = Fleet()
    fleet.tick(700)
    back_ms = 20_000
    fleet.prove(back_ms)
    for now_ms in range(back_ms, back_ms + SETTLE_MS, 50):
        fleet.prove(now_ms)
        for ping in fleet.due(now_ms):
            assert not fleet.unserved(ping, now_ms)
    assert fleet.said == []


def test_a_killed_worker_has_left_within_0_6_s_and_requests_go_elsewhere() -> None:
    core = fleet("least_loaded", P0, P1, D0)

    def pings(now_ms: int) -> list[SendPing]:
        return pings_of(core.tick(now_ms))

    for ping in pings(0):
        core.handle(PingAnswered(ping, ping.worker_id, "a"), 0)
    said: list[WorkerLeft] = []
    for now_ms in range(10, 600, 10):
        for ping in pings(now_ms):
            if ping.worker_id == "p0":
                said += said_left(core.handle(PingUnserved(ping), now_ms))
            else:
                core.handle(PingAnswered(ping, ping.worker_id, "a"), now_ms)
    assert [(left.worker_id, left.incarnation, left.reason) for left in said] == [("p0", "a", "died")]
    assert {placed(core, ask(n, excluded=("p1",)))[0] for n in range(3)} == {"p1"}


@pytest.mark.parametrize("policy", ["affinity", "cost", "least_loaded", "round_robin"])
def test_a_suspect_worker_gets_nothing_while_somebody_else_could_serve(policy: str) -> None:
    core = fleet(policy, P0, P1, D0)
    for now_ms in range(500, 2_600, 500):
        core.handle(load(P1), now_ms)
        core.handle(load(D0), now_ms)

    def at(now_ms: int, *excluded: str) -> tuple[str, str | None]:
        decision = core.place(ask(excluded=excluded), now_ms)
        assert isinstance(decision, Placement)
        return decision.prefill_worker, decision.decode_worker

    assert {at(2_600) for _ in range(4)} == {("p1", "d0")}
    assert at(2_600, "p1", "d0") == ("p1", "d0"), "one that failed once, before one that may be stopped"
    core.handle(WorkerLeft(worker_id=P1.worker_id, incarnation="a", reason=LeftReason.STOPPED), 2_600)
    assert at(2_600) == ("p0", "d0") and not core.describe_fleet(2_600).ready
    core.handle(load(P0), 2_700)
    assert core.describe_fleet(2_700).ready


@pytest.mark.parametrize("policy", ["affinity", "cost", "least_loaded", "round_robin"])
def test_who_failed_is_used_only_where_nobody_else_could_serve(policy: str) -> None:
    core = fleet(policy, P0, D0, info("d1", "decode"))
    assert placed(core, ask(excluded=("d0",))) == ("p0", "d1")
    assert placed(core, ask(excluded=("p0", "d0"))) == ("p0", "d1")
    core.handle(WorkerLeft(worker_id=WorkerId("d1"), incarnation="a", reason=LeftReason.DIED), 0)
    assert placed(core, ask(excluded=("p0", "d0"))) == ("p0", "d0")
    core.handle(WorkerLeft(worker_id=D0.worker_id, incarnation="a", reason=LeftReason.DIED), 0)
    assert refused(core, ask(excluded=("p0", "d0"))).reason == RefusalReason.NO_WORKER


def test_what_has_left_is_told_so_until_it_comes_back_as_another() -> None:
    core = fleet("least_loaded", P0, D0)
    core.handle(WorkerLeft(worker_id=P0.worker_id, incarnation="a", reason=LeftReason.SILENT), 0)
    assert core.handle(load(P0), 500) == []
    assert [left.reason for left in said_left(core.handle(load(P0), 1_000))] == ["silent"]
    assert core.handle(WorkerJoined(worker=P0), 1_500) == []
    assert refused(core, ask(), 1_500).reason == RefusalReason.NO_WORKER
    assert core.handle(load(info("p0", "prefill", incarnation="b")), 1_600) == []
    assert placed(core, ask()) == ("p0", "d0")


def word(kind: str, worker: WorkerInfo) -> FleetEvent:
    match kind:
        case "joined":
            return WorkerJoined(worker=worker)
        case "load":
            return load(worker)
        case "beat":
            return WorkerBeat(worker_id=worker.worker_id, incarnation=worker.incarnation)
        case "draining":
            return WorkerDraining(worker_id=worker.worker_id, incarnation=worker.incarnation)
        case _:
            return WorkerLeft(worker_id=worker.worker_id, incarnation=worker.incarnation, reason=LeftReason(kind))


KINDS = ["joined", "load", "load", "beat", "draining", "stopped"]


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_two_schedulers_that_hear_the_same_in_any_order_see_the_same_fleet(data: st.DataObject) -> None:
    """Each hears every word once or twice, in an order of its own, and what both say of others too. Once the living
    have spoken again, as new incarnations where they are told that they have left, both see them and nobody else."""
    cores = [SchedulerCore(SchedulerConfig(), PresenceTimes()) for _ in range(2)]
    workers = [info(w, role, incarnation=i) for w, role in (("p0", "prefill"), ("d0", "decode")) for i in "abc"]
    words = [word(data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(workers))) for _ in range(12)]
    words += [word("load", worker) for worker in workers]
    inboxes: list[deque[FleetEvent]] = []
    for _ in cores:
        extra = data.draw(st.lists(st.sampled_from(words), max_size=6))
        inboxes.append(deque(data.draw(st.permutations(words + extra))))
    now_ms = 0
    while any(inboxes):
        at = data.draw(st.sampled_from([at for at, inbox in enumerate(inboxes) if inbox]))
        now_ms += data.draw(st.sampled_from([0, 1, 1_100]))
        for left in said_left(cores[at].handle(inboxes[at].popleft(), now_ms)):
            for inbox in inboxes:
                inbox.append(left)
    assert cores[0].incarnations() == cores[1].incarnations()
    for worker_id, role in (("p0", "prefill"), ("d0", "decode")):
        now = cores[0].incarnations().get(WorkerId(worker_id), "new")
        for core in cores:
            assert core.handle(load(info(worker_id, role, incarnation=now)), now_ms) == []  # type: ignore[arg-type]
    assert cores[0].incarnations() == cores[1].incarnations()
    assert set(cores[0].incarnations()) == {"p0", "d0"}
    assert all(isinstance(w, WorkerLoad) for core in cores for w in core.describe_fleet(now_ms).workers)
