"""The bench of the mesh on vLLM: its load, ratios, proxy and processes without vLLM; then the parts themselves."""

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from services.bench.drive.http_client import Client, Completion, ReportedUsage
from services.bench.multiturn import make_conversations
from services.errors import UserError
from services.ports import free_port
from tests.bench import bench_vllm, vllm_load, vllm_turns
from tests.bench.bench_vllm import PARTS, QUICK, parse_parts, table
from tests.bench.gpu_report import Row
from tests.bench.test_bench import completion
from tests.bench.vllm_load import Load, arrivals_s, compared, in_turn, period_of
from tests.bench.vllm_peers import OURS, THEIRS, Process, started
from tests.bench.vllm_profile import cpu_ns, group_pids, token_times
from tests.bench.vllm_proxy import ASK_FOR_KV, Proxy, decode_body, prefill_body
from tests.bench.vllm_turns import Group, Sides

ASKED: dict[str, Any] = {
    "model": "random", "prompt": [1, 2, 3], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True},
}  # fmt: skip
KEPT = {"do_remote_prefill": True, "remote_port": 1234}
SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def answer(ttft_ms: float, num_tokens: int, ms_per_token: float) -> Completion:
    usage = ReportedUsage(prompt_tokens=100, completion_tokens=num_tokens)
    return completion(ttft_ms, gaps_ms=[ms_per_token] * (num_tokens - 1), usage=usage)


class Side(Client):
    """A client of nothing, that notes how long the prompts were that it was asked with."""

    def __init__(self, name: str, ttft_ms: float, asked: list[str]) -> None:
        self.name, self.ttft_ms, self.asked = name, ttft_ms, asked

    async def complete(self, prompt: Sequence[int], num_tokens: int, *, return_token_ids: bool = False) -> Completion:
        self.asked.append(self.name)
        made = answer(self.ttft_ms, num_tokens, 1.0)
        return msgspec.structs.replace(made, token_ids=(7,) * num_tokens if return_token_ids else ())


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("vllm") is None:
        for module in (vllm_load, vllm_turns):
            monkeypatch.setattr(module, "SETTLE_S", 0.0)


# Load and ratios


def test_requests_arrive_at_their_rate_and_at_the_same_times_for_both_sides() -> None:
    load = Load(4, 2_000, 10, 1)
    times = arrivals_s(random.Random(1), load)
    assert times[0] == 0.0 and times == sorted(times) and times == arrivals_s(random.Random(1), load)
    assert times[-1] == pytest.approx(2_000 / 4, rel=0.1)
    assert arrivals_s(random.Random(1), Load(0, 3, 10, 1, at_once=2)) == [0.0] * 3


def test_a_period_is_its_requests_and_how_long_they_took_together() -> None:
    period = period_of([answer(10.0, 5, 2.0), answer(30.0, 5, 4.0)], 0.5)
    assert (period.ttft_ms, period.ms_per_token, period.tokens_per_s) == (20.0, 3.0, 20.0)
    assert period.ttft_p99_ms == pytest.approx(29.8)
    assert period_of([answer(10.0, 1, 0.0)], 1.0).ms_per_token == 0.0


def test_each_round_gives_a_ratio_and_the_row_their_median() -> None:
    row = compared("TTFT", ("ours", "vLLM"), ([10.0, 30.0, 12.0], [10.0, 10.0, 10.0]), "ms", 1.15)
    assert row.ratio == 1.2 and row.is_met is False
    assert row.result == "ours 12.0, vLLM 10.0 ms; by round 1.00–3.00"
    assert compared("rate", ("ours", "vLLM"), ([9.0], [10.0]), "/s", 0.9, "more").is_met
    assert compared("nothing", ("ours", "vLLM"), ([], []), "ms").error
    assert compared("nothing", ("ours", "vLLM"), ([1.0], [0.0]), "ms").error


async def test_sides_have_the_same_load_in_turn() -> None:
    asked: list[str] = []
    loads = (Load(1_000, 2, 4, 3), Load(0, 2, 4, 3, at_once=1))
    clients = {OURS: Side("o", 20.0, asked), THEIRS: Side("t", 10.0, asked)}
    periods: list[None] = []
    found = await in_turn(clients, loads, 2, 1024, lambda: periods.append(None))
    assert "".join(asked) == "ooo" + "ttt" + "oott" * 2 + "ttoo" * 2, "warm-up, and then two rounds of two loads"
    assert len(periods) == 8 and set(found) == set(loads)
    assert [one.ttft_ms for one in found[loads[0]][OURS]] == [20.0, 20.0]


def test_parts_are_chosen_by_name() -> None:
    assert parse_parts("") == list(PARTS) and parse_parts("loop,alone") == ["loop", "alone"]
    with pytest.raises(UserError, match="peer: choose of alone"):
        parse_parts("alone,peer")
    assert (
        table("loop", [Row(what="late", ratio=0.5, aim=1.0, better="less"), Row(what="x", error="no")]).row_count == 2
    )


# The proxy


def test_the_prefill_server_is_asked_for_one_token_and_to_keep_its_blocks() -> None:
    body = prefill_body(ASKED | {"return_token_ids": True})
    assert body == {
        "model": "random", "prompt": [1, 2, 3], "max_tokens": 1, "stream": False, "kv_transfer_params": ASK_FOR_KV,
    }  # fmt: skip
    assert decode_body(ASKED, {"kv_transfer_params": KEPT, "id": "1"}) == ASKED | {"kv_transfer_params": KEPT}
    with pytest.raises(KeyError):
        decode_body(ASKED, {"id": "1"})


