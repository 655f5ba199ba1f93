"""Checkpoints with random weights in the shapes of known models; what was made is kept for next time."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import torch as safetensors_torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from services.bench.drive.make_checkpoint import copy_tokenizer, make_random_checkpoint
from services.config import state_dir
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.weights import INDEX_FILE
from services.errors import CheckpointError

TINY = "tiny"
"""Tries the benchmark itself, without a card."""
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


def checkpoint_of(name: str) -> str:
    """Return the folder of a checkpoint, making it if need be. The large one takes 16 GB."""
    folder = state_dir() / "bench-models" / name
    if name == TINY:
        return str(folder if folder.is_dir() else make_random_checkpoint(folder, vocab=2048, context_length=4096))
    columns = (TextColumn("making {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(name)
        return str(
            make_known_checkpoint(
                name, folder, on_progress=lambda done, total: progress.update(bar, completed=done, total=total)
            )
        )


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
    copy_tokenizer(DEMO_MODEL_DIR, folder)
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
