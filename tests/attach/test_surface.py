"""What the attached connector uses of vLLM is there, by name and parameter: a version that changes one fails here, and
says which. No server is started; a server of another version is another identity, and shares with none of this one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.attach.connector.identity import NotServedError
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.engine.vllm_engine.test_vllm_surface import CONNECTOR, named, parameters

pytestmark = pytest.mark.vllm
HOOKS = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "on_new_request": ["request"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "request_finished": ["request", "block_ids"],
    "reset_cache": [],
    "register_kv_caches": ["kv_caches"],
    "start_load_kv": ["forward_context", "**kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "**kwargs"],
    "wait_for_save": [],
    "get_transfer_results": ["finished_req_ids"],
    "shutdown": [],
}
READ = {
    "vllm.v1.core.sched.output.SchedulerOutput": [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "kv_connector_block_state",
    ],
    "vllm.v1.core.sched.output.NewRequestData": ["req_id", "num_computed_tokens"],
    "vllm.v1.core.sched.output.CachedRequestData": ["req_ids", "num_computed_tokens"],
    "vllm.v1.outputs.KVConnectorOutput": ["finished_recving", "failed_recving"],
    f"{CONNECTOR}.KVConnectorTransferResults": ["finished_recving", "failed_recving"],
    "vllm.v1.kv_cache_interface.KVCacheConfig": ["kv_cache_groups"],
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.kv_cache_interface.FullAttentionSpec": [
        "block_size", "num_kv_heads", "head_size", "dtype", "sliding_window", "attention_chunk_size",
    ],
    "vllm.config.KVTransferConfig": [
        "engine_id", "kv_connector_extra_config", "kv_load_failure_policy", "kv_connector_module_path",
    ],
    "vllm.config.VllmConfig": [
        "parallel_config", "model_config", "cache_config", "device_config", "speculative_config", "lora_config",
        "load_config", "additional_config", "scheduler_config", "kv_transfer_config",
    ],
    "vllm.config.ParallelConfig": [
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ],
    "vllm.config.ModelConfig": [
        "model", "revision", "dtype", "served_model_name", "hf_overrides", "quantization", "model_impl",
    ],
    "vllm.config.CacheConfig": ["cache_dtype"],
    "vllm.config.LoadConfig": ["load_format"],
    "vllm.config.DeviceConfig": ["device_type"],
    "vllm.config.SchedulerConfig": ["max_num_batched_tokens"],
}  # fmt: skip
"""Fields of data classes."""
OF_A_REQUEST = (
    "request_id", "all_token_ids", "num_tokens", "prompt_token_ids", "cache_salt", "kv_transfer_params", "mm_features",
    "prompt_embeds", "lora_request", "skip_reading_prefix_cache", "trace_headers",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make attach-test")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_it_calls(hook: str) -> None:
    found = parameters(getattr(named(f"{CONNECTOR}.KVConnectorBase_V1"), hook))
    assert [f"**{each.name}" if each.kind == each.VAR_KEYWORD else each.name for each in found] == HOOKS[hook]


@pytest.mark.parametrize("hook", [*HOOKS, "request_finished_all_groups", "requires_kv_delivery"])
def test_ours_has_it(hook: str) -> None:
    from services.attach.connector.connector import KvmeshConnector

    assert hook in vars(KvmeshConnector) and not KvmeshConnector.__abstractmethods__  # type: ignore[attr-defined]


def test_the_hook_at_a_request_s_end() -> None:
    hook = named(f"{CONNECTOR}.SupportsHMA.request_finished_all_groups")
    assert [each.name for each in parameters(hook)] == ["request", "block_ids"]


@pytest.mark.parametrize("path", READ)
def test_what_is_read(path: str) -> None:
    names = {each.name for each in dataclasses.fields(named(path))}
    assert names >= {*READ[path]}, f"{path} has no {', '.join({*READ[path]} - names)}"


def test_properties_of_a_model() -> None:
    config = named("vllm.config.ModelConfig")(model=str(DEMO_MODEL_DIR), dtype="float32")
    assert (config.runner_type, config.is_encoder_decoder) == ("generate", False)


def test_a_request_of_its_scheduler_s() -> None:
    params = named("vllm.SamplingParams")(max_tokens=1)
    request = named("vllm.v1.request.Request")("r-1", [1, 2, 3], params, None)
    assert not [name for name in OF_A_REQUEST if not hasattr(request, name)]
    assert (request.request_id, list(request.all_token_ids), request.num_tokens) == ("r-1", [1, 2, 3], 3)


def test_how_a_block_is_packed() -> None:
    found = parameters(named("vllm.v1.attention.backends.cpu_attn._get_attn_isa"))
    assert [each.name for each in found[:4]] == ["dtype", "block_size", "head_size", "kv_cache_dtype"]


# What vLLM has its KV in: `register_kv_caches` takes pages that are all of their memory, each byte once.

SHAPE = (4, 2, 32, 16)


def sound() -> dict[str, Any]:
    return {f"model.layers.{number}.self_attn.attn": torch.zeros(SHAPE) for number in range(2)}


def strided() -> dict[str, Any]:
    return sound() | {"model.layers.1.self_attn.attn": torch.zeros((8, *SHAPE[1:]))[::2]}


def transposed() -> dict[str, Any]:
    return sound() | {"model.layers.1.self_attn.attn": torch.zeros((4, 32, 2, 16)).transpose(1, 2)}


def padded() -> dict[str, Any]:
    return sound() | {"model.layers.1.self_attn.attn": torch.zeros((5, *SHAPE[1:]))[:4]}


def overlapping() -> dict[str, Any]:
    memory = torch.zeros((6, *SHAPE[1:]))
    return {"model.layers.0.self_attn.attn": memory[:4], "model.layers.1.self_attn.attn": memory[2:]}


def unnumbered() -> dict[str, Any]:
    return sound() | {"model.attn": torch.zeros(SHAPE)}


@pytest.fixture
def pages_of(_vllm: None) -> Callable[[dict[str, Any]], dict[int, Any]]:
    from services.attach.connector.connector import pages_of

    return pages_of


def test_pages_are_a_layer_s_memory(pages_of: Any) -> None:
    caches = sound()
    pages = pages_of(caches)
    assert sorted(pages) == [0, 1] and pages[1].shape == (4, 2 * 32 * 16 * 4)
    pages[1][2] = 255
    first, second = caches.values()
    assert second[2].view(torch.int32).eq(-1).all() and not second[[0, 1, 3]].any() and not first.any()


def test_layers_may_lie_in_one_memory(pages_of: Any) -> None:
    memory = torch.zeros((8, *SHAPE[1:]))
    pages = pages_of({"model.layers.0.self_attn.attn": memory[:4], "model.layers.1.self_attn.attn": memory[4:]})
    pages[1][0] = 255
    assert memory[4].view(torch.int32).eq(-1).all() and not memory[:4].any()


@pytest.mark.parametrize("planted", [strided, transposed, padded, overlapping, unnumbered])
def test_pages_that_are_not_are_refused(pages_of: Any, planted: Callable[[], dict[str, Any]]) -> None:
    with pytest.raises(NotServedError):
        pages_of(planted())
