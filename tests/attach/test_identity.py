"""What a server's configuration says of its KV, and what is not shared, by name. With vLLM's own records:
`tests/attach/test_vllm_attach.py`."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.attach import KVIdentity
from services.attach.connector.identity import Machine, NotServedError, identity_of
from services.attach.connector.settings import ConnectorSettings, read_api_key, read_settings
from services.engine.checkpoint import read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.vllm_engine.formats import cpu_format
from services.errors import CheckpointError, UserError

BLOCK_SIZE = 32
MACHINE = Machine("0.0", lambda dtype, block_size, head_size: f"vec-{dtype}-{block_size}-{head_size}")


class FullAttentionSpec(SimpleNamespace):
    """Named as vLLM's."""


class SlidingWindowSpec(SimpleNamespace):
    """Named as vLLM's."""


def config(**changes: Any) -> SimpleNamespace:
    """Return what is read of vLLM's `VllmConfig`; `changes`: by "part.field"."""
    made = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        model_config=SimpleNamespace(
            model=str(DEMO_MODEL_DIR), revision=None, dtype="torch.float32", runner_type="generate",
            is_encoder_decoder=False, hf_overrides={}, quantization=None, model_impl="auto",
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute"),
        device_config=SimpleNamespace(device_type="cpu"),
        load_config=SimpleNamespace(load_format="auto"),
        speculative_config=None, lora_config=None, additional_config={},
    )  # fmt: skip
    for name, value in changes.items():
        *parts, field = name.split("__")
        target = made
        for part in parts:
            target = getattr(target, part)
        setattr(target, field, value)
    return made


def cache(*specs: Any, **changes: Any) -> SimpleNamespace:
    demo = read_checkpoint(str(DEMO_MODEL_DIR), "vllm")
    fields = {
        "block_size": BLOCK_SIZE, "num_kv_heads": demo.num_kv_heads, "head_size": demo.head_dim,
        "dtype": "torch.float32", "sliding_window": None, "attention_chunk_size": None,
    }  # fmt: skip
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(demo.num_layers)]
    specs = specs or (FullAttentionSpec(**fields | changes),)
    groups = [SimpleNamespace(layer_names=names, kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def test_an_identity_is_of_the_files_and_of_what_vllm_makes_of_them() -> None:
    demo = read_checkpoint(str(DEMO_MODEL_DIR), "vllm")
    packing = f"vec-float32-{BLOCK_SIZE}-{demo.head_dim}"
    assert identity_of(config(), cache(), MACHINE) == KVIdentity(
        weights=demo.weights, kv_format=cpu_format("0.0", packing, "float32", {}), dtype="float32",
        num_layers=demo.num_layers, num_kv_heads=demo.num_kv_heads, head_dim=demo.head_dim, block_size=BLOCK_SIZE,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__hf_overrides": {"rope_theta": 1e5}},
        {"model_config__quantization": "fp8"},
        {"model_config__model_impl": "transformers"},
        {"additional_config": {"x": 1}},
        {"machine": Machine("0.1", MACHINE.packing)},
        {"machine": Machine("0.0", lambda *_: "amx")},
    ],
)
def test_whatever_changes_kv_changes_the_identity(changes: dict[str, Any]) -> None:
    machine = changes.pop("machine", MACHINE)
    assert identity_of(config(**changes), cache(), machine) != identity_of(config(), cache(), MACHINE)


def test_other_weights_are_another_identity(tmp_path: Path) -> None:
    for file in DEMO_MODEL_DIR.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"rms_norm_eps": 2e-6}))
    other = identity_of(config(model_config__model=str(tmp_path)), cache(), MACHINE)
    assert other.weights != identity_of(config(), cache(), MACHINE).weights


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_transfer_config__kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"parallel_config__data_parallel_size": 2}, "data_parallel_size is 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size is 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill_context_parallel_size is 2"),
        ({"device_config__device_type": "cuda"}, "runs on cuda"),
        ({"speculative_config": object()}, "speculative"),
        ({"lora_config": object()}, "--enable-lora"),
        ({"model_config__runner_type": "pooling"}, "pooling"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"load_config__load_format": "gguf"}, "load_format gguf"),
        ({"load_config__load_format": "dummy"}, "load_format dummy"),
        ({"cache_config__cache_dtype": "fp8_e5m2"}, "kv_cache_dtype fp8_e5m2"),
    ],
)
def test_what_is_not_shared_does_not_start_and_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotServedError, match=text):
        identity_of(config(**changes), cache(), MACHINE)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"sliding_window": 128}, "windows"),
        ({"attention_chunk_size": 128}, "windows"),
        ({"dtype": "torch.float8_e4m3fn"}, "float8_e4m3fn"),
        ({"num_kv_heads": 99}, "config.json says"),
    ],
)
def test_another_kind_of_kv_is_named(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(NotServedError, match=text):
        identity_of(config(), cache(**changes), MACHINE)
    for specs in ((SlidingWindowSpec(),), (FullAttentionSpec(), SlidingWindowSpec())):
        with pytest.raises(NotServedError, match="full attention"):
            identity_of(config(), cache(*specs), MACHINE)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        identity_of(config(model_config__model=str(tmp_path)), cache(), MACHINE)
    with pytest.raises(NotServedError, match="not found"):
        identity_of(config(model_config__model="no/such"), cache(), MACHINE)


# Its settings.


def test_settings_have_defaults() -> None:
    assert read_settings({"socket": "s"}) == ConnectorSettings(socket="s")


@pytest.mark.parametrize(
    "wrong", [{}, {"socket": 3}, {"socket": "s", "sokcet": "s"}, {"socket": "s", "check_every": 0}]
)
def test_a_setting_that_cannot_be_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="kv_connector_extra_config"):
        read_settings(wrong)


def test_a_key_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k\n")
    assert read_api_key(ConnectorSettings(socket="s", api_key_file=str(file))) == "k"
    assert read_api_key(ConnectorSettings(socket="s")) == ""
    with pytest.raises(UserError, match="api_key_file"):
        read_api_key(ConnectorSettings(socket="s", api_key_file=str(tmp_path)))
