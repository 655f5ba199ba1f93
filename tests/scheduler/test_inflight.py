"""What was placed shortly ago, and is still being computed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.block import hash_blocks, join_hashes
from schemas.ids import WorkerId
from schemas.request import Placement, PlaceRequest
from services.config import SchedulerConfig
from services.scheduler.limits import IN_FLIGHT_MS, IN_FLIGHT_SHARE, IN_FLIGHT_SLACK_MS, MARK_BLOCKS
from services.scheduler.placement import inflight as inflight_module
from services.scheduler.placement.cost import Cost
from services.scheduler.placement.fleet_view import FleetView
from services.scheduler.placement.inflight import InFlightPrompt, InFlightPrompts
from services.scheduler.placement.place import Case, Placer
from services.scheduler.placement.policy import POLICIES
from tests.scheduler.test_cost import ask, worker

P0, P1 = WorkerId("p0"), WorkerId("p1")
ALIVE = {(P0, "i"), (P1, "i")}


def hashes(tokens: list[int]) -> bytes:
    return join_hashes(hash_blocks(tokens, 4, model_fingerprint="f"))


def maker(worker_id: WorkerId = P0, num_blocks: int = 0, ready_ms: float = 50.0) -> InFlightPrompt:
    return InFlightPrompt(worker_id, "i", num_blocks, ready_ms)


@given(common=st.integers(0, 60), own=st.integers(0, 60), theirs=st.integers(0, 60))
def test_it_is_never_said_to_make_more_than_is_common(common: int, own: int, theirs: int) -> None:
    making, stem = InFlightPrompts(), list(range(4 * common))
    first = hashes([*stem, *[1_000] * 4 * theirs])
    making.placed(first, maker(), ALIVE, 0)
    found = making.find(hashes([*stem, *[2_000] * 4 * own]), ALIVE, 1)
    num_found = found.num_blocks if found is not None else 0
    assert num_found <= common
    if not own and not theirs:
        assert num_found == common, "all of the same prompt"
    # What is common and not noted: less than one mark's distance, or less than half.
    assert common - num_found < MARK_BLOCKS


def test_who_began_stays_the_maker_until_it_is_gone_has_failed_or_is_old() -> None:
    making, prompt = InFlightPrompts(), hashes(list(range(80)))
    making.placed(prompt, maker(P0, ready_ms=10), ALIVE, 0)
    making.placed(prompt, maker(P1, ready_ms=20), ALIVE, 1)
    assert making.find(prompt, ALIVE, 2) == InFlightPrompt(P0, "i", 20, 10)
    assert making.find(prompt, {(P0, "another life")}, 2) is None
    assert making.find(prompt, ALIVE, IN_FLIGHT_MS) is None
    making.placed(prompt, maker(P1), {(P1, "i")}, 3)
    assert making.find(prompt, ALIVE, 4) == InFlightPrompt(P1, "i", 20, 50)
    making.failed(prompt, (P0,))
    assert making.find(prompt, ALIVE, 4) is not None
    making.failed(prompt, (P1,))
    assert making.find(prompt, ALIVE, 4) is None


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    making = InFlightPrompts()
    monkeypatch.setattr(inflight_module, "MAX_MARKS", 40)
    for number in range(6):
        making.placed(hashes([number] * 4 * 64), maker(), ALIVE, 0)
    assert len(making._marks) <= 40  # pyright: ignore[reportPrivateUsage]
    assert making.find(hashes([0] * 4 * 64), ALIVE, 1) is None, "the oldest goes first"
    assert making.find(hashes([5] * 4 * 64), ALIVE, 1) is not None
    assert making.find(b"", ALIVE, 1) is None


def prompt(tokens: int, request_id: str = "r", excluded: tuple[str, ...] = ()) -> PlaceRequest:
    request = ask(tokens, excluded=excluded)
    return msgspec.structs.replace(request, block_hashes=hash_all(tokens))


def hash_all(tokens: int) -> bytes:
    return join_hashes(hash_blocks(list(range(tokens)), 16, model_fingerprint="f"))


class Bench:
    """A placer with two prefill workers and a decode worker."""

    def __init__(self, *, wait_for_duplicates: bool = True, policy: str = "cost", waiting: int = 0) -> None:
        self.fleet = FleetView()
        for name in ("p0", "p1", "d0"):
            load = worker(name)
            self.fleet.add_worker(load.worker)
            self.fleet.note_load(load, 0)
        settings = SchedulerConfig(policy=policy, wait_for_duplicates=wait_for_duplicates)
        self.placer = Placer(settings, POLICIES.get(policy) or Cost())

    def place(self, request: PlaceRequest, now_ms: int = 0, suspects: tuple[str, ...] = ()) -> Placement:
        placed = self.placer.place(Case(request, now_ms, self.fleet, {WorkerId(name) for name in suspects}))
        assert isinstance(placed, Placement), placed
        return placed

    def busy(self, name: str, waiting: int, now_ms: int = 0) -> None:
        """A worker reports so many tokens in line."""
        self.fleet.note_load(worker(name, waiting=waiting), now_ms)


def test_the_next_one_goes_where_the_first_is_being_computed() -> None:
    bench = Bench()
    first = bench.place(prompt(4_000))
    placed = [bench.place(prompt(4_000), now_ms) for now_ms in range(1, 6)]
    at_first = [p for p in placed if p.prefill_worker == first.prefill_worker]
    elsewhere = [p for p in placed if p.prefill_worker != first.prefill_worker]
    assert all(p.terms is not None and p.terms.computed_tokens <= 16 for p in at_first) and len(at_first) > 3
    # To wait in line there costs as much as to compute on an idle one, which then reads what the first one computes.
    assert all(source.worker_id == first.prefill_worker for p in elsewhere for source in p.sources)
    assert all(p.sources for p in elsewhere)


def test_who_computes_elsewhere_is_told_whom_to_wait_for() -> None:
    bench = Bench()
    first = bench.place(prompt(4_000))
    bench.busy(first.prefill_worker, 40_000, 10)
    second = bench.place(prompt(4_000), 10)
    assert second.prefill_worker != first.prefill_worker
    [source] = second.sources
    assert (source.worker_id, source.first_block, source.num_blocks) == (first.prefill_worker, 0, 250)


def test_nobody_is_waited_for_that_would_take_longer_than_computing() -> None:
    bench = Bench()
    bench.busy("p0", 400_000)
    bench.busy("p1", 400_000)
    first = bench.place(prompt(4_000))
    other = ({"p0", "p1"} - {first.prefill_worker}).pop()
    bench.busy(other, 0, 10)
    second = bench.place(prompt(4_000), 10)
    assert (second.prefill_worker, second.sources) == (other, ())


def test_who_is_suspect_or_has_failed_is_not_waited_for() -> None:
    bench = Bench()
    first = bench.place(prompt(4_000))
    assert bench.place(prompt(4_000), 1, suspects=(first.prefill_worker,)).sources == ()
    again = bench.place(prompt(4_000, excluded=(first.prefill_worker,)), 2)
    assert again.prefill_worker != first.prefill_worker and again.sources == ()


def test_a_restarted_worker_makes_nothing() -> None:
    bench = Bench()
    first = bench.place(prompt(4_000))
    bench.fleet.leave(first.prefill_worker)
    load = worker(first.prefill_worker)
    reborn = msgspec.structs.replace(load.worker, incarnation="another life")
    bench.fleet.add_worker(reborn)
    bench.fleet.note_load(msgspec.structs.replace(load, worker=reborn), 5)
    placed = bench.place(prompt(4_000), 6)
    assert placed.terms is not None and placed.terms.computed_tokens == 4_000 and placed.sources == ()


def test_it_can_be_left_out_and_simple_policies_look_at_no_blocks() -> None:
    for bench in (Bench(wait_for_duplicates=False), Bench(policy="round_robin")):
        placed = [bench.place(prompt(4_000), now_ms) for now_ms in range(4)]
        assert {p.prefill_worker for p in placed} == {"p0", "p1"} and not any(p.sources for p in placed)


def test_who_should_have_computed_it_long_ago_is_left_to_the_directory() -> None:
    making, prompt = InFlightPrompts(), hashes([1] * MARK_BLOCKS)
    making.placed(prompt, maker(P0, ready_ms=500), ALIVE, 0)
    end_ms = IN_FLIGHT_SHARE * 500 + IN_FLIGHT_SLACK_MS
    assert making.find(prompt, ALIVE, end_ms - 1) is not None
    assert making.find(prompt, ALIVE, end_ms) is None
