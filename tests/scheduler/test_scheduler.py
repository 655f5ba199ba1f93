"""Placement: events and the time in, decisions out."""

import itertools

import numpy as np
import pytest
from msgspec.structs import replace

from schemas.directory import HolderPrefix
from schemas.ids import RequestId, WorkerId
from schemas.message import encode
from schemas.request import Placement, PlaceRequest, RefusalReason, Refused
from schemas.worker import (
    BlockCounts,
    LeftReason,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRole,
)
from services.bus.limits import MIN_PAYLOAD_BYTES
from services.config import SchedulerConfig
from services.errors import UserError
from services.scheduler.core import SchedulerCore
from services.scheduler.events import Action, BusProved, PublishLeft
from services.scheduler.placement.fleet_view import Demand, FleetView
from services.scheduler.placement.named import policy_named
from services.scheduler.placement.policy import Policy, Question, affinity, least_loaded, round_robin
from services.times import PresenceTimes


def info(worker_id: str, role: WorkerRole, **fields: object) -> WorkerInfo:
    defaults: dict[str, object] = {
        "incarnation": "a",
        "model": "m",
        "fingerprint": "f",
        "num_blocks": 100,
        "block_size": 16,
        "context_length": 1000,
    }
    return WorkerInfo(worker_id=WorkerId(worker_id), role=role, **(defaults | fields))  # type: ignore[arg-type]


def load(worker: WorkerInfo, *, tokens: int = 0, running: int = 0, state: str = "ready") -> WorkerLoad:
    return WorkerLoad(
        worker=worker,
        state=state,  # type: ignore[arg-type]
        blocks=BlockCounts(total=100, free=100, running=0, leased=0),
        num_running=running,
        num_queued=0,
        num_uncomputed_tokens=tokens,
    )


def ask(number: int = 0, *, tokens: int = 10, max_tokens: int = 10, excluded: tuple[str, ...] = ()) -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId(f"r{number}"),
        attempt=1,
        deadline_ms=10_000,
        num_prompt_tokens=tokens,
        max_tokens=max_tokens,
        excluded_workers=tuple(WorkerId(w) for w in excluded),
    )


def fleet(policy: str, *workers: WorkerInfo) -> SchedulerCore:
    core = SchedulerCore(SchedulerConfig(policy=policy), PresenceTimes())
    for worker in workers:
        core.handle(WorkerJoined(worker=worker), 0)
    return core


def said_left(actions: list[Action]) -> list[WorkerLeft]:
    return [action.left for action in actions if isinstance(action, PublishLeft)]


def placed(core: SchedulerCore, request: PlaceRequest) -> tuple[str, str | None]:
    decision = core.place(request, 0)
    assert isinstance(decision, Placement), decision
    return decision.prefill_worker, decision.decode_worker


def refused(core: SchedulerCore, request: PlaceRequest, now_ms: int = 0) -> Refused:
    decision = core.place(request, now_ms)
    assert isinstance(decision, Refused), decision
    return decision


P0, P1 = info("p0", "prefill"), info("p1", "prefill")
D0, D1 = info("d0", "decode"), info("d1", "decode")
A0 = info("a0", "aggregated")


def candidate(name: str, tokens: int = 0, requests: int = 0, free: int = 0) -> WorkerLoad:
    """A worker whose role is its initial."""
    said = load(info(name, {"p": "prefill", "d": "decode"}[name[0]]), tokens=tokens, running=requests)  # type: ignore[arg-type]
    return replace(said, blocks=replace(said.blocks, free=free))


def chosen(policy: Policy, *loads: WorkerLoad, turn: int = 0, first_block: bytes = b"") -> tuple[str, str | None]:
    view = FleetView()
    for said in loads:
        view.add_worker(said.worker)
        view.note_load(said, 0)
    nothing = np.zeros(len(view.rows), np.intp)
    choice = policy(Question(Demand(10, 10), first_block, turn, view, view.groups, (), nothing))
    assert choice is not None
    return choice.prefill, choice.decode


