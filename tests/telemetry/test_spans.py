"""What a service makes of spans: names, sampling, what is kept, links within bounds, one TTFT."""

import random
from pathlib import Path

import pytest

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.block import pack_tokens
from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd, ReadEnd
from schemas.request import (
    AttemptEnd,
    FirstTokenTimes,
    PrefillAccepted,
    RunPrefill,
    SamplingParams,
)
from services.config import MeshConfig, TelemetryConfig, apply_environment
from services.engine.interface import SampledToken, Sequence, StepResult
from services.errors import UserError
from services.gateway.limits import MAX_KEEPS_PER_S
from services.gateway.observe.spans import GatewaySpans
from services.gateway.observe.ttft_parts import Milestones, fit_clock, ttft_parts
from services.prefill.core import PrefillAttempt, PrefillCore
from services.telemetry import FileExporter, Key, ListExporter, SpanName, SpanRecord, Telemetry, parse_traceparent
from services.telemetry.context import new_trace
from services.telemetry.names import TTFT_PARTS
from services.telemetry.ring import Ring
from services.worker.core.actions import Emit, SendReply, Submit
from services.worker.core.content import AttemptKey, SequenceContent
from services.worker.core.events import RunAsked
from services.worker.core.leases import LeaseTable
from services.worker.limits import MAX_LINKED_STEPS
from services.worker.observe.spans import WorkerSpans, times_of
from services.worker.observe.transfers import HolderSpans, described_by
from tests.worker import worker_cases as case

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def attempt_of(traceparent: str) -> PrefillAttempt:
    """Return an attempt that has just come."""
    request = RunPrefill(
        request_id=RequestId("req-1"), attempt=1, deadline_ms=1, gateway_id=GatewayId("g"),
        prompt=pack_tokens([1, 2, 3]), sampling=SamplingParams(max_tokens=100),
    )  # fmt: skip
    return PrefillAttempt(request, [1, 2, 3], SequenceContent([1, 2, 3], 8, "f"), times_of(traceparent))


def telemetry(ratio: float = 1.0, service: str = "worker-0") -> tuple[Telemetry, list[SpanRecord]]:
    spans: list[SpanRecord] = []
    return Telemetry(service, ListExporter(spans), TelemetryConfig(sample_ratio=ratio), at_once=True), spans


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
    ],
)
def test_a_malformed_traceparent_names_nothing(bad: str) -> None:
    assert parse_traceparent(bad) is None


