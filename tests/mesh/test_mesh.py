"""The mesh as a user meets it: one 1P1D mesh of real processes, many questions."""

import asyncio
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from schemas import subjects
from schemas.block import hash_blocks, join_hashes
from schemas.directory import LocateBlocks
from schemas.ids import RequestId
from schemas.permissions import SERVICE_NAMES, Direction, granted
from schemas.subjects import Role
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.cli.trace import SpanRecord, find_trace, load_spans
from services.config import GatewayConfig, MeshConfig
from services.launch.options import Launch
from tests.cli.commands import ENDS_WITHIN_S, QUESTION, end_as_it_starts, may_be_process_1
from tests.corpus import make_fact_prompt
from tests.mesh.processes import Mesh, RunningMesh, TokenRecorder, in_parallel
from tests.promises import same_tokens

EVERY_SERVICE = {"gateway", "scheduler", "directory", "prefill", "decode"}


_rng = random.Random(20261121)


def fresh(num_tokens: int = 40) -> list[int]:
    """Return a prompt that nobody has in a cache: it is always split."""
    return [_rng.randrange(5, 500) for _ in range(num_tokens)]


@pytest.fixture(scope="module")
def mesh(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with running_mesh(
        tmp_path_factory.mktemp("mesh"), Launch(config=MeshConfig(gateway=GatewayConfig(port=0)))
    ) as running:
        yield running


@pytest.fixture
def client(mesh: Mesh) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0)


def test_the_readme_question_gets_the_right_code(mesh: Mesh) -> None:
    answer = mesh.complete(QUESTION)
    assert answer["choices"][0]["text"].strip() == "7412"
    assert answer["choices"][0]["finish_reason"] == "stop"
    kvmesh = answer["usage"]["kvmesh"]
    assert (kvmesh["prefill_worker"], kvmesh["decode_worker"]) == ("prefill-0", "decode-0")
    assert kvmesh["transferred_tokens"] == answer["usage"]["prompt_tokens"]
    assert kvmesh["carrier"] == "shm"


def test_the_openai_client_not_streaming(client: openai.OpenAI, mesh: Mesh) -> None:
    completion = client.completions.create(model=mesh.model, prompt=QUESTION, max_tokens=16, temperature=0)
    assert completion.choices[0].text.strip() == "7412"
    messages = [{"role": "user", "content": QUESTION.split(" Q: ", maxsplit=1)[0] + " What is the code of Ada Brook?"}]
    chat = client.chat.completions.create(model=mesh.model, messages=messages, temperature=0)  # type: ignore[arg-type]
    assert (chat.choices[0].message.content or "").strip() == "7412"
    assert chat.usage is not None and chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 0


