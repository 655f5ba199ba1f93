"""Traces of a real mesh: processes, a broker, HTTP, span files."""

import os
import secrets
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from schemas.request import Reuse
from services.cli.trace import show_trace
from services.config import GatewayConfig, MeshConfig, SchedulerConfig, WorkerConfig
from services.launch.options import Launch
from services.sim.verdict.traces import MAX_RESIDUAL, ttft_residual
from services.telemetry import Key, SpanName, SpanRecord
from services.times import SchedulerTimes
from tests.mesh.processes import Mesh, RunningMesh, in_parallel
from tests.sim.trees import GOLDEN, draw

NUM_REQUESTS = 500
OPTIONS = Launch(
    num_prefill=1,
    num_decode=1,
    config=MeshConfig(
        gateway=GatewayConfig(port=0),
        scheduler=SchedulerConfig(unsplit_tokens_max=0),
        worker=WorkerConfig(kv_bytes=64 << 20, num_threads=1),
    ),
)


def spans_in(folder: Path) -> list[SpanRecord]:
    """Return what has been written; a last line may still be on its way."""
    decoder = msgspec.json.Decoder(SpanRecord)
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().split(b"\n")[:-1]]
    return [decoder.decode(line) for line in lines]


def traces_in(mesh: Mesh) -> dict[str, list[SpanRecord]]:
    by_trace: defaultdict[str, list[SpanRecord]] = defaultdict(list)
    for span in spans_in(mesh.supervisor.trace_dir):
        by_trace[span.trace_id].append(span)
    return by_trace


def fresh_prompt(num_tokens: int) -> list[int]:
    return [3 + secrets.randbelow(200) for _ in range(num_tokens)]


def ask(mesh: Mesh, num_tokens: int = 60, **fields: object) -> httpx.Response:
    headers = {"traceparent": str(fields.pop("traceparent"))} if "traceparent" in fields else {}
    body = {"model": mesh.model, "prompt": fresh_prompt(num_tokens), "max_tokens": 4, "ignore_eos": True} | fields
    return mesh.client.post("/v1/completions", json=body, headers=headers)


def trace_id_of(response: httpx.Response) -> str:
    return response.headers["traceparent"].split("-")[1]


