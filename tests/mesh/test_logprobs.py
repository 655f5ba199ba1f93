"""Logprobs through real processes, split, cached and over a killed worker, equal transformers' own."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.config import GatewayConfig, MeshConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.settings import changed
from tests.mesh.processes import Mesh, RunningMesh

TOLERANCE = 1e-4
NUM_TOP = 5
NUM_TRIES = 10
"""An answer may be over before its worker has said that it runs: who must be killed is not known then."""


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32).eval()


def library(token_ids: list[int]) -> torch.Tensor:
    """Return log-softmax `[tokens, vocab]`: row p tells of the token behind position p."""
    with torch.inference_mode():
        return model()(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)


def prompt_of(length: int) -> list[int]:
    return torch.randint(1, 1336, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def largest_difference(choice: dict[str, Any], prompt: list[int]) -> float:
    """Return how far an echoed choice's logprobs are from the library's."""
    token_ids = [*prompt, *choice["token_ids"]]
    found, rows = choice["logprobs"], library(token_ids)
    assert len(found["token_logprobs"]) == len(token_ids) and found["token_logprobs"][0] is None
    own = [float(rows[at, token_id]) for at, token_id in enumerate(token_ids[1:])]
    worst = max(abs(a - b) for a, b in zip(found["token_logprobs"][1:], own, strict=True))
    for at, top in enumerate(found["top_logprobs"][1:]):
        likeliest = sorted(top.values(), reverse=True)[:NUM_TOP]
        best = rows[at].topk(NUM_TOP).values.tolist()
        worst = max([worst, *(abs(a - b) for a, b in zip(likeliest, best, strict=True))])
    return worst


def echoes_split_and_cached(
    running_mesh: RunningMesh, folder: Path, options: Launch, tolerance: float = TOLERANCE
) -> None:
    """Ask for prompts back with logprobs, where they are cached, on a mesh of one prefill and one decode worker."""
    worst = 0.0
    with running_mesh(folder, changed(options, {"num_prefill": 1, "num_decode": 1, "config.gateway.port": 0})) as mesh:
        for length in (2, 17, 60, 700):
            prompt, had = prompt_of(length), None
            asked = {"max_tokens": 12, "echo": True, "logprobs": NUM_TOP, "return_token_ids": True, "ignore_eos": True}
            mesh.complete(prompt, max_tokens=4)  # the prompt is cached from here on
            for _ in range(2):
                answer = mesh.complete(prompt, **asked)
                (choice,) = answer["choices"]
                worst = max(worst, largest_difference(choice, prompt))
                assert had in (None, choice["token_ids"])
                had = choice["token_ids"]
                where = answer["usage"]["kvmesh"]
                assert where["prefill_worker"] != where["decode_worker"]
                assert where["prefill"]["recomputed_tokens"] == length, "its logprobs need all of it"
        mesh.assert_no_blocks_held()
    print(f"\nlargest difference: {worst:.1e}")
    assert worst < tolerance


@pytest.mark.timeout(300)
def test_echoed_prompts_split_and_cached(running_mesh: RunningMesh, tmp_path: Path) -> None:
    echoes_split_and_cached(running_mesh, tmp_path, Launch())


@pytest.mark.timeout(300)
def test_only_the_prompt(running_mesh: RunningMesh, tmp_path: Path) -> None:
    """What lm-eval asks for: how likely a continuation is, and nothing more."""
    with running_mesh(
        tmp_path, Launch(num_prefill=1, num_decode=1, config=MeshConfig(gateway=GatewayConfig(port=0)))
    ) as mesh:
        prompt = prompt_of(30)
        answer = mesh.complete(prompt, max_tokens=0, echo=True, logprobs=NUM_TOP, return_token_ids=True)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == [] and answer["usage"]["completion_tokens"] == 0
        assert largest_difference(choice, prompt) < TOLERANCE


@pytest.mark.timeout(300)
def test_an_answer_over_a_killed_decode_worker(running_mesh: RunningMesh, tmp_path: Path) -> None:
    prompt = prompt_of(40)
    body = {"prompt": prompt, "max_tokens": 120, "temperature": 0.9, "seed": 4, "logprobs": NUM_TOP, "stream": True,
            "frequency_penalty": 0.5, "repetition_penalty": 1.1, "ignore_eos": True, "return_token_ids": True,
            "stream_options": {"include_usage": True}, "echo": True}  # fmt: skip
    with running_mesh(
        tmp_path, Launch(num_prefill=1, num_decode=2, config=MeshConfig(gateway=GatewayConfig(port=0)))
    ) as mesh:
        whole, _ = stream(mesh, body, kill_after=None)
        answers = (stream(mesh, body, kill_after=10) for _ in range(NUM_TRIES))
        answer, usage = next(found for found in answers if found[1]["kvmesh"]["num_retries"])
        mesh.wait_until(lambda: len(mesh.fleet.workers) == 3, "the killed worker is back")
    assert usage["kvmesh"]["resumed_tokens"] >= 10
    assert answer["token_ids"] == whole["token_ids"]
    worst = largest_difference(answer, prompt)
    print(f"\nlargest difference: {worst:.1e}")
    assert worst < TOLERANCE


def stream(mesh: Mesh, body: dict[str, Any], kill_after: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a streamed choice put together, and the usage; kill who decodes it after so many tokens."""
    choice: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": {"token_logprobs": [], "top_logprobs": []}}
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{mesh.url}/v1/completions", json={"model": mesh.model, **body}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line.endswith("[DONE]"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for part in event["choices"]:
                choice["text"] += part["text"]
                choice["token_ids"] += part["token_ids"]
                for name, values in choice["logprobs"].items():
                    values += (part["logprobs"] or {}).get(name, [])
            if kill_after is not None and len(choice["token_ids"]) >= kill_after and mesh.kill_who_decodes():
                kill_after = None
    return choice, usage
