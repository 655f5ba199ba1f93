"""`kvmesh bench multiturn`: conversations, whose every prompt repeats all that came before.

Each turn's prompt is the previous one, the model's answer, and a new message. Four meshes of the same size hold the
same conversations in turns: one computes every prompt anew, one keeps what each worker computed and places by load, one
does too and sends every turn of a conversation to the workers of its last (session affinity), one reads KV from any
worker that has it. Time to first token is from sending the request to the first token's event.

With `--restart` a worker is killed after half of the turns, in every mesh: the one that computed the last prompt of the
group's first conversation. The next turn begins once its successor, which holds no KV, is known to the scheduler.
"""

import asyncio
import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from services.bench.drive.arguments import check_plot_file, parse_lengths, parse_range
from services.bench.drive.http_client import Client, Completion, RequestFailedError
from services.bench.drive.meshes import AFFINITY, RECOMPUTE, Served, restart_worker, reuse_modes, rotated, serving
from services.bench.drive.random_model import SHAPE
from services.bench.drive.sources import SourceShares, shares_of
from services.bench.drive.stats import percentile, ratio, rounded
from services.bench.drive.workload import random_tokens
from services.errors import UserError
from services.launch.options import Launch

MESSAGE_TOKENS = (64, 128)
WARM_UP_HISTORY = 512
WARM_UP_TURNS = 3
SEED = 20261121


@dataclass(frozen=True, kw_only=True)
class MultiturnPlan:
    """The command's options. `num_conversations`: for each history length, in each mesh."""

    history: str
    output: str
    num_turns: int
    num_conversations: int
    concurrency: int
    think_ms: int
    restart: bool = False

    @property
    def stops(self) -> tuple[int, ...]:
        """How many turns are held before each stop: the restart where there is one, and the end."""
        return (self.num_turns // 2, self.num_turns) if self.restart else (self.num_turns,)


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation's messages, of which the first is the history, and the lengths of its answers, all in tokens."""

    history: int
    messages: tuple[tuple[int, ...], ...]
    answer_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.messages)) + sum(self.answer_lengths)


