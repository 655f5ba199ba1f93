"""Who goes on with an answer that was migrated, and who may leave."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import KVSource, Placement, PlaceRequest
from schemas.worker import LeaveAnswered, LeaveMesh, WorkerDraining, WorkerInfo, WorkerLoad
from services.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from tests.scheduler.test_scheduler import D0, D1, P0, P1, ask, fleet, info, load

A0, A1, S0 = info("a0", "aggregated"), info("a1", "aggregated"), info("s0", "store")
HASH_BYTES = 16


def moved(tokens: int = 100, blocks: int = 6, worker: str = "d0", excluded: Sequence[str] = ("d0",)) -> PlaceRequest:
    source = KVSource(worker_id=WorkerId(worker), first_block=0, num_blocks=blocks)
    hashes = bytes(range(1, 1 + HASH_BYTES)) * (tokens // 16)
    return replace(ask(tokens=tokens, excluded=tuple(excluded)), attempt=2, moved_from=source, block_hashes=hashes)


def place(core: SchedulerCore, request: PlaceRequest, *holders: HolderPrefix) -> Placement:
    decision = core.place(request, 0, holders)
    assert isinstance(decision, Placement), decision
    return decision


def drained(*workers: WorkerInfo, policy: str = "cost", leaving: str = "d0") -> SchedulerCore:
    core = fleet(policy, *workers)
    core.handle(WorkerDraining(worker_id=WorkerId(leaving), incarnation="a"), 0)
    return core


@pytest.mark.parametrize("policy", ["cost", "least_loaded", "round_robin", "affinity"])
def test_a_moved_answer_goes_to_a_decode_worker_alone_that_reads_it_where_it_was(policy: str) -> None:
    decision = place(drained(P0, D0, D1, policy=policy), moved())
    assert (decision.prefill_worker, decision.decode_worker, decision.policy) == ("d1", None, "moved")
    assert decision.sources == (KVSource(worker_id=WorkerId("d0"), first_block=0, num_blocks=6),)
    assert decision.terms is not None
    assert (decision.terms.pulled_tokens, decision.terms.computed_tokens) == (96, 4)


def test_it_need_not_have_been_heard_yet_that_the_worker_drains() -> None:
    assert place(fleet("cost", P0, D0, D1), moved()).prefill_worker == "d1"


def test_the_least_loaded_goes_on_with_it_and_whoever_has_no_room_comes_last() -> None:
    core = drained(P0, D0, D1, info("d2", "decode"), info("d3", "decode"))
    core.handle(load(D1, running=3), 0)
    core.handle(load(info("d2", "decode"), running=1), 0)
    full = load(info("d3", "decode"))
    core.handle(replace(full, blocks=replace(full.blocks, free=0)), 0)
    assert [place(core, moved()).prefill_worker for _ in range(4)] == ["d2", "d2", "d1", "d2"]


def test_an_aggregated_worker_goes_on_with_another_s() -> None:
    decision = place(drained(A0, A1, leaving="a0"), moved(worker="a0", excluded=("a0",)))
    assert (decision.prefill_worker, decision.decode_worker) == ("a1", None)


def test_a_prompt_of_which_much_is_missing_is_placed_by_the_policy_and_reads_what_there_is() -> None:
    core = drained(P0, P1, D0, leaving="p0")
    request = moved(tokens=900, blocks=10, worker="p0", excluded=("p0",))
    decision = place(core, request)
    assert (decision.prefill_worker, decision.decode_worker, decision.policy) == ("p1", "d0", "cost")
    assert [(s.worker_id, s.num_blocks) for s in decision.sources] == [("p0", 10)]


@pytest.mark.parametrize("why", ["unknown", "no blocks", "no hashes", "not from the first", "nobody else"])
def test_what_cannot_be_read_is_computed_elsewhere(why: str) -> None:
    core, request = drained(P0, D0, D1), moved()
    match why:
        case "unknown":
            request = moved(worker="d9")
        case "no blocks":
            request = moved(blocks=0)
        case "no hashes":
            request = replace(request, block_hashes=b"")
        case "not from the first":
            source = KVSource(worker_id=WorkerId("d0"), first_block=1, num_blocks=5)
            request = replace(request, moved_from=source)
        case _:
            core = fleet("cost", P0, D0)
    decision = place(core, request)
    assert (decision.policy, decision.sources) == ("cost", ())


def test_a_word_of_more_blocks_than_the_prompt_has_is_cut() -> None:
    decision = place(drained(P0, D0, D1), moved(blocks=1_000_000_000))
    assert decision.sources[0].num_blocks == 6


def test_others_who_hold_some_of_it_are_asked_after_the_worker_that_moved_it() -> None:
    holder = HolderPrefix(worker_id=P0.worker_id, incarnation="a", num_blocks=4)
    stale = HolderPrefix(worker_id=D0.worker_id, incarnation="a", num_blocks=2)
    decision = place(drained(P0, D0, D1), moved(), holder, stale)
    assert [(s.worker_id, s.num_blocks) for s in decision.sources] == [("d0", 6), ("p0", 4)]


# Who may leave.


def leave(core: SchedulerCore, worker: WorkerInfo, *, forced: bool = False, incarnation: str = "a") -> LeaveAnswered:
    return core.leave(LeaveMesh(worker_id=worker.worker_id, incarnation=incarnation, forced=forced), 0)


def test_of_two_that_can_stand_in_for_each_other_one_may_leave() -> None:
    core = fleet("cost", P0, D0, D1)
    assert leave(core, D0) == LeaveAnswered()
    answer = leave(core, D1)
    assert answer.is_last and "d1 is the last decode worker" in answer.refusal
    assert [s.state for s in core.standing(0)].count("draining") == 1


def test_the_last_of_a_role_may_leave_where_it_is_forced_and_is_told_that_it_is() -> None:
    core = fleet("cost", P0, D0)
    assert leave(core, P0).is_last and core.describe_fleet(0).ready
    assert leave(core, P0, forced=True).is_last and not core.describe_fleet(0).ready


@pytest.mark.parametrize(
    ("workers", "leaving", "may"),
    [
        ((P0, P1, D0), P0, True),
        ((P0, D0, D1), P0, False),
        ((P0, D0, A0), P0, True),
        ((A0, P0, D0), A0, True),
        ((A0, P0), A0, False),
        ((A0, A1), A0, True),
        ((P0, D0, S0), D0, False),
        ((D0, info("d1", "decode", fingerprint="g"), P0), D0, False),
    ],
)
def test_who_can_stand_in_for_whom(workers: tuple[WorkerInfo, ...], leaving: WorkerInfo, may: bool) -> None:
    assert leave(fleet("cost", *workers), leaving).is_last is not may


def test_who_is_suspect_stands_in_for_nobody() -> None:
    core = fleet("cost", P0, D0, D1)
    core.tick(SchedulerConfig().suspect_after_ms - 1)
    suspects = [each.state for each in core.standing(10_000)]
    if "suspect" in suspects:
        answer = core.leave(LeaveMesh(worker_id=D0.worker_id, incarnation="a"), 10_000)
        assert answer.is_last


def test_nobody_is_told_to_go_who_is_not_known() -> None:
    answer = leave(fleet("cost", P0, D0, D1), D0, incarnation="z")
    assert answer.refusal and not answer.is_last


def full(worker: WorkerInfo, free: int) -> WorkerLoad:
    said = load(worker)
    return replace(said, blocks=replace(said.blocks, free=free))


@pytest.mark.parametrize(("first", "second", "spare"), [(1, 3, 1), (3, 2, 2), (1, 200, 0), (200, 1, 0)])
def test_a_full_decode_worker_is_told_what_room_another_one_has(first: int, second: int, spare: int) -> None:
    """A prompt of 100 tokens and its answer need more than 3 blocks: where one has room it is chosen."""
    core = fleet("cost", P0, D0, D1)
    core.handle(full(D0, first), 0)
    core.handle(full(D1, second), 0)
    assert place(core, replace(ask(tokens=100), attempt=2)).spare_blocks == spare


def test_who_has_failed_a_request_is_no_room_for_others() -> None:
    core = fleet("cost", P0, D0, D1)
    core.handle(full(D0, 1), 0)
    core.handle(full(D1, 3), 0)
    assert place(core, replace(ask(tokens=100, excluded=("d1",)), attempt=2)).spare_blocks == 0
