"""Checkpoints of any shape with random weights, for tests and benchmarks."""

import shutil
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import CheckpointError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


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
    # Describe the model in transformers' names. `config_fields` come last, so that they override the other values.
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
    # Draw the weights in a fork of torch's generator: `seed` decides them, and the caller's random state is kept.
    with cast(Any, torch.random).fork_rng(devices=[]):
        cast(Any, torch).manual_seed(seed)
        model = cast(PreTrainedModel, cast(Any, AutoModelForCausalLM).from_config(config, dtype=getattr(torch, dtype)))
    # Save the model, and copy a tokenizer beside it: the folder is then a whole checkpoint.
    logging.disable_progress_bar()  # it is done in a moment
    cast(Any, model).save_pretrained(folder)
    copy_tokenizer(tokenizer_from, folder)
    return folder


def copy_tokenizer(source_folder: str | Path, folder: Path) -> None:
    """Raises CheckpointError when there is none to copy."""
    sources = [source for name in TOKENIZER_FILES if (source := Path(source_folder) / name).is_file()]
    if not sources:
        raise CheckpointError(f"{source_folder} has no tokenizer to copy: name a folder that has one")
    for source in sources:
        shutil.copy(source, folder)
