"""What is used of vLLM is there, by name: a version that changes one fails here at once, and says which. No model is
loaded. What the names *do* is the self-check's."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import pytest

from services.engine.vllm_engine import loading
from services.engine.vllm_engine.formats import NOT_SERVED, OURS

pytestmark = pytest.mark.vllm
CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base"
HOOKS = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "register_kv_caches": ["kv_caches"],
    "start_load_kv": ["forward_context", "**kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "**kwargs"],
    "wait_for_save": [],
}
CALLED = {
    "vllm.LLMEngine.from_engine_args": ["engine_args"],
    "vllm.LLMEngine.add_request": ["request_id", "prompt", "params"],
    "vllm.LLMEngine.abort_request": ["request_ids", "internal"],
    "vllm.LLMEngine.step": [],
    "vllm.LLMEngine.reset_prefix_cache": [],
    "vllm.v1.attention.backends.cpu_attn._get_attn_isa": ["dtype", "block_size", "head_size", "kv_cache_dtype"],
    "vllm.v1.sample.logits_processor.LogitsProcessor.__init__": ["vllm_config", "device", "is_pin_memory"],
    "vllm.v1.sample.logits_processor.LogitsProcessor.apply": ["logits"],
    "vllm.v1.sample.logits_processor.LogitsProcessor.is_argmax_invariant": [],
    "vllm.v1.sample.logits_processor.LogitsProcessor.update_state": ["batch_update"],
    "vllm.v1.sample.logits_processor.builtin.process_dict_updates": ["req_entries", "batch_update", "new_state"],
    "vllm.v1.core.sched.output.KVConnectorBlockState.get_block_ids": ["req_id"],
}
"""Each with the parameters that we give it, in order; it may have more, which have defaults."""
READ = {
    "vllm.v1.core.sched.output.SchedulerOutput": [
        "scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids",
        "kv_connector_block_state",
    ],
    "vllm.v1.core.sched.output.NewRequestData": ["req_id", "num_computed_tokens"],
    "vllm.v1.core.sched.output.CachedRequestData": ["req_ids", "num_computed_tokens"],
    "vllm.v1.kv_cache_interface.KVCacheConfig": ["kv_cache_groups"],
    "vllm.v1.kv_cache_interface.KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.kv_cache_interface.UniformTypeKVCacheSpecs": ["kv_cache_specs"],
    "vllm.v1.kv_cache_interface.SlidingWindowSpec": ["sliding_window"],
    "vllm.v1.kv_cache_interface.ChunkedLocalAttentionSpec": ["attention_chunk_size"],
    "vllm.CompletionOutput": ["token_ids"],
    "vllm.logprobs.Logprob": ["logprob"],
}  # fmt: skip
"""Fields of data classes."""
MADE = {
    "KVTransferConfig": "vllm.config.KVTransferConfig",
    "SamplingParams": "vllm.SamplingParams",
}
"""What `loading.py` makes, with names of fields."""


@pytest.fixture(autouse=True)
def _vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")


def named(path: str) -> Any:
    """Return what a dotted name stands for."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(path)


def parameters(function: Any) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(function).parameters.values() if each.name != "self"]


def fields_given(name: str) -> Iterable[str]:
    """Return the names by which `loading.py` gives a class its fields."""
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(loading))) if isinstance(node, ast.Call)]
    [call] = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_it_calls(hook: str) -> None:
    found = parameters(getattr(named(f"{CONNECTOR}.KVConnectorBase_V1"), hook))
    assert [f"**{each.name}" if each.kind == each.VAR_KEYWORD else each.name for each in found] == HOOKS[hook]


def test_the_hook_at_a_request_s_end() -> None:
    hook = named(f"{CONNECTOR}.SupportsHMA.request_finished_all_groups")
    assert [each.name for each in parameters(hook)] == ["request", "block_ids"]


def test_no_hook_is_missing() -> None:
    """One that it asks every connector for, and ours has not."""
    from services.engine.vllm_engine.connector import MeshConnector

    assert not inspect.isabstract(MeshConnector), MeshConnector.__abstractmethods__
    assert isinstance(named(f"{CONNECTOR}.KVConnectorBase_V1.requires_kv_delivery"), property)


@pytest.mark.parametrize("path", CALLED)
def test_what_is_called(path: str) -> None:
    found, given = parameters(named(path)), CALLED[path]
    assert [each.name for each in found[: len(given)]] == given
    needed = [each.name for each in found[len(given) :] if each.default is each.empty]
    assert not [name for name in needed if name not in ("args", "kwargs")]


@pytest.mark.parametrize("path", READ)
def test_what_is_read(path: str) -> None:
    names = {each.name for each in dataclasses.fields(named(path))}
    assert names >= {*READ[path]}, f"{path} has no {', '.join({*READ[path]} - names)}"


@pytest.mark.parametrize("name", MADE)
def test_what_is_made(name: str) -> None:
    given, known = {*fields_given(name)}, inspect.signature(named(MADE[name])).parameters
    assert given and given <= known.keys(), f"{name} has no {', '.join(given - known.keys())}"


def test_its_engine_s_arguments() -> None:
    """Those that we give it, those that a user may not, and those that we set unless a user does."""
    known = {each.name for each in dataclasses.fields(named("vllm.EngineArgs"))}
    assert known >= OURS | NOT_SERVED.keys() | loading.DEFAULTS.keys()


def test_a_request_of_its_scheduler_s() -> None:
    params = named("vllm.SamplingParams")(max_tokens=1)
    request = named("vllm.v1.request.Request")("r-1", [1, 2, 3], params, None)
    assert (request.request_id, request.num_tokens) == ("r-1", 3)


def test_an_output_of_its_engine_s() -> None:
    output = named("vllm.RequestOutput")("r", None, [1], None, [], True)
    assert (output.request_id, output.outputs, output.finished, output.prompt_logprobs) == ("r", [], True, None)
    assert named("vllm.sampling_params.RequestOutputKind").DELTA


def test_what_it_reads_of_the_environment() -> None:
    known = named("vllm.envs").environment_variables
    assert not [name for name in loading.ENVIRONMENT if name.startswith("VLLM_") and name not in known]