@pytest.mark.parametrize(
    ("candidates", "turn", "expected"),
    [
        ([candidate("pa", tokens=5), candidate("pb", tokens=3)], 0, "pb"),
        ([candidate("pa", tokens=3, requests=9), candidate("pb", tokens=3)], 0, "pb"),
        ([candidate("pa"), candidate("pb")], 0, "pa"),
        ([candidate("pa"), candidate("pb")], 1, "pb"),
        ([candidate("da", tokens=0, requests=4), candidate("db", tokens=99, requests=3)], 0, "db"),
        ([candidate("da", requests=4, free=1), candidate("db", requests=4, free=2)], 0, "db"),
    ],
)
def test_least_loaded(candidates: list[WorkerLoad], turn: int, expected: str) -> None:
    others = [candidate("pz", tokens=999), candidate("dz", requests=999)]
    assert expected in chosen(least_loaded, *candidates, *others[expected[0] == "p" :][:1], turn=turn)


def test_round_robin_ignores_load() -> None:
    candidates = [candidate("pa", tokens=99), candidate("pb"), candidate("pc"), candidate("da")]
    assert [chosen(round_robin, *candidates, turn=turn)[0] for turn in range(4)] == ["pa", "pb", "pc", "pa"]


def test_affinity_moves_nothing_but_what_a_missing_worker_had() -> None:
    candidates = [candidate(name) for name in ("pa", "pb", "pc")]
    keys = [bytes([number]) * 16 for number in range(60)]

    def places(of: list[WorkerLoad]) -> list[str]:
        return [chosen(affinity, *of, candidate("da"), turn=n, first_block=key)[0] for n, key in enumerate(keys)]

    before = places(candidates)
    assert all(before.count(name) > 10 for name in ("pa", "pb", "pc"))
    assert places(candidates[::-1]) == before == places([candidate("pa", tokens=99), *candidates[1:]])
    assert [after for was, after in zip(before, places(candidates[:2]), strict=True) if was != "pc"] == [
        was for was in before if was != "pc"
    ]


def test_affinity_follows_a_prompts_first_block() -> None:
    core = fleet("affinity", P0, P1, D0, D1)

    def placed_at(number: int, first: int, more: int) -> tuple[str, str | None]:
        hashes = bytes([first]) * 16 + bytes([more]) * 16 * more
        return placed(core, replace(ask(number), block_hashes=hashes))

    talks = [[placed_at(number, first, more) for more in range(3)] for number, first in enumerate(range(20))]
    assert all(len(set(turns)) == 1 for turns in talks) and len({turns[0] for turns in talks}) == 4
    assert len({placed(core, ask(number, tokens=10))[0] for number in range(2)}) == 2, "shorter than a block: by load"


def test_an_unknown_policy_is_a_users_error_that_names_the_others() -> None:
    with pytest.raises(UserError, match="affinity, cost, least_loaded, round_robin"):
        policy_named(SchedulerConfig(policy="fastest"))


def test_round_robin_visits_all_pairs() -> None:
    core = fleet("round_robin", P0, P1, D0, D1)
    assert [placed(core, ask(n)) for n in range(4)] == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


def test_least_loaded_counts_what_it_has_placed_until_the_worker_speaks() -> None:
    core = fleet("least_loaded", P0, P1, D0)
    assert placed(core, ask(0, tokens=500))[0] == "p0"
    assert [placed(core, ask(n, tokens=10))[0] for n in (1, 2, 3)] == ["p1", "p1", "p1"]
    core.handle(load(P0, tokens=0), 100)
    assert placed(core, ask(4, tokens=10))[0] == "p0"


def test_a_decode_worker_of_another_model_is_no_partner() -> None:
    core = fleet("least_loaded", P0, info("d9", "decode", fingerprint="other"))
    assert refused(core, ask()).reason == RefusalReason.NO_WORKER
    core.handle(WorkerJoined(worker=D0), 0)
    assert placed(core, ask()) == ("p0", "d0")