@pytest.mark.parametrize(("flags", "is_sampled"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_the_sender_decides_whether_a_trace_is_sampled(flags: str, is_sampled: bool) -> None:
    made, spans = telemetry(ratio=0.5)
    root = made.start("POST /x", f"00-{TRACE}-{SPAN}-{flags}")
    assert (root.trace_id, root.parent_id, root.context.is_sampled) == (TRACE, SPAN, is_sampled)
    made.record(SpanName.PLACE, root.traceparent, (1, 2), {})
    root.end()
    assert len(spans) == (2 if is_sampled else 0)


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_a_share_of_the_traces_that_begin_here_is_sampled(ratio: float) -> None:
    random.seed(3)
    sampled = sum(new_trace(ratio).is_sampled for _ in range(10_000))
    assert sampled == pytest.approx(10_000 * ratio, abs=150 if 0 < ratio < 1 else 0)


def test_what_was_not_sampled_is_exported_once_it_is_wanted_and_so_is_what_follows() -> None:
    made, spans = telemetry(ratio=0.0)
    root, other = made.start("POST /x"), made.start("POST /x")
    for one in (root, other):
        made.record(SpanName.PLACE, one.traceparent, (1, 2), {})
    other.end()
    assert not spans
    made.keep(root.trace_id)
    made.keep(root.trace_id)
    assert [span.name for span in spans] == [SpanName.PLACE]
    root.end()
    assert [span.name for span in spans] == [SpanName.PLACE, "POST /x"]
    assert {span.trace_id for span in spans} == {root.trace_id}


def test_a_ring_has_a_bound_and_gives_up_the_oldest_trace() -> None:
    made, spans = telemetry()
    for number in range(10):
        made.record(SpanName.PLACE, f"00-{number + 1:032x}-{SPAN}-01", (1, 2), {})
    ring = Ring(max_spans=4, max_kept=2)
    for span in spans:
        ring.add(span)
    assert len(ring) == 4
    assert [len(ring.keep(span.trace_id)) for span in spans] == [0] * 6 + [1] * 4
    assert len(ring) == 0
    assert [ring.is_kept(span.trace_id) for span in spans] == [False] * 8 + [True] * 2


def test_a_parent_is_written_before_its_children(tmp_path: Path) -> None:
    made = Telemetry("prefill-0", FileExporter(tmp_path, "prefill-0"))
    spans = WorkerSpans(made, "prefill-0")
    attempt = attempt_of(f"00-{TRACE}-{SPAN}-01")
    attempt.outcome, attempt.end = "cancelled", AttemptEnd.CANCELLED
    spans.ended(attempt)
    made.close()
    (file,) = tmp_path.iterdir()
    names = [line.split(b'"name":"')[1].split(b'"')[0] for line in file.read_bytes().splitlines()]
    assert names == [b"prefill", b"prefill.queue"]


def sequence(max_local_tokens: int | None = None) -> Sequence:
    return Sequence(
        request_id=RequestId("req-1"), attempt=1, token_ids=[1, 2, 3], num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=100), tables=(), max_local_tokens=max_local_tokens,
    )  # fmt: skip


def step(seq: Sequence, at_ns: int, *, samples: bool) -> StepResult:
    sampled = (SampledToken(seq, 0, 5, None, False),) if samples else ()
    return StepResult(at_ns, at_ns + 5, 0 if samples else 1, int(samples), ((seq, 1),), sampled)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_steps_are_recorded_for_sampled_requests_within_their_caps(flags: str) -> None:
    made, recorded = telemetry()
    spans, seq, attempt = WorkerSpans(made, "worker-0"), sequence(), attempt_of(f"00-{TRACE}-{SPAN}-{flags}")

    def find(_: AttemptKey) -> PrefillAttempt:
        return attempt

    spans.submitted(attempt, seq)
    for number in range(2 * MAX_LINKED_STEPS):
        spans.stepped(step(seq, 10 * number + 10, samples=False), find)
    for number in range(2 * MAX_LINKED_STEPS):
        spans.stepped(step(seq, 10_000 + 10 * number, samples=True), find)
    spans.prefilled(attempt)
    spans.decoded(attempt, "length")
    spans.ended(attempt)
    by_name = {span.name: span for span in recorded if span.trace_id == TRACE}
    steps = [span for span in recorded if span.name == SpanName.ENGINE_STEP]
    if flags == "00":
        assert not recorded
        return
    # The step that gave the first token was the prompt's too, and there was no more room for it.
    assert len(steps) == 2 * MAX_LINKED_STEPS
    for name in (SpanName.PREFILL_COMPUTE, SpanName.DECODE_STREAM):
        assert len(by_name[name].links) == MAX_LINKED_STEPS
        assert sum(link.split("-")[2] == by_name[name].span_id for s in steps for link in s.links) == MAX_LINKED_STEPS
    assert not {span.trace_id for span in steps} & {TRACE}


def test_the_first_word_tells_how_its_worker_came_to_it() -> None:
    made, _ = telemetry()
    spans, core = (
        WorkerSpans(made, "worker-0"),
        PrefillCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable()),
    )
    asked = RunAsked(case.run_prefill(split=False), times_of(f"00-{TRACE}-{SPAN}-01"))
    submit = case.one(core.handle(asked, 0), Submit)
    again = RunAsked(asked.request, times_of(f"00-{TRACE}-{SPAN}-01"))
    reply = case.one(core.handle(again, 1), SendReply).message
    accepted_ns = asked.times.accepted_ns
    assert isinstance(reply, PrefillAccepted) and reply.accepted_ns == accepted_ns, "a repeat changes nothing"
    spans.submitted(submit.attempt, submit.sequence)
    result = step(submit.sequence, accepted_ns + 100, samples=True)
    spans.stepped(result, core.attempts.get)
    report = case.one(core.handle(result, 2), Emit).tokens.report
    assert report is not None and report.first_token == FirstTokenTimes(
        accepted_ns=accepted_ns, first_step_ns=accepted_ns + 100, computed_ns=accepted_ns + 105
    )


SEEN = Milestones(read_ns=100, submitted_ns=110, asked_ns=110, placed_ns=150, written_ns=400)


@pytest.mark.parametrize("offset_ns", [0, -(10**9), 10**9], ids=["one clock", "behind", "ahead"])
def test_the_parts_add_up_whatever_the_worker_s_clock_says(offset_ns: int) -> None:
    told = FirstTokenTimes(accepted_ns=170 + offset_ns, first_step_ns=200 + offset_ns, computed_ns=350 + offset_ns)
    fitted = fit_clock(told, SEEN.placed_ns, SEEN.written_ns)
    parts = ttft_parts(SEEN, fitted)
    assert tuple(parts) == TTFT_PARTS
    assert sum(parts.values()) == pytest.approx(300e-9)
    assert min(parts.values()) >= 0.0
    assert parts["prefill.compute"] == pytest.approx(150e-9), "a duration is the same by any clock"


