"""The benches' pure parts (statistics, traces, prompts), and the load driver against a gateway that does as told."""

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bench import multiturn, replay, ttft
from services.bench.drive import progress_bar as shown
from services.bench.drive.arguments import parse_lengths, parse_range
from services.bench.drive.http_client import (
    Client,
    Completion,
    EventTimes,
    ReportedMeshUsage,
    ReportedUsage,
    RequestFailedError,
    Source,
    base_url,
    model_of,
    open_http,
)
from services.bench.drive.meshes import AFFINITY, BOTH, CACHE_ONLY, RECOMPUTE, SPLIT, WHOLE, reuse_modes, rotated
from services.bench.drive.random_model import LARGE_KV_SHAPE, make_model
from services.bench.drive.sources import shares_of
from services.bench.drive.stats import percentile, ratio, spread
from services.bench.drive.workload import (
    TRACE_BLOCK,
    ReplayRequest,
    TraceRequest,
    build_prompt,
    first_groups,
    make_trace,
    parse_trace,
    reusable_tokens,
    scale_trace,
)
from services.config import WorkerConfig
from services.engine.checkpoint import layout_of, read_checkpoint
from services.errors import UserError
from services.launch.options import Launch
from services.settings import changed
from tests.bench import bench_directory
from tests.bench.bench_compression import agreement

VOCAB = 1024


def completion(ttft_ms: float, *, gaps_ms: Sequence[float] = (), usage: ReportedUsage | None = None) -> Completion:
    return Completion(
        ttft_ms=ttft_ms,
        gaps_ms=tuple(gaps_ms),
        total_ms=ttft_ms + sum(gaps_ms),
        token_ids=(),
        usage=usage
        or ReportedUsage(prompt_tokens=100, completion_tokens=1, kvmesh=ReportedMeshUsage(recomputed_tokens=100)),
    )


