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
    try:
        cast("Any", figure).savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
