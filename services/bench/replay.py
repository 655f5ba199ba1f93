"""`kvmesh bench replay`: a trace's arrival times, lengths and shared prefixes, scaled to the model and the machine.

Each request is sent at the trace's time, whether or not earlier ones have ended. The prompts' tokens are made from the
trace's hash ids, so that prompts share the prefixes that they share in the trace.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from services.bench.drive.http_client import Client, Completion, RequestFailedError
from services.bench.drive.meshes import serving
from services.bench.drive.sources import SourceShares, shares_of
from services.bench.drive.stats import percentile, rounded
from services.bench.drive.workload import (
    ReplayRequest,
    TraceRequest,
    build_prompt,
    first_groups,
    make_trace,
    parse_trace,
    reusable_tokens,
    scale_trace,
)
from services.errors import UserError
from services.launch.options import Launch

BLOCK_SIZE = 16
"""The mesh's block size in tokens: caches share full blocks."""
GENERATED_CONVERSATIONS = 60
SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """The command's options. `path` None: a made-up trace; `groups` and `limit` 0: all of the trace. The SLO is a
    client's: time to first token, and mean time between tokens."""

    path: Path | None
    scale: float
    speed: float
    groups: int
    limit: int
    slo_ttft_ms: float
    slo_itl_ms: float


class ReplayOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One request: when it was sent, how late that was, and its answer; None where it failed with `error`."""

    sent_s: float
    late_s: float
    completion: Completion | None = None
    error: str = ""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result. `reuse_bound`: the share of prompt tokens that a cache of unlimited size would have had."""

    model: str
    trace: str
    scale: float
    speed: float
    num_requests: int
    num_cut: int
    num_failed: int
    failures: dict[str, int]
    duration_s: float
    reuse_bound: float
    reused: float
    reused_of_bound: float | None
    sources: SourceShares
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    slo_ttft_ms: float
    slo_itl_ms: float
    num_within_slo: int
    goodput_per_s: float
    sent_late_p99_ms: float | None


def run_replay(plan: ReplayPlan, options: Launch, *, url: str, as_json: bool) -> None:
    """Replay and print. Raises UserError for a bad trace, before a mesh is started."""
    if plan.path is None:
        name, trace = "made up", make_trace(GENERATED_CONVERSATIONS, seed=SEED)
    else:
        name = str(plan.path)
        try:
            with plan.path.open("rb") as lines:
                trace = parse_trace(lines, name)
        except OSError as error:
            raise UserError(f"cannot read the trace {plan.path}: {error.strerror}") from error
    if plan.groups:
        trace = first_groups(trace, plan.groups)
    trace = trace[: plan.limit or None]
    scale_trace([], scale=plan.scale, speed=plan.speed, context_length=1)  # refuses what is out of range
    report = asyncio.run(_run(plan, options, url, trace, name))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def is_within(completion: Completion, slo_ttft_ms: float, slo_itl_ms: float) -> bool:
    """Return whether a request met the SLO: first token, and mean time between tokens."""
    gaps = completion.gaps_ms
    return completion.ttft_ms <= slo_ttft_ms and (not gaps or sum(gaps) / len(gaps) <= slo_itl_ms)


def report_of(
    plan: ReplayPlan, requests: Sequence[ReplayRequest], outcomes: Sequence[ReplayOutcome], *, model: str, trace: str
) -> ReplayReport:
    """Return the result of these outcomes, which are in the order of the requests."""
    done = [outcome.completion for outcome in outcomes if outcome.completion is not None]
    # Duration: from the first request sent to the last event. A failed request counts with its sending time only.
    ends_s = [o.sent_s + (o.completion.total_ms / 1e3 if o.completion else 0.0) for o in outcomes]
    duration_s = max(ends_s, default=0.0) - min((o.sent_s for o in outcomes), default=0.0)
    # Compare the reuse with its bound over the same requests: the answered ones, which alone report a usage.
    sources = shares_of([completion.usage for completion in done])
    answered = [r for r, outcome in zip(requests, outcomes, strict=True) if outcome.completion is not None]
    bound = reusable_tokens(answered, BLOCK_SIZE) / max(1, sum(request.num_prompt_tokens for request in answered))
    # The percentiles are over all gaps together; `is_within` judges a request by the mean of its own gaps.
    ttfts = [completion.ttft_ms for completion in done]
    gaps = [gap for completion in done for gap in completion.gaps_ms]
    num_within = sum(is_within(completion, plan.slo_ttft_ms, plan.slo_itl_ms) for completion in done)
    return ReplayReport(
        model=model,
        trace=trace,
        scale=plan.scale,
        speed=plan.speed,
        num_requests=len(outcomes),
        num_cut=sum(request.is_cut for request in requests),
        num_failed=len(outcomes) - len(done),
        failures=dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common(5)),
        duration_s=round(duration_s, 2),
        reuse_bound=round(bound, 4),
        reused=round(sources.reused_share, 4),
        reused_of_bound=round(sources.reused_share / bound, 4) if bound else None,
        sources=sources,
        ttft_p50_ms=rounded(percentile(ttfts, 50)),
        ttft_p90_ms=rounded(percentile(ttfts, 90)),
        ttft_p99_ms=rounded(percentile(ttfts, 99)),
        itl_p50_ms=rounded(percentile(gaps, 50)),
        itl_p99_ms=rounded(percentile(gaps, 99)),
        slo_ttft_ms=plan.slo_ttft_ms,
        slo_itl_ms=plan.slo_itl_ms,
        num_within_slo=num_within,
        goodput_per_s=round(num_within / duration_s, 3) if duration_s else 0.0,
        sent_late_p99_ms=rounded(percentile([outcome.late_s * 1e3 for outcome in outcomes], 99)),
    )