# Statistics


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, None), ([7], 99, 7), ([1, 2, 3, 4], 50, 2.5), ([4, 1, 3, 2], 75, 3.25), ([1, 2], 0, 1), ([1, 2], 100, 2)],
)
def test_percentile(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_between_the_extremes(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found is not None
    assert min(values) <= found <= max(values) or math.isclose(found, max(values))


def test_where_there_is_no_terminal_progress_is_lines(capsys: pytest.CaptureFixture[str]) -> None:
    for total, line in ((3, "reading: 2 of 3, 0 s"), (None, "reading: 0 s")):
        said = ""
        with shown.progress("reading", total, first_line_s=0.0, interval_s=0.001) as advance:
            advance()
            advance()
            while line not in said.splitlines():
                said += capsys.readouterr().err


def test_ratio_and_spread_of_too_little() -> None:
    assert ratio(1.0, None) is None and ratio(1.0, 0.0) is None and ratio(1.0, 4.0) == 0.25
    assert spread([1, 2, 3]) is None and spread([1, 2, 3, 4, 5]) == 2


# Options


def test_options_that_are_none() -> None:
    assert parse_lengths("4,2", "--lengths", 10) == [4, 2]
    assert parse_range("32..64", "--output") == (32, 64) and parse_range("7", "--output") == (7, 7)
    for text in ("", "a", "1,,2", "0", "11"):
        with pytest.raises(UserError, match="--lengths"):
            parse_lengths(text, "--lengths", 10)
    for text in ("", "a..b", "0..3", "5..4", "1..2..3"):
        with pytest.raises(UserError, match="--output"):
            parse_range(text, "--output")
    assert base_url("http://h:1/v1/") == base_url("http://h:1") == "http://h:1"


def test_the_modes_differ_in_nothing_else() -> None:
    modes = reuse_modes(Launch(num_prefill=2, num_decode=2))
    assert list(modes) == [RECOMPUTE, CACHE_ONLY, AFFINITY, BOTH]
    assert [(m.config.worker.prefix_cache, m.config.scheduler.policy) for m in modes.values()] == [
        (False, "least_loaded"), (True, "least_loaded"), (True, "affinity"), (True, "cost"),
    ]  # fmt: skip
    alike = {"config.worker.prefix_cache": True, "config.scheduler.policy": "cost"}
    assert all(changed(launch, alike) == modes[BOTH] for launch in modes.values())
    assert rotated("abc", 0) == ["a", "b", "c"] and rotated("abc", 4) == ["b", "c", "a"]


# Time to first token


def test_the_kv_of_the_large_model_is_an_8b_models(tmp_path: Path) -> None:
    path, num_parameters = make_model(tmp_path, LARGE_KV_SHAPE)
    layout = layout_of(read_checkpoint(str(path)))
    assert layout.block_bytes // layout.block_size == 128 * 1024 and num_parameters < 5e6
    assert layout.block_bytes * LARGE_KV_SHAPE["context_length"] / layout.block_size <= WorkerConfig().kv_bytes


async def test_what_a_request_hands_over_is_beside_the_ratio() -> None:
    async with StubGateway().serving() as gateway:
        urls = {SPLIT: gateway.url, WHOLE: gateway.url}
        (row,) = await ttft.alternate(urls, [6], 1, 1024)
        (unknown,) = await ttft.alternate(urls, [6], 1)
    assert row.kv_bytes == 6 * 1024 and row.with_split_ms is not None
    assert row.kv_bytes_per_s == round(6 * 1024 / row.with_split_ms * 1e3)
    assert unknown.kv_bytes is None and unknown.kv_bytes_per_s is None and unknown.ratio is not None


async def test_tokens_of_one_event_came_together() -> None:
    together = {"choices": [{"index": 0, "text": "ab", "token_ids": [300, 301], "finish_reason": None}]}
    async with StubGateway([together, STREAM[-1]]).serving() as gateway:
        (row,) = await ttft.alternate({SPLIT: gateway.url}, [6], 1)
    assert row.second_with_split_ms == row.with_split_ms is not None


# Traces and prompts

block_counts = st.lists(st.integers(1, 6), min_size=1, max_size=12)


def request(timestamp: float, ids: Sequence[int], tail: int = TRACE_BLOCK, output: int = 64) -> TraceRequest:
    length = TRACE_BLOCK * (len(ids) - 1) + tail
    return TraceRequest(timestamp=timestamp, input_length=length, output_length=output, hash_ids=tuple(ids))


def scaled(trace: Sequence[TraceRequest], scale: float = 16, context_length: int = 10**6) -> list[ReplayRequest]:
    return scale_trace(trace, scale=scale, speed=1, context_length=context_length)


def test_a_trace_is_read_by_time() -> None:
    lines = [
        '{"timestamp": 9, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]}',
        "",
        b'{"timestamp": 2, "input_length": 512, "output_length": 3, "hash_ids": [0], "more": 1}',
    ]
    assert [r.timestamp for r in parse_trace(lines, "t")] == [2, 9]


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "no trace request"),
        ("[1]", "no trace request"),
        (b"\xff", "no trace request"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1}', "hash_ids"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 1, "hash_ids": [1]}', "input_length"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "1 or more"),
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}', "2 blocks"),
        ('{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 0]}', "hash id 0"),
    ],
)
def test_a_bad_line_is_named(line: str | bytes, word: str) -> None:
    good = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}'
    with pytest.raises(UserError, match=rf"trace\.jsonl, line 2: .*{word}"):
        parse_trace([good, line], "trace.jsonl")


def test_an_empty_trace_is_an_error() -> None:
    with pytest.raises(UserError, match="no request"):
        parse_trace(["\n"], "trace.jsonl")


