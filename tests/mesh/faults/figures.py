"""`make faults`: what surviving comes to, as a table. Every figure is measured here and now, and can be had alone."""

import argparse
import asyncio
import dataclasses
import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.bench.drive.meshes import model_folder
from services.bench.drive.stats import percentile
from services.launch.options import Launch
from services.settings import changed
from services.sim.many import run_many, wall_clock
from services.sim.scenario import FAULT_KINDS, load_scenario
from services.sim.world import SimOptions
from tests.bench.bench_proof import LENGTHS, TIMES, proved_and_not
from tests.bench.side_by_side import compare, num_rounds
from tests.mesh.faults import brokers, times
from tests.mesh.faults.harness import (
    OPTIONS,
    SCENARIOS,
    FaultMesh,
    Outcome,
    fault_mesh,
    make_documents,
    make_long_truth,
    make_truth,
)
from tests.mesh.faults.kills import Killing
from tests.mesh.faults.truth import Truth
from tests.mesh.zygote import Zygote
from tests.plane.corruption import Corruption, measure
from tests.sim.documents import cut_documents

FREE_AFTER_DEATH_S = 3.0
FREE_AFTER_CANCEL_S = 0.25
GO_ON_S = 0.5
LEFT_S = 1.5
AWAY_S, SPARED_S, ALONE_S, TWICE_S = 0.3, 1.5, 0.5, 1.0
"""What an engine's death may cost an answer: with another worker, with a spare, and, beside its start, alone: once, and
twice, where the second start waits a little longer."""
ALONE = changed(OPTIONS, {"num_prefill": 0, "num_decode": 0, "num_aggregated": 1})
SPARED = changed(ALONE, {"config.engine.spares": 1})
NO_MEMBER_LEFT = frozenset({"kill_gateway"})
"""Its own clients lose their answers: a connection cannot outlive its process."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. `is_met` None: nothing was promised."""

    figure: str
    measured: str
    wanted: str
    is_met: bool | None
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    rounds: int
    kills: int
    cut_documents: int
    document_kills: int
    requests: int
    flips: int
    clean_blocks: int
    deaths: int
    pauses: int
    broker_pauses: int
    gateway_cuts: int
    broker_kills: int
    broker_faults: int
    cancels: int
    timed: int


Advance = Callable[[], None]
Begin = Callable[[str, int], Advance]
"""Begins a bar of so many steps."""
Figure = Callable[["Sizes", Begin], Awaitable[list["Row"]]]


async def scenarios(sizes: Sizes, begin: Begin) -> list[Row]:
    """Carry out every scenario file on real processes."""
    files = sorted(SCENARIOS.glob("*.toml"))
    advance = begin("scenarios on real processes", len(files) * sizes.rounds)
    outcomes: list[Outcome] = []
    async with _mesh() as mesh:
        for _ in range(sizes.rounds):
            for file in files:
                outcomes.append(await mesh.run(load_scenario(file)))
                advance()
    killed = [o for o in outcomes if o.faults["kill"] and o.name not in NO_MEMBER_LEFT]
    num_requests, num_wrong = sum(o.num_requests for o in outcomes), sum(len(o.wrong) for o in outcomes)
    late, leased = sum(o.num_late for o in outcomes), sum(o.num_leased_late for o in outcomes)
    failed = [failure for o in killed for failure in o.failed]
    others = [what for o in outcomes for what in (*o.problems, *(o.failed if o not in killed else ()))]
    return [
        _none("wrong outputs", num_wrong, f"{num_requests} requests, {len(outcomes)} scenarios", _all_wrong(outcomes)),
        _none("not ended by the deadline + 1 s", late, f"{num_requests} requests"),
        _none(
            "failed on SIGKILL, two members per role",
            len(failed), f"{sum(o.num_requests for o in killed)} requests, {len(killed)} scenarios", failed,
        ),
        _none("blocks leased 1 s after quiescence", leased, f"{len(outcomes)} scenarios"),
        _none("anything else that must not be", len(others), f"{len(outcomes)} scenarios", others),
    ]  # fmt: skip


