"""Conversations over real processes: later turns read what earlier ones left anywhere, and every token is right."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from schemas.request import SamplingParams
from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.config import GatewayConfig, MeshConfig, ModelConfig, StoreConfig, WorkerConfig
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from tests.mesh.processes import Mesh, RunningMesh, in_parallel
from tests.mesh.reference import Case, Judge, SingleProcess
from tests.promises import nothing_wrong

NUM_CONVERSATIONS, NUM_TURNS, WIDTH = 10, 4, 5
FIRST_TOKENS = range(40, 500)


def talk(mesh: Mesh, number: int, *, ignore_eos: bool = True) -> list[tuple[Case, list[int], dict[str, Any]]]:
    """Hold one conversation; return each turn's case, answer and usage."""
    rng = random.Random(number)
    vocabulary = 500
    tokens = [rng.randrange(5, vocabulary) for _ in range(rng.choice(FIRST_TOKENS))]
    turns: list[tuple[Case, list[int], dict[str, Any]]] = []
    for _ in range(NUM_TURNS):
        sampling = SamplingParams(max_tokens=rng.randrange(2, 40), temperature=0, ignore_eos=ignore_eos)
        answer = mesh.complete(tokens, max_tokens=sampling.max_tokens, ignore_eos=ignore_eos, return_token_ids=True)
        token_ids = answer["choices"][0]["token_ids"]
        turns.append((Case(list(tokens), sampling), token_ids, answer["usage"]))
        tokens += token_ids + [rng.randrange(5, vocabulary) for _ in range(rng.randrange(1, 50))]
    return turns


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("carrier", "num_blocks", "store"), [("shm", 4096, ""), ("tcp", 64, "disk")])
def test_conversations(
    carrier: str,
    num_blocks: int,
    store: str,
    running_mesh: RunningMesh,
    tmp_path: Path,
    single: SingleProcess,
    judge: Judge,
) -> None:
    """With 64 blocks a worker everything is evicted all the time; a store then keeps what the workers cannot."""
    block_bytes = layout_of(read_checkpoint(str(DEMO_MODEL_DIR))).block_bytes
    options = Launch(
        num_prefill=2,
        num_decode=2,
        store=store,
        config=MeshConfig(
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(carrier=carrier, kv_bytes=num_blocks * block_bytes),
            store=StoreConfig(path=str(tmp_path / "store") if store else ""),
        ),
    )
    computed: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    with running_mesh(tmp_path / "run", options) as mesh:
        talks = in_parallel([lambda n=n: talk(mesh, n) for n in range(NUM_CONVERSATIONS)], WIDTH)
        mesh.assert_no_blocks_held()
        assert all(w.num_dropped_messages == w.num_refused_reads == 0 for w in mesh.fleet.workers)
    for turns in talks:
        for case, token_ids, usage in turns:
            judge.compare(f"{carrier} and one process", case, single.run(case), token_ids)
            mesh_usage = usage["kvmesh"]
            for view in (mesh_usage, mesh_usage["prefill"] or mesh_usage):
                told = view["cached_tokens"] + view["transferred_tokens"] + view["recomputed_tokens"]
                assert told == usage["prompt_tokens"] == len(case.prompt)
                assert sum(view["transferred_from"].values()) == view["transferred_tokens"]
            computing = mesh_usage["prefill"] or mesh_usage
            computed["tokens"] += computing["recomputed_tokens"]
            computed["prompts"] += usage["prompt_tokens"]
            sources.update(computing["transferred_from"])
            sources["cached"] += computing["cached_tokens"]
    print(f"\n{carrier}, {num_blocks} blocks: {dict(judge.verdict.counts)}, {dict(computed)}, {dict(sources)}")
    nothing_wrong(judge.verdict.wrong)
    assert computed["tokens"] < computed["prompts"], "something was reused"
    if num_blocks > 64:
        assert any(name.startswith("decode") for name in sources), "answers came back from decode workers"
        assert computed["tokens"] < 0.6 * computed["prompts"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("gemma3_text", {"num_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}),
        ("mistral", {"num_layers": 3}),
    ],
)
def test_hybrid_models_say_what_transformers_says(
    architecture: str, fields: dict[str, Any], running_mesh: RunningMesh, tmp_path: Path
) -> None:
    """Conversations longer than the window, through splits, prefix hits and reads: the library's own tokens."""
    folder = make_random_checkpoint(
        tmp_path / "model", architecture=architecture, vocab=512, context_length=2048, sliding_window=64, **fields
    )
    judge = Judge(folder)
    options = Launch(
        num_prefill=2,
        num_decode=2,
        config=MeshConfig(
            model=ModelConfig(path=str(folder)),
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(kv_bytes=8 << 20, token_budget=128),
        ),
    )
    reused = 0
    with running_mesh(tmp_path / "run", options) as mesh:
        talks = in_parallel([lambda n=n: talk(mesh, n, ignore_eos=False) for n in range(6)], 3)
        mesh.assert_no_blocks_held()
    for turns in talks:
        for case, token_ids, usage in turns:
            judge.compare(f"{architecture} and generate()", case, judge.generate(case), token_ids)
            computing = usage["kvmesh"]["prefill"] or usage["kvmesh"]
            reused += usage["prompt_tokens"] - computing["recomputed_tokens"]
    print(f"\n{architecture}: {dict(judge.verdict.counts)}, {reused} tokens reused")
    nothing_wrong(judge.verdict.wrong)
    assert reused > 0