@pytest.fixture
def heard() -> list[tuple[str, dict[str, Any]]]:
    return []


def proxied(heard: list[tuple[str, dict[str, Any]]], prefill_status: int = 200) -> httpx.AsyncClient:
    """Return a client of a proxy before servers that note what they hear."""

    def serve(request: httpx.Request) -> httpx.Response:
        heard.append((f"{request.url.host}{request.url.path}", msgspec.json.decode(request.content or b"{}")))
        if request.url.host == "prefill":
            return httpx.Response(prefill_status, json={"kv_transfer_params": KEPT})
        return httpx.Response(200, content=b"data: 1\n\ndata: 2\n\n", headers={"content-type": "text/event-stream"})

    servers = httpx.AsyncClient(transport=httpx.MockTransport(serve))
    application: Any = Proxy(servers, "http://prefill", "http://decode")
    return httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://proxy")


async def test_the_proxy_asks_one_server_and_then_the_other(heard: list[tuple[str, dict[str, Any]]]) -> None:
    async with proxied(heard) as http:
        reply = await http.post("/v1/completions", json=ASKED)
    assert reply.text == "data: 1\n\ndata: 2\n\n" and reply.headers["content-type"] == "text/event-stream"
    assert heard == [
        ("prefill/v1/completions", prefill_body(ASKED)),
        ("decode/v1/completions", ASKED | {"kv_transfer_params": KEPT}),
    ]


async def test_what_is_no_completion_is_the_decode_servers(heard: list[tuple[str, dict[str, Any]]]) -> None:
    async with proxied(heard) as http:
        assert (await http.get("/v1/models")).status_code == 200
    assert heard == [("decode/v1/models", {})]


async def test_a_refusal_of_the_prefill_server_is_passed_on(heard: list[tuple[str, dict[str, Any]]]) -> None:
    async with proxied(heard, 503) as http:
        assert (await http.post("/v1/completions", json=ASKED)).status_code == 503
    assert len(heard) == 1


# CPU time


def test_the_thread_that_steps_is_the_busiest_and_the_rest_is_told_by_process() -> None:
    before = {(1, 1): 1_000_000, (1, 2): 5_000_000, (2, 2): 7_000_000}
    after = {(1, 1): 5_000_000, (1, 2): 45_000_000, (1, 3): 2_000_000, (2, 2): 17_000_000}
    assert token_times(before, after, 80.0, 10) == (4.0, 0.6, 1.0, 8.0)


def test_what_a_thread_computes_is_counted() -> None:
    before = cpu_ns([os.getpid()])
    while (spent := cpu_ns([os.getpid()])[os.getpid(), os.getpid()]) < before[os.getpid(), os.getpid()] + 10_000_000:
        pass
    assert spent and os.getpid() in group_pids(os.getpgid(0))


# Processes


async def pid_of(url: str) -> int:
    async with httpx.AsyncClient() as http:
        return int((await http.get(url)).text)


async def test_a_server_is_restarted_and_leaves_nothing_behind(tmp_path: Path) -> None:
    port = free_port()
    process = Process("server", tmp_path / "log", ["-c", SERVER, str(port)], {}, f"http://127.0.0.1:{port}")
    async with started([process]):
        before = await pid_of(process.url)
        await process.restart()
        assert await pid_of(process.url) != before
    with pytest.raises(httpx.HTTPError):
        await pid_of(process.url)


async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    process = Process("server", tmp_path / "log", ["-c", "import sys; sys.exit('no room')"], {}, "http://127.0.0.1:9")
    with pytest.raises(UserError, match="server ended when it started: no room"):
        async with started([process]):
            raise AssertionError("it has not started")


# Turns


async def test_a_conversation_stays_with_its_server() -> None:
    asked: list[str] = []
    servers = (Side("a", 10.0, asked), Side("b", 30.0, asked))
    sides: Any = Sides(servers, (None, None), Side("m", 5.0, asked), None)  # type: ignore[arg-type]
    made = make_conversations(1, 8, num_turns=2, count=3, output=(2, 2), vocab_size=1024)
    group = Group(sides, made, [0, 1, 0])
    turns: list[None] = []
    await group.turn(1, lambda: turns.append(None))
    await group.turn(2, lambda: turns.append(None))
    assert "".join(asked[3:]) == "mmm" + "mmm" + "aba" and sorted(asked[:3]) == ["a", "a", "b"] and len(turns) == 4
    assert group.measured(2, [0, 1], [0, 1, 2])[:2] == (5.0, 10.0) and group.measured(2, [0], [1]).theirs_ms == 30.0
    assert group.computed_by("", 1) == [0, 1, 2] and group.computed_by("prefill", 1) == []


# With vLLM itself


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_parts_run_with_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of vLLM's own, both ends of the TCP connector, the proxy, our split, and what is measured in a process.
    `alone` and `turns` start the same again, and `split` the meshes that other tests start: they take minutes."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    monkeypatch.setattr(bench_vllm, "missing_nixl", lambda: "left out here")
    for name in ("peers", "copies", "loop"):
        rows = await PARTS[name](QUICK, tmp_path)
        assert [row.what for row in rows if row.error] == (["vLLM's split, NIXL"] if name == "peers" else [])
        assert all(row.ratio for row in rows if not row.error)
