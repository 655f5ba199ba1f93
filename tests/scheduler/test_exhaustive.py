"""Policy `cost` prices few pairs, and chooses what pricing all of them would."""

from unittest.mock import patch

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.worker import PrefillRate, TenantLine, WorkerLoad, WorkerRates
from services.config import SchedulerConfig
from services.scheduler.placement import cost
from services.scheduler.placement.cost import Cost, CostLimits
from services.scheduler.placement.fleet_view import FleetView
from services.scheduler.placement.inflight import InFlightPrompt
from services.scheduler.placement.place import Case, Placer
from services.scheduler.placement.policy import Question
from tests.scheduler.exhaustive import Exhaustive, Option
from tests.scheduler.test_cost import ask, holds, worker
from tests.share import examples

PREFILL, DECODE, OTHERS = [f"p{n}" for n in range(6)], [f"d{n}" for n in range(6)], ["a0", "a1", "s0"]
NAMES = [*PREFILL, *DECODE, *OTHERS]
SLACK = 1e-9
"""Sums are added up in another order: what costs as much as the limit, to this part, may be within it or not."""


@st.composite
def loads(draw: st.DrawFn, name: str) -> WorkerLoad:
    """A worker that is more often idle and like the others than not: equals are what is hard."""
    few = st.sampled_from([0, 0, 0, 1, 2, 7])
    speeds = st.sampled_from([0.0, 0.0, 300.0, 3_000.0, 30_000.0])
    reads = st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.sampled_from([1.0, 100.0, 3_000.0]), st.sampled_from([0.0, 3.0, 50.0]))
    )
    said = worker(
        name,
        waiting=draw(st.sampled_from([0, 0, 0, 40, 900])),
        running=draw(few),
        free=draw(st.sampled_from([1_000, 1_000, 999, 40])),
        kept=draw(st.sampled_from([0, 0, 10])),
        reads=draw(reads) if draw(st.booleans()) else None,
        fingerprint=draw(st.sampled_from(["f", "f", "f", "g"])),
    )
    points = tuple(
        PrefillRate(context_tokens=at, tokens_per_s=draw(speeds))
        for at in draw(st.sets(st.sampled_from([0, 256, 700])))
    )
    rates = WorkerRates(
        prefill=points, transfers=said.rates.transfers, decode_step_ms=draw(st.sampled_from([0.0, 0.0, 4.0])),
        kv_token_bytes=draw(st.sampled_from([0, 0, 1_000, 200_000])),
    )  # fmt: skip
    num_theirs = said.num_uncomputed_tokens // draw(st.sampled_from([1, 1, 2]))
    lines = (TenantLine(tenant="other", num_queued=2, num_uncomputed_tokens=num_theirs),) if draw(st.booleans()) else ()
    return WorkerLoad(
        worker=said.worker, state="ready", blocks=said.blocks, num_running=said.num_running, num_queued=draw(few),
        num_uncomputed_tokens=said.num_uncomputed_tokens, rates=rates, lines=lines,
    )  # fmt: skip


FLEETS = st.lists(st.sampled_from(NAMES), unique=True, max_size=15).flatmap(
    lambda names: st.tuples(*(loads(name) for name in names))
)
HOLDERS = st.lists(
    st.builds(
        holds,
        st.sampled_from(NAMES),
        num_blocks=st.sampled_from([1, 10, 31, 62, 80]),
        first_block=st.sampled_from([0, 0, 10, 31]),
        tier=st.sampled_from(["arena", "memory", "disk", "remote"]),
    ),
    max_size=8,
)


def question_of(
    fleet: tuple[WorkerLoad, ...],
    holders: list[HolderPrefix],
    turn: int,
    excluded: list[str],
    tokens: int,
    making: HolderPrefix | None = None,
) -> Question:
    """Return what the policy is asked. `making`: who is computing the prompt just now."""
    view = FleetView()
    for number, load in enumerate(fleet):
        view.add_worker(load.worker)
        view.note_load(load, number)
    for number, load in enumerate(fleet[::2]):  # again, and later: what was measured has aged
        view.note_load(load, 100_000 * (number + 1))
    placer = Placer(SchedulerConfig(), Cost())
    placer._turn = turn  # pyright: ignore[reportPrivateUsage]
    suspects = {WorkerId(name) for name in excluded[1:]}
    case = Case(ask(tokens, excluded=tuple(excluded[:1])), 0, view, suspects, holders)
    maker = None
    if making is not None and (making.worker_id, making.incarnation) in view:
        maker = InFlightPrompt(making.worker_id, making.incarnation, making.num_blocks, 0.0)
    return placer._question(case, maker)  # pyright: ignore[reportPrivateUsage]


def ways_of(option: Option) -> tuple[WorkerId, WorkerId | None]:
    return option.prefill.info.worker_id, option.decode.info.worker_id if option.decode else None


TWO_LAYOUTS = (
    *(worker(name) for name in ("p0", "p1", "p2", "p3", "d0", "d1")),
    worker("d2", reads={"p0": (1.0, 0.0), "p1": (1.0, 0.0)}),
    worker("d3", reads={"p0": (100.0, 0.0)}, fingerprint="g"),
    worker("p5", fingerprint="g"),
    worker("p4", waiting=40, fingerprint="g"),
)
"""The first pair of the second layout is dearer than all of the first layout's, and the next one is the cheapest."""


@pytest.mark.parametrize("rows_at_once", [1, 16])
@settings(max_examples=examples(400), deadline=None, phases=set(Phase) - {Phase.explain})  # it takes minutes to explain
@given(
    fleet=FLEETS,
    holders=HOLDERS,
    making=st.none() | st.builds(holds, st.sampled_from(NAMES), num_blocks=st.sampled_from([1, 31, 62])),
    turn=st.integers(0, 5),
    excluded=st.lists(st.sampled_from(NAMES), max_size=3),
    tokens=st.sampled_from([1, 16, 100, 1_000]),
    limits=st.sampled_from([CostLimits(), CostLimits(1, 1_000), CostLimits(500, 0)]),
)
@example(fleet=TWO_LAYOUTS, holders=[], making=None, turn=0, excluded=[], tokens=1, limits=CostLimits())
def test_the_choice_is_that_of_an_exhaustive_search(
    rows_at_once: int,
    fleet: tuple[WorkerLoad, ...],
    holders: list[HolderPrefix],
    making: HolderPrefix | None,
    turn: int,
    excluded: list[str],
    tokens: int,
    limits: CostLimits,
) -> None:
    asked = question_of(fleet, holders, turn, excluded, tokens, making)
    with patch.object(cost, "ROWS_AT_ONCE", rows_at_once):
        choice = Cost(limits)(asked)
    search = Exhaustive(asked, limits)
    options = search.options()
    assert (choice is None) == (not options)
    if choice is None:
        return
    right = [search.choose(options, slack) for slack in (0.0, -SLACK, SLACK)]
    found = next((option for option in right if ways_of(option) == (choice.prefill, choice.decode)), None)
    assert found is not None, (choice, right)
    assert choice.terms is not None and found.gathered.num_computed_tokens == choice.terms.computed_tokens
    sources = tuple((source.worker_id, source.first_block, source.num_blocks) for source in choice.sources)
    assert sources == found.gathered.sources
    others = sorted(option.cost_ms for option in options if option is not found)[:3]
    told = [float(other.split()[-2]) for other in choice.terms.alternatives.split("; ") if other]
    assert told == pytest.approx(others, abs=0.051)
