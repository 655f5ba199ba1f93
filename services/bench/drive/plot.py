"""Plots measurements. Imports matplotlib, which is slow: import this module where it is used."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from matplotlib.figure import Figure

from services.errors import UserError

COLORS = ("#8c8c8c", "#2a78b5", "#3f9b4f", "#d1602a")


class TurnTimes(Protocol):
    """One turn of conversations whose history has `history` tokens, in one mode; times in milliseconds."""

    @property
    def history(self) -> int: ...
    @property
    def turn(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def ttft_p50_ms(self) -> float | None: ...
    @property
    def ttft_p75_ms(self) -> float | None: ...


def plot_turns(rows: Sequence[TurnTimes], path: Path) -> None:
    """Write TTFT by turn: a panel for each history length, a line for each mode, a band from p50 to p75.

    Raises UserError where the file cannot be written.
    """
    histories = sorted({row.history for row in rows})
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure = Figure(figsize=(3.6 * len(histories), 3.8), layout="constrained")
    # The library's own types leave most of its arguments open.
    panels = cast("list[Any]", figure.subplots(1, len(histories), squeeze=False)[0])
    for panel, history in zip(panels, histories, strict=True):
        for number, mode in enumerate(modes):
            mine = [row for row in rows if (row.history, row.mode) == (history, mode)]
            turns, p50 = [row.turn for row in mine], [row.ttft_p50_ms for row in mine]
            color = COLORS[number % len(COLORS)]
            panel.plot(turns, p50, marker="o", markersize=4, color=color, label=mode.replace("_", " "))
            panel.fill_between(turns, p50, [row.ttft_p75_ms for row in mine], color=color, alpha=0.2, linewidth=0)
        panel.set_title(f"{history:,} tokens of history", fontsize=10)
        panel.set_xlabel("turn")
        panel.set_xticks(sorted({row.turn for row in rows}))
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("time to first token, ms (p50, band to p75)")
    panels[0].legend(fontsize=8)
    _save(figure, path)


class SizeFigures(Protocol):
    """A mesh of so many workers; `cpu_us`: CPU time for each request, by service."""

    @property
    def workers(self) -> int: ...
    @property
    def requests_per_s(self) -> float: ...
    @property
    def ttft_p50_ms(self) -> float | None: ...
    @property
    def ttft_p99_ms(self) -> float | None: ...
    @property
    def cpu_us(self) -> dict[str, float]: ...


def plot_sizes(rows: Sequence[SizeFigures], path: Path) -> None:
    """Write three panels over the number of workers: requests a second, TTFT, CPU time for each request by service.

    Raises UserError where the file cannot be written.
    """
    workers = [row.workers for row in rows]
    lines: list[list[tuple[str, list[float | None]]]] = [
        [("requests/s", [row.requests_per_s for row in rows])],
        [("p50", [row.ttft_p50_ms for row in rows]), ("p99", [row.ttft_p99_ms for row in rows])],
        [(name, [row.cpu_us[name] / 1e3 for row in rows]) for name in rows[0].cpu_us],
    ]
    titles = ("requests a second", "time to first token, ms", "CPU time for each request, ms")
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    panels = cast("list[Any]", figure.subplots(1, len(lines), squeeze=False)[0])
    for panel, title, group in zip(panels, titles, lines, strict=True):
        for number, (name, values) in enumerate(group):
            panel.loglog(workers, values, marker="o", markersize=4, color=COLORS[number % len(COLORS)], label=name)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("workers")
        panel.grid(alpha=0.3)
        if len(group) > 1:
            panel.legend(fontsize=8)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        cast("Any", figure).savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
