"""What a service makes of spans: names, sampling, what is kept, links within bounds, one TTFT."""

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, SpanKind

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import TransferStats
from schemas.block import BlockHasher, pack_tokens
from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd, ReadEnd
from schemas.request import (
    AttemptAccepted,
    AttemptEnd,
    FirstTokenTimes,
    RunAttempt,
    SamplingParams,
    TransferReport,
)
from schemas.worker import BlockCounts
from services.config import MeshConfig, TelemetryConfig, apply_environment
from services.engine.messages import SampledToken, StepResult
from services.errors import UserError
from services.gateway.limits import MAX_KEEPS_PER_S
from services.gateway.observe.answer_observer import AnswerObserver, ChoiceSpans, KeepRate
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.observe.ttft_parts import Milestones, fit_clock, ttft_parts
from services.gateway.request.answer_usage import AnswerUsage, PromptSources
from services.gateway.request.core import RequestCore
from services.gateway.request.events import PlaceGranted, Submitted, WorkerAccepted
from services.gateway.request.job import BlockKey, Job, PackedPrompt
from services.gateway.request.live import LiveRequest, Published
from services.gateway.request.mailbox import Mailbox
from services.holder.core.actions import Emit, SendReply, Submit
from services.holder.core.attempt import Attempt
from services.holder.core.events import AttemptAsked
from services.holder.core.leases import LeaseTable
from services.holder.limits import MAX_LINKED_STEPS
from services.holder.observe.transfers import HolderSpans, TransferSpan, described_by
from services.metrics import Metrics
from services.presence import FailureDetector
from services.telemetry import (
    FileExporter,
    Key,
    ListExporter,
    SpanName,
    SpanRecord,
    Telemetry,
    parse_traceparent,
)
from services.telemetry import ring as ring_module
from services.telemetry.context import is_sampled, trace_id_of
from services.telemetry.names import TTFT_PARTS
from services.telemetry.ring import Ring
from services.times import PresenceTimes
from services.worker.core import AttemptCore
from services.worker.observe.spans import WorkerSpans, times_of
from tests.gateway.test_gateway_core import placement
from tests.telemetry.test_metrics import OPENMETRICS
from tests.worker import worker_cases as case

ROUTE = "/v1/completions"
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def attempt_of(traceparent: str) -> Attempt:
    """Return an attempt that has just come."""
    request = RunAttempt(
        request_id=RequestId("req-1"), attempt=1, deadline_ms=1, gateway_id=GatewayId("g"),
        prompt=pack_tokens([1, 2, 3]), sampling=SamplingParams(max_tokens=100),
    )  # fmt: skip
    hasher = BlockHasher(8, model_fingerprint="f")
    return Attempt(request, [1, 2, 3], hasher, times_of(traceparent, 0), traceparent)


def telemetry(ratio: float = 1.0, service: str = "worker-0") -> tuple[Telemetry, list[SpanRecord]]:
    spans: list[SpanRecord] = []
    return Telemetry(service, [ListExporter(spans)], TelemetryConfig(sample_ratio=ratio), at_once=True), spans


class Nothing:
    """A gateway without requests."""

    num_resumes = num_progress_asked = num_live = 0
    ages_s, overdue_s, block_counts = list[float], float, dict[WorkerId, BlockCounts]


def role_of(worker_id: WorkerId) -> str:
    return {"p1": "prefill", "d1": "decode"}.get(worker_id, "")


def observer_of(made: Telemetry, metrics: Metrics, keep: Callable[[str, str], bool]) -> AnswerObserver:
    asked, told = {Key.URL_PATH: ROUTE, Key.URL_SCHEME: "http"}, GatewayMetrics(metrics, "m", Nothing())
    return AnswerObserver(RequestId("req-1"), ROUTE, "", asked, told, ChoiceSpans(made, role_of), keep)


def choice_of(trace: str) -> LiveRequest:
    job = Job(
        request_id=RequestId("req-1"), prompt=PackedPrompt(pack_tokens([1, 2, 3]), b"", 3), deadline_ms=1,
        key=BlockKey(block_size=8, model_fingerprint="f"), sampling=SamplingParams(max_tokens=100), trace=trace,
    )  # fmt: skip
    core = RequestCore(job.request_id, 100, MeshConfig(), FailureDetector(PresenceTimes()))
    return LiveRequest(job, 0, Mailbox(), core, job.prompt, b"", 0, Published("placing", 0))


