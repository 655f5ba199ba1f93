"""Who is alive, who is only quiet, and who must not come back."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.ids import WorkerId
from schemas.request import Placement
from schemas.worker import WorkerAlive, WorkerDraining, WorkerInfo, WorkerJoined, WorkerLeft, WorkerLoad
from services.scheduler.core import FleetEvent, SchedulerCore
from services.scheduler.fences import MAX_FENCES, REPEAT_MS, Fences
from services.scheduler.liveness import SETTLE_MS, Liveness, LivenessLimits, Ping
from tests.scheduler.test_scheduler import D0, P0, P1, ask, fleet, info, load, placed, refused

W = WorkerId("w")
LIMITS = LivenessLimits()


def alive(worker_id: str = "w", incarnation: str = "a") -> WorkerAlive:
    return WorkerAlive(worker_id=WorkerId(worker_id), incarnation=incarnation)


def answering(now_ms: int = 0) -> Liveness:
    """A worker that has answered its first ping."""
    liveness = Liveness(LIMITS)
    liveness.heard(W, "a", now_ms)
    (ping,) = liveness.due(now_ms)
    liveness.answered(ping, "a", now_ms)
    return liveness


def test_a_new_worker_is_pinged_at_once_then_every_interval_and_never_more_than_twice_unanswered() -> None:
    liveness = Liveness(LIMITS)
    liveness.heard(W, "a", 0)
    assert liveness.wait_ms(0) == 1 and liveness.due(0) == [Ping(W, "a", 0)]
    assert liveness.due(199) == [] and liveness.wait_ms(150) == 50
    assert liveness.due(200) == [Ping(W, "a", 200)]
    assert liveness.due(5_000) == [] and liveness.wait_ms(5_000) == 200
    liveness.unanswered(Ping(W, "a", 0))
    assert liveness.due(5_000) == [Ping(W, "a", 5_000)]


def test_a_process_that_died_is_known_dead_by_two_pings_that_nobody_serves() -> None:
    liveness = answering()
    (ping,) = liveness.due(200)
    assert not liveness.unserved(ping, 201)
    assert liveness.due(250) == [] and liveness.due(251) == [Ping(W, "a", 251)], "the second one soon"
    assert liveness.unserved(Ping(W, "a", 251), 252)


def test_two_pings_that_waited_for_the_same_broker_are_one_proof() -> None:
    liveness = answering()
    first, second = *liveness.due(200), *liveness.due(400)
    assert not liveness.unserved(first, 600) and not liveness.unserved(second, 600)
    (third,) = liveness.due(650)
    assert liveness.unserved(third, 651)


@pytest.mark.parametrize("between", ["load", "answer"])
def test_a_sign_of_life_between_two_pings_that_nobody_serves_is_life(between: str) -> None:
    liveness = answering()
    (ping,) = liveness.due(200)
    assert not liveness.unserved(ping, 201)
    if between == "load":
        liveness.heard(W, "a", 230)
    else:
        (ping,) = liveness.due(251)
        liveness.answered(ping, "a", 252)
    (ping,) = liveness.due(500)
    assert not liveness.unserved(ping, 501)


def test_a_worker_that_serves_no_pings_is_judged_by_its_silence() -> None:
    liveness = Liveness(LIMITS)
    for now_ms in range(0, 3_000, 100):
        if now_ms % 500 == 0:
            liveness.heard(W, "a", now_ms)
        for ping in liveness.due(now_ms):
            assert not liveness.unserved(ping, now_ms)
        assert not liveness.is_suspect(W, now_ms) and liveness.silent(now_ms) == []
    assert liveness.is_suspect(W, 4_100)


def test_a_stopped_worker_is_suspect_then_silent_and_a_slow_one_neither() -> None:
    liveness = answering()
    for now_ms in range(100, 3_001, 100):
        liveness.proved(now_ms)
        assert liveness.is_suspect(W, now_ms) == (now_ms > LIMITS.suspect_after_ms)
        assert liveness.silent(now_ms) == []
    assert liveness.silent(3_001) == [W]
    (ping,) = liveness.due(3_001)
    liveness.answered(ping, "a", 3_001)
    assert not liveness.is_suspect(W, 3_001) and liveness.silent(3_001) == []


def test_an_answer_of_another_incarnation_is_no_sign_of_life_of_this_one() -> None:
    liveness = answering()
    (ping,) = liveness.due(700)
    liveness.answered(ping, "b", 700)
    assert liveness.is_suspect(W, 700)
    liveness.heard(W, "b", 700)
    assert liveness.due(700) == [Ping(W, "b", 700)]
    liveness.answered(Ping(W, "a", 0), "a", 2_000)
    assert liveness.is_suspect(W, 2_201), "an outcome for the incarnation before"


def test_after_a_reconnection_nobody_is_dead_or_silent_before_there_was_time_to_come_back() -> None:
    liveness = answering()
    liveness.reconnected(9_000)
    assert liveness.silent(9_000) == [] and not liveness.is_suspect(W, 9_000)
    now_ms = 9_000
    while now_ms < 9_000 + SETTLE_MS:
        for ping in liveness.due(now_ms):
            assert not liveness.unserved(ping, now_ms)
        now_ms += 50
    dead = False
    while not dead:
        assert now_ms < 9_000 + SETTLE_MS + 500
        dead = any(liveness.unserved(ping, now_ms) for ping in liveness.due(now_ms))
        now_ms += 50


def test_while_the_bus_is_away_nobody_is_silent_and_afterwards_the_clocks_start_anew() -> None:
    liveness = answering()
    assert liveness.needs_proof(700)
    assert liveness.silent(60_000) == [], "nothing at all has come: the bus, or we, were away"
    liveness.proved(60_000)
    assert not liveness.is_suspect(W, 60_600) and liveness.is_suspect(W, 60_601)
    liveness.proved(61_400), liveness.proved(62_800)
    assert liveness.silent(63_000) == [] and liveness.silent(63_001) == [W]


def test_a_fence_is_said_again_once_a_second_and_the_oldest_is_forgotten() -> None:
    fences = Fences(max_fences=2)
    for incarnation in "abc":
        fences.add(WorkerLeft(worker_id=W, incarnation=incarnation, reason=incarnation), 0)
    assert [fences.holds(W, incarnation) for incarnation in "abc"] == [False, True, True]
    assert fences.repeat(W, "b", REPEAT_MS - 1) == []
    assert [left.reason for left in fences.repeat(W, "b", REPEAT_MS)] == ["b"]
    assert fences.repeat(W, "b", REPEAT_MS + 1) == []
    fences.add(WorkerLeft(worker_id=W, incarnation="b", reason="another word"), 5_000)
    assert fences.repeat(W, "b", 5_999) == []
    assert [left.reason for left in fences.repeat(W, "b", 6_000)] == ["b"]
    assert MAX_FENCES >= 1_000


def test_a_killed_worker_has_left_within_half_a_second_and_requests_go_elsewhere() -> None:
    core = fleet("least_loaded", P0, P1, D0)
    for ping in core.liveness.due(0):
        core.answered(ping, alive(ping.worker_id), 0)
    said: list[WorkerLeft] = []
    for now_ms in range(10, 500, 10):
        for ping in core.liveness.due(now_ms):
            if ping.worker_id == "p0":
                said += core.unserved(ping, now_ms)
            else:
                core.answered(ping, alive(ping.worker_id), now_ms)
    assert [(left.worker_id, left.incarnation, left.reason) for left in said] == [("p0", "a", "died")]
    assert {placed(core, ask(n, excluded=("p1",)))[0] for n in range(3)} == {"p1"}


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "round_robin"])
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
    core.handle(WorkerLeft(worker_id=P1.worker_id, incarnation="a", reason="stopped"), 2_600)
    assert at(2_600) == ("p0", "d0") and not core.describe(2_600).ready
    core.handle(load(P0), 2_700)
    assert core.describe(2_700).ready


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "round_robin"])
def test_who_failed_is_used_only_where_nobody_else_could_serve(policy: str) -> None:
    core = fleet(policy, P0, D0, info("d1", "decode"))
    assert placed(core, ask(excluded=("d0",))) == ("p0", "d1")
    assert placed(core, ask(excluded=("p0", "d0"))) == ("p0", "d1")
    core.handle(WorkerLeft(worker_id=WorkerId("d1"), incarnation="a", reason="died"), 0)
    assert placed(core, ask(excluded=("p0", "d0"))) == ("p0", "d0")
    core.handle(WorkerLeft(worker_id=D0.worker_id, incarnation="a", reason="died"), 0)
    assert refused(core, ask(excluded=("p0", "d0"))).reason == "no_worker"


def test_what_has_left_is_told_so_until_it_comes_back_as_another() -> None:
    core = fleet("least_loaded", P0, D0)
    core.handle(WorkerLeft(worker_id=P0.worker_id, incarnation="a", reason="silent"), 0)
    assert core.handle(load(P0), 500) == []
    assert [left.reason for left in core.handle(load(P0), 1_000)] == ["silent"]
    assert core.handle(WorkerJoined(worker=P0), 1_500) == []
    assert refused(core, ask(), 1_500).reason == "no_worker"
    assert core.handle(load(info("p0", "prefill", incarnation="b")), 1_600) == []
    assert placed(core, ask()) == ("p0", "d0")


def word(kind: str, worker: WorkerInfo) -> FleetEvent:
    match kind:
        case "joined":
            return WorkerJoined(worker=worker)
        case "load":
            return load(worker)
        case "draining":
            return WorkerDraining(worker_id=worker.worker_id, incarnation=worker.incarnation)
        case _:
            return WorkerLeft(worker_id=worker.worker_id, incarnation=worker.incarnation, reason=kind)


KINDS = ["joined", "load", "load", "draining", "stopped"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_two_schedulers_that_hear_the_same_in_any_order_see_the_same_fleet(data: st.DataObject) -> None:
    """Each hears every word once or twice, in an order of its own, and what both say of others too. Once the living
    have spoken again, as new incarnations where they are told that they have left, both see them and nobody else."""
    cores = [SchedulerCore("cost", 3_000) for _ in range(2)]
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
        for left in cores[at].handle(inboxes[at].popleft(), now_ms):
            for inbox in inboxes:
                inbox.append(left)
    assert cores[0].incarnations() == cores[1].incarnations()
    for worker_id, role in (("p0", "prefill"), ("d0", "decode")):
        now = cores[0].incarnations().get(WorkerId(worker_id), "new")
        for core in cores:
            assert core.handle(load(info(worker_id, role, incarnation=now)), now_ms) == []  # type: ignore[arg-type]
    assert cores[0].incarnations() == cores[1].incarnations()
    assert set(cores[0].incarnations()) == {"p0", "d0"}
    assert all(isinstance(w, WorkerLoad) for core in cores for w in core.describe(now_ms).workers)
