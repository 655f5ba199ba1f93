"""A mesh of real processes whose workers compute with vLLM: the tokens of a single vLLM, whoever dies."""

import asyncio
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from schemas.request import SamplingParams
from services.bench.drive.meshes import running
from services.config import MeshConfig
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.launch.supervisor import Supervisor, UpOptions
from tests.engine.vllm_engine.conftest import World
from tests.mesh.faults.actor import is_there
from tests.mesh.forked import ForkedSupervisor, ForkingLoop
from tests.mesh.processes import RunningMesh
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
OPTIONS = UpOptions(port=0, engine="vllm", kv_bytes=64 << 20, num_threads=1, token_budget=160)
CONCURRENCY = 4


@dataclass(frozen=True)
class Question:
    prompt: list[int]
    sampling: SamplingParams
    model: str = "demo_model"

    def body(self) -> dict[str, object]:
        sampling = self.sampling
        return {
            "model": self.model, "prompt": self.prompt, "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip


def questions(count: int, *, max_tokens: int = 24, seed: int = 5, vocab_size: int = 1300) -> list[Question]:
    rng = random.Random(seed)
    found: list[Question] = []
    for number in range(count):
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=number % 2 * 2.0, top_p=(1.0, 0.9)[number % 4 == 3], seed=number,
            ignore_eos=True,
        )  # fmt: skip
        found.append(Question([rng.randrange(1, vocab_size) for _ in range(rng.randrange(5, 600))], sampling))
    return found


async def ask(http: httpx.AsyncClient, url: str, question: Question) -> tuple[list[int], dict[str, Any]]:
    """Return the answer's tokens and `usage.kvmesh`."""
    response = await http.post(f"{url}/v1/completions", json=question.body())
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["choices"][0]["token_ids"], reply["usage"]["kvmesh"]


def num_computed(usage: dict[str, Any]) -> int:
    """Return how many of a prompt's tokens were computed, on whichever worker."""
    return (usage["prefill"] or usage)["recomputed_tokens"]


async def ask_all(url: str, asked: list[Question], width: int = CONCURRENCY) -> list[tuple[list[int], dict[str, Any]]]:
    gate = asyncio.Semaphore(width)
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:

        async def one(question: Question) -> tuple[list[int], dict[str, Any]]:
            async with gate:
                return await ask(http, url, question)

        return await asyncio.gather(*(one(question) for question in asked))


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
            Question([*one.prompt, *tokens, 7, 8, 9], one.sampling)
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

    with running_mesh(tmp_path, replace(OPTIONS, num_prefill=2, num_decode=2)) as mesh:
        assert mesh.call(while_two_die(mesh.supervisor)) == expected


class MixedFleet(ForkedSupervisor):
    """Its mesh.toml was written where vLLM packs its blocks otherwise."""

    def _config(self, port: int) -> MeshConfig:
        config = super()._config(port)
        engine = msgspec.structs.replace(config.engine, kv_format=config.engine.kv_format.replace("LBHNC", "LBNHC"))
        return msgspec.structs.replace(config, engine=engine)


def test_a_worker_of_another_format_does_not_start(forking: ForkingLoop, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    mesh = MixedFleet(OPTIONS, tmp_path, forking.zygote)
    with pytest.raises(UserError, match=r"workers that share KV run one version of it, on processors of one kind$"):
        forking.run(mesh.start())
    forking.run(mesh.stop())