def test_the_openai_client_streaming(client: openai.OpenAI, mesh: Mesh) -> None:
    whole = client.completions.create(model=mesh.model, prompt=QUESTION, max_tokens=12, temperature=1, seed=5)
    stream = client.completions.create(
        model=mesh.model,
        prompt=QUESTION,
        max_tokens=12,
        temperature=1,
        seed=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage.model_copy(  # type: ignore[union-attr]
        update={"kvmesh": chunks[-1].usage.kvmesh}  # type: ignore[union-attr]
    )
    messages = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(model=mesh.model, messages=messages, max_tokens=5, stream=True)  # type: ignore[arg-type]
    assert [c.choices[0].finish_reason for c in chat if c.choices][-1] in ("stop", "length")


def test_the_bus_reads_like_a_story(mesh: Mesh) -> None:
    """With one subscription to mesh.> a person finds the hand-over's five steps in order, each valid JSON."""

    async def listen() -> list[tuple[str, dict[str, object]]]:
        bus = await NatsBus.connect(mesh.access(Role.OPERATOR), "listener")
        subscription = await bus.subscribe("mesh.>")
        await bus.flush()
        answer = await asyncio.to_thread(mesh.complete, fresh(), ignore_eos=True)
        request_id = answer["usage"]["kvmesh"]["request_id"]
        heard: list[tuple[str, dict[str, object]]] = []
        async for delivery in subscription:
            message = json.loads(delivery.payload)
            assert message["type"], delivery.subject
            if message.get("request_id") == request_id:
                heard.append((delivery.subject, message))
            if delivery.subject.endswith(".released"):
                break
        await bus.close()
        return heard

    heard = mesh.call(listen())
    steps = [subject.rsplit(".", 1)[-1] for subject, _ in heard if subject.startswith("mesh.v1.handoff.")]
    # `reserved` is said again where no offer comes for a while: either may be lost.
    assert list(dict.fromkeys(steps)) == ["reserved", "offered", "streaming", "landed", "released"]
    request_id = str(heard[0][1]["request_id"])
    assert [subject for subject, _ in heard[:2]] == [subjects.ACCEPTED.of(request_id), subjects.PLACE.of()]
    assert {subjects.RUN.of("prefill-0"), subjects.RUN.of("decode-0")} <= {subject for subject, _ in heard}


def test_the_trace_is_one_connected_tree(mesh: Mesh) -> None:
    request_id = mesh.complete(fresh(), ignore_eos=True)["usage"]["kvmesh"]["request_id"]
    wanted = {"POST /v1/completions", "tokenize", "place", "prefill", "decode", "kv.release"}

    def names() -> list[str]:
        return [span.name for span in find_trace(load_spans(mesh.supervisor.trace_dir), request_id)]

    mesh.wait_until(
        lambda: _has_trace(mesh, request_id) and wanted <= set(names()) and names().count("kv.transfer") == 2,
        "all spans of the request",
    )
    spans = find_trace(load_spans(mesh.supervisor.trace_dir), request_id)
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id for span in spans}
    roots = [span for span in spans if not span.parent_id]
    assert [root.name for root in roots] == ["POST /v1/completions"]
    assert all(span.parent_id in ids for span in spans if span.parent_id)
    transfers = [span for span in spans if span.name == "kv.transfer"]
    assert {t.attributes["kvmesh.transfer_end"] for t in transfers} == {"source", "target"}
    assert {t.parent_id for t in transfers} == {roots[0].span_id}
    assert all(t.attributes["kvmesh.carrier"] == "shm" and t.attributes["kvmesh.num_bytes"] > 0 for t in transfers)


def _has_trace(mesh: Mesh, request_id: str) -> bool:
    return any(s.attributes.get("kvmesh.request_id") == request_id for s in load_spans(mesh.supervisor.trace_dir))


def test_a_question_asked_again_is_answered_where_its_kv_lies(mesh: Mesh) -> None:
    """The decode worker holds nearly all of it: no split, and the placement's terms say why. What a placement costs is
    measured, and a busy machine may make another one cheaper once: then another prompt is asked again."""
    asked: list[dict[str, Any]] = []
    mesh.wait_until(lambda: _is_placed_where_its_kv_lies(mesh, asked), "a placement where its KV lies")
    kvmesh = asked[-1]
    assert (kvmesh["prefill_worker"], kvmesh["prefill"]) == ("decode-0", None)
    assert (kvmesh["cached_tokens"], kvmesh["recomputed_tokens"]) == (288, 12)
    request_id = kvmesh["request_id"]

    def placements() -> list[SpanRecord]:
        found = _has_trace(mesh, request_id) and find_trace(load_spans(mesh.supervisor.trace_dir), request_id)
        return [span for span in found or [] if span.name == "place"]

    mesh.wait_until(lambda: len(placements()) == 1, "the placement's span")
    place = placements()[0]
    assert place.attributes["kvmesh.place.cached_tokens"] == 288 and place.attributes["kvmesh.place.alternatives"]


def _is_placed_where_its_kv_lies(mesh: Mesh, asked: list[dict[str, Any]]) -> bool:
    """Ask a fresh question twice; note what its second answer says of itself."""
    prompt = fresh(300)
    first = mesh.complete(prompt, ignore_eos=True, return_token_ids=True)
    mesh.wait_until(lambda: _num_located(mesh, prompt) >= 18, "the directory to hear of it")
    mesh.assert_no_blocks_held()  # as long as a worker says that it is busy, an idle one may be quicker
    again = mesh.complete(prompt, ignore_eos=True, return_token_ids=True)
    same_tokens(again["choices"][0]["token_ids"], first["choices"][0]["token_ids"])
    asked.append(again["usage"]["kvmesh"])
    return asked[-1]["prefill_worker"] == asked[-1]["decode_worker"] == "decode-0"


