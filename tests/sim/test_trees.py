"""The trace of each outcome is the golden one, span by span (`python -m tests.sim.trees` writes them anew)."""

import msgspec
import pytest

from services.config import TelemetryConfig
from services.sim import mesh
from services.sim.verdict.traces import MAX_RESIDUAL, ttft_residual
from services.telemetry import Key, ListExporter, SpanName, SpanRecord, Telemetry
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


def configured(patch: pytest.MonkeyPatch, config: TelemetryConfig) -> None:
    """Let every service of the simulations to come trace like this."""

    def make(name: str, exporters: list[ListExporter], _: TelemetryConfig, *, at_once: bool) -> Telemetry:
        return Telemetry(name, exporters, config, at_once=at_once)

    patch.setattr(mesh, "Telemetry", make)


def test_what_is_not_sampled_and_goes_well_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, TelemetryConfig(sample_ratio=0.0))
    assert spans_of(FINISHED) == []


def test_what_is_not_sampled_and_is_slow_has_its_whole_tree_but_for_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, TelemetryConfig(sample_ratio=0.0, slow_ttft_ms=1))
    spans = spans_of(FINISHED)
    golden = (GOLDEN / "finished.txt").read_text()
    for role in ("prefill", "decode"):
        golden = golden.replace(f" -> {SpanName.ENGINE_STEP} ({role})", "")
    assert draw(spans) == golden.replace("http.route prefill_worker", "http.route kept prefill_worker")
    (root,) = (span for span in spans if span.is_server)
    assert root.attributes[Key.KEPT] == "slow first token"


def test_what_is_not_sampled_and_fails_is_told_by_those_who_live(monkeypatch: pytest.MonkeyPatch) -> None:
    configured(monkeypatch, TelemetryConfig(sample_ratio=0.0))
    spans = spans_of(next(case for case in CASES if case.name == "failed"))
    (root,) = (span for span in spans if span.is_server)
    assert (root.attributes[Key.KEPT], root.attributes[Key.OUTCOME]) == ("failed", "deadline")
    known = {span.span_id for span in spans}
    assert all(span.parent_id in known for span in spans if span is not root)
    assert {SpanName.PREFILL, SpanName.KV_TRANSFER, SpanName.KV_RELEASE} <= {span.name for span in spans}
