"""A mesh of real processes whose workers compute with vLLM: the tokens of a single vLLM, whoever dies."""

import asyncio
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from schemas.request import SamplingParams
from services.bench.drive.meshes import running
from services.config import EngineConfig, GatewayConfig, MeshConfig, WorkerConfig
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.settings import changed
from tests.cli.commands import ENDS_WITHIN_S, end_as_it_starts, may_be_process_1
from tests.engine.vllm_engine.conftest import World
from tests.engine.vllm_engine.test_logprobs import TOLERANCE
from tests.mesh.faults.actor import is_there
from tests.mesh.forked import ForkedSupervisor, ForkingLoop
from tests.mesh.processes import RunningMesh
from tests.mesh.reference import Case
from tests.mesh.test_logprobs import echoes_split_and_cached
from tests.mesh.test_shaped_choices import survives_everything
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
OPTIONS = Launch(
    config=MeshConfig(
        gateway=GatewayConfig(port=0),
        worker=WorkerConfig(kv_bytes=64 << 20, num_threads=1, token_budget=160),
        engine=EngineConfig(name="vllm"),
    )
)
CONCURRENCY = 4


def questions(count: int, *, max_tokens: int = 24, seed: int = 5, vocab_size: int = 1300) -> list[Case]:
    rng = random.Random(seed)
    found: list[Case] = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=number % 2 * 2.0, top_p=(1.0, 0.9)[number % 4 == 3], seed=number,
            ignore_eos=True,
        )  # fmt: skip
        found.append(Case([rng.randrange(1, vocab_size) for _ in range(rng.randrange(5, 600))], sampling))
    return found


async def ask(http: httpx.AsyncClient, url: str, case: Case, model: str) -> tuple[list[int], dict[str, Any]]:
    """Return the answer's tokens and `usage.kvmesh`."""
    body = case.fields | {"model": model, "return_token_ids": True}
    response = await http.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["choices"][0]["token_ids"], reply["usage"]["kvmesh"]


def num_computed(usage: dict[str, Any]) -> int:
    """Return how many of a prompt's tokens were computed, on whichever worker."""
    return (usage["prefill"] or usage)["recomputed_tokens"]


async def ask_all(
    url: str, asked: list[Case], *, model: str = "demo_model", width: int = CONCURRENCY
) -> list[tuple[list[int], dict[str, Any]]]:
    gate = asyncio.Semaphore(width)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:

        async def one(case: Case) -> tuple[list[int], dict[str, Any]]:
            async with gate:
                return await ask(http, url, case, model)

        return await asyncio.gather(*(one(case) for case in asked))