async def _run(plan: ReplayPlan, options: Launch, url: str, trace: list[TraceRequest], name: str) -> ReplayReport:
    async with serving(lambda given: {"replay": given}, options, url) as served:
        client = next(iter(served.clients.values()))
        requests = scale_trace(trace, scale=plan.scale, speed=plan.speed, context_length=served.context_length)
        outcomes = await _replay(client, requests, served.vocab_size)
    if all(outcome.completion is None for outcome in outcomes):
        raise UserError(f"every request failed; the first: {outcomes[0].error}")
    return report_of(plan, requests, outcomes, model=served.model, trace=name)


async def _replay(client: Client, requests: Sequence[ReplayRequest], vocab_size: int) -> list[ReplayOutcome]:
    """Send each request at its time."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=len(requests))
        started = time.perf_counter()
        num_open = num_failed = 0

        # Each request waits for its time in its own task: a slow answer delays no later request.
        async def send(request: ReplayRequest) -> ReplayOutcome:
            nonlocal num_open, num_failed
            await asyncio.sleep(started + request.at_s - time.perf_counter())
            # Build the prompt before the clock is read: a slow build shows in `late_s`, not in the TTFT.
            prompt = build_prompt(request, vocab_size)
            sent_s = time.perf_counter() - started
            # Turn a failure into an outcome: an exception would end the whole replay.
            num_open += 1
            try:
                completion = await client.complete(prompt, request.num_output_tokens)
                return ReplayOutcome(sent_s=sent_s, late_s=sent_s - request.at_s, completion=completion)
            except RequestFailedError as error:
                num_failed += 1
                return ReplayOutcome(sent_s=sent_s, late_s=sent_s - request.at_s, error=str(error))
            finally:
                num_open -= 1
                progress.update(task, advance=1, description=f"replaying, {num_open} open, {num_failed} failed")

        return await asyncio.gather(*map(send, requests))


def _print(report: ReplayReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    total = max(1, report.sources.prompt_tokens)
    table = Table("", "", show_header=False, title=f"{report.num_requests} requests, {report.trace}")
    table.add_row("prompt tokens", f"{report.sources.prompt_tokens:,}")
    table.add_row("cached on the worker", f"{report.sources.cached_tokens / total:.1%}")
    for worker, count in report.sources.transferred_from.items():
        table.add_row(f"read from {worker}", f"{count / total:.1%}")
    table.add_row("recomputed", f"{report.sources.recomputed_tokens / total:.1%}")
    table.add_row("reused / most that could be", f"{report.reused:.1%} / {report.reuse_bound:.1%}")
    table.add_section()
    p50, p90, p99 = report.ttft_p50_ms, report.ttft_p90_ms, report.ttft_p99_ms
    table.add_row("time to first token, p50 / p90 / p99", f"{_ms(p50)} / {_ms(p90)} / {_ms(p99)} ms")
    table.add_row("between tokens, p50 / p99", f"{_ms(report.itl_p50_ms)} / {_ms(report.itl_p99_ms)} ms")
    slo = f"{report.slo_ttft_ms:.0f} ms to the first token, {report.slo_itl_ms:.0f} ms between tokens"
    table.add_row(f"goodput ({slo})", f"{report.goodput_per_s:.2f} / s ({report.num_within_slo} requests)")
    table.add_row("duration", f"{report.duration_s:.1f} s")
    table.add_row("sent late, p99", f"{_ms(report.sent_late_p99_ms)} ms")
    table.add_row("cut to the model's context", str(report.num_cut))
    table.add_row("failed", str(report.num_failed))
    console.print(table)
    for message, count in report.failures.items():
        console.print(f"{count} × {message}", markup=False)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