def test_aggregated_workers_are_placed_without_a_split() -> None:
    core = fleet("round_robin", info("a0", "aggregated"), info("a1", "aggregated"))
    assert [placed(core, ask(n)) for n in range(3)] == [("a0", None), ("a1", None), ("a0", None)]


@pytest.mark.parametrize(
    ("workers", "detail"),
    [((), "no prefill and no decode worker"), ((P0,), "no decode worker"), ((D0,), "no prefill worker")],
)
def test_what_is_missing_is_named(workers: tuple[WorkerInfo, ...], detail: str) -> None:
    refusal = refused(fleet("least_loaded", *workers), ask())
    assert (refusal.reason, refusal.retry_after_ms > 0) == (RefusalReason.NO_WORKER, True)
    assert detail in refusal.detail


def test_a_request_that_fits_nowhere_is_refused_for_good() -> None:
    refusal = refused(fleet("least_loaded", P0, D0), ask(tokens=900, max_tokens=101))
    assert (refusal.reason, refusal.retry_after_ms) == (RefusalReason.TOO_LONG, 0)


@pytest.mark.parametrize("policy", ["cost", "least_loaded"])
def test_a_store_is_no_place_for_a_request(policy: str) -> None:
    store = info("s0", "store", num_blocks=10_000, context_length=100_000)
    core = fleet(policy, P0, D0, store)
    assert {placed(core, ask(n)) for n in range(3)} == {("p0", "d0")}
    assert refused(core, ask(tokens=900, max_tokens=101)).reason == RefusalReason.TOO_LONG
    assert refused(fleet(policy, store), ask()).detail == "no prefill and no decode worker is ready"


def test_a_passed_deadline_is_refused() -> None:
    assert refused(fleet("least_loaded", P0, D0), ask(), now_ms=10_000).reason == RefusalReason.DEADLINE


def test_excluded_workers_are_not_chosen() -> None:
    core = fleet("least_loaded", P0, P1, D0, D1)
    assert {placed(core, ask(n, excluded=("p0", "d1"))) for n in range(4)} == {("p1", "d0")}


def test_a_draining_worker_gets_nothing_new() -> None:
    core = fleet("least_loaded", P0, P1, D0)
    core.handle(WorkerDraining(worker_id=P0.worker_id, incarnation="a"), 0)
    assert {placed(core, ask(n))[0] for n in range(3)} == {"p1"}
    core.handle(load(P1, state="draining"), 0)
    assert refused(core, ask()).reason == RefusalReason.NO_WORKER


def test_a_worker_whose_engine_is_starting_gets_nothing_new_until_it_is_there() -> None:
    core = fleet("least_loaded", P0, P1, D0)
    core.handle(load(P0, state="starting"), 0)
    assert {placed(core, ask(n))[0] for n in range(3)} == {"p1"}
    assert [standing.state for standing in core.standing(0)] == ["starting", "ready", "ready"]
    core.handle(load(P1, state="starting"), 0)
    refusal = refused(core, ask())
    assert refusal.reason == RefusalReason.NO_WORKER
    assert refusal.detail == "no prefill worker is ready (the engine of p0, p1 is starting again)"
    core.handle(load(P0), 0)
    assert placed(core, ask()) == ("p0", "d0")


def test_a_worker_that_left_is_forgotten_but_not_by_an_old_message() -> None:
    core = fleet("least_loaded", P0, D0)
    replaced = core.handle(WorkerJoined(worker=info("p0", "prefill", incarnation="b")), 0)
    assert [(left.worker_id, left.incarnation, left.reason) for left in said_left(replaced)] == [
        ("p0", "a", "restarted")
    ]
    core.handle(WorkerLeft(worker_id=P0.worker_id, incarnation="a", reason=LeftReason.STOPPED), 0)
    assert placed(core, ask()) == ("p0", "d0")
    core.handle(WorkerLeft(worker_id=P0.worker_id, incarnation="b", reason=LeftReason.STOPPED), 0)
    assert refused(core, ask()).reason == RefusalReason.NO_WORKER