async def until_free(mesh: Supervisor) -> None:
    """Wait until no worker has a block that is running or leased."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            loads = (await describe_fleet(mesh.access())).workers
            if loads and all(load.blocks.running == load.blocks.leased == 0 for load in loads):
                return
            await asyncio.sleep(0.1)


async def test_a_split_mesh_gives_the_tokens_of_a_single_vllm(real_world: World) -> None:
    asked = questions(24)
    expected = [real_world.reference(one.prompt, one.sampling) for one in asked]
    async with running({"vllm": OPTIONS}) as meshes:
        mesh = meshes["vllm"]
        first = await ask_all(mesh.url, asked)
        assert [tokens for tokens, _ in first] == expected
        for one, (_, usage) in zip(asked, first, strict=True):
            assert usage["transferred_tokens"] + usage["cached_tokens"] == len(one.prompt), "padding counts as nothing"
        turns = [
            Case([*one.prompt, *tokens, 7, 8, 9], one.sampling)
            for one, (tokens, _) in zip(asked[:8], first[:8], strict=True)
        ]
        second = await ask_all(mesh.url, turns)
        assert [tokens for tokens, _ in second] == [real_world.reference(t.prompt, t.sampling) for t in turns]
        assert sum(num_computed(usage) for _, usage in second) < sum(len(turn.prompt) for turn in turns) // 2, (
            "a turn begins with what the one before left"
        )
        await until_free(mesh)
        for target in mesh.metrics_targets:
            async with httpx.AsyncClient() as http:
                text = (await http.get(f"http://{target.targets[0]}/metrics")).text
            counted = re.findall(r'vllm:generation_tokens_total\{.*model_name="demo_model".*\} (\S+)', text)
            is_worker = target.labels["role"] in ("prefill", "decode")
            assert [float(count) > 0 for count in counted] == [True] * is_worker, target


async def test_a_burst_of_one_prompt_is_computed_once(real_world: World) -> None:
    """Four clients at once, on two prefill workers: each full block of it is computed by one of them."""
    asked = [replace(one, prompt=one.prompt[:1] + [11] * 999) for one in questions(1) * 4]
    expected = real_world.reference(asked[0].prompt, asked[0].sampling)
    async with running({"vllm": changed(OPTIONS, {"num_prefill": 2, "num_decode": 2})}) as meshes:
        mesh = meshes["vllm"]
        got = await ask_all(mesh.url, asked)
        assert [tokens for tokens, _ in got] == [expected] * 4
        computed = sum(num_computed(usage) for _, usage in got)
        assert computed <= len(asked[0].prompt) + 4 * real_world.size, computed
        await until_free(mesh)


def test_workers_that_are_killed_cost_no_token(real_world: World, running_mesh: RunningMesh, tmp_path: Path) -> None:
    asked = questions(12, max_tokens=160, seed=6)
    expected = [real_world.reference(one.prompt, one.sampling) for one in asked]

    async def while_two_die(mesh: Supervisor) -> list[list[int]]:
        answers = asyncio.create_task(ask_all(mesh.url, asked))
        for name in ("decode-0", "prefill-1"):
            await asyncio.sleep(1.0)
            next(child for child in mesh.children if child.name == name).kill()
        got = await answers
        await until(lambda: all(map(is_there, mesh.children)))
        await until_free(mesh)
        return [tokens for tokens, _ in got]

    with running_mesh(tmp_path, changed(OPTIONS, {"num_prefill": 2, "num_decode": 2})) as mesh:
        assert mesh.call(while_two_die(mesh.supervisor)) == expected


def test_shaped_choices_survive_everything(real_world: World, running_mesh: RunningMesh, tmp_path: Path) -> None:
    block_bytes = real_world.link.layout.block_bytes
    options = changed(
        OPTIONS, {"config.worker.kv_bytes": 96 * block_bytes, "config.engine.kv_bytes": 100 * block_bytes}
    )
    survives_everything(
        running_mesh, tmp_path, options, lambda case, _: real_world.reference(case.prompt, case.sampling)
    )


def test_echoed_prompts_have_transformers_logprobs(running_mesh: RunningMesh, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    echoes_split_and_cached(running_mesh, tmp_path, OPTIONS, TOLERANCE)


@pytest.mark.skipif(not may_be_process_1(), reason="no namespace of processes may be made here")
def test_a_worker_ends_whenever_it_is_told_to(running_mesh: RunningMesh, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    with running_mesh(tmp_path, OPTIONS) as mesh:
        for after_s in (0.5, 2, 5, 10, 20):
            took_s = end_as_it_starts(mesh.run_dir / "mesh.toml", after_s)
            print(f"told after {after_s} s: gone after {took_s:.2f} s")
            assert took_s < ENDS_WITHIN_S


class MixedFleet(ForkedSupervisor):
    """Its mesh.toml was written where vLLM packs its blocks otherwise."""

    def _config(self) -> MeshConfig:
        config = super()._config()
        return changed(config, {"engine.kv_format": config.engine.kv_format.replace("LBHNC", "LBNHC")})


def test_a_worker_of_another_format_does_not_start(forking: ForkingLoop, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    mesh = MixedFleet(OPTIONS, tmp_path, forking.zygote)
    with pytest.raises(UserError, match=r"workers that share KV run one version of it, on processors of one kind$"):
        forking.run(mesh.start_all())
    forking.run(mesh.stop_all())