async def kills(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill real workers in the middle of answers, over and over."""
    advance = begin("kills of real workers", sizes.kills)
    async with _mesh() as mesh:
        report = await Killing(mesh, sizes.kills, advance).run()
    around = f"{report.num_kills} kills, {report.num_cut} of a worker with requests; {report.num_streams} answers, "
    around += f"{report.num_tokens} tokens, {report.num_resumed} answers resumed"
    if report.num_near_ties:
        around += f", {report.num_near_ties} proven near-ties"
    return [
        _none("answers with tokens lost or doubled", len(report.wrong), around, report.wrong),
        _none("failed while killing", len(report.failed), f"{report.num_streams} answers", report.failed),
    ]


async def documents(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill workers in the middle of JSON documents: simulated ones, with a toy grammar, and real ones."""
    advance = begin("documents cut by kills, simulated", sizes.cut_documents)
    found = await asyncio.to_thread(cut_documents, sizes.cut_documents, advance)
    rows = [
        _none(
            "simulated: documents that are invalid, or have other tokens",
            len(found.problems), f"{found.num_cut} cut in the middle, of {found.num_documents}", found.problems,
        )
    ]  # fmt: skip
    advance = begin("kills of real workers that write documents", sizes.document_kills)
    async with _mesh(make_documents()) as mesh:
        wanted = sizes.document_kills
        report = await Killing(mesh, wanted, advance, aimed=True, num_cut_documents=wanted).run()
    around = f"{report.num_kills} kills, {report.num_cut} of a worker with requests; {report.num_documents} documents, "
    around += f"{report.num_tokens} tokens, {report.num_cut_documents} cut in the middle; logprobs of the same "
    around += f"document differ by at most {report.logprob_difference:.1e}"
    return [
        *rows,
        _none("invalid documents", len(report.invalid), around, report.invalid),
        _none("documents with tokens that differ", len(report.wrong), f"{report.num_documents}", report.wrong),
        _none("documents that failed while killing", len(report.failed), f"{report.num_streams}", report.failed),
    ]


async def death(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill decode workers that are reading."""
    advance = begin("deaths of a reader", sizes.deaths)
    async with _mesh() as mesh:
        waits = await times.death_to_free(mesh, sizes.deaths, advance)
    return [_times("decode's death to P's blocks free", waits, FREE_AFTER_DEATH_S, f"{len(waits)} deaths")]


async def pause(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill the decode worker of a running answer; its client measures."""
    return [await _pauses(sizes, begin, times.kill, "longest gap in a stream whose decode worker dies")]


async def move(sizes: Sizes, begin: Begin) -> list[Row]:
    """Have the decode worker of a running answer leave; its client measures."""
    return [await _pauses(sizes, begin, times.leave, "longest gap in a stream whose decode worker leaves")]


async def kill_engine(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill the engine of a running answer, with another worker, alone, and alone with a spare; its client measures."""
    figure, advance = (
        "longest gap in a stream whose engine dies",
        begin("engines' deaths with a full cache", sizes.deaths),
    )
    rows = [
        await _pauses(sizes, begin, times.kill_engine, f"{figure}, another worker", limit_s=AWAY_S),
        await _pauses(sizes, begin, times.kill_engine, f"{figure}, alone with a spare", SPARED, limit_s=SPARED_S),
        await _pauses(sizes, begin, times.kill_engine, f"{figure}, alone", ALONE, limit_s=ALONE_S, starts=1),
    ]
    async with _mesh(options=ALONE) as mesh:
        before, after = await times.cached_after_death(mesh, sizes.deaths, advance)
    share, around = after / max(before, 1), f"{after} of {before} prompt tokens, {sizes.deaths} deaths"
    kept = Row(
        "served from the cache after an engine's death / before", f"{share:.2f} ({around})", ">= 0.95", share >= 0.95
    )
    return [*rows, kept]


async def kill_engine_twice(sizes: Sizes, begin: Begin) -> list[Row]:
    """Kill the engine of a running answer and the next one as it is loaded, on the only worker that there is."""
    figure = "longest gap in a stream whose engine dies twice, alone"
    return [await _pauses(sizes, begin, times.kill_engine_twice, figure, ALONE, limit_s=TWICE_S, starts=2)]


async def hang_engine(sizes: Sizes, begin: Begin) -> list[Row]:
    """Stop the engine's process of a running answer for good; another worker goes on."""
    options = changed(OPTIONS, {"config.engine.step_timeout_s": 1.0})
    figure = "longest gap in a stream whose engine hangs"
    figure = f"{figure}, with a step timeout of 1 s"
    return [await _pauses(sizes, begin, times.hang_engine, figure, options, limit_s=1.0 + AWAY_S)]


async def _pauses(
    sizes: Sizes,
    begin: Begin,
    strike: times.Strike,
    figure: str,
    options: Launch = OPTIONS,
    *,
    limit_s: float | None = None,
    starts: int = 0,
) -> Row:
    """`starts`: of an engine, which may come on top of `limit_s`."""
    advance = begin(figure, sizes.pauses)
    async with _mesh(options=options) as mesh:
        found = await times.pauses(mesh, sizes.pauses, advance, strike)
    around = f"{len(found.struck_s)} times; any gap without it: {_p50_p99(found.quiet_s)}"
    if found.num_near_ties:
        around += f"; {found.num_near_ties} proven near-ties"
    gaps, wanted = found.struck_s, "the same tokens"
    if starts:
        gaps = [gap - starts * ready for gap, ready in zip(gaps, found.ready_s, strict=True)]
        around += f"; without the start of {starts} engine(s), {_p50_p99(found.ready_s)}: {_p50_p99(gaps)}"
    is_met = not found.wrong
    if limit_s is not None:
        wanted += f", p99 <= {1e3 * limit_s:.0f} ms" + (f" and {starts} start(s)" if starts else "")
        is_met = is_met and (percentile(gaps, 99) or 0.0) <= limit_s
    return Row(figure, f"{_p50_p99(found.struck_s)} ({around})", wanted, is_met, tuple(found.wrong))


async def broker_pause(sizes: Sizes, begin: Begin) -> list[Row]:
    """Stop the broker's process under load; the clients of what was under way measure."""
    for_s = times.BROKER_PAUSES_S * sizes.broker_pauses
    advance = begin("pauses of the broker", len(for_s))
    async with _mesh() as mesh:
        found = await times.broker_pauses(mesh, for_s, advance)
    around = f"{len(for_s)} pauses of {min(for_s):g} to {max(for_s):g} s"
    return _outage_rows(found, around, "a broker's pause", "the broker's return")


async def gateway_cut(sizes: Sizes, begin: Begin) -> list[Row]:
    """Cut a gateway off from the broker; the clients of what was under way there measure."""
    advance = begin("cuts of a gateway", sizes.gateway_cuts)
    async with _mesh(make_long_truth()) as mesh:
        found = await times.gateway_cuts(mesh, [times.CUT_S] * sizes.gateway_cuts, advance)
    around = f"{sizes.gateway_cuts} cuts of {times.CUT_S:g} s, {found.num_resumed} attempts given up"
    return _outage_rows(found, around, "a gateway that was cut off", "a cut gateway's return")


def _server_figure(name: str, what: str, p99_s: float, p50_s: float = math.inf) -> Figure:
    """Return the figure of what is done to one of a broker's three servers. The times: the longest pause that an answer
    may have, of 99 % and of half of the answers."""

    async def figure(sizes: Sizes, begin: Begin) -> list[Row]:
        num_strikes = sizes.broker_kills if name == "kill" else sizes.broker_faults
        advance = begin(f"a server of three {what}", num_strikes)
        found, truth = brokers.ServerOutages(), make_long_truth()
        # Clients stay where they have gone to. A cut is to be between some of them: each time in a new mesh.
        for in_one in [1] * num_strikes if name == "split" else [num_strikes]:
            async with _mesh(truth, has_cluster=True) as mesh:
                await brokers.server_outages(mesh, name, in_one, advance, found)
        one, bad = f"one server of three {what}", found.complaints
        around = f"{num_strikes} times, {found.num_answers} answers, {found.num_near_ties} proven near-ties"
        streams, times_of = f"{len(found.gaps_s)} streams", f"{len(found.away_s)} times"
        return [
            _none(f"{one}: wrong or lost, or a worker declared dead", len(bad), around, bad),
            _times(f"{one}: an answer's longest pause", found.gaps_s, p99_s, streams, p50_s=p50_s),
            _times(f"{one}: until it has no client any more", found.away_s, LEFT_S, times_of),
        ]

    figure.__name__ = f"broker_{name}"
    return figure


def _outage_rows(found: times.Outages, around: str, outage: str, end: str) -> list[Row]:
    around += f", {found.num_answers} answers"
    if found.num_near_ties:
        around += f", {found.num_near_ties} proven near-ties"
    bad = found.complaints
    return [
        _none(f"wrong or lost, or a worker declared dead, for {outage}", len(bad), around, bad),
        _times(f"{end} to a stream's next token", found.gaps_s, GO_ON_S, f"{len(found.gaps_s)} streams"),
    ]


async def cancel(sizes: Sizes, begin: Begin) -> list[Row]:
    """Hang up in every phase."""
    advance = begin("cancels", sizes.cancels * len(times.PHASES))
    async with _mesh() as mesh:
        by_phase = await times.cancel_to_free(mesh, sizes.cancels, advance)
    waits = [time for phase in by_phase.values() for time in phase]
    around = f"{len(waits)} cancels in {len(by_phase)} phases"
    worst = tuple(f"{phase}: at most {1e3 * max(phase_times):.0f} ms" for phase, phase_times in by_phase.items())
    return [_times("cancel to both sides free", waits, FREE_AFTER_CANCEL_S, around, worst)]


async def corruption(sizes: Sizes, begin: Begin) -> list[Row]:
    """Flip bits on both carriers."""
    carriers = ("tcp", "shm")
    advance = begin("flipped bits, by carrier", len(carriers))
    rows: list[Row] = []
    for carrier in carriers:
        result = await asyncio.to_thread(measure, carrier, num_flips=sizes.flips, num_clean_blocks=sizes.clean_blocks)
        rows.append(_corruption(carrier, result))
        advance()
    return rows


async def simulate(sizes: Sizes, begin: Begin) -> list[Row]:
    """Run the simulator over both cores."""
    advance = begin("simulated requests, by the hundred", sizes.requests // 100)
    shown = 0
    num_done = 0

    def show(num_requests: int) -> None:
        nonlocal shown, num_done
        num_done += num_requests
        while shown < num_done // 100:
            advance()
            shown += 1

    started_s = wall_clock()
    total = await asyncio.to_thread(
        lambda: run_many(
            0, sizes.requests, SimOptions(kinds=FAULT_KINDS), on_batch=lambda batch: show(batch.verdict.num_requests)
        )
    )
    wall_s, verdict = wall_clock() - started_s, total.verdict
    problems = [f"seed {failure.seed}: {failure.problems[0]}" for failure in total.failures]
    around = f"{sum(verdict.faults.values())} faults, {verdict.faults['kill']} of them kills; in {wall_s / 60:.1f} min"
    num_bad = verdict.num_wrong + verdict.num_unfinished + verdict.num_leaked_blocks
    return [
        Row("lifetimes simulated", f"{verdict.num_requests} ({around})", "", None),
        _none("simulated: wrong, unfinished or leaked", num_bad, f"{verdict.num_requests} requests"),
        _none("simulations that broke any promise", len(problems), f"{total.num_runs} simulations", problems),
    ]


async def bugs(_: Sizes, begin: Begin) -> list[Row]:
    """Plant every known bug."""
    advance = begin("planted bugs", 1)
    command = [sys.executable, "-m", "tests.sim.bugs", "--json"]
    ran = await asyncio.to_thread(
        subprocess.run, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, text=True
    )
    advance()
    if not ran.stdout:
        return [Row("bugs caught of bugs planted", "the hunt failed: run python -m tests.sim.bugs", "all", False)]
    found = json.loads(ran.stdout)
    seeds = max(bug["num_seeds"] for bug in found["bugs"])
    measured = f"{found['caught']} of {found['planted']}, each within {seeds} seeds"
    return [Row("bugs caught of bugs planted", measured, "all, at least 20", found["caught"] == found["planted"] >= 20)]


async def cost(sizes: Sizes, begin: Begin) -> list[Row]:
    """Time the same requests with and without digests."""
    on_round = begin("rounds of timed requests", num_rounds(LENGTHS, sizes.timed, 1))
    async with model_folder("") as (model, _):
        rows = await compare(lambda: proved_and_not(model, "tcp"), TIMES, LENGTHS, sizes.timed, 1, on_round)
    measured = "; ".join(
        f"{row.num_tokens} tokens: TTFT x{row.times['first'].ratio}, second token x{row.times['second'].ratio}"
        for row in rows
        if row.mesh == "proof"
    )
    return [Row("what digests cost", f"{measured} (medians of {sizes.timed} each, tcp)", "", None)]


_FIGURES: tuple[Figure, ...] = (
    scenarios, kills, documents, death, pause, move, kill_engine, kill_engine_twice, hang_engine, broker_pause,
    _server_figure("kill", "SIGKILLed", 0.5, 0.15), _server_figure("stop", "SIGSTOPped", 1.5),
    _server_figure("away", "sent away", 0.3), _server_figure("split", "cut off from the others", 1.5),
    gateway_cut, cancel, corruption, simulate, bugs, cost,
)  # fmt: skip
FIGURES: dict[str, Figure] = {each.__name__: each for each in _FIGURES}


@asynccontextmanager
async def _mesh(
    truth: Truth | None = None, options: Launch = OPTIONS, *, has_cluster: bool = False
) -> AsyncGenerator[FaultMesh]:
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory(prefix="kvmesh-faults-") as folder:
            async with fault_mesh(
                Path(folder), truth or make_truth(), zygote, options, has_cluster=has_cluster
            ) as mesh:
                yield mesh
    finally:
        await zygote.stop()


def _none(figure: str, number: int, around: str, details: "list[str] | tuple[str, ...]" = ()) -> Row:
    """Return the row of something of which there must be none."""
    return Row(figure, f"{number} ({around})", "0", number == 0, tuple(details))


def _all_wrong(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.name}: {wrong}" for o in outcomes for wrong in o.wrong]


def _times(
    figure: str,
    waits: list[float],
    limit_s: float,
    around: str,
    details: tuple[str, ...] = (),
    *,
    p50_s: float = math.inf,
) -> Row:
    is_met = (percentile(waits, 99) or 0.0) <= limit_s and (percentile(waits, 50) or 0.0) <= p50_s
    measured, wanted = f"{_p50_p99(waits)} ({around})", f"p99 <= {1e3 * limit_s:.0f} ms"
    if p50_s < math.inf:
        wanted = f"p50 <= {1e3 * p50_s:.0f} ms, {wanted}"
    return Row(figure, measured, wanted, is_met, () if is_met else details)


def _p50_p99(waits: list[float]) -> str:
    p50, p99 = percentile(waits, 50), percentile(waits, 99)
    assert p50 is not None and p99 is not None
    return f"p50 {1e3 * p50:.0f} ms, p99 {1e3 * p99:.0f} ms"


def _corruption(carrier: str, result: Corruption) -> Row:
    measured = f"{result.num_caught} of {result.num_flipped}, {result.num_false_alarms} false alarms in "
    measured += f"{result.num_clean_blocks} clean blocks"
    is_met = result.num_caught == result.num_flipped and not result.num_wrong and not result.num_false_alarms
    return Row(f"corruption caught, {carrier}", measured, "all, no false alarm", is_met)


def markdown(rows: list[Row]) -> str:
    """Return the table as Markdown."""
    lines = ["| figure | measured | wanted |", "|---|---|---|"]
    lines += [f"| {row.figure} | {row.measured} | {row.wanted or '-'} |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, write. Exit code 1 where a figure is not as wanted."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--only", default="", help=f"one of: {', '.join(FIGURES)}; or several with commas")
    parser.add_argument("--out", type=Path, default=Path(".kvmesh/faults.md"), help="the Markdown table's file")
    parser.add_argument("--rounds", type=int, default=1, help="how often each scenario")
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--cut-documents", type=int, default=1_000, help="simulated documents cut by a kill")
    parser.add_argument("--document-kills", type=int, default=100, help="documents of real workers cut by a kill")
    parser.add_argument("--requests", type=int, default=20_000, help="simulated; make sim does 100,000")
    parser.add_argument("--flips", type=int, default=1_000, help="flipped bits, on each carrier")
    parser.add_argument("--clean-blocks", type=int, default=100_000, help="transferred unharmed, on each carrier")
    parser.add_argument("--deaths", type=int, default=50)
    parser.add_argument(
        "--pauses", type=int, default=50, help="answers whose decode worker is killed, and as many whose leaves"
    )
    parser.add_argument("--broker-pauses", type=int, default=5, help="of each length")
    parser.add_argument("--gateway-cuts", type=int, default=10)
    parser.add_argument("--broker-kills", type=int, default=100, help="of one of three servers")
    parser.add_argument("--broker-faults", type=int, default=20, help="of one of three servers, of each other kind")
    parser.add_argument("--cancels", type=int, default=10, help="in each phase")
    parser.add_argument("--timed", type=int, default=20, help="requests of each length, with checks and without")
    options = vars(parser.parse_args())
    logging.getLogger("services.bus").setLevel(logging.ERROR)  # what is done to the broker is no news here
    out, names = options.pop("out"), [name for name in options.pop("only").split(",") if name] or list(FIGURES)
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"no figure is called {unknown[0]!r}; there are: {', '.join(FIGURES)}")
    console = Console(highlight=False)
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def begin(what: str, num_steps: int) -> Advance:
            task = progress.add_task(what, total=num_steps)
            return lambda: progress.advance(task)

        for name in names:
            found = asyncio.run(_measured(name, Sizes(**options), begin))
            for row in found:
                for detail in row.details[:20] if row.is_met is False else ():
                    progress.console.print(f"{row.figure}: {detail}", markup=False)
            rows += found
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(markdown(rows))  # as far as it goes: what takes long may be stopped
    table = Table("figure", "measured", "wanted", "")
    for row in rows:
        table.add_row(
            row.figure, row.measured, row.wanted, "" if row.is_met is None else "ok" if row.is_met else "NOT MET"
        )
    console.print(table)
    console.print(f"written to {out}")
    sys.exit(any(row.is_met is False for row in rows))


async def _measured(name: str, sizes: Sizes, begin: Begin) -> list[Row]:
    return await FIGURES[name](sizes, begin)


if __name__ == "__main__":
    main()
