"""Logprobs: how far they are from transformers', and what a prompt's cost a request whose
prompt is cached, as all of it is computed anew. `python -m tests.bench.bench_logprobs [--json]`.

The differences are of the engine alone, in float32, with chunks of 16 tokens, over all tokens and the five likeliest
at each place: tiny random models, and the demo model. The times are of a split mesh on the random model of `bench
ttft`, a fresh prompt each round, one request at a time, each until its answer of one token is read as a whole.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import msgspec

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import ReportedUsage, model_of, open_http
from services.bench.drive.meshes import model_folder, running
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import SHAPE
from services.bench.drive.workload import random_tokens
from services.config import GatewayConfig, MeshConfig, ModelConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from tests.engine.rig import load_tiny, make_tiny, prompt_of
from tests.engine.test_logprobs import differences, wanted

TINY: dict[str, dict[str, Any]] = {"qwen3": {}, "llama": {}, "mistral": {"sliding_window": 24}}
PROMPT_LENGTHS = (45, 200)
CHUNK_TOKENS = 16
WARM_UP_ROUNDS = 3
ECHO: dict[str, Any] = {"echo": True, "logprobs": 5}
ASKED: dict[str, dict[str, Any]] = {"computed": {}, "cached": {}, "cached, echoed with logprobs": ECHO}
"""In this order, of the same prompt."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The largest ones of a model's prompts and answers."""

    model: str
    prompt: float
    answer: float


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of the requests of one kind: their milliseconds, and how many of the prompt's tokens were computed."""

    num_tokens: int
    what: str
    ms: float
    num_computed: float


def measured_differences() -> list[Difference]:
    found: list[Difference] = []
    with tempfile.TemporaryDirectory() as folder, progress("models", len(TINY) + 1) as on_model:
        models = {name: make_tiny(Path(folder) / name, name, **fields) for name, fields in TINY.items()}
        for name, model in (models | {"demo": DEMO_MODEL_DIR}).items():
            engine = load_tiny(model)
            worst = [
                differences(model, engine, prompt_of(length, seed), CHUNK_TOKENS, wanted(temperature=seed * 0.8))
                for length in PROMPT_LENGTHS
                for seed in range(2)
            ]
            prompt, answer = (max(values) for values in zip(*worst, strict=True))
            found.append(Difference(model=name, prompt=prompt, answer=answer))
            on_model()
    return found


async def timed(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Return the milliseconds of a request, and how many tokens of its prompt were computed."""
    started = time.perf_counter()
    response = await http.post(f"{url}/v1/completions", json=body)
    took_ms = (time.perf_counter() - started) * 1e3
    response.raise_for_status()
    usage = msgspec.convert(response.json()["usage"], ReportedUsage)
    return took_ms, usage.computing.recomputed_tokens


async def measured_costs(lengths: list[int], num_rounds: int) -> list[Cost]:
    costs: list[Cost] = []
    rng = random.Random(20261124)
    async with (
        model_folder("") as (model, _),
        running(
            {"split": Launch(config=MeshConfig(model=ModelConfig(path=model), gateway=GatewayConfig(port=0)))}
        ) as meshes,
    ):
        url = meshes["split"].url
        async with open_http() as http:
            name = (await model_of(http, url)).id
            with progress("rounds", len(lengths) * (num_rounds + WARM_UP_ROUNDS)) as on_round:
                for length in lengths:
                    times: dict[str, list[tuple[float, int]]] = {what: [] for what in ASKED}
                    for number in range(num_rounds + WARM_UP_ROUNDS):
                        prompt = random_tokens(rng, length, SHAPE["vocab"])
                        for what, more in ASKED.items():
                            body = {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
                            had = await timed(http, url, body)
                            if number >= WARM_UP_ROUNDS:
                                times[what].append(had)
                        on_round()
                    for what, had_all in times.items():
                        ms, computed = (median(values) for values in zip(*had_all, strict=True))
                        costs.append(Cost(num_tokens=length, what=what, ms=ms, num_computed=computed))
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="1000", help="prompt lengths in tokens, with commas between")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=("differences", "costs"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = [] if options.only == "costs" else measured_differences()
    lengths = parse_lengths(options.lengths, "--lengths", SHAPE["context_length"] - 1)
    costs = [] if options.only == "differences" else asyncio.run(measured_costs(lengths, options.rounds))
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode({"differences": found, "costs": costs}) + b"\n")
        return
    for one in found:
        sys.stdout.write(f"{one.model}: prompts differ by at most {one.prompt:.1e}, answers by {one.answer:.1e}\n")
    for cost in costs:
        sys.stdout.write(f"{cost.num_tokens} tokens, {cost.what}: {cost.ms:.1f} ms, {cost.num_computed:g} computed\n")


if __name__ == "__main__":
    main()
