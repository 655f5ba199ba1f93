"""Shows on stderr how far a measurement is: a bar on a terminal, elsewhere a line now and then."""

import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.bench.limits import FIRST_LINE_S, LINE_INTERVAL_S


@contextmanager
def progress(
    what: str, total: int | None = None, *, first_line_s: float = FIRST_LINE_S, interval_s: float = LINE_INTERVAL_S
) -> Generator[Callable[[], None]]:
    """Give a function to be called after each of `total` steps. None: only the time that it has taken is shown."""
    console = Console(stderr=True)
    # On a terminal: a bar. Without a total there is no count and no remaining time to show.
    if console.is_terminal:
        known = (MofNCompleteColumn(), TimeRemainingColumn()) if total else ()
        columns = (TextColumn("{task.description}"), BarColumn(), *known, TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    # Elsewhere (a file, a pipe): count the steps, and write a line at intervals.
    num_done = 0

    def advance() -> None:
        nonlocal num_done
        num_done += 1

    ended, started = threading.Event(), time.monotonic()

    def show() -> None:
        wait_s = first_line_s
        while not ended.wait(wait_s):
            share = f"{num_done} of {total}, " if total else ""
            sys.stderr.write(f"{what}: {share}{time.monotonic() - started:.0f} s\n")
            wait_s = interval_s

    # Write the lines from a thread: they must also appear while a single step takes long.
    teller = threading.Thread(target=show, name="progress", daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        # End the thread before the caller goes on, also after an error: no line may follow the block.
        ended.set()
        teller.join()
