"""Says of each thing that a script tries whether it worked: a line on standard output, with tabs between its parts."""

import asyncio
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODEL = os.environ["MODEL"]

_parts: list[tuple[str, Callable[[], Any]]] = []


def tries(what: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Keep the function, plain or async, for `run`."""

    def keep(function: Callable[[], Any]) -> Callable[[], Any]:
        _parts.append((what, function))
        return function

    return keep


def call(name: str, *arguments: str, **options: Any) -> None:
    """Call a command that is installed beside this Python. Raises RuntimeError with the last line of what it said."""
    command = [Path(sys.executable).with_name(name), *arguments]
    call = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)
    print(call.stdout, file=sys.stderr, flush=True)
    if call.returncode:
        last = [line for line in call.stdout.splitlines() if line.strip()][-1:]
        raise RuntimeError(f"{name} ended with {call.returncode}: {' '.join(last)}")


def run() -> None:
    """Call what was kept, in order. The process ends with 1 where something failed."""
    with asyncio.Runner() as runner:  # one loop for all: clients keep their connections
        results = [_works(runner, what, function) for what, function in _parts]
    sys.exit(0 if all(results) else 1)


def _works(runner: asyncio.Runner, what: str, function: Callable[[], Any]) -> bool:
    try:
        result = function()
        if inspect.isawaitable(result):
            runner.run(_wait(result))
    except Exception as error:  # noqa: BLE001 whatever it is, it is what the table shows
        traceback.print_exc()
        text = str(error) or str(traceback.extract_tb(error.__traceback__)[-1].line)
        print("failed", what, f"{type(error).__name__}: {' '.join(text.split())}", sep="\t", flush=True)
        return False
    print("ok", what, sep="\t", flush=True)
    return True


async def _wait(result: Any) -> None:
    await result