def _num_located(mesh: Mesh, prompt: list[int]) -> int:
    """Return how many blocks of a prompt the directory says that the decode worker holds."""
    fingerprint = next(w.worker.fingerprint for w in mesh.fleet.workers)
    hashes = join_hashes(hash_blocks(prompt, 16, model_fingerprint=fingerprint))
    ids = {"request_id": RequestId("locate"), "attempt": 1, "deadline_ms": 2**53}

    async def ask() -> int:
        bus = await NatsBus.connect(mesh.access(Role.SCHEDULER), "requester")
        reply = await TypedBus(bus, "requester").ask(subjects.LOCATE, (), LocateBlocks(**ids, block_hashes=hashes), 10)
        await bus.close()
        return max((h.num_blocks for h in reply.holders if h.worker_id == "decode-0"), default=0)

    return mesh.call(ask())


def test_a_clients_traceparent_is_honoured(mesh: Mesh) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body = {"model": mesh.model, "prompt": fresh(), "max_tokens": 4, "ignore_eos": True}
    assert mesh.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    mesh.wait_until(
        lambda: "kv.transfer" in {s.name for s in load_spans(mesh.supervisor.trace_dir) if s.trace_id == trace_id},
        "the client's trace",
    )


def test_junk_on_subjects_and_ports_disturbs_nobody(mesh: Mesh) -> None:
    async def spray() -> None:
        rng = random.Random(1)
        for role, name in (
            (Role.HOLDER, "prefill-0"),
            (Role.HOLDER, "decode-0"),
            *((role, "x") for role in SERVICE_NAMES),
        ):
            bus = await NatsBus.connect(mesh.access(role, name), "junk")
            patterns = [p for s in subjects.SUBJECTS for p in granted(s, role, Direction.PUBLISH, name)]
            for subject in (pattern.replace("*", to) for pattern in patterns for to in ("prefill-0", "decode-0")):
                for payload in (b"", b"{", b"null", rng.randbytes(200), b'{"type":"PlaceRequest"}', b"[" * 5000):
                    await bus.publish(subject, payload, {})
            await bus.flush()
            await bus.close()

    mesh.call(spray())
    port = _plane_port(mesh)
    for payload in (b"", b"GET / HTTP/1.1\r\n\r\n", random.Random(2).randbytes(5000), b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
            sock.sendall(payload)
    answers = in_parallel([lambda: mesh.complete(QUESTION)["choices"][0]["text"].strip()] * 8, 4)
    assert answers == ["7412"] * 8
    mesh.wait_until(
        lambda: all(w.num_dropped_messages > 0 for w in mesh.fleet.workers), "junk to be counted by both workers"
    )
    mesh.wait_until(
        lambda: {w.worker.worker_id: w.num_refused_reads for w in mesh.fleet.workers}["prefill-0"] >= 2,
        "junk on the data plane's port to be counted",
    )
    mesh.assert_no_blocks_held()


def _plane_port(mesh: Mesh) -> int:
    endpoint = next(w.worker.endpoint for w in mesh.fleet.workers if w.worker.worker_id == "prefill-0")
    assert endpoint is not None
    return endpoint.port


def test_a_client_that_goes_away_frees_everything(mesh: Mesh) -> None:
    body = {"model": mesh.model, "prompt": QUESTION, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with mesh.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    mesh.assert_no_blocks_held()


def test_every_service_is_listed_by_the_services_api(mesh: Mesh) -> None:
    async def ping() -> set[str]:
        bus = await NatsBus.connect(mesh.access(Role.OBSERVER), "pinger")
        inbox = await bus.subscribe("_INBOX.test")
        client = bus._client
        await client.publish("$SRV.PING", b"", reply="_INBOX.test")
        found: set[str] = set()
        async for delivery in inbox:
            found.add(json.loads(delivery.payload)["name"])
            if found >= EVERY_SERVICE:
                break
        await bus.close()
        return found

    assert mesh.call(ping()) >= EVERY_SERVICE


def test_workers_join_and_leave_at_run_time(mesh: Mesh) -> None:
    config = mesh.run_dir / "mesh.toml"
    command = [
        sys.executable,
        "-m",
        "services.cli.main",
        "serve",
        "decode",
        "--config",
        str(config),
        "--id",
        "decode-9",
    ]
    used: set[str] = set()

    def both_have_served() -> bool:
        used.add(mesh.complete(fresh())["usage"]["kvmesh"]["decode_worker"])
        return used == {"decode-0", "decode-9"}

    with subprocess.Popen(command) as worker:
        try:
            mesh.wait_until(lambda: "decode-9" in {w.worker.worker_id for w in mesh.fleet.workers}, "decode-9 to join")
            mesh.wait_until(both_have_served, "both to serve")
        finally:
            worker.terminate()
    assert worker.returncode == 0
    mesh.wait_until(lambda: "decode-9" not in {w.worker.worker_id for w in mesh.fleet.workers}, "decode-9 to leave")
    assert mesh.complete(fresh())["usage"]["kvmesh"]["decode_worker"] == "decode-0"


@pytest.mark.skipif(not may_be_process_1(), reason="no namespace of processes may be made here")
def test_a_worker_ends_whenever_it_is_told_to(mesh: Mesh) -> None:
    for after_s in (0.5, 2, 5):
        took_s = end_as_it_starts(mesh.run_dir / "mesh.toml", after_s)
        print(f"told after {after_s} s: gone after {took_s:.2f} s")
        assert took_s < ENDS_WITHIN_S
    mesh.wait_until(lambda: "decode-9" not in {w.worker.worker_id for w in mesh.fleet.workers}, "decode-9 to leave")


def test_status_shows_the_fleet(mesh: Mesh) -> None:
    command = [sys.executable, "-m", "services.cli.main", "status", *mesh.bus_options(), "--json"]
    fleet = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert fleet["ready"] and {w["worker"]["role"] for w in fleet["workers"]} == {"prefill", "decode"}


def test_the_demo_model_answers_long_prompts(mesh: Mesh) -> None:
    """The end-to-end quality check in small; `make quality` prints the full one."""
    rng = random.Random(11)
    prompts = [make_fact_prompt(rng, 6, length) for length in (100, 500, 2000, 2300) for _ in range(6)]
    texts = in_parallel([lambda p=p: mesh.complete(p.prompt)["choices"][0]["text"].strip() for p in prompts], 4)
    right = sum(text == prompt.answer for text, prompt in zip(texts, prompts, strict=True))
    assert right >= 20, f"{right} of {len(prompts)}"


def test_tokens_are_heard_once_each(mesh: Mesh) -> None:
    with TokenRecorder(mesh) as recorder:
        request_id = mesh.complete(QUESTION, max_tokens=30, ignore_eos=True)["usage"]["kvmesh"]["request_id"]
        assert len(recorder.tokens(request_id)) == 30


def test_the_log_files_are_quiet(mesh: Mesh) -> None:
    """Nothing but what the junk of these tests was answered with."""
    for log in Path(mesh.supervisor.log_dir).glob("*.log"):
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def test_without_the_split_one_worker_does_both(running_mesh: RunningMesh, tmp_path: Path) -> None:
    options = Launch(num_prefill=0, num_decode=0, num_aggregated=1, config=MeshConfig(gateway=GatewayConfig(port=0)))
    with running_mesh(tmp_path, options) as whole:
        answer = whole.complete(QUESTION)
        kvmesh = answer["usage"]["kvmesh"]
        assert answer["choices"][0]["text"].strip() == "7412"
        assert (kvmesh["prefill_worker"], kvmesh["transferred_tokens"]) == ("aggregated-0", 0)
        assert kvmesh["decode_worker"] in (None, "aggregated-0")
        whole.assert_no_blocks_held()


def test_a_mesh_without_workers_says_503_and_when_to_try_again(running_mesh: RunningMesh, tmp_path: Path) -> None:
    options = Launch(num_prefill=1, num_decode=0, config=MeshConfig(gateway=GatewayConfig(port=0)))
    with running_mesh(tmp_path, options) as half:
        response = half.client.post("/v1/completions", json={"model": half.model, "prompt": "x"})
        assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
        assert "decode" in response.json()["error"]["message"]
        assert half.client.get("/health").status_code == 503
