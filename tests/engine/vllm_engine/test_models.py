"""What vLLM brings: other architectures and quantized weights keep all that `test_contract.py` asks for."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.bench.drive.meshes import running
from services.config import EngineConfig, GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.engine.checkpoint import read_checkpoint
from services.errors import CheckpointError
from services.launch.options import Launch
from tests.engine.rig import make_tiny
from tests.engine.vllm_engine.quantized import CONFIGS, quantize
from tests.engine.vllm_engine.test_vllm_mesh import ask_all, num_computed, questions, until_free
from tests.mesh.reference import Judge, SingleProcess
from tests.promises import nothing_wrong

SLIDING, FULL = "sliding_attention", "full_attention"
SHAPE: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows-of-five-in-six": (
        "gemma3_text",
        {"num_layers": 6, "sliding_window": 48, "layer_types": [SLIDING] * 5 + [FULL], "query_pre_attn_scalar": 32},
    ),
    "windows-everywhere": ("mistral", {"num_layers": 3, "sliding_window": 40}),
    "sinks": (
        "gpt_oss",
        {"num_layers": 4, "sliding_window": 64, "layer_types": [SLIDING, FULL] * 2, "num_local_experts": 4},
    ),
    "experts": (
        "qwen3_moe",
        {"num_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    "capped-logits": ("gemma2", {"num_layers": 2, "sliding_window": 64, "query_pre_attn_scalar": 32}),
}
NEEDS_AVX512 = ("gptq", "awq")
"""vLLM has no kernel for these on other CPUs."""
TIME_LIMIT_S = 400


def keeps_the_contract(model: Path) -> None:
    """One process has one vLLM, so the contract runs in another."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    contract = Path(__file__).with_name("test_contract.py")
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", contract, "-m", "vllm", "-W", "default", "-q", "--vllm-model", model],
        capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
    )  # fmt: skip
    last = ran.stdout.splitlines()[-1] if ran.stdout else ""
    is_kept = ran.returncode == 0 and " passed" in last and " skipped" not in last
    assert is_kept, ran.stdout[-8_000:] + ran.stderr[-2_000:]


@pytest.mark.vllm
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("name", MODELS)
def test_an_architecture(name: str, tmp_path: Path) -> None:
    architecture, fields = MODELS[name]
    keeps_the_contract(make_tiny(tmp_path / "model", architecture, **SHAPE, **fields))


@pytest.mark.vllm
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@pytest.mark.parametrize("method", CONFIGS)
def test_quantized_weights(method: str, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", **SHAPE, num_layers=2, dtype="bfloat16")
    if method in NEEDS_AVX512 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        with pytest.raises(AssertionError, match="cpu_gemm_wna16"):  # what is missing is said
            keeps_the_contract(quantize(model, method))
        return
    keeps_the_contract(quantize(model, method))


@pytest.mark.vllm
@pytest.mark.timeout(TIME_LIMIT_S)
async def test_windows_cross_between_workers(tmp_path: Path) -> None:
    """Rings on either end, leases that are padded, turns that begin with what the one before left. What our own engine
    computes is the reference: it shares nothing with vLLM but the sampler."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    architecture, fields = MODELS["windows-of-five-in-six"]
    model = make_tiny(tmp_path / "model", architecture, **SHAPE, **fields)
    single, judge = SingleProcess(model), Judge(model)
    options = Launch(
        config=MeshConfig(
            model=ModelConfig(path=str(model)),
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(kv_bytes=64 << 20, num_threads=1, token_budget=160),
            engine=EngineConfig(name="vllm"),
        )
    )
    asked = questions(16, vocab_size=500)
    async with running({"vllm": options}) as meshes:
        answers = await ask_all(meshes["vllm"].url, asked, model="model")
        turns = [
            replace(one, prompt=[*one.prompt, *tokens, 7, 8, 9])
            for one, (tokens, _) in zip(asked, answers, strict=True)
        ]
        following = await ask_all(meshes["vllm"].url, turns, model="model")
        await until_free(meshes["vllm"])
    assert sum(num_computed(usage) for _, usage in following) < sum(len(turn.prompt) for turn in turns) // 2
    for case, (tokens, _) in zip([*asked, *turns], [*answers, *following], strict=True):
        judge.compare("windows", case, single.run(case), tokens)
    nothing_wrong(judge.verdict.wrong)


@pytest.mark.parametrize("method", CONFIGS)
def test_a_quantized_checkpoint_is_computed_in_its_config_s_dtype(method: str, tmp_path: Path) -> None:
    model = quantize(make_tiny(tmp_path / "model", **SHAPE, dtype="bfloat16"), method)
    assert read_checkpoint(str(model), "vllm").dtype == "bfloat16"
    with pytest.raises(CheckpointError, match=r"is quantized: .* or try --engine vllm"):
        read_checkpoint(str(model))