@pytest.mark.parametrize(
    ("scale", "tail", "prompt", "output"),
    [(16, 512, 64, 4), (16, 1, 33, 4), (16, 256, 48, 4), (1, 100, 612, 64), (512, 512, 2, 1), (100, 512, 10, 1)],
)
def test_lengths_are_scaled(scale: float, tail: int, prompt: int, output: int) -> None:
    (found,) = scaled([request(0, [3, 4], tail)], scale)
    assert (found.num_prompt_tokens, found.num_output_tokens, found.is_cut) == (prompt, output, False)
    assert len(build_prompt(found, VOCAB)) == prompt


def test_arrivals_are_scaled_from_the_first_on() -> None:
    trace = [request(5_000, [0]), request(9_000, [0])]
    assert [r.at_s for r in scale_trace(trace, scale=1, speed=2, context_length=9_999)] == [0, 2]
    for scale, speed in ((0, 1), (513, 1), (1, 0)):
        with pytest.raises(UserError, match="--scale"):
            scale_trace(trace, scale=scale, speed=speed, context_length=9_999)


@given(block_counts, st.integers(1, TRACE_BLOCK), st.integers(0, 3_000), st.integers(2, 300))
def test_what_does_not_fit_is_cut_and_counted(blocks: list[int], tail: int, output: int, context: int) -> None:
    ids = list(range(sum(blocks)))
    (whole,) = scaled([request(0, ids, tail, output)])
    (found,) = scaled([request(0, ids, tail, output)], context_length=context)
    assert found.num_prompt_tokens >= 1 and found.num_output_tokens >= 1
    assert found.num_prompt_tokens + found.num_output_tokens <= context
    assert found.is_cut == (found.num_prompt_tokens < whole.num_prompt_tokens)
    assert build_prompt(whole, VOCAB)[: found.num_prompt_tokens] == build_prompt(found, VOCAB)


@given(block_counts, block_counts, st.integers(0, 6), st.sampled_from([1, 7, 16, 32]), st.randoms())
def test_equal_ids_are_equal_prefixes(
    a: list[int], b: list[int], shared: int, scale: float, rng: random.Random
) -> None:
    common = [rng.randrange(10**6) for _ in range(shared)]
    first, second = (
        scaled([request(0, [*common, *(10**7 * side + n for n in range(len(own)))])], scale)[0]
        for side, own in ((1, a), (2, b))
    )
    one, two = build_prompt(first, VOCAB), build_prompt(second, VOCAB)
    num_equal = next((i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y), min(len(one), len(two)))
    assert num_equal >= shared * first.block_tokens
    assert num_equal < (shared + 1) * first.block_tokens, "unequal ids gave equal blocks"
    assert all(256 <= token < VOCAB for token in one)


def test_a_block_is_the_same_in_every_process() -> None:
    (found,) = scaled([request(0, [42])], scale=128)
    assert build_prompt(found, VOCAB) == [751, 858, 529, 899]


def test_the_bound_of_reuse() -> None:
    trace = [request(0, [0, 1]), request(1, [0, 1]), request(2, [0, 2]), request(3, [9])]
    assert reusable_tokens(scaled(trace), 16) == 48 + 32  # never a whole prompt: 63 tokens are three blocks
    assert reusable_tokens(scaled(trace), 1) == 63 + 32
    assert reusable_tokens(scaled(trace[:1] * 2, context_length=44), 1) == 39  # what was cut is in no cache


@given(st.integers(0, 2**32), st.integers(1, 20))
def test_the_bound_is_what_a_naive_cache_gives(seed: int, num_conversations: int) -> None:
    requests = scaled(make_trace(num_conversations, seed=seed), scale=64, context_length=150)
    seen = set[tuple[int, ...]]()
    expected = 0
    for found in requests:
        prompt = build_prompt(found, VOCAB)
        prefixes = [tuple(prompt[:end]) for end in range(4, len(prompt) + 1, 4)]
        expected += max((len(p) for p in prefixes if p in seen and len(p) < len(prompt)), default=0)
        seen.update(prefixes)
    assert reusable_tokens(requests, 4) == expected


