"""`python -m tests.bench.bench_quality`: how often the demo model's answers are exactly right, split or not.

The same questions on fresh facts go to a mesh with the split and to one without. An answer that differs between them
would show wrong KV.
"""

import asyncio
import random
import sys
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import base_url, model_of
from services.bench.drive.meshes import SPLIT, WHOLE, split_and_whole
from services.bench.drive.random_model import SHAPE
from services.bench.limits import REQUEST_TIMEOUT_S
from services.cli.bench import Json, Url
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from tests.corpus import FactPrompt, make_fact_prompt

NUM_FACTS = 6
WIDTH = 8
SEED = 20261121


class QualityRow(msgspec.Struct, frozen=True, kw_only=True):
    """Exact matches at one prompt length, and answers that differ between the two meshes (None: only one asked)."""

    length: int
    num_questions: int
    num_right_with_split: int
    num_right_without_split: int | None
    num_different: int | None


def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "100,500,2000,2500",
    num_questions: Annotated[int, typer.Option("--questions", min=1, help="Fresh questions a length.")] = 50,
    url: Url = "",
    *,
    as_json: Json = False,
) -> None:
    """How often the demo model's answer is exactly right, with and without the split."""
    rows = asyncio.run(_run(parse_lengths(lengths, "--lengths", SHAPE["context_length"]), num_questions, url))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode({"rows": rows}) + b"\n")
        return
    table = Table("prompt", "questions", "right with split", "right without", "different answers")
    for row in rows:
        n = row.num_questions
        table.add_row(
            str(row.length),
            str(n),
            f"{row.num_right_with_split / n:.1%}",
            "–" if row.num_right_without_split is None else f"{row.num_right_without_split / n:.1%}",
            "–" if row.num_different is None else str(row.num_different),
        )
    Console().print(table)


async def _run(lengths: list[int], num_questions: int, url: str) -> list[QualityRow]:
    if url:
        return await _measure({SPLIT: base_url(url)}, lengths, num_questions)
    async with split_and_whole(str(DEMO_MODEL_DIR)) as urls:
        return await _measure(urls, lengths, num_questions)


async def _measure(urls: dict[str, str], lengths: list[int], num_questions: int) -> list[QualityRow]:
    rng = random.Random(SEED)
    rows: list[QualityRow] = []
    async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        model = (await model_of(client, urls[SPLIT])).id
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for length in lengths:
                task = progress.add_task(f"{length} tokens", total=len(urls) * num_questions)
                prompts = [make_fact_prompt(rng, NUM_FACTS, length) for _ in range(num_questions)]
                slots = asyncio.Semaphore(WIDTH)

                async def ask(url: str, prompt: FactPrompt, slots: asyncio.Semaphore = slots, task: int = task) -> str:
                    async with slots:
                        text = await _ask(client, url, model, prompt)
                        progress.advance(task)  # pyright: ignore[reportArgumentType]
                        return text

                split = await asyncio.gather(*(ask(urls[SPLIT], prompt) for prompt in prompts))
                whole = await asyncio.gather(*(ask(urls[WHOLE], prompt) for prompt in prompts if WHOLE in urls))
                rows.append(
                    QualityRow(
                        length=length,
                        num_questions=num_questions,
                        num_right_with_split=_num_right(split, prompts),
                        num_right_without_split=_num_right(whole, prompts) if whole else None,
                        num_different=sum(a != b for a, b in zip(split, whole, strict=True)) if whole else None,
                    )
                )
    return rows


async def _ask(client: httpx.AsyncClient, url: str, model: str, prompt: FactPrompt) -> str:
    body = {"model": model, "prompt": prompt.prompt, "max_tokens": 16, "temperature": 0}
    try:
        response = await client.post(f"{url}/v1/completions", json=body)
        return str(response.raise_for_status().json()["choices"][0]["text"])
    except httpx.HTTPError as error:
        raise UserError(f"a request to {url} failed: {error}") from error


def _num_right(texts: list[str], prompts: list[FactPrompt]) -> int:
    return sum(text.strip() == prompt.answer for text, prompt in zip(texts, prompts, strict=True))


if __name__ == "__main__":
    typer.run(main)
