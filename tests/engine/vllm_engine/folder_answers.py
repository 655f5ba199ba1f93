"""`python -m tests.engine.vllm_engine.folder_answers FOLDER ...`: writes what vLLM answers by each checkpoint, or why
not, into `answer.json` beside its folder. One process has one vLLM, so each has one of its own."""

import json
import os
import sys
from pathlib import Path

from schemas.request import SamplingParams
from services.errors import CheckpointError
from tests.engine.vllm_engine.conftest import load_world

PROMPT = [1 + (7 * at * at) % 1_300 for at in range(70)]
NUM_TOKENS = 8


def answer(folder: Path) -> list[int] | str:
    try:
        world = load_world(str(folder))
    except CheckpointError as error:
        return str(error)
    return world.reference(PROMPT, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True))


def main(folders: list[str]) -> None:
    import services.engine.vllm_engine.connector  # noqa: F401 - once, before the processes part

    for folder in map(Path, folders):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        (folder.parent / "answer.json").write_text(json.dumps(answer(folder)))
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
