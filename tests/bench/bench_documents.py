"""`python -m tests.bench.bench_documents`: many questions on few long documents, in random order, some at once.

Each round has fresh documents. The first question on a document has to be computed; the time of later ones depends on
whether their worker has the document's KV, or can read it from one that has.
"""

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import RECOMPUTE, Served, reuse_modes, rotated, serving
from services.bench.drive.sources import SourceShares, shares_of
from services.bench.drive.stats import percentile, ratio, rounded
from services.bench.drive.workload import random_tokens
from services.cli.bench import Concurrency, Decode, Json, Model, Prefill, Url
from services.errors import UserError
from services.launch.supervisor import UpOptions

QUESTION_TOKENS = (32, 64)
ANSWER_TOKENS = 16
WARM_UP_TOKENS = 512
SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class DocumentsPlan:
    """The command's options. `num_questions`: on each document."""

    num_documents: int
    document_tokens: int
    num_questions: int
    num_rounds: int
    concurrency: int


class DocumentQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """One question and its document as one prompt. `is_first`: the first one on this document."""

    prompt: tuple[int, ...]
    is_first: bool


class DocumentsRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one mode. The ratios are to recomputing, at p50."""

    mode: str
    num_first: int
    num_later: int
    first_ttft_p50_ms: float | None
    first_ttft_p75_ms: float | None
    later_ttft_p50_ms: float | None
    later_ttft_p75_ms: float | None
    first_ratio: float | None
    later_ratio: float | None
    later_sources: SourceShares


class DocumentsReport(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    num_parameters: int | None
    num_documents: int
    document_tokens: int
    later_ttft_p50_ratio: dict[str, float | None]
    rows: tuple[DocumentsRow, ...]


def main(
    documents: Annotated[int, typer.Option(min=1, help="Documents a round.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a document.")] = 4_000,
    questions: Annotated[int, typer.Option(min=1, help="Questions on each document.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, each with fresh documents.")] = 2,
    concurrency: Concurrency = 2,
    prefill: Prefill = 2,
    decode: Decode = 2,
    model: Model = "",
    url: Url = "",
    *,
    as_json: Json = False,
) -> None:
    """Many questions on few long documents, in the same modes as multiturn."""
    plan = DocumentsPlan(
        num_documents=documents,
        document_tokens=tokens,
        num_questions=questions,
        num_rounds=rounds,
        concurrency=concurrency,
    )
    options = UpOptions(model=model, num_prefill=prefill, num_decode=decode)
    report = asyncio.run(_run(plan, options, url))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)


def make_questions(
    rng: random.Random, *, num_documents: int, document_tokens: int, num_questions: int, vocab_size: int
) -> list[DocumentQuestion]:
    """Return the questions of one round, shuffled; each prompt is its document, then the question."""
    documents = [random_tokens(rng, document_tokens, vocab_size) for _ in range(num_documents)]
    order = [number for number in range(num_documents) for _ in range(num_questions)]
    rng.shuffle(order)
    seen = set[int]()
    questions: list[DocumentQuestion] = []
    for number in order:
        text = random_tokens(rng, rng.randint(*QUESTION_TOKENS), vocab_size)
        questions.append(DocumentQuestion(prompt=(*documents[number], *text), is_first=number not in seen))
        seen.add(number)
    return questions


def rows_of(answers: dict[str, list[tuple[DocumentQuestion, Completion]]]) -> list[DocumentsRow]:
    """Return a row for each mode."""

    def times(mode: str, *, first: bool) -> list[float]:
        return [answer.ttft_ms for question, answer in answers.get(mode, []) if question.is_first is first]

    def against_recompute(mode: str, *, first: bool) -> float | None:
        return ratio(percentile(times(mode, first=first), 50), percentile(times(RECOMPUTE, first=first), 50))

    return [
        DocumentsRow(
            mode=mode,
            num_first=len(times(mode, first=True)),
            num_later=len(times(mode, first=False)),
            first_ttft_p50_ms=rounded(percentile(times(mode, first=True), 50)),
            first_ttft_p75_ms=rounded(percentile(times(mode, first=True), 75)),
            later_ttft_p50_ms=rounded(percentile(times(mode, first=False), 50)),
            later_ttft_p75_ms=rounded(percentile(times(mode, first=False), 75)),
            first_ratio=against_recompute(mode, first=True),
            later_ratio=against_recompute(mode, first=False),
            later_sources=shares_of([answer.usage for question, answer in pairs if not question.is_first]),
        )
        for mode, pairs in answers.items()
    ]


async def _run(plan: DocumentsPlan, options: UpOptions, url: str) -> DocumentsReport:
    async with serving(reuse_modes, options, url) as served:
        longest = plan.document_tokens + QUESTION_TOKENS[1] + ANSWER_TOKENS
        if longest > served.context_length:
            raise UserError(f"{longest} tokens do not fit the model's context, {served.context_length}")
        rows = rows_of(await _measure(plan, served))
    return DocumentsReport(
        model=served.model,
        num_parameters=served.num_parameters,
        num_documents=plan.num_documents,
        document_tokens=plan.document_tokens,
        later_ttft_p50_ratio={row.mode: row.later_ratio for row in rows if row.mode != RECOMPUTE},
        rows=tuple(rows),
    )


async def _measure(plan: DocumentsPlan, served: Served) -> dict[str, list[tuple[DocumentQuestion, Completion]]]:
    """Ask every mesh the same questions, a round at a time. Only one mesh is busy at any time."""
    rng = random.Random(SEED)
    answers: dict[str, list[tuple[DocumentQuestion, Completion]]] = {mode: [] for mode in served.clients}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        total = plan.num_rounds * plan.num_documents * plan.num_questions * len(served.clients)
        task = progress.add_task("warming up", total=total)

        def make(document_tokens: int, num_questions: int) -> list[DocumentQuestion]:
            return make_questions(
                rng,
                num_documents=plan.num_documents,
                document_tokens=document_tokens,
                num_questions=num_questions,
                vocab_size=served.vocab_size,
            )

        warm_up = make(min(WARM_UP_TOKENS, plan.document_tokens), 2)
        for client in served.clients.values():
            await _ask_all(client, warm_up, plan.concurrency)
        for number in range(plan.num_rounds):
            questions = make(plan.document_tokens, plan.num_questions)
            for mode in rotated(served.clients, number):
                progress.update(task, description=f"round {number + 1}, {mode}")
                completions = await _ask_all(served.clients[mode], questions, plan.concurrency)
                answers[mode] += zip(questions, completions, strict=True)
                progress.advance(task, len(questions))
    return answers


async def _ask_all(client: Client, questions: Sequence[DocumentQuestion], concurrency: int) -> list[Completion]:
    slots = asyncio.Semaphore(concurrency)

    async def ask(question: DocumentQuestion) -> Completion:
        async with slots:
            return await client.complete(question.prompt, ANSWER_TOKENS)

    return await asyncio.gather(*map(ask, questions))


def _print(report: DocumentsReport) -> None:
    console = Console(highlight=False)
    headings = ("mode", "first: p50 / p75 ms", "ratio", "later: p50 / p75 ms", "ratio", "later prompts' tokens")
    table = Table(
        *(
            Column(heading, justify="left" if heading in (headings[0], headings[-1]) else "right")
            for heading in headings
        ),
        title=f"time to first token, {report.num_documents} documents of {report.document_tokens} tokens",
    )
    for row in report.rows:
        table.add_row(
            row.mode.replace("_", " "),
            f"{_ms(row.first_ttft_p50_ms)} / {_ms(row.first_ttft_p75_ms)}",
            _times(row.first_ratio),
            f"{_ms(row.later_ttft_p50_ms)} / {_ms(row.later_ttft_p75_ms)}",
            _times(row.later_ratio),
            row.later_sources.words,
        )
    console.print(table)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


if __name__ == "__main__":
    typer.run(main)