def test_the_first_groups_of_a_trace_are_whole() -> None:
    ids = ([0, 1], [0, 2], [0, 3], [0, 2, 4], [0, 3, 5], [0, 2, 6], [0, 7, 8])
    trace = [request(at, chain) for at, chain in enumerate(ids)]
    assert [r.timestamp for r in first_groups(trace, 1)] == [1, 3, 5]
    assert [r.timestamp for r in first_groups(trace, 9)] == [1, 2, 3, 4, 5]
    assert first_groups([trace[0]] * 2, 1) == [trace[0]] * 2  # all alike
    with pytest.raises(UserError, match="--groups"):
        first_groups(trace[:3], 1)


def test_a_made_up_trace_is_one() -> None:
    trace = make_trace(30, seed=1)
    assert trace == make_trace(30, seed=1) != make_trace(30, seed=2)
    lines = [json.dumps({field: getattr(r, field) for field in TraceRequest.__struct_fields__}) for r in trace]
    assert parse_trace(lines, "made up") == trace
    requests = scaled(trace)
    assert 0.3 < reusable_tokens(requests, 16) / sum(r.num_prompt_tokens for r in requests) < 0.95


# Conversations


def test_conversations_share_nothing_and_are_the_same_each_time() -> None:
    def make(seed: int) -> list[multiturn.Conversation]:
        return multiturn.make_conversations(seed, 100, num_turns=3, count=2, output=(4, 6), vocab_size=VOCAB)

    assert make(1) == make(1)
    first, second = make(1)
    assert len(first.messages[0]) == 100 and all(64 <= len(m) <= 128 for m in first.messages[1:])
    assert all(4 <= length <= 6 for length in first.answer_lengths) and len(first.answer_lengths) == 3
    assert len({m for c in (first, second, *make(2)) for m in c.messages}) == 12


def test_ratios_of_later_turns() -> None:
    samples = [
        multiturn.TurnSample(history=history, turn=turn, mode=mode, completion=completion(ms * history))
        for history in (1, 10)
        for mode, ms in ((RECOMPUTE, 100.0), (CACHE_ONLY, 50.0), (BOTH, 20.0))
        for turn in (1, 2, 3)
        if not (turn == 1 and mode == BOTH and history == 10)
    ]
    assert multiturn.later_ratios([s for s in samples if s.history == 1]) == {CACHE_ONLY: 0.5, BOTH: 0.2}
    rows = multiturn.rows_of(samples)
    assert [(row.history, row.turn, row.mode) for row in rows[:3]] == [
        (1, 1, RECOMPUTE),
        (1, 1, CACHE_ONLY),
        (1, 1, BOTH),
    ]
    assert [row.ratio for row in rows[3:6]] == [1.0, 0.5, 0.2]
    missing = next(row for row in rows if (row.history, row.turn, row.mode) == (10, 1, BOTH))
    assert missing.num_requests == 0 and missing.ttft_p50_ms is None and missing.ratio is None


def test_a_restart_is_compared_with_recomputing_the_same_turn() -> None:
    talk = multiturn.Conversation(history=10, messages=((1,),) * 4, answer_lengths=(1,) * 4)

    def held(worker: str, times_ms: Sequence[float]) -> list[Completion]:
        alone = ReportedMeshUsage(prefill_worker=worker, decode_worker=worker, cached_tokens=100)
        usage = ReportedUsage(prompt_tokens=100, completion_tokens=1, kvmesh=alone)
        return [completion(ms, usage=usage) for ms in times_ms]

    samples = [
        sample
        for mode, first, other in (
            (RECOMPUTE, [100.0] * 4, [100.0] * 4),
            (AFFINITY, [100.0, 10.0, 90.0, 10.0], [100.0, 10.0, 10.0, 10.0]),
        )
        for sample in multiturn.samples_of(mode, [talk, talk], [held("p-0", first), held("p-1", other)], "p-0", 2)
    ]
    assert [(s.mode, s.turn) for s in samples if s.restarted] == [(RECOMPUTE, 3), (AFFINITY, 3)]
    report = multiturn.restart_report(samples, 3, {RECOMPUTE: Counter(["p-0"]), AFFINITY: Counter(["p-0"])})
    assert report.before_ttft_p50_ratio == report.after_ttft_p50_ratio == {AFFINITY: 0.1}
    assert report.next_turns_ttft_p50_ratio == report.next_turns_by_history["10"] == {AFFINITY: 0.9}
    assert report.next_turns == {RECOMPUTE: 1, AFFINITY: 1} and report.num_restarts[AFFINITY] == {"p-0": 1}
    assert report.next_turns_sources[AFFINITY].cached_tokens == 100
    whole = multiturn.samples_of(AFFINITY, [talk], [held("p-0", [1.0] * 4)], "", 4)
    assert not any(sample.restarted for sample in whole)


