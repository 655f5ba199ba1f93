"""What strangers met, on the real engine of each kind: its grammars, its texts, and what befalls its process."""

import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from schemas.worker import WorkerLoad
from services.config import EngineConfig, EngineName, GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.launch.options import Launch
from tests.gateway.sentencepiece import folder_with, llama
from tests.mesh.faults.actor import engines_of, is_stopped
from tests.mesh.processes import Mesh, RunningMesh
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.timeout(900)
HEARD_BY_GROUPS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def mesh(
    request: pytest.FixtureRequest, running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mesh]:
    """One worker, whose engine has a spare, each a process as `kvmesh up` starts it; a tokenizer whose words begin
    with the space before them."""
    engine: EngineName = request.param
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    folder = tmp_path_factory.mktemp(engine)
    options = Launch(
        num_prefill=0,
        num_decode=0,
        num_aggregated=1,
        config=MeshConfig(
            model=ModelConfig(path=str(folder_with(llama(), folder / "model"))),
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(kv_bytes=64 << 20, num_threads=1),
            engine=EngineConfig(name=engine, spares=1),
        ),
    )
    with running_mesh(folder / "run", options, forked=False) as running:
        yield running


@pytest.fixture(scope="module")
def tokenizer(mesh: Mesh) -> Tokenizer:
    return Tokenizer.from_file(str(Path(mesh.supervisor.checkpoint.path) / "tokenizer.json"))


def worker_of(mesh: Mesh) -> tuple[int, WorkerLoad]:
    """Return the worker's process, and what it says of itself."""
    (child,) = [child for child in mesh.supervisor.children if child.role == "aggregated"]
    (load,) = mesh.fleet.workers
    return child.process.pid, load


def await_spare(mesh: Mesh) -> None:
    mesh.wait_until(lambda: worker_of(mesh)[1].engine.num_spares == 1, "a spare is loaded")


def answer(mesh: Mesh) -> list[int]:
    """Return the tokens of an answer that takes a second or so: they are the same each time. A gateway waits for the
    one worker there is for so long, and says then when to ask again."""
    body = {"model": mesh.model, "prompt": [300, 301, 302], "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "allowed_token_ids": [*range(3, 300)]}
    while (told := httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=PATIENCE_S)).status_code == 503:
        assert told.json()["error"]["code"] == "no_worker" and told.headers["retry-after"], told.text
    assert told.status_code == 200, told.text
    return told.json()["choices"][0]["token_ids"]


def await_running(mesh: Mesh) -> None:
    mesh.wait_until(lambda: worker_of(mesh)[1].num_running > 0, "the answer has begun")


def test_a_grammar_that_cannot_be_held_is_refused_and_another_one_held(mesh: Mesh) -> None:
    words = " & ".join(f"/(?s:.*)w{number}(?s:.*)/" for number in range(60))
    refused: list[dict[str, Any]] = [
        {"guided_grammar": f"start: A\nA: {words}\n"},
        {"guided_json": {"enum": [9007199254740993]}},
        {"guided_json": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}},
    ]
    for fields in refused:
        body = {"model": mesh.model, "prompt": "the dog", **fields}
        told = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert told.status_code == 400, told.text
    (choice,) = mesh.complete("the dog", guided_json={"enum": [9007199254740991]}, max_tokens=40)["choices"]
    assert choice["text"] == "9007199254740991"


def test_a_text_is_what_the_answer_adds_to_its_prompt(mesh: Mesh, tokenizer: Tokenizer) -> None:
    words = [tokenizer.token_to_id(word) for word in ("▁the", "▁dog", "▁cat")]
    fields: dict[str, Any] = {"allowed_token_ids": words, "return_token_ids": True, "ignore_eos": True}
    (choice,) = mesh.complete("the dog", **fields)["choices"]
    both = tokenizer.decode([*tokenizer.encode("the dog").ids, *choice["token_ids"]])
    assert choice["text"] == both.removeprefix("the dog") and choice["text"].startswith(" ")
    assert mesh.complete("the dog", echo=True, **fields)["choices"][0]["text"] == both
    assert mesh.complete("the dog", guided_choice=[" the cat"])["choices"][0]["text"] == " the cat"
    assert mesh.complete("the dog", stop=choice["text"][:4], **fields)["choices"][0]["text"] == ""


def test_what_a_group_is_told_ends_no_engine(mesh: Mesh) -> None:
    await_spare(mesh)
    pid, before = worker_of(mesh)
    for number in HEARD_BY_GROUPS:
        for child in engines_of(pid):
            os.kill(child, number)
    os.kill(pid, signal.SIGHUP)
    answer(mesh)
    after_pid, after = worker_of(mesh)
    assert (after_pid, after.engine.num_deaths, after.engine.num_spares) == (pid, before.engine.num_deaths, 1)


def test_an_engine_comes_back_when_there_are_descriptors_again(mesh: Mesh) -> None:
    await_spare(mesh)
    expected = answer(mesh)
    pid, before = worker_of(mesh)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(answer, mesh)
        await_running(mesh)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for child in reversed(engines_of(pid)):
                os.kill(child, signal.SIGKILL)
            log = mesh.supervisor.log_dir / f"{before.worker.worker_id}.log"
            for what in ("the engine does not start", "a spare engine does not start"):
                mesh.wait_until(lambda what=what: f"{what}: [Errno 24]" in log.read_text(), what)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert asked.result() == expected
    await_spare(mesh)
    after_pid, after = worker_of(mesh)
    assert after_pid == pid and after.engine.num_deaths > before.engine.num_deaths


def test_a_spare_that_hangs_as_it_loads_is_not_waited_for(mesh: Mesh) -> None:
    await_spare(mesh)
    expected = answer(mesh)
    pid, _ = worker_of(mesh)
    engine, spare = engines_of(pid)
    os.kill(spare, signal.SIGKILL)
    mesh.wait_until(lambda: len(set(engines_of(pid)) - {spare}) == 2, "another spare is being loaded")
    hanging = engines_of(pid)[-1]
    os.kill(hanging, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    assert answer(mesh) == expected
    assert is_stopped(hanging), "the answer came before it was given up"
    os.kill(hanging, signal.SIGCONT)
    await_spare(mesh)
