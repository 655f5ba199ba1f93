"""`python -m tests.bench.bench_compression`: what compressing KV on the wire costs in quality.

The demo model answers the same questions in a mesh that sends KV as it is and in one for each way to compress, all over
tcp. Exact match: the answer is the fact. Greedy agreement: the share of tokens before the first that differs from the
answer with exact KV.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import serving
from services.cli.bench import Json
from services.config import MeshConfig, ModelConfig, WireDtype
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.tokenizer import read_tokenizer
from services.gateway.api.text import TextCodec, codec_of
from services.launch.options import Launch
from services.settings import changed
from tests.corpus import make_fact_prompt

SAME = "same"
PACKED: tuple[WireDtype, ...] = ("int8", "fp8")
NUM_FACTS = 6
NUM_TOKENS = 48
"""Of each answer: the fact, and some tokens that the model adds to it."""
WIDTH = 4
SEED = 20261121


class CompressionRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one way to send KV and one prompt length (tokens). Shares are from 0 to 1."""

    length: int
    wire_dtype: str
    num_questions: int
    num_right: int
    exact_match: float
    greedy_agreement: float


def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "100,500,2000",
    num_questions: Annotated[
        int, typer.Option("--questions", min=1, help="Fresh questions a length, for each way to send KV.")
    ] = 30,
    *,
    as_json: Json = False,
) -> None:
    """What compressing KV on the wire costs the demo model: exact match, and agreement with exact KV."""
    wanted = parse_lengths(lengths, "--lengths", 4_000)
    rows = asyncio.run(_run(wanted, num_questions))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"rows": rows}) + b"\n")
        return
    table = Table("prompt", "KV sent as", "questions", "exact match", "greedy agreement")
    for row in rows:
        table.add_row(
            str(row.length), row.wire_dtype, str(row.num_questions), f"{row.exact_match:.1%}",
            f"{row.greedy_agreement:.1%}",
        )  # fmt: skip
    Console().print(table)


def agreement(exact: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the mean share of tokens before the first difference; 1 where there are no answers."""
    shares: list[float] = []
    for right, other in zip(exact, others, strict=True):
        same = next((at for at, (a, b) in enumerate(zip(right, other, strict=False)) if a != b), len(right))
        shares.append(same / len(right) if right else 1.0)
    return sum(shares) / len(shares) if shares else 1.0


def mesh_options(options: Launch) -> dict[str, Launch]:
    """Return a mesh for each way to send KV. Each request is split, so that all KV crosses."""
    tcp = changed(
        options,
        {
            "config.worker.carrier": "tcp",
            "config.worker.prefix_cache": False,
            "config.scheduler.policy": "least_loaded",
        },
    )
    return {SAME: tcp} | {dtype: changed(tcp, {"config.worker.wire_dtype": dtype}) for dtype in PACKED}


async def _run(lengths: list[int], num_questions: int) -> list[CompressionRow]:
    codec = codec_of(read_tokenizer(DEMO_MODEL_DIR))
    rng = random.Random(SEED)
    rows: list[CompressionRow] = []
    async with serving(mesh_options, Launch(config=MeshConfig(model=ModelConfig(path=str(DEMO_MODEL_DIR))))) as served:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for length in lengths:
                task = progress.add_task(f"{length} tokens", total=len(served.clients) * num_questions)
                facts = [make_fact_prompt(rng, NUM_FACTS, length) for _ in range(num_questions)]
                prompts = [codec.encode(fact.prompt) for fact in facts]
                answers: dict[str, list[tuple[int, ...]]] = {}
                for way, client in served.clients.items():
                    done = await _ask_all(client, prompts, lambda task=task: progress.advance(task))
                    answers[way] = [completion.token_ids for completion in done]
                for way, found in answers.items():
                    right = [_is_right(codec, ids, fact.answer) for ids, fact in zip(found, facts, strict=True)]
                    rows.append(
                        CompressionRow(
                            length=length,
                            wire_dtype=way,
                            num_questions=num_questions,
                            num_right=sum(right),
                            exact_match=sum(right) / num_questions,
                            greedy_agreement=agreement(answers[SAME], found),
                        )
                    )
    return rows


async def _ask_all(client: Client, prompts: Sequence[Sequence[int]], on_done: Callable[[], object]) -> list[Completion]:
    slots = asyncio.Semaphore(WIDTH)

    async def ask(prompt: Sequence[int]) -> Completion:
        async with slots:
            done = await client.complete(prompt, NUM_TOKENS, return_token_ids=True)
            on_done()
            return done

    return await asyncio.gather(*(ask(prompt) for prompt in prompts))


def _is_right(codec: TextCodec, token_ids: Sequence[int], answer: str) -> bool:
    """Say whether the text begins with the answer: no stop string ends it."""
    detokenizer = codec.detokenizer(codec.prompt_end((), codec.ids_shown()))
    text = detokenizer.add_tokens(list(token_ids)) + detokenizer.rest()
    return text.strip().startswith(answer)


if __name__ == "__main__":
    typer.run(main)