def test_a_plot_is_written(tmp_path: Path) -> None:
    from services.bench.drive.plot import plot_turns

    samples = [
        multiturn.TurnSample(history=100, turn=turn, mode=mode, completion=completion(turn))
        for turn in (1, 2)
        for mode in (RECOMPUTE, BOTH)
    ]
    plot_turns(multiturn.rows_of(samples), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# Replay


def test_sources_are_those_of_the_worker_that_computed_the_prompt() -> None:
    split = ReportedMeshUsage(
        transferred_tokens=100,
        prefill=Source(
            cached_tokens=10, transferred_tokens=30, transferred_from={"a": 20, "b": 10}, recomputed_tokens=60
        ),
    )
    alone = ReportedMeshUsage(cached_tokens=40, transferred_tokens=20, transferred_from={"b": 20}, recomputed_tokens=40)
    shares = shares_of(
        [ReportedUsage(prompt_tokens=100, completion_tokens=1, kvmesh=usage) for usage in (split, alone)]
    )
    assert (shares.cached_tokens, shares.transferred_tokens, shares.recomputed_tokens) == (50, 50, 100)
    assert shares.transferred_from == {"a": 20, "b": 30} and shares.reused_share == 0.5
    assert shares.words == "25% cached, 25% read (a 10%, b 15%), 50% computed"
    untold = ReportedMeshUsage(transferred_tokens=100, prefill_worker="a", decode_worker="b")
    assert shares_of([ReportedUsage(prompt_tokens=100, completion_tokens=1, kvmesh=untold)]).reused_share == 0


@pytest.mark.parametrize(
    ("ttft_ms", "gaps_ms", "expected"),
    [(100, [50, 50], True), (101, [1], False), (100, [99, 2], False), (100, [99, 1], True), (99, [], True)],
)
def test_the_slo(ttft_ms: float, gaps_ms: list[float], expected: bool) -> None:
    assert replay.is_within(completion(ttft_ms, gaps_ms=gaps_ms), 100, 50) is expected


def test_a_replays_report() -> None:
    plan = replay.ReplayPlan(path=None, scale=16, speed=1, groups=0, limit=0, slo_ttft_ms=100, slo_itl_ms=50)
    requests = scaled([request(0, [0, 1]), request(1, [0, 2]), request(2, [0, 3]), request(3, [0, 4])])
    cached = ReportedUsage(
        prompt_tokens=64, completion_tokens=1, kvmesh=ReportedMeshUsage(cached_tokens=16, recomputed_tokens=48)
    )
    fresh = ReportedUsage(prompt_tokens=64, completion_tokens=1, kvmesh=ReportedMeshUsage(recomputed_tokens=64))
    outcomes = [
        replay.ReplayOutcome(sent_s=1, late_s=0, completion=completion(50, usage=fresh)),
        replay.ReplayOutcome(sent_s=2, late_s=0, completion=completion(1_000, usage=cached)),
        replay.ReplayOutcome(sent_s=3, late_s=0.5, completion=completion(50, gaps_ms=[20, 30], usage=cached)),
        replay.ReplayOutcome(sent_s=2.5, late_s=0, error="no"),
    ]
    report = replay.report_of(plan, requests, outcomes, model="m", trace="t")
    assert (report.num_requests, report.num_failed, report.failures) == (4, 1, {"no": 1})
    assert report.duration_s == 2.1 and report.num_within_slo == 2 and report.goodput_per_s == round(2 / 2.1, 3)
    assert (report.ttft_p50_ms, report.itl_p50_ms) == (50, 25)
    assert report.reuse_bound == round(64 / 192, 4) and report.reused == round(32 / 192, 4)
    assert report.reused_of_bound == 0.5


# The load driver


def event(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def test_a_streams_times() -> None:
    events = EventTimes()
    events.add_event(
        event(choices=[{"index": 0, "text": "a", "token_ids": [5], "finish_reason": None}], usage=None), 10
    )
    events.add_event(event(choices=[{"index": 0, "text": "b", "token_ids": [6, 7], "finish_reason": None}]), 14)
    events.add_event(event(choices=[{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]), 15)
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "kvmesh": {"cached_tokens": 4, "prefill": None}}
    events.add_event(event(choices=[], usage=usage), 16)
    found = events.completion(17)
    assert (found.ttft_ms, found.gaps_ms, found.total_ms, found.token_ids) == (10, (4,), 17, (5, 6, 7))
    assert found.usage.computing.cached_tokens == 4


def test_the_last_event_of_another_server_may_have_all_tokens() -> None:
    events = EventTimes()
    events.add_event(event(choices=[{"index": 0, "text": "ab", "finish_reason": "length"}]), 10)
    events.add_event(event(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 2}), 11)
    assert events.completion(11).ttft_ms == 10


def test_a_stream_that_is_none() -> None:
    with pytest.raises(RequestFailedError, match="no worker"):
        EventTimes().add_event(event(error={"message": "no worker", "type": "server_error"}), 1)
    with pytest.raises(RequestFailedError, match="sent an invalid event"):
        EventTimes().add_event(b"{", 1)
    with pytest.raises(RequestFailedError, match="usage"):
        EventTimes().completion(1)


STREAM = [
    {"choices": [{"index": 0, "text": "x", "token_ids": [300], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "y", "token_ids": [301], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]},
]


class StubGateway:
    """Answers each completion with two tokens and says what it was asked; refuses prompts of one token."""

    def __init__(self, stream: Sequence[dict[str, object]] = STREAM) -> None:
        self.bodies: list[dict[str, object]] = []
        self.url = ""
        self._stream = stream

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["StubGateway"]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        async with server:
            yield self

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0]) if "content-length: " in head else 0
        body = json.loads(await reader.readexactly(length) or b"{}")
        if head.startswith("get"):
            self._write(writer, 200, event(data=[{"id": "stub", "context_length": 4096}]))
        elif len(body["prompt"]) == 1:
            self._write(writer, 503, event(error={"message": "no worker is free", "type": "server_error"}))
        else:
            self.bodies.append(body)
            n = len(body["prompt"])
            split = {"transferred_tokens": n, "prefill": {"recomputed_tokens": n}}
            usage = {"prompt_tokens": n, "completion_tokens": 2, "kvmesh": split}
            events = [*self._stream, {"choices": [], "usage": usage}]
            self._write(writer, 200, b"".join(b"data: " + event(**e) + b"\n\n" for e in events) + b"data: [DONE]\n\n")
        await writer.drain()
        writer.close()

    def _write(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)