class TurnSample(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one conversation, in one mode. Turns count from 1. `restarted`: the worker that computed the turn
    before was restarted since."""

    history: int
    turn: int
    mode: str
    completion: Completion
    restarted: bool = False


class TurnRow(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of all conversations with a history of this length, in one mode. The ratio is to recomputing, at p50."""

    history: int
    turn: int
    mode: str
    num_requests: int
    ttft_p50_ms: float | None
    ttft_p75_ms: float | None
    ratio: float | None


class RestartReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was left after a worker was restarted before `turn`. The ratios are to recomputing, at p50.

    `next_turns`: of `turn`, the conversations whose last prompt that worker had computed. `before`, `after`: all
    conversations, from turn 2 to `turn` - 1 and from `turn` on. `num_restarts`: by mode and worker.
    """

    turn: int
    num_restarts: dict[str, dict[str, int]]
    before_ttft_p50_ratio: dict[str, float | None]
    after_ttft_p50_ratio: dict[str, float | None]
    next_turns: dict[str, int]
    next_turns_ttft_p50_ratio: dict[str, float | None]
    next_turns_by_history: dict[str, dict[str, float | None]]
    next_turns_sources: dict[str, SourceShares]


class MultiturnReport(msgspec.Struct, frozen=True, kw_only=True):
    """`by_history` has the same ratios as `later_turns_ttft_p50_ratio`, by history length. Later turns: 2 and on."""

    model: str
    num_parameters: int | None
    num_prefill: int
    num_decode: int
    concurrency: int
    think_ms: int
    num_conversations: int
    later_turns_ttft_p50_ratio: dict[str, float | None]
    by_history: dict[str, dict[str, float | None]]
    later_turns_sources: dict[str, SourceShares]
    rows: tuple[TurnRow, ...]
    restart: RestartReport | None = None


def run_multiturn(plan: MultiturnPlan, options: Launch, *, url: str, plot: Path | None, as_json: bool) -> None:
    """Measure, print, and plot. Raises UserError for invalid options."""
    check_plot_file(plot)
    if plan.restart and (url or plan.num_turns < 2):
        raise UserError("--restart needs a mesh of our own, without --url, and two turns or more")
    report = asyncio.run(_run(plan, options, url))
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    else:
        _print(report)
    if plot is not None:
        from services.bench.drive.plot import plot_turns  # noqa: PLC0415  (slow to import)

        plot_turns(report.rows, plot)
        Console(stderr=as_json, highlight=False, soft_wrap=True).print(f"plot: {plot.absolute()}")


def make_conversations(
    seed: int, history: int, *, num_turns: int, count: int, output: tuple[int, int], vocab_size: int
) -> list[Conversation]:
    """Return conversations that share no prefix with each other, nor with those of another seed."""
    rng = random.Random(seed)
    made: list[Conversation] = []
    for _ in range(count):
        lengths = [history, *(rng.randint(*MESSAGE_TOKENS) for _ in range(num_turns - 1))]
        made.append(
            Conversation(
                history=history,
                messages=tuple(tuple(random_tokens(rng, length, vocab_size)) for length in lengths),
                answer_lengths=tuple(rng.randint(*output) for _ in range(num_turns)),
            )
        )
    return made


def samples_of(
    mode: str, conversations: Sequence[Conversation], held: list[list[Completion]], victim: str, num_before: int
) -> list[TurnSample]:
    """Return every turn of these conversations. The worker `victim` was restarted after `num_before` turns; empty: none
    was."""
    return [
        TurnSample(
            history=conversation.history,
            turn=turn,
            mode=mode,
            completion=completion,
            restarted=turn == num_before + 1 and completions[turn - 2].usage.kvmesh.prefill_worker == victim,
        )
        for conversation, completions in zip(conversations, held, strict=True)
        for turn, completion in enumerate(completions, start=1)
    ]


def rows_of(samples: Sequence[TurnSample]) -> list[TurnRow]:
    """Return the rows by history length, turn and mode."""
    key = sorted({(sample.history, sample.turn) for sample in samples})
    modes = list(dict.fromkeys(sample.mode for sample in samples))
    rows: list[TurnRow] = []
    for history, turn in key:
        times = {
            mode: [s.completion.ttft_ms for s in samples if (s.history, s.turn, s.mode) == (history, turn, mode)]
            for mode in modes
        }
        rows += [
            TurnRow(
                history=history,
                turn=turn,
                mode=mode,
                num_requests=len(times[mode]),
                ttft_p50_ms=rounded(percentile(times[mode], 50)),
                ttft_p75_ms=rounded(percentile(times[mode], 75)),
                ratio=ratio(percentile(times[mode], 50), percentile(times.get(RECOMPUTE, []), 50)),
            )
            for mode in modes
        ]
    return rows


def later_ratios(samples: Sequence[TurnSample]) -> dict[str, float | None]:
    """Return each mode's median TTFT over the turns from 2 on, divided by recomputing's."""
    times: dict[str, list[float]] = {}
    for sample in samples:
        if sample.turn > 1:
            times.setdefault(sample.mode, []).append(sample.completion.ttft_ms)
    recompute = percentile(times.get(RECOMPUTE, []), 50)
    return {mode: ratio(percentile(values, 50), recompute) for mode, values in times.items() if mode != RECOMPUTE}


def restart_report(samples: Sequence[TurnSample], turn: int, num_restarts: dict[str, Counter[str]]) -> RestartReport:
    """Return what the samples show of a restart before this turn."""
    hit = [sample for sample in samples if sample.restarted]
    compared = [s for s in samples if s.turn == turn and (s.restarted or s.mode == RECOMPUTE)]
    histories = sorted({sample.history for sample in samples})
    return RestartReport(
        turn=turn,
        num_restarts={mode: dict(sorted(counts.items())) for mode, counts in num_restarts.items()},
        before_ttft_p50_ratio=later_ratios([s for s in samples if s.turn < turn]),
        after_ttft_p50_ratio=later_ratios([s for s in samples if s.turn >= turn]),
        next_turns=dict(Counter(sample.mode for sample in hit)),
        next_turns_ttft_p50_ratio=later_ratios(compared),
        next_turns_by_history={str(h): later_ratios([s for s in compared if s.history == h]) for h in histories},
        next_turns_sources={m: shares_of([s.completion.usage for s in hit if s.mode == m]) for m in num_restarts},
    )


async def converse(
    client: Client,
    conversation: Conversation,
    think_ms: int,
    answered: Sequence[Completion] = (),
    until: int | None = None,
) -> list[Completion]:
    """Hold one conversation up to `until` turns, or all; return all answers. `answered`: the answers so far.

    Raises RequestFailedError, also where the gateway does not return the answer's token ids.
    """
    completions = list(answered)
    prompt = [t for m, answer in zip(conversation.messages, answered, strict=False) for t in (*m, *answer.token_ids)]
    turns = list(zip(conversation.messages, conversation.answer_lengths, strict=True))
    for message, num_answer in turns[len(answered) : until]:
        if completions:
            await asyncio.sleep(think_ms / 1e3)
        prompt += message
        completion = await client.complete(prompt, num_answer, return_token_ids=True)
        if len(completion.token_ids) != num_answer:
            got = len(completion.token_ids)
            raise RequestFailedError(f"asked for {num_answer} tokens' ids (return_token_ids), the gateway gave {got}")
        prompt += completion.token_ids
        completions.append(completion)
    return completions


async def _run(plan: MultiturnPlan, options: Launch, url: str) -> MultiturnReport:
    longest = sys.maxsize if options.config.model.path else SHAPE["context_length"]
    histories = parse_lengths(plan.history, "--history", longest)
    output = parse_range(plan.output, "--output")
    async with serving(reuse_modes, options, url) as served:
        num_restarts = {mode: Counter[str]() for mode in served.clients}
        samples = await _measure(plan, histories, output, served, num_restarts)
    later = [sample for sample in samples if sample.turn > 1]
    modes = list(served.clients)
    return MultiturnReport(
        model=served.model,
        num_parameters=served.num_parameters,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        concurrency=plan.concurrency,
        think_ms=plan.think_ms,
        num_conversations=plan.num_conversations,
        later_turns_ttft_p50_ratio=later_ratios(samples),
        by_history={str(h): later_ratios([s for s in samples if s.history == h]) for h in histories},
        later_turns_sources={mode: shares_of([s.completion.usage for s in later if s.mode == mode]) for mode in modes},
        rows=tuple(rows_of(samples)),
        restart=restart_report(samples, plan.stops[0] + 1, num_restarts) if plan.restart else None,
    )


async def _measure(
    plan: MultiturnPlan,
    histories: list[int],
    output: tuple[int, int],
    served: Served,
    num_restarts: dict[str, Counter[str]],
) -> list[TurnSample]:
    """Hold the same conversations in every mesh, a group at a time. Only one mesh is busy at any time. Counts the
    restarts in `num_restarts`, by mode and worker."""
    # Each call of `group` takes the next seed: runs are repeatable, and no two groups share a prefix.
    seeds = itertools.count(SEED)
    num_groups = -(-plan.num_conversations // plan.concurrency)

    def group(history: int, count: int, num_turns: int) -> list[Conversation]:
        made = make_conversations(
            next(seeds), history, num_turns=num_turns, count=count, output=output, vocab_size=served.vocab_size
        )
        if (longest := max(c.num_tokens for c in made)) > served.context_length:
            raise UserError(f"{longest} tokens of conversation do not fit the model's context, {served.context_length}")
        return made

    # Make all conversations first: one that exceeds the model's context ends the run before any measurement.
    groups: list[list[Conversation]] = []
    for number in range(num_groups):
        count = min(plan.concurrency, plan.num_conversations - number * plan.concurrency)
        groups += [group(history, count, plan.num_turns) for history in histories]
    samples: list[TurnSample] = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up", total=len(groups) * len(served.clients))
        # Warm up every mesh with a group of its own seed: the KV of the warm-up is of no use to a measured prompt.
        warm_up = group(min(WARM_UP_HISTORY, *histories), plan.concurrency, WARM_UP_TURNS)
        for client in served.clients.values():
            await _hold(client, warm_up, 0, [], WARM_UP_TURNS)
        # Hold each group in one mesh after another; `rotated` lets a different mesh begin each time.
        for number, conversations in enumerate(groups):
            for mode in rotated(served.clients, number):
                progress.update(task, description=f"{conversations[0].history} tokens, {mode}")
                held: list[list[Completion]] = []
                victim = ""
                for stop in plan.stops:
                    # `held` is empty before the first stop: a worker is restarted only between two stops.
                    if held:
                        victim = held[0][-1].usage.kvmesh.prefill_worker
                        num_restarts[mode][victim] += 1
                        await restart_worker(served.supervisors[mode], victim)
                    held = await _hold(served.clients[mode], conversations, plan.think_ms, held, stop)
                samples += samples_of(mode, conversations, held, victim, plan.stops[0])
                progress.advance(task)
    # Return the samples in the fixed order of the modes: the sort is stable, so groups and turns keep theirs.
    order = {mode: number for number, mode in enumerate(served.clients)}
    return sorted(samples, key=lambda sample: order[sample.mode])


async def _hold(
    client: Client, conversations: Sequence[Conversation], think_ms: int, held: list[list[Completion]], until: int
) -> list[list[Completion]]:
    answered = held or [[]] * len(conversations)
    return await asyncio.gather(
        *(converse(client, talk, think_ms, own, until) for talk, own in zip(conversations, answered, strict=True))
    )


def _print(report: MultiturnReport) -> None:
    console = Console(highlight=False, soft_wrap=True)
    size = f", {report.num_parameters / 1e6:.1f} M parameters" if report.num_parameters else ""
    modes = list(dict.fromkeys(row.mode for row in report.rows))
    # One column of times per mode, then one of ratios per mode that can be compared with recomputing.
    columns = [Column("history", justify="right"), Column("turn", justify="right")]
    columns += [Column(_words(mode), justify="right") for mode in modes]
    compared = [mode for mode in modes if mode != RECOMPUTE] if RECOMPUTE in modes else []
    columns += [Column(f"{_words(mode)}, ratio", justify="right") for mode in compared]
    table = Table(*columns, title=f"time to first token, p50 / p75 ms, {report.model}{size}")
    # One line per history length and turn; a rule follows the last turn before a restart, and the last turn.
    for _, group in itertools.groupby(report.rows, key=lambda row: (row.history, row.turn)):
        rows = list(group)
        cells = [f"{row.ttft_p50_ms:.0f} / {row.ttft_p75_ms:.0f}" for row in rows]
        cells += [_times(row.ratio) for row in rows if row.mode in compared]
        table.add_row(str(rows[0].history), str(rows[0].turn), *cells)
        ends = {max(row.turn for row in report.rows), report.restart.turn - 1 if report.restart else 0}
        if rows[0].turn in ends:
            table.add_section()
    console.print(table)
    if AFFINITY in modes:
        console.print("affinity: by a hash of how a conversation begins, whatever the load; several may share a worker")
    # Sum up turns 2 and later: only these have an earlier turn whose KV can be reused.
    _print_turns(
        console, "later turns", report.later_turns_ttft_p50_ratio, report.by_history, report.later_turns_sources
    )
    if (restart := report.restart) is None:
        return
    # Report the restart: the conversations that the worker had served, then all of them, then how many restarts.
    console.print(
        f"\na worker was restarted before turn {restart.turn}; of it, the conversations that it had served last:"
    )
    _print_turns(
        console,
        f"turn {restart.turn}",
        restart.next_turns_ttft_p50_ratio,
        restart.next_turns_by_history,
        restart.next_turns_sources,
    )
    for mode, after in restart.after_ttft_p50_ratio.items():
        before = _times(restart.before_ttft_p50_ratio.get(mode))
        console.print(f"all conversations, {_words(mode)} / recompute at p50: {before} before, {_times(after)} after")
    for mode, counts in restart.num_restarts.items():
        workers = ", ".join(f"{worker} {count}" for worker, count in counts.items())
        console.print(f"restarts, {_words(mode)}: {workers}; conversations hit: {restart.next_turns.get(mode, 0)}")


def _print_turns(
    console: Console,
    turns: str,
    ratios: dict[str, float | None],
    by_history: dict[str, dict[str, float | None]],
    sources: dict[str, SourceShares],
) -> None:
    for mode, value in ratios.items():
        each = ", ".join(f"{h}: {_times(found.get(mode))}" for h, found in by_history.items())
        console.print(f"{turns}, {_words(mode)} / recompute at p50: [bold]{_times(value)}[/bold] ({each})")
    for mode, shares in sources.items():
        if shares.prompt_tokens:  # one turn has no later ones
            console.print(f"{turns}, prompt tokens, {_words(mode)}: {shares.words}")


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}×"


def _words(mode: str) -> str:
    return mode.replace("_", " ")
