"""Parses and checks the values of options."""

from pathlib import Path

from services.errors import UserError


def parse_lengths(text: str, option: str, limit: int) -> list[int]:
    """Return the lengths of a comma-separated list, in its order. Raises UserError where one is not from 1 to
    `limit`."""
    try:
        lengths = [int(length) for length in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} {text!r}: give numbers with commas between, as in 100,1000,10000") from error
    if not all(1 <= length <= limit for length in lengths):
        raise UserError(f"{option} must lie between 1 and {limit}")
    return lengths


def parse_range(text: str, option: str) -> tuple[int, int]:
    """Return the bounds of a range such as `32..64`; a single number is both. Raises UserError for anything else."""
    least, separator, most = text.partition("..")
    try:
        bounds = (int(least), int(most) if separator else int(least))
    except ValueError as error:
        raise UserError(f"{option} {text!r}: give a number or a range, as in 32..64") from error
    if not 1 <= bounds[0] <= bounds[1]:
        raise UserError(f"{option} {text!r}: the range must begin at 1 or more and not end before it begins")
    return bounds


def check_plot_file(path: Path | None) -> None:
    """Raise UserError where no plot can be written there."""
    if path is not None and path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"--plot {path}: name a .png, .svg or .pdf file")
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--plot {path}: there is no folder {path.parent}")
