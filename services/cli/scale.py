"""`kvmesh simulate --workers`: measures a mesh at one or several sizes in virtual time, and prints the figures."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from services.bench.drive.arguments import check_plot_file
from services.cli.limits import MAX_PROBLEMS_SHOWN
from services.sim.scale import CONTROL, ScaleOptions, ScaleRow, measure


def run_scale(
    sizes: Sequence[int], seed: int, num_requests: int, *, charge: bool, plot: Path | None, as_json: bool
) -> None:
    """Measure each size, one after another, print, and plot. Exit code 1 where something was wrong. Raises UserError:
    the plot cannot be written."""
    # Refuse a path that cannot be plotted to before the measurement, not after it.
    check_plot_file(plot)
    plan = [ScaleOptions(num_workers=size, num_requests=num_requests, charge=charge) for size in sizes]
    # Progress goes to standard error: standard output has the result alone.
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    rows: list[ScaleRow] = []
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=sum(options.size for options in plan))
        for options in plan:
            what = f"{options.num_workers:,} workers, {options.size:,} requests"
            progress.update(bar, description=what)
            # Without a terminal no bar is drawn: name each size on a line of its own.
            if not console.is_terminal:
                sys.stderr.write(f"{what}\n")
            rows.append(measure(seed, options, lambda: progress.advance(bar)))
    if as_json:
        document = {"seed": seed, "charge": charge, "rows": [msgspec.to_builtins(row) for row in rows]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        _print_tables(rows, charge=charge)
    # With --json the plot's path goes to standard error, so that standard output stays valid JSON.
    if plot is not None:
        from services.bench.drive.plot import plot_sizes

        plot_sizes(rows, plot)
        Console(stderr=as_json, highlight=False, soft_wrap=True).print(f"plot: {plot.absolute()}")
    # Show the first problems only; a single one is enough for exit code 1.
    problems = [(row.workers, problem) for row in rows for problem in row.problems]
    for workers, problem in problems[:MAX_PROBLEMS_SHOWN]:
        sys.stderr.write(f"{workers} workers: {problem}\n")
    if problems:
        sys.exit(1)


def _print_tables(rows: Sequence[ScaleRow], *, charge: bool) -> None:
    console = Console(highlight=False)
    served = _table("workers", "requests", "failed", "requests/s", "TTFT p50", "p99", "tokens reused")
    control = _table("workers", "placed p99", "of TTFT", *CONTROL, "of CPU")
    # Each size has a row in both tables: what clients get, and what the control plane costs.
    for row in rows:
        served.add_row(
            f"{row.workers:,}",
            f"{row.requests:,}",
            f"{sum(row.failed.values()):,}",
            f"{row.requests_per_s:,.1f}",
            _ms(row.ttft_p50_ms),
            _ms(row.ttft_p99_ms),
            _share(row.reused),
        )
        control.add_row(
            f"{row.workers:,}",
            _ms(row.place_p99_ms),
            _share(row.place_share),
            *(f"{_ms(row.cpu_us[role] / 1e3)} {row.cpu_busy[role]:.0%}" for role in CONTROL),
            _share(row.control_share),
        )
    console.print(served)
    console.print(control)
    # Explain the columns below the tables: their headings have room for a word or two only.
    passes = "It passes in virtual time too." if charge else "None of it passes in virtual time."
    for line in (
        "placed: until a gateway knows where to send a request; its share of all TTFT.",
        "scheduler, directory, gateway: CPU time of this machine for each request,",
        f"and how busy one such process is (over 100 %: too busy). {passes}",
        "of CPU: these three of all services; engines and the bus count nothing.",
    ):
        console.print(line, markup=False)


def _table(*heads: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="right", min_width=max(map(len, head.split())))
    return table


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
