"""Memory that is too small for the load, and a store behind it: what vLLM computed, evicted, kept on disk and read by
another mesh gives the tokens of a single vLLM. Another engine's mesh is never given it."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from services.config import EngineConfig, GatewayConfig, MeshConfig, SchedulerConfig, StoreConfig, WorkerConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.settings import changed
from tests.engine.vllm_engine.conftest import World
from tests.engine.vllm_engine.test_vllm_mesh import ask_all, questions
from tests.mesh.processes import Mesh, RunningMesh
from tests.mesh.reference import Case, Judge, SingleProcess
from tests.promises import nothing_wrong

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NUM_BLOCKS = 64
"""Of each worker: half of what is asked for at once."""
BLOCK_SIZE = 32
WIDTH = 12


def num_from_store(usages: list[dict[str, Any]]) -> int:
    """Return how many tokens' KV came from the store, to whichever worker."""
    reports = [report for usage in usages for report in (usage, usage["prefill"] or {})]
    return sum(report.get("transferred_from", {}).get("store-0", 0) for report in reports)


def test_small_memories_and_a_store_that_outlives_the_mesh(
    real_world: World, running_mesh: RunningMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_STATE_DIR", str(tmp_path / "state"))
    block_bytes = real_world.link.layout.block_bytes
    options = Launch(
        store="disk",
        config=MeshConfig(
            gateway=GatewayConfig(port=0),
            scheduler=SchedulerConfig(policy="tests.scheduler.policies:reads_what_it_can"),
            worker=WorkerConfig(
                block_size=BLOCK_SIZE, num_threads=1, token_budget=160, kv_bytes=NUM_BLOCKS * block_bytes
            ),
            engine=EngineConfig(name="vllm", kv_bytes=(NUM_BLOCKS + 4) * block_bytes),
            store=StoreConfig(path=str(tmp_path / "store")),
        ),
    )
    asked = questions(16, seed=7)
    expected = [real_world.reference(one.prompt, one.sampling) for one in asked]

    def answers(mesh: Mesh) -> tuple[list[list[int]], int]:
        got = mesh.call(ask_all(mesh.url, asked, width=WIDTH))
        return [tokens for tokens, _ in got], num_from_store([usage for _, usage in got])

    with running_mesh(tmp_path / "first", options) as mesh:
        too_long = Case([7] * (NUM_BLOCKS * BLOCK_SIZE + 1), asked[0].sampling)
        refused = httpx.post(f"{mesh.url}/v1/completions", json=too_long.fields | {"model": mesh.model}, timeout=60)
        assert refused.status_code == 400, refused.text
        assert answers(mesh) == (expected, 0)
        tokens, num_read = answers(mesh)
        assert tokens == expected and num_read > 0, "what was evicted is read back"
        mesh.assert_no_blocks_held()

    own = changed(options, {"config.engine.name": "transformers", "config.engine.kv_bytes": 0})
    single, judge = SingleProcess(DEMO_MODEL_DIR), Judge(DEMO_MODEL_DIR)
    with running_mesh(tmp_path / "own", own) as mesh:
        tokens, num_read = answers(mesh)
        assert num_read == 0, "KV of vLLM's is no KV of our own engine's"
        for number, (case, got) in enumerate(zip(asked, tokens, strict=True)):
            judge.compare("own engine", case, single.run(case, number), got)
        nothing_wrong(judge.verdict.wrong)

    with running_mesh(tmp_path / "second", options) as mesh:
        tokens, num_read = answers(mesh)
        assert tokens == expected and num_read > 0, "what another mesh has left is read back"
