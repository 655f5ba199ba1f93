"""The trace of each outcome is the golden one, span by span (`python -m tests.sim.trees` writes them anew)."""

import msgspec
import pytest

from services.sim.traces import MAX_RESIDUAL, ttft_residual
from services.telemetry import Key, SpanName, SpanRecord
from tests.sim.trees import CASES, GOLDEN, Case, draw, spans_of

FINISHED = next(case for case in CASES if case.name == "finished")
LINKED = (SpanName.PREFILL_COMPUTE, SpanName.DECODE_STREAM)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_outcome_has_its_tree(case: Case) -> None:
    assert draw(spans_of(case)) == (GOLDEN / f"{case.name}.txt").read_text()


def test_there_is_a_tree_of_every_outcome_and_no_other() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {case.name for case in CASES}


def named(spans: list[SpanRecord], name: str) -> list[SpanRecord]:
    return [span for span in spans if span.name == name]


def test_the_parts_lie_end_to_end() -> None:
    spans = spans_of(FINISHED)
    residual = ttft_residual(spans)
    assert residual is not None and abs(residual) <= MAX_RESIDUAL
    (target,) = (s for s in named(spans, SpanName.KV_TRANSFER) if s.attributes[Key.END] == "target")
    phases = [s for s in spans if s.parent_id == target.span_id]
    borders = [target.start_ns, *(phase.end_ns for phase in phases)]
    assert [phase.start_ns for phase in phases] == borders[:-1] and borders[-1] <= target.end_ns


def test_a_missing_part_is_noticed() -> None:
    spans = [
        msgspec.structs.replace(s, end_ns=s.start_ns) if s.name == SpanName.PREFILL_COMPUTE else s
        for s in spans_of(FINISHED)
    ]
    residual = ttft_residual(spans)
    assert residual is not None and residual > MAX_RESIDUAL


def test_steps_are_linked_both_ways() -> None:
    spans = spans_of(FINISHED)
    steps = {f"00-{s.trace_id}-{s.span_id}-01": s for s in named(spans, SpanName.ENGINE_STEP)}
    for name in LINKED:
        (span,) = named(spans, name)
        assert span.links
        assert all(f"00-{span.trace_id}-{span.span_id}-01" in steps[link].links for link in span.links)
    assert sum(len(s.links) for s in steps.values()) == sum(len(s.links) for s in spans if s.name in LINKED)
    assert all(s.attributes[Key.BATCH_SIZE] == 1 for s in steps.values())
