"""A burst on a mesh that has room for four answers: no prompt is computed twice. tests/sim/test_room.py has it in
virtual time."""

import asyncio
import random

import httpx
import pytest

from services.bench.burst import Meter
from services.bench.drive.meshes import running
from services.config import EngineConfig, EngineName, GatewayConfig, MeshConfig, WorkerConfig
from services.launch.options import Launch
from tests.waiting import PATIENCE_S

NUM_REQUESTS, NUM_TOKENS, MAX_TOKENS = 64, 1_000, 64


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
async def test_a_burst_beyond_the_room_computes_each_prompt_once(engine: EngineName) -> None:
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    rng = random.Random(18)
    options = Launch(
        config=MeshConfig(
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(kv_bytes=8 << 20, num_threads=1),
            engine=EngineConfig(name=engine),
        )
    )
    async with running({engine: options}) as meshes, httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        mesh = meshes[engine]
        meter = await Meter.of(mesh)

        async def ask() -> int:
            body = {
                "model": "demo_model", "prompt": [rng.randrange(1, 1_300) for _ in range(NUM_TOKENS)],
                "max_tokens": MAX_TOKENS, "ignore_eos": True, "temperature": 0,
            }  # fmt: skip
            answer = await http.post(f"{mesh.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]["kvmesh"]
            return usage["recomputed_tokens"] + (usage["prefill"] or {}).get("recomputed_tokens", 0)

        told = sum(await asyncio.gather(*(ask() for _ in range(NUM_REQUESTS))))
        counted = (await meter.work()).computed_tokens
    needed = NUM_REQUESTS * NUM_TOKENS
    assert needed <= told <= 1.1 * needed
    assert needed <= counted <= 1.1 * needed
