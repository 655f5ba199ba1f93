"""What the KV of a server is, read from vLLM's own configuration; and what is not shared, by name.

`config`: `vllm.config.VllmConfig`, `cache`: `vllm.v1.kv_cache_interface.KVCacheConfig`. What of them is relied on is in
`tests/attach/test_identity.py`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dataplane.blocks.layout import ITEM_BYTES, KVLayout
from schemas.attach import KVIdentity, NotSaved
from services.engine.checkpoint import read_checkpoint
from services.engine.vllm_engine.formats import cpu_format
from services.errors import UserError

LOAD_FORMATS = ("auto", "hf", "safetensors")
"""Which load the safetensors files that the identity covers."""


class NotServedError(UserError):
    """A server with this setting cannot be attached."""


class Machine(NamedTuple):
    """What only vLLM itself knows: its version, and how it lays a block out for this machine, by dtype, block size and
    head size."""

    version: str
    packing: Callable[[str, int, int], str]


def check_served(config: Any, cache: Any) -> None:
    """Raise NotServedError for what is not shared, in a line that says what to change."""
    parallel, model, kv = config.parallel_config, config.model_config, config.cache_config
    transfer = config.kv_transfer_config
    if transfer.kv_load_failure_policy != "recompute":
        raise NotServedError(
            f'kv_load_failure_policy is "{transfer.kv_load_failure_policy}": a block that cannot be loaded would end '
            'the answer; set "kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) != 1:
            raise NotServedError(f"{name} is {size}: a server that is attached has one rank; leave it out")
    if (device := config.device_config.device_type) != "cpu":
        raise NotServedError(f"vLLM runs on {device}: only servers on the CPU are attached yet")
    if config.speculative_config is not None:
        raise NotServedError("speculative decoding writes KV of tokens that are not taken: leave it out")
    if config.lora_config is not None:
        raise NotServedError("KV of an adapter would be taken for the model's: leave out --enable-lora")
    if model.runner_type == "pooling":
        raise NotServedError("a pooling model answers with no tokens: nothing is shared")
    if model.is_encoder_decoder:
        raise NotServedError("an encoder-decoder's KV depends on more than its tokens: nothing is shared")
    if config.load_config.load_format not in LOAD_FORMATS:
        raise NotServedError(
            f"load_format {config.load_config.load_format} loads other files than those that name the weights: "
            "use safetensors"
        )
    if kv.cache_dtype not in ("auto", _dtype(config)):
        raise NotServedError(f"kv_cache_dtype {kv.cache_dtype} is not shared: leave it out, for that of the model")
    _check_groups(cache)


def identity_of(config: Any, cache: Any, machine: Machine) -> KVIdentity:
    """Return what the KV of this server is. Raises NotServedError, and CheckpointError for its folder."""
    check_served(config, cache)
    checkpoint = read_checkpoint(_folder(config.model_config), "vllm")
    if any(checkpoint.windows):
        raise NotServedError(f"{checkpoint.name} has layers with windows, which are not shared yet")
    (group,) = cache.kv_cache_groups
    spec = group.kv_cache_spec
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise NotServedError(f"KV of dtype {dtype} is not shared: start with --dtype {' or '.join(ITEM_BYTES)}")
    found = (len(group.layer_names), spec.num_kv_heads, spec.head_size)
    named = (checkpoint.num_layers, checkpoint.num_kv_heads, checkpoint.head_dim)
    if found != named:
        raise NotServedError(f"vLLM has KV of {found} layers, heads and values, and config.json says {named}")
    packing = machine.packing(dtype, spec.block_size, spec.head_size)
    return KVIdentity(
        weights=checkpoint.weights,
        kv_format=cpu_format(machine.version, packing, dtype, further_args(config)),
        dtype=dtype,
        num_layers=checkpoint.num_layers,
        num_kv_heads=checkpoint.num_kv_heads,
        head_dim=checkpoint.head_dim,
        block_size=spec.block_size,
    )


def further_args(config: Any) -> Mapping[str, Any]:
    """Return the arguments that change what a server computes, besides the checkpoint's files: those that are set."""
    model = config.model_config
    args: dict[str, Any] = {
        "hf_overrides": repr(model.hf_overrides) if callable(model.hf_overrides) else model.hf_overrides,
        "quantization": model.quantization,
        "additional_config": config.additional_config,
        "model_impl": "" if (impl := str(getattr(model.model_impl, "value", model.model_impl))) == "auto" else impl,
    }
    return {name: value for name, value in args.items() if value}


def layout_of(identity: KVIdentity) -> KVLayout:
    """Return how this KV lies in the holder's arena: whole pages, as bytes that only servers like it understand."""
    return KVLayout(
        weights=f"{identity.weights}@{identity.kv_format}",
        dtype=identity.dtype,
        num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads,
        head_dim=identity.head_dim,
        block_size=identity.block_size,
        whole_blocks=True,
    )


def not_shared(request: Any) -> NotSaved | None:
    """Return why this request (`vllm.v1.request.Request`) is answered without others' KV, and leaves none; None: it is
    shared."""
    if request.mm_features:
        return NotSaved.IMAGES
    if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
        return NotSaved.EMBEDDINGS
    if request.lora_request is not None:
        return NotSaved.ADAPTER
    if request.skip_reading_prefix_cache:
        return NotSaved.PROMPT_LOGPROBS
    return None


def _check_groups(cache: Any) -> None:
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        raise NotServedError(f"the model has {len(groups)} kinds of KV: only models of full attention are shared yet")
    spec = groups[0].kv_cache_spec
    if type(spec).__name__ != "FullAttentionSpec":
        raise NotServedError(f"the model's KV is a {type(spec).__name__}: only full attention is shared yet")
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        raise NotServedError("the model has layers with windows, which are not shared yet")


def _dtype(config: Any) -> str:
    return str(config.model_config.dtype).removeprefix("torch.")


def _folder(model: Any) -> str:
    """Return the checkpoint's folder; of a hub's model, the one that vLLM has downloaded. Raises NotServedError."""
    if Path(model.model).is_dir():
        return str(model.model)
    import huggingface_hub  # noqa: PLC0415 - there is one wherever vLLM is

    try:
        download = cast("Callable[..., str]", huggingface_hub.snapshot_download)  # pyright: ignore[reportUnknownMemberType]
        return download(model.model, revision=model.revision, local_files_only=True)
    except Exception as error:
        raise NotServedError(f"the files of {model.model} are not found: name its folder ({error})") from error
