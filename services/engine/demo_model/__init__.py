"""The demo checkpoint: a small trained Qwen3 model that answers questions about facts stated in its prompt.

The folder is a complete Hugging Face checkpoint (``config.json``, ``model.safetensors``, ``tokenizer.json``,
``chat_template.jinja``, ...). ``tests/corpus.py`` writes the documents and questions that it was trained on;
``python -m tests.engine.train_demo_model`` trains, saves and evaluates it.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_DIR: Path = Path(__file__).resolve().parent
"""The checkpoint's folder, for any loader that takes a Hugging Face checkpoint directory."""

__all__ = ["DEMO_MODEL_DIR"]