def served(num_retries: int = 0) -> AnswerUsage:
    """Return what an answer of two tokens has taken."""
    sources = PromptSources(cached_tokens=0, transferred_tokens=0, recomputed_tokens=3, transferred_from={})
    return AnswerUsage(
        num_prompt_tokens=3, num_completion_tokens=2, num_choices=1, num_retries=num_retries, resumed_tokens=0,
        sources=sources, prefill=None, carrier="", prefill_worker=None, decode_worker=None, attempt=1 + num_retries,
        reuse=None,
    )  # fmt: skip


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


def test_a_long_text_is_not_remembered() -> None:
    text = "0" * 30_000
    before = sys.getrefcount(text)
    assert parse_traceparent(text) is None
    assert sys.getrefcount(text) == before, "what strangers send would fill the memory"


@pytest.mark.parametrize(("flags", "goes_out"), [("00", False), ("01", True), ("03", True), ("02", False)])
def test_the_sender_decides_whether_a_trace_is_sampled(flags: str, goes_out: bool) -> None:
    made, spans = telemetry(ratio=0.5)
    root = made.begin_span("POST /x", f"00-{TRACE}-{SPAN}-{flags}")
    _, trace_id, span_id, own_flags = root.traceparent.split("-")
    assert (trace_id, own_flags) == (TRACE, "01" if goes_out else "00")
    made.record(SpanName.PLACE, root.traceparent, (1, 2), {})
    root.end()
    told = [(SpanName.PLACE, span_id), ("POST /x", SPAN)]
    assert [(span.name, span.parent_id) for span in spans] == (told if goes_out else [])


@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_a_share_of_the_traces_that_begin_here_is_sampled(ratio: float) -> None:
    random.seed(3)
    made, _ = telemetry(ratio)
    sampled = sum(is_sampled(made.child_of("")) for _ in range(10_000))
    assert sampled == pytest.approx(10_000 * ratio, abs=150 if 0 < ratio < 1 else 0)


def test_what_was_not_sampled_is_exported_once_it_is_wanted_and_so_is_what_follows() -> None:
    made, spans = telemetry(ratio=0.0)
    root, other = made.begin_span("POST /x"), made.begin_span("POST /x")
    for one in (root, other):
        made.record(SpanName.PLACE, one.traceparent, (1, 2), {})
    other.end()
    assert not spans
    made.keep_trace(trace_id_of(root.traceparent))
    made.keep_trace(trace_id_of(root.traceparent))
    assert [span.name for span in spans] == [SpanName.PLACE]
    root.end()
    assert [span.name for span in spans] == [SpanName.PLACE, "POST /x"]
    assert {span.trace_id for span in spans} == {trace_id_of(root.traceparent)}


def test_a_ring_has_a_bound_and_gives_up_the_oldest_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "MAX_SPANS", 4)
    monkeypatch.setattr(ring_module, "MAX_KEPT_TRACES", 2)
    ring, trace_ids = Ring(), range(1, 11)
    for trace_id in trace_ids:
        ring.append(ReadableSpan("place", SpanContext(trace_id, 1, is_remote=False)))
    assert len(ring) == 4
    assert [len(ring.keep_trace(trace_id)) for trace_id in trace_ids] == [0] * 6 + [1] * 4
    assert len(ring) == 0
    assert [ring.is_kept(trace_id) for trace_id in trace_ids] == [False] * 8 + [True] * 2


def test_a_parent_is_written_before_its_children(tmp_path: Path) -> None:
    made = Telemetry("prefill-0", [FileExporter(tmp_path, "prefill-0")])
    spans = WorkerSpans(made, "prefill-0")
    attempt = attempt_of(f"00-{TRACE}-{SPAN}-01")
    attempt.outcome, attempt.end = "cancelled", AttemptEnd.CANCELLED
    spans.ended(attempt)
    made.close()
    (file,) = tmp_path.iterdir()
    names = [line.split(b'"name":"')[1].split(b'"')[0] for line in file.read_bytes().splitlines()]
    assert names == [b"prefill", b"prefill.queue"]