@pytest.fixture(scope="module")
def mesh(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(tmp_path_factory.mktemp("traced"), OPTIONS) as running:
        yield running


def test_of_500_requests_the_parts_of_the_ttft_add_up(mesh: Mesh) -> None:
    answers = in_parallel([lambda: ask(mesh) for _ in range(NUM_REQUESTS)], 4)
    assert all(answer.status_code == 200 for answer in answers)
    wanted = {trace_id_of(answer) for answer in answers}

    def residuals() -> list[float]:
        traces = traces_in(mesh)
        found = [ttft_residual(spans) for trace_id, spans in traces.items() if trace_id in wanted]
        return [abs(residual) for residual in found if residual is not None]

    mesh.wait_until(lambda: len(residuals()) == NUM_REQUESTS, "the traces of all requests, each with all of its parts")
    assert sorted(residuals())[int(0.95 * NUM_REQUESTS)] <= MAX_RESIDUAL


def test_a_finished_tree_is_the_simulator_s(mesh: Mesh) -> None:
    """Span by span, with what links them. Over shared memory as over a wire."""
    answer = ask(mesh, num_tokens=100)
    trace_id, golden = trace_id_of(answer), (GOLDEN / "finished.txt").read_text()

    def drawn() -> str:
        spans = spans_in(mesh.supervisor.trace_dir)
        return draw(spans, trace_id) if any(s.trace_id == trace_id and s.is_server for s in spans) else ""

    mesh.wait_until(lambda: drawn().count("\n") == golden.count("\n"), "all spans of the request")
    assert drawn() == golden


def test_a_transfer_says_what_moved(mesh: Mesh) -> None:
    trace_id = trace_id_of(ask(mesh, num_tokens=100))

    def ends() -> dict[str, SpanRecord]:
        spans = traces_in(mesh)[trace_id]
        return {str(s.attributes[Key.END]): s for s in spans if s.name == SpanName.KV_TRANSFER}

    mesh.wait_until(lambda: len(ends()) == 2, "both ends of the transfer")
    source, target = ends()["source"], ends()["target"]
    assert source.attributes[Key.NUM_BYTES] == target.attributes[Key.NUM_BYTES] != 0
    assert (target.attributes[Key.NUM_BLOCKS], target.attributes[Key.NUM_CACHED_BLOCKS]) == (7, 0)
    assert target.attributes[Key.SOURCE] == source.attributes[Key.WORKER] == "prefill-0"
    assert [link.split("-")[2] for link in target.links] == [source.span_id]
    assert [link.split("-")[2] for link in source.links] == [target.span_id]


def test_where_the_directory_does_not_answer_the_answer_and_its_trace_say_so(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the time that was lost waiting for it is seen: the parts of the TTFT add up all the same."""
    (directory,) = (child for child in mesh.supervisor.children if child.role == "directory")
    assert reuse_of(ask(mesh)) is Reuse.NOTHING_HELD
    os.kill(directory.process.pid, signal.SIGSTOP)
    try:
        answer = ask(mesh)
    finally:
        os.kill(directory.process.pid, signal.SIGCONT)
    assert reuse_of(answer) is Reuse.WITHOUT_DIRECTORY
    trace_id = trace_id_of(answer)

    def named(name: str) -> list[SpanRecord]:
        return [span for span in traces_in(mesh)[trace_id] if span.name == name]

    wanted = {SpanName.LOCATE, SpanName.FIRST_TOKEN, SpanName.PREFILL_COMPUTE, "POST /v1/completions"}
    mesh.wait_until(lambda: wanted <= {span.name for span in traces_in(mesh)[trace_id]}, "the spans of the request")
    (place,), (schedule,), (locate,) = (named(n) for n in (SpanName.PLACE, SpanName.SCHEDULE, SpanName.LOCATE))
    assert (schedule.parent_id, locate.parent_id) == (place.span_id, place.span_id)
    assert (schedule.service, locate.service) == ("scheduler", "directory")
    assert place.attributes[Key.REUSE] == schedule.attributes[Key.REUSE] == Reuse.WITHOUT_DIRECTORY
    waited_ms = schedule.attributes[Key.LOCATE_MS]
    slack_ms = 1  # the loop's timers are as coarse
    assert isinstance(waited_ms, float) and waited_ms >= 1000 * SchedulerTimes().locate_timeout_s - slack_ms
    assert ttft_residual(traces_in(mesh)[trace_id]) == pytest.approx(0, abs=MAX_RESIDUAL)
    show_trace(mesh.supervisor.trace_dir, answer.json()["usage"]["kvmesh"]["request_id"])
    assert "without_directory" in capsys.readouterr().out


def reuse_of(answer: httpx.Response) -> Reuse:
    return Reuse(answer.json()["usage"]["kvmesh"]["reuse"])


PARENT = "b7ad6b7169203331"


def unsampled() -> tuple[str, str]:
    """Return a new trace's id and a client's traceparent that asks for no trace."""
    trace_id = f"{secrets.randbits(128) or 1:032x}"
    return trace_id, f"00-{trace_id}-{PARENT}-00"


def test_a_client_may_ask_for_no_trace(mesh: Mesh) -> None:
    trace_id, traceparent = unsampled()
    assert ask(mesh, traceparent=traceparent).status_code == 200
    later = [trace_id_of(ask(mesh)) for _ in range(3)]
    mesh.wait_until(lambda: set(later) <= set(traces_in(mesh)), "later traces")
    assert trace_id not in traces_in(mesh)


def test_what_is_not_sampled_is_kept_where_it_is_resumed(mesh: Mesh) -> None:
    """Its decode worker dies with what it had recorded; what everybody else had is exported, and what comes after."""
    trace_id, traceparent = unsampled()
    (decode,) = (child for child in mesh.supervisor.children if child.name == "decode-0")
    body = {
        "model": mesh.model, "prompt": fresh_prompt(50), "max_tokens": 1200, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    with mesh.client.stream("POST", "/v1/completions", json=body, headers={"traceparent": traceparent}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for _ in range(3):
            next(lines)
        os.kill(decode.process.pid, signal.SIGKILL)
        assert len(list(lines)) > 0, "the answer goes on"

    def is_there() -> bool:
        spans = traces_in(mesh)[trace_id]
        return {SpanName.DECODE, SpanName.KV_RELEASE} <= {s.name for s in spans} and any(s.is_server for s in spans)

    mesh.wait_until(is_there, "the trace, with its second attempt")
    spans = traces_in(mesh)[trace_id]
    (root,) = (span for span in spans if span.is_server)
    assert (root.parent_id, root.attributes[Key.KEPT], root.attributes[Key.OUTCOME]) == (PARENT, "resumed", "ok")
    known = {span.span_id for span in spans}
    assert all(span.parent_id in known for span in spans if span is not root), "no orphan"
    assert {1, 2} <= {span.attributes.get(Key.ATTEMPT) for span in spans if span.name == SpanName.PREFILL}
