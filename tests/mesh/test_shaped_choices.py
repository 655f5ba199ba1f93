"""Grammars, penalties, masks, logprobs and several choices at once: the same tokens however their KV came to be."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from schemas.request import SamplingParams
from services.config import MeshConfig, WorkerConfig
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.settings import changed
from tests.mesh.faults.truth import DOCUMENT_TOKENS, GRAMMAR, Alone, Documents
from tests.mesh.processes import Mesh, RunningMesh, in_parallel
from tests.mesh.reference import Case, SingleProcess

NUM_CHOICES = 3
NUM_BLOCKS = 128
"""Of a worker."""
NUM_FILLERS, FILLER_TOKENS = 12, 1500
NUM_WORKERS = 4
MAX_ROUNDS = 8
MAX_KILLS = 10
"""An answer may be over before its worker has said that it runs, or before its end reaches anybody."""
TOLERANCE = 1e-3
"""Between two answers of other batches, in text that no model would write: what they are is `test_logprobs`'s."""
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.2}
SHAPES: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES | {"temperature": 0.0, "max_tokens": 120},
    "penalties and masks, drawn": PENALTIES
    | {
        "temperature": 1.2,
        "max_tokens": 100,
        "min_p": 0.02,
        "logit_bias": ((30, 4.0), (31, 4.0), (32, -100.0)),
        "allowed_token_ids": tuple(range(20, 700)),
    },
    "document": {"temperature": 0.0, "grammar": GRAMMAR, "presence_penalty": 0.5},
    "document, drawn": {"temperature": 1.0, "grammar": GRAMMAR, "logit_bias": ((100, 2.0),), "frequency_penalty": 0.5},
}


def case_of(number: int, shape: dict[str, Any]) -> Case:
    rng = random.Random(number)
    fields: dict[str, Any] = {"max_tokens": DOCUMENT_TOKENS[0], "ignore_eos": not shape.get("grammar")} | shape
    prompt = [rng.randrange(5, 500) for _ in range(rng.randint(300, 420))]
    return Case(prompt, SamplingParams(seed=1000 * number, logprobs=2, **fields))


@dataclass
class Answered:
    """What a client has of one request: by choice, and the usage at the end."""

    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(NUM_CHOICES)])
    logprobs: list[list[float]] = field(default_factory=lambda: [[] for _ in range(NUM_CHOICES)])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])


class Asking:
    """Asks for each case and compares every choice with what one process said, logprobs with the first answer's."""

    def __init__(self, mesh: Mesh, expected: dict[str, list[list[int]]], cases: dict[str, Case]) -> None:
        self._mesh, self._expected, self._cases = mesh, expected, cases
        self._documents = Documents(DEMO_MODEL_DIR)
        self._first: dict[str, list[list[float]]] = {}

    def ask(self, name: str, kill_after: int | None = None) -> dict[str, Any]:
        """Return the usage. `kill_after`: so many tokens a decode worker of the answer is killed."""
        case = self._cases[name]
        found = stream(self._mesh, case, kill_after)
        assert found.tokens == self._expected[name], name
        if case.sampling.grammar:
            assert [self._documents.problem(tokens) for tokens in found.tokens] == [""] * NUM_CHOICES
        first = self._first.setdefault(name, found.logprobs)
        for tokens, had, now in zip(found.tokens, first, found.logprobs, strict=True):
            assert len(now) == len(tokens) and now == pytest.approx(had, abs=TOLERANCE)
        return found.usage["kvmesh"]

    def ask_until_resumed(self, name: str) -> dict[str, Any]:
        """Return the usage of the first of these answers that went on elsewhere."""
        for _ in range(MAX_KILLS):
            usage = self.ask(name, kill_after=30)
            self._mesh.wait_until(lambda: len(self._mesh.fleet.workers) == NUM_WORKERS + 1, "the killed worker is back")
            if usage["num_retries"]:
                return usage
        raise AssertionError(f"none of {MAX_KILLS} answers lost its worker")

    def ask_until_restored(self) -> bool:
        """Fill the workers with other prompts and ask for all, over and over, until a store's blocks are read."""
        for number in range(MAX_ROUNDS):
            others = [[5 + number, 5 + other] * (FILLER_TOKENS // 2) for other in range(NUM_FILLERS)]
            in_parallel([lambda other=other: self._mesh.complete(other, max_tokens=8) for other in others], NUM_WORKERS)
            usages = [computing(self.ask(name)) for name in self._cases]
            if any("store-0" in usage["transferred_from"] for usage in usages):
                return True
        return False


def computing(usage: dict[str, Any]) -> dict[str, Any]:
    """What the worker tells that computed the prompt."""
    return usage["prefill"] or usage


def stream(mesh: Mesh, case: Case, kill_after: int | None) -> Answered:
    found = Answered()
    body = case.fields | {"model": mesh.model, "n": NUM_CHOICES, "stream": True, "return_token_ids": True}
    body |= {"stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{mesh.url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            found.usage = event.get("usage") or found.usage
            for part in event["choices"]:
                found.tokens[part["index"]] += part["token_ids"]
                found.logprobs[part["index"]] += (part["logprobs"] or {}).get("token_logprobs", [])
            if kill_after is not None and sum(map(len, found.tokens)) >= kill_after and mesh.kill_who_decodes():
                kill_after = None
    return found


def choice_of(case: Case, number: int) -> Case:
    """A choice's own case: its seed follows the one before."""
    sampling = msgspec.structs.replace(case.sampling, seed=case.sampling.seed + number)
    return Case(case.prompt, sampling)


def survives_everything(running_mesh: RunningMesh, folder: Path, options: Launch, single: Alone) -> None:
    """Ask for every shape split, cached, resumed and from the store, on a mesh of two of each with such options."""
    cases = {name: case_of(number, shape) for number, (name, shape) in enumerate(SHAPES.items())}
    expected = {name: [single(choice_of(case, at), at) for at in range(NUM_CHOICES)] for name, case in cases.items()}
    assert all(len({tuple(answer) for answer in expected[name]}) > 1 for name in SHAPES if "drawn" in name)
    options = changed(
        options,
        {
            "num_prefill": 2,
            "num_decode": 2,
            "config.gateway.port": 0,
            "config.scheduler.policy": "tests.scheduler.policies:reads_what_it_can",
            "config.worker.carrier": "tcp",
            "store": "disk",
            "config.store.path": str(folder / "store"),
        },
    )
    with running_mesh(folder / "run", options) as mesh:
        asking = Asking(mesh, expected, cases)
        for name in cases:
            usage = asking.ask(name)
            assert usage["prefill_worker"] != usage["decode_worker"] and usage["transferred_tokens"] > 0
            assert computing(asking.ask(name))["cached_tokens"] > 0
        for name in cases:
            assert asking.ask_until_resumed(name)["resumed_tokens"] > 0
        assert asking.ask_until_restored()
        mesh.assert_no_blocks_held()


@pytest.mark.timeout(600)
def test_choices_survive_everything(running_mesh: RunningMesh, tmp_path: Path, single: SingleProcess) -> None:
    kv_bytes = NUM_BLOCKS * layout_of(read_checkpoint(str(DEMO_MODEL_DIR))).block_bytes
    survives_everything(
        running_mesh, tmp_path, Launch(config=MeshConfig(worker=WorkerConfig(kv_bytes=kv_bytes))), single.run
    )