def step(at_ns: int, *, samples: bool) -> StepResult:
    """Of the first sequence that a worker submits."""
    sampled = (SampledToken(1, 0, 5, None, False),) if samples else ()
    return StepResult(at_ns, at_ns + 5, 0 if samples else 1, int(samples), ((1, 1),), sampled)


@pytest.mark.parametrize("flags", ["00", "01"])
def test_steps_are_recorded_for_sampled_requests_within_their_caps(flags: str) -> None:
    made, recorded = telemetry()
    spans, attempt = WorkerSpans(made, "worker-0"), attempt_of(f"00-{TRACE}-{SPAN}-{flags}")

    def find(_: int) -> Attempt:
        return attempt

    attempt.times.computes_prompt = attempt.times.decodes = True
    for number in range(4 * MAX_LINKED_STEPS):
        samples = number >= 2 * MAX_LINKED_STEPS
        result = step(10 * number + 10, samples=samples)
        attempt.times.stepped(result.started_ns, result.ended_ns)
        if samples:
            attempt.times.sampled(result.ended_ns)
        spans.stepped(result, find)
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


AHEAD_NS = 10**18
"""Of the mesh's clock: what a worker tells others are dates."""


def test_the_first_word_tells_how_its_worker_came_to_it() -> None:
    core = AttemptCore(case.limits(case.PREFILL), case.block_cache(), LeaseTable())
    asked = AttemptAsked(
        case.run_prefill(split=False), times_of(f"00-{TRACE}-{SPAN}-01", AHEAD_NS), f"00-{TRACE}-{SPAN}-01"
    )
    case.one(case.decide(core, asked, 0), Submit)
    again = AttemptAsked(asked.request, times_of(f"00-{TRACE}-{SPAN}-01", AHEAD_NS), f"00-{TRACE}-{SPAN}-01")
    reply = case.one(case.decide(core, again, 1), SendReply).message
    accepted_ns = asked.times.accepted_ns
    date_ns = accepted_ns + AHEAD_NS
    assert isinstance(reply, AttemptAccepted) and reply.accepted_ns == date_ns, "a repeat changes nothing"
    result = step(accepted_ns + 100, samples=True)
    report = case.one(case.decide(core, result, 2), Emit).tokens.report
    assert report is not None and report.first_token == FirstTokenTimes(
        accepted_ns=date_ns, first_step_ns=date_ns + 100, computed_ns=date_ns + 105
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
    rate = KeepRate()
    kept = [rate.allows_one_more() for _ in range(10 * MAX_KEEPS_PER_S)]
    assert kept[0] and kept.count(True) <= 2 * MAX_KEEPS_PER_S


@pytest.mark.parametrize(
    ("ratio", "outcome", "error", "num_retries", "has_room", "why"),
    [
        (0.0, "ok", "", 0, True, None),
        (0.0, "deadline", "the request's deadline passed", 1, True, "failed"),
        (0.0, "client_gone", "the client has disconnected", 0, True, None),
        (0.0, "ok", "", 1, True, "resumed"),
        (0.0, "ok", "", 1, False, None),
        (1.0, "ok", "", 1, True, None),
    ],
    ids=["all is well", "failed", "nobody waited", "resumed", "too many of them", "it is sampled anyway"],
)
def test_a_trace_is_kept_for_a_reason(
    ratio: float, outcome: str, error: str, num_retries: int, has_room: bool, why: str | None
) -> None:
    made, spans = telemetry(ratio)
    asked: list[tuple[str, str]] = []

    def keep(trace_id: str, reason: str) -> bool:
        asked.append((trace_id, reason))
        if has_room:
            made.keep_trace(trace_id)
        return has_room

    observer = observer_of(made, Metrics(), keep)
    observer.ended(200, outcome, error, served(num_retries))
    if ratio == 0.0 and (why or not has_room):
        assert asked == [(trace_id_of(observer.trace), why or "resumed")]
    else:
        assert not asked
    assert len(spans) == (1 if ratio or why else 0)
    assert all(span.attributes.get(Key.KEPT) == why for span in spans)


def test_the_parts_of_a_time_to_first_token_are_spans_and_metrics() -> None:
    made, spans = telemetry()
    metrics = Metrics()
    observer = observer_of(made, metrics, lambda trace_id, reason: False)
    choice, seen = choice_of(observer.trace), ChoiceSpans(made, role_of)
    for event in (Submitted(), PlaceGranted(1, placement(WorkerId("p1"), WorkerId("d1")))):
        seen.saw(choice, event, choice.core.handle(event, 0))
    at_ns = made.clock.date_ns(choice.times.placed_ns)
    times = FirstTokenTimes(accepted_ns=at_ns, first_step_ns=at_ns, computed_ns=at_ns)
    choice.core.prefill_report = TransferReport(is_prefill=True, first_token=times)
    observer.wrote([choice, choice])
    observer.wrote([choice])
    observer.ended(200, "ok", "", served())
    assert [span.name for span in spans] == [SpanName.PLACE, SpanName.DISPATCH, SpanName.FIRST_TOKEN, "POST " + ROUTE]
    root, children = spans[-1], spans[:-1]
    assert all(span.parent_id == root.span_id for span in children)
    parts = {part: root.attributes[f"{Key.TTFT_PART}.{part}_ms"] for part in TTFT_PARTS}
    text = metrics.render(OPENMETRICS)[0].decode()
    sums = {part: float(took_s) for part, took_s in re.findall(r'ttft_part_seconds_sum{part="(.+)"} (.+)', text)}
    assert {part: took_s * 1000 for part, took_s in sums.items()} == pytest.approx(parts)
    assert f'trace_id="{trace_id_of(observer.trace)}"' in text
    assert "kvmesh_gateway_itl_seconds_count 1.0" in text, "what is written at once has no gap"


def test_whoever_asks_names_the_role_of_the_other() -> None:
    """Of that a back end draws its graph. Whose role is not known yet is no node of it."""
    exporter = InMemorySpanExporter()
    made = Telemetry("gateway", [exporter], at_once=True)
    choice, seen = choice_of(made.child_of("")), ChoiceSpans(made, role_of)
    granted = PlaceGranted(1, placement(WorkerId("p1"), WorkerId("x9")))
    accepted = [WorkerAccepted(1, WorkerId(worker_id), 0) for worker_id in ("p1", "x9")]
    for event in (Submitted(), granted, *accepted):
        seen.saw(choice, event, choice.core.handle(event, 0))
    reads = TransferSpan(made, WorkerId("d1"), choice.job.trace, holder_role="store")
    reads.finished({Key.SOURCE: "s1"}, ReadEnd.LANDED)
    spans = [span for span in exporter.get_finished_spans() if span.name != SpanName.KV_LEASE_WAIT]
    assert [(span.name, span.kind, (span.attributes or {}).get("peer.service")) for span in spans] == [
        (SpanName.PLACE, SpanKind.CLIENT, "kvmesh-scheduler"),
        (SpanName.DISPATCH, SpanKind.CLIENT, "kvmesh-prefill"),
        (SpanName.DISPATCH, SpanKind.INTERNAL, None),
        (SpanName.KV_TRANSFER, SpanKind.CLIENT, "kvmesh-store"),
    ]


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
    made, spans = telemetry()
    span = TransferSpan(made, WorkerId("store-0"), "")
    assert span.story == span.stats.traceparent
    span.finished({Key.NUM_BLOCKS: 0}, ReadEnd.REFUSED, "nobody answered")
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
    made = Telemetry("prefill-0", [ListExporter(found)], at_once=True)
    spans, leases, at_ns = HolderSpans(made, "prefill-0"), LeaseTable(), made.clock.date_ns(5)
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
    assert (span.name, span.trace_id, span.parent_id, span.start_ns) == (SpanName.KV_RELEASE, TRACE, SPAN, at_ns)
    assert (span.attributes[Key.OUTCOME], span.error, span.attributes[Key.NUM_BLOCKS]) == (outcome, error, 3)
