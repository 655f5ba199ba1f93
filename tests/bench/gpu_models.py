"""The checkpoints that `make gpu-bench` runs: random weights in the shapes of known models; kept for next time."""

import shutil
from typing import Any

from services.config import state_dir

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden": 1024, "num_layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden": 4096, "num_layers": 36, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 12288,
        "tie_word_embeddings": False,
    },
    "tiny": {"hidden": 64, "num_layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128},
}  # fmt: skip
"""`tiny` tries the benchmark itself, without a card."""
VOCAB, CONTEXT_LENGTH = 151_936, 40_960


def checkpoint_of(name: str) -> str:
    """Return the folder of a checkpoint, making it if need be."""
    from services.engine.make_checkpoint import make_random_checkpoint

    folder = state_dir() / "bench-models" / name
    if not (folder / "config.json").is_file():
        unfinished = folder.with_name(f"{name}.new")
        shutil.rmtree(unfinished, ignore_errors=True)
        vocab, dtype = (VOCAB, "bfloat16") if name != "tiny" else (2048, "float32")
        make_random_checkpoint(
            unfinished, vocab=vocab, context_length=CONTEXT_LENGTH, dtype=dtype, initializer_range=0.02, **SHAPES[name]
        )
        unfinished.rename(folder)
    return str(folder)
