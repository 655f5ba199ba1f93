"""What `make gpu-bench` and `make vllm-bench` say: a row per figure, with what it is compared with. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

Better = Literal["more", "less"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one section. `ratio`: against what stands in the same row; `aim`: what it should be, `better`:
    which way. `error`: why there is no figure."""

    what: str
    result: str = ""
    ratio: float | None = None
    aim: float | None = None
    better: Better = "more"
    error: str = ""

    @property
    def is_met(self) -> bool | None:
        """None: there is nothing to be met, or nothing was measured."""
        if self.ratio is None or self.aim is None:
            return None
        return self.ratio >= self.aim if self.better == "more" else self.ratio <= self.aim


def against(what: str, unit: str, ours: float, limit: float, limit_is: str, aim: float | None = None) -> Row:
    """Return the row of a rate beside its limit."""
    ratio = ours / limit if limit else None
    return Row(what=what, result=f"{ours:,.1f} {unit}; {limit_is}: {limit:,.1f}", ratio=ratio, aim=aim)


def with_and_without(what: str, with_ms: float | None, without_ms: float | None, aim: float) -> Row:
    """Return the row of a time with the split beside the same without; less is better."""
    if not with_ms or not without_ms:
        return Row(what=what, error="nothing was measured")
    ratio = with_ms / without_ms
    return Row(what=what, result=f"{with_ms:,.1f} / {without_ms:,.1f} ms", ratio=ratio, aim=aim, better="less")


def share(what: str, part_ms: float | None, whole_ms: float | None, aim: float) -> Row:
    """Return the row of what a part has of the whole; less is better."""
    if part_ms is None or not whole_ms:
        return Row(what=what, error="nothing was measured")
    ratio = part_ms / whole_ms
    result = f"{part_ms:,.2f} of {whole_ms:,.1f} ms: {ratio:.1%}"
    return Row(what=what, result=result, ratio=ratio, aim=aim, better="less")


def cells(row: Row) -> tuple[str, str, str, str]:
    """Return what, result, ratio and aim as people read them."""
    if row.error:
        return (row.what, f"**not measured**: {row.error}", "", _aim(row))
    shown = "" if row.ratio is None else f"{row.ratio:.2f}×"
    mark = {None: "", True: " ✓", False: " ✗"}[row.is_met]
    return (row.what, row.result, shown + mark, _aim(row))


def markdown(heading: str, rows: Sequence[Row]) -> str:
    """Return the whole report; a pipe in a text would break its line."""
    lines = [heading, "", "| what | result | ratio | aim |", "|---|---|--:|--:|"]
    lines += ["| " + " | ".join(cell.replace("|", "/") for cell in cells(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def plain(row: Row) -> str:
    """Return the row as one line of a terminal."""
    what, result, ratio, aim = (cell.replace("**", "") for cell in cells(row))
    tail = "  ".join(part for part in (ratio, f"(aim {aim})" if aim else "") if part)
    return f"  {what:64} {result}{'  ' + tail if tail else ''}"


def _aim(row: Row) -> str:
    return "" if row.aim is None else f"{'≥' if row.better == 'more' else '≤'} {row.aim:g}×"