def test_traces_that_are_kept_have_a_rate() -> None:
    made, _ = telemetry(ratio=0.0)
    spans, root = GatewaySpans(made), made.start("POST /x")
    assert spans.keeps(root, {"failed": False, "slow": False}) == ""
    kept = [spans.keeps(root, {"failed": False, "slow": True}) for _ in range(10 * MAX_KEEPS_PER_S)]
    assert set(kept) == {"slow", ""} and kept.count("slow") <= 2 * MAX_KEEPS_PER_S
    assert spans.keeps(telemetry()[0].start("POST /x"), {"failed": True}) == "", "it is sampled anyway"


@pytest.mark.parametrize(
    ("environment", "ratio"),
    [
        ({"KVMESH_SAMPLE_RATIO": "0.25"}, 0.25),
        ({"OTEL_TRACES_SAMPLER_ARG": "0.5"}, 0.5),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, 0.5),
        ({"OTEL_TRACES_SAMPLER": "parentbased_jaeger_remote", "OTEL_TRACES_SAMPLER_ARG": "endpoint=x"}, 1.0),
        ({"KVMESH_SAMPLE_RATIO": "0.25", "OTEL_TRACES_SAMPLER_ARG": "0.5"}, 0.25),
        ({}, 1.0),
    ],
)
def test_the_environment_sets_the_ratio(
    environment: dict[str, str], ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KVMESH_SAMPLE_RATIO", "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert apply_environment(MeshConfig()).telemetry.sample_ratio == ratio


@pytest.mark.parametrize("bad", ["1.5", "-0.1", "half"])
def test_a_ratio_that_is_none_is_refused(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMESH_SAMPLE_RATIO", bad)
    with pytest.raises(UserError, match="KVMESH_SAMPLE_RATIO"):
        apply_environment(MeshConfig())


def test_a_transfer_has_a_name_before_it_has_a_parent() -> None:
    """What belongs to nobody's trace begins one of its own, and its parts lie under it."""
    from services.worker.observe.transfers import TransferSpan

    made, spans = telemetry()
    span = TransferSpan(made, WorkerId("store-0"), "")
    assert span.story == span.stats.traceparent
    span.end({Key.NUM_BLOCKS: 0}, ReadEnd.REFUSED, "nobody answered")
    transfer, wait = spans
    assert (transfer.parent_id, wait.parent_id) == ("", transfer.span_id)
    assert (wait.name, wait.error) == (SpanName.KV_LEASE_WAIT, "nobody answered")


def test_the_reader_s_end_says_why_its_carrier_was_taken() -> None:
    """The holder's end did not choose, and does not know."""
    moved = TransferStats(carrier="cuda", reason="one host, one card", num_frames=1, num_bytes=8)
    assert described_by(moved)[Key.CARRIER_REASON] == "one host, one card"
    assert Key.CARRIER_REASON not in described_by(TransferStats(carrier="cuda", num_frames=1))
    assert described_by(TransferStats(carrier="cuda", reason="one host")) == {}, "there was no stream"


@pytest.mark.parametrize(
    ("end", "detail", "outcome", "error"),
    [
        (LeaseEnd.LANDED, "", "landed", ""),
        (LeaseEnd.UNNEEDED, "a stop string was reached", "a stop string was reached", ""),
        (LeaseEnd.READER_LEFT, "the reader left", "the reader left", "the reader left"),
        (LeaseEnd.EXPIRED, "", "expired", "expired"),
    ],
)
def test_a_lease_is_released_in_its_trace(end: LeaseEnd, detail: str, outcome: str, error: str) -> None:
    found: list[SpanRecord] = []
    spans = HolderSpans(Telemetry("prefill-0", ListExporter(found), at_once=True), "prefill-0")
    leases = LeaseTable()
    for lease_id, traceparent in (("of nobody's trace", ""), ("traced", f"00-{TRACE}-{SPAN}-01")):
        lease = leases.grant(
            lease_id=LeaseId(lease_id), holder=WorkerId("prefill-0"), reader=WorkerId("decode-0"),
            request_id=RequestId("req-1"), attempt=1, tables=(BlockTable((Segment(0, 3),)),), num_tokens=3,
            progress=KVProgress(1, 3), expires_at_ms=1,
        )  # fmt: skip
        lease.traceparent, lease.readable_ns = traceparent, 5
        leases.end(lease.lease_id, end, detail)
        spans.lease_ended(lease)
    (span,) = found
    assert (span.name, span.trace_id, span.parent_id, span.start_ns) == (SpanName.KV_RELEASE, TRACE, SPAN, 5)
    assert (span.attributes[Key.OUTCOME], span.error, span.attributes[Key.NUM_BLOCKS]) == (outcome, error, 3)