async def test_the_driver_asks_and_times() -> None:
    async with StubGateway().serving() as gateway, open_http() as http:
        client = await Client.open(http, gateway.url)
        assert (client.model.id, client.model.context_length) == ("stub", 4096)
        found = await client.complete([256, 257], 2, return_token_ids=True)
        assert found.token_ids == (300, 301) and len(found.gaps_ms) == 1
        assert 0 < found.ttft_ms <= found.total_ms and found.usage.prompt_tokens == 2
        body = gateway.bodies[0]
        assert body["max_tokens"] == 2 and body["stream_options"] == {"include_usage": True}
        assert body["return_token_ids"] is True and body["prompt"] == [256, 257]
        with pytest.raises(RequestFailedError, match="no worker is free"):
            await client.complete([256], 2)
    async with open_http() as http:
        with pytest.raises(RequestFailedError, match="a request to"):
            await client_of(http, gateway.url).complete([256, 257], 2)
        with pytest.raises(UserError, match="no gateway answers"):
            await model_of(http, gateway.url)


def client_of(http: httpx.AsyncClient, url: str) -> Client:
    from services.bench.drive.http_client import ListedModel

    return Client(http, url, ListedModel("stub", 4096))


async def test_a_conversation_repeats_what_was_said() -> None:
    talk = multiturn.Conversation(history=3, messages=((256, 257, 258), (400,)), answer_lengths=(2, 2))
    async with StubGateway().serving() as gateway, open_http() as http:
        await multiturn.converse(await Client.open(http, gateway.url), talk, 0)
        assert [body["prompt"] for body in gateway.bodies] == [[256, 257, 258], [256, 257, 258, 300, 301, 400]]
        client = await Client.open(http, gateway.url)
        said = await multiturn.converse(client, talk, 0, until=1)
        assert len(said) == 1 and len(await multiturn.converse(client, talk, 0, said)) == 2
        assert [body["prompt"] for body in gateway.bodies[2:]] == [body["prompt"] for body in gateway.bodies[:2]]
        longer = multiturn.Conversation(history=3, messages=((256, 257, 258),), answer_lengths=(3,))
        with pytest.raises(RequestFailedError, match="return_token_ids"):
            await multiturn.converse(await Client.open(http, gateway.url), longer, 0)