def test_a_silent_worker_is_declared_left_once_and_comes_back_as_another_incarnation() -> None:
    core = fleet("least_loaded", P0, D0)
    for now_ms in (1000, 2000, 3000):
        core.handle(load(D0), now_ms)
    assert said_left(core.tick(2999)) == []
    core.handle(BusProved(works=True), 2999)
    assert [left.worker_id for left in said_left(core.tick(3000))] == ["p0"]
    assert said_left(core.tick(3001)) == []
    core.handle(load(P0), 3500)
    assert refused(core, ask(), 3500).reason == RefusalReason.NO_WORKER
    core.handle(load(info("p0", "prefill", incarnation="b")), 3600)
    assert placed(core, ask()) == ("p0", "d0")


def test_a_scheduler_that_has_just_started_knows_a_worker_from_its_load() -> None:
    core = SchedulerCore(SchedulerConfig(policy="least_loaded"), PresenceTimes())
    for worker in (P0, D0):
        core.handle(load(worker), 0)
    assert core.describe_fleet(0).ready
    assert [w.worker.worker_id for w in core.describe_fleet(0).workers] == ["d0", "p0"]


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "round_robin", "affinity"])
def test_what_must_be_split_goes_to_two_workers_or_nowhere(policy: str) -> None:
    must = replace(ask(), must_split=True)
    core = fleet(policy, A0, P0, D0)
    assert [placed(core, must) for _ in range(4)] == [("p0", "d0")] * 4
    alone = fleet(policy, A0, D0)
    assert placed(alone, ask())[1] is None
    refusal = refused(alone, must)
    assert refusal.reason is RefusalReason.NO_WORKER
    assert refusal.detail == "no prefill worker is ready, and it must be split"


def test_what_must_be_split_is_not_left_to_a_decode_worker_that_holds_it_all() -> None:
    core = fleet("cost", P0, D0)
    held = (HolderPrefix(worker_id=D0.worker_id, incarnation=D0.incarnation, num_blocks=6),)
    question = replace(ask(tokens=100), block_hashes=bytes(range(96)))
    alone = core.place(question, 0, held)
    assert isinstance(alone, Placement) and alone.decode_worker is None
    split = core.place(replace(question, must_split=True), 0, held)
    assert isinstance(split, Placement) and (split.prefill_worker, split.decode_worker) == ("p0", "d0")


def test_a_large_fleet_is_described_in_parts_that_fit() -> None:
    core = SchedulerCore(SchedulerConfig(policy="least_loaded"), PresenceTimes())
    names = sorted(f"p{number}" for number in range(150))
    for name in names:
        core.handle(load(info(name, "prefill")), 0)
    found: list[str] = []
    while True:
        part = core.describe_fleet(0, found[-1] if found else "", MIN_PAYLOAD_BYTES)
        assert len(encode(part)) <= MIN_PAYLOAD_BYTES
        found += [worker.worker.worker_id for worker in part.workers]
        if not part.more:
            break
    assert found == names


def test_a_worker_that_has_only_joined_is_taken_to_be_idle_and_is_not_listed() -> None:
    core = fleet("least_loaded", P0, P1, D0)
    core.handle(load(P0, tokens=1), 0)
    assert placed(core, ask()) == ("p1", "d0") and core.describe_fleet(0).ready
    assert [w.worker.worker_id for w in core.describe_fleet(0).workers] == ["p0"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_order_of_joining_does_not_matter(order: tuple[int, ...]) -> None:
    workers = [P0, P1, D0]
    core = fleet("round_robin", *(workers[at] for at in order))
    assert [placed(core, ask(n))[0] for n in range(2)] == ["p0", "p1"]
