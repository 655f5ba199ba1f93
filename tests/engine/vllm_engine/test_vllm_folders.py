"""vLLM is given the weights that the identity is of, however a folder was saved: its tokens are transformers'."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.engine.weights import INDEX_FILE
from tests.engine.folders import ASPECTS, make_folder, merge, pairs
from tests.engine.rig import generate, greedy, num_near_ties
from tests.engine.vllm_engine.folder_answers import NUM_TOKENS, PROMPT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
OF_WEIGHTS = ("head", "files", "rope")
"""What the gateway reads is read alike for both engines (`tests/engine/test_folders.py`)."""


def test_tokens(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    shape = {"hidden": 128, "intermediate": 256, "head_dim": 32, "vocab": 1336}
    base = make_random_checkpoint(tmp_path / "base", **shape, tie_word_embeddings=True)
    aspects = {name: ASPECTS[name] for name in OF_WEIGHTS}
    wholes = list(pairs(aspects))
    folders = [make_folder(tmp_path / str(number) / "model", base, whole) for number, whole in enumerate(wholes)]
    subprocess.run([sys.executable, "-m", "tests.engine.vllm_engine.folder_answers", *folders], check=True)
    wrong: list[str] = []
    for whole, folder in zip(wholes, folders, strict=True):
        answer = json.loads((folder.parent / "answer.json").read_text())
        if whole["files"] == "an index without metadata":  # which the library does not take
            merge(folder / INDEX_FILE, metadata={})
        try:
            num_near_ties(folder, PROMPT, answer, generate(folder, PROMPT, NUM_TOKENS), greedy(NUM_TOKENS))
        except AssertionError as error:
            wrong.append(f"{whole}: {answer}, {error}")
    assert not wrong, "\n".join(wrong)