def test_replaying_a_running_gateway(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """The whole command, but for the mesh."""
    trace = tmp_path / "trace.jsonl"
    lines = [request(at, ids) for at, ids in ((0, [0, 1]), (5, [0, 2]), (9, [7]))]
    trace.write_text("\n".join(json.dumps({f: getattr(r, f) for f in r.__struct_fields__}) for r in lines))
    plan = replay.ReplayPlan(path=trace, scale=16, speed=1, groups=0, limit=2, slo_ttft_ms=10**6, slo_itl_ms=10**6)

    async def main() -> None:
        async with StubGateway().serving() as gateway:
            await asyncio.to_thread(replay.run_replay, plan, Launch(), url=gateway.url + "/v1", as_json=True)

    asyncio.run(main())
    report = json.loads(capsysbinary.readouterr().out)
    assert (report["num_requests"], report["num_failed"], report["num_within_slo"]) == (2, 0, 2)
    assert report["reuse_bound"] == 0.25 and report["reused"] == 0.0
    assert report["sources"]["recomputed_tokens"] == 128


@pytest.mark.parametrize(
    ("exact", "other", "share"),
    [([1, 2, 3, 4], [1, 2, 3, 4], 1.0), ([1, 2, 3, 4], [1, 9, 3, 4], 0.25), ([1, 2], [9, 2], 0.0), ([], [], 1.0)],
)
def test_greedy_agreement_ends_at_the_first_difference(exact: list[int], other: list[int], share: float) -> None:
    assert agreement([exact], [other]) == share


def test_the_bench_of_the_directory_in_small() -> None:
    rows = [bench_directory.measure(2_000, holders, num_rounds=20) for holders in (8, 40)]
    shown = bench_directory.table(rows)
    assert json.loads(json.dumps(rows)) == rows and "locate 8,000 blocks" in shown
    for row, holders in zip(rows, (8, 40), strict=True):
        assert (row["blocks"], row["holders"]) == (2_000, holders) and row["held"] > row["blocks"]
