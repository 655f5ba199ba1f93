"""Checkpoints with random weights, for tests and benchmarks: of any shape, and of known models' shapes."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.weights import INDEX_FILE
from services.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SHARD_BYTES = 2 << 30
_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
KNOWN_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "qwen3",
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-8b": (
        "qwen3",
        _QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
    ),
}
"""Model type and configuration, as in the config.json of Qwen/Qwen3-0.6B and Qwen/Qwen3-8B."""


def make_random_checkpoint(
    path: str | Path,
    *,
    architecture: str = "qwen3",
    hidden: int = 64,
    num_layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 128,
    vocab: int = 512,
    context_length: int = 2048,
    seed: int = 0,
    dtype: str = "float32",
    tokenizer_from: str | Path = DEMO_MODEL_DIR,
    **config_fields: Any,
) -> Path:
    """Write a loadable checkpoint of transformers' model type `architecture` and return its folder.

    `config_fields` go to the configuration as they are (`sliding_window=32`, `eos_token_id=[1, 2]`). The tokenizer's
    files are copied from the folder `tokenizer_from`. Raises CheckpointError when it has none.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context_length,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
        # Wider than usual: random logits then differ enough for greedy choices to be no near-ties.
        "initializer_range": 0.1,
        **config_fields,
    }
    config = cast(Any, AutoConfig).for_model(architecture, **fields)
    with cast(Any, torch.random).fork_rng(devices=[]):
        cast(Any, torch).manual_seed(seed)
        model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(config, dtype=getattr(torch, dtype)))
    logging.disable_progress_bar()  # it is done in a moment
    cast(Any, model).save_pretrained(folder)
    _copy_tokenizer(tokenizer_from, folder)
    return folder


def make_known_checkpoint(
    name: str,
    path: str | Path,
    *,
    on_progress: Callable[[int, int], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    **config_fields: Any,
) -> Path:
    """Write a checkpoint of one of KNOWN_SHAPES in bfloat16 and return its folder; what lies there already is kept.

    Never has more than a shard in memory. `on_progress` is told the bytes that are written and those of it all.
    `config_fields` go to the configuration. Raises CheckpointError for an unknown name.
    """
    if name not in KNOWN_SHAPES:
        raise CheckpointError(f"{name} is no known shape: choose one of {', '.join(KNOWN_SHAPES)}")
    folder = Path(path)
    if (folder / INDEX_FILE).is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    architecture, fields = KNOWN_SHAPES[name]
    config = cast(Any, AutoConfig).for_model(architecture, **(fields | config_fields))
    shapes = _parameter_shapes(config)
    shards = list(_shards(shapes, shard_bytes))
    total = sum(_num_bytes(shape) for shape in shapes.values())
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    written = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {key: _random_parameter(shapes[key], generator, config.initializer_range) for key in shard}
        cast(Any, safetensors_torch).save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        written += sum(_num_bytes(shapes[key]) for key in shard)
        if on_progress is not None:
            on_progress(written, total)
    config.save_pretrained(folder)
    _copy_tokenizer(DEMO_MODEL_DIR, folder)
    # Last: it says that all of it is there.
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2), "utf-8")
    return folder


def _parameter_shapes(config: Any) -> dict[str, torch.Size]:
    """Return the names and shapes of what a checkpoint of this configuration holds; sets the configuration's rest."""
    with torch.device("meta"):
        model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(config, dtype=torch.bfloat16))
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    return {key: parameter.shape for key, parameter in model.named_parameters()}  # tied ones are named once


def _shards(shapes: dict[str, torch.Size], shard_bytes: int) -> Iterator[list[str]]:
    """Yield the names of the tensors of each file, in order, no file larger than `shard_bytes` if it has several."""
    shard: list[str] = []
    size = 0
    for name, shape in shapes.items():
        if shard and size + _num_bytes(shape) > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(name)
        size += _num_bytes(shape)
    yield shard


def _num_bytes(shape: torch.Size) -> int:
    return shape.numel() * torch.bfloat16.itemsize


def _random_parameter(shape: torch.Size, generator: torch.Generator, spread: float) -> torch.Tensor:
    """Return normal numbers; ones for what has one dimension, a norm's scale."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, spread, generator=generator)


def _copy_tokenizer(source_folder: str | Path, folder: Path) -> None:
    """Raises CheckpointError when there is none to copy."""
    sources = [source for name in TOKENIZER_FILES if (source := Path(source_folder) / name).is_file()]
    if not sources:
        raise CheckpointError(f"{source_folder} has no tokenizer to copy: name a folder that has one")
    for source in sources:
        shutil.copy(source, folder)
