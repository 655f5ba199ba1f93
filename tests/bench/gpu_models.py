"""The checkpoints that `make gpu-bench` runs: random weights in the shapes of known models; kept for next time."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from services.config import state_dir

TINY = "tiny"
"""Tries the benchmark itself, without a card."""


def checkpoint_of(name: str) -> str:
    """Return the folder of a checkpoint, making it if need be. The large one takes 16 GB."""
    from services.bench.drive.make_checkpoint import make_known_checkpoint, make_random_checkpoint

    folder = state_dir() / "bench-models" / name
    if name == TINY:
        return str(folder if folder.is_dir() else make_random_checkpoint(folder, vocab=2048, context_length=4096))
    columns = (TextColumn("making {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(name)
        return str(
            make_known_checkpoint(
                name, folder, on_progress=lambda done, total: progress.update(bar, completed=done, total=total)
            )
        )
