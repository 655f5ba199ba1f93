"""Installs each client into an environment of its own and runs its script on a mesh: `make clients`.

    python -m tests.clients                     all of them
    python -m tests.clients litellm aiperf      these
    python -m tests.clients --install NAME …    only install
    python -m tests.clients --page docs/clients.md

Prints a table of what was tried, and ends with 1 where something failed.
"""

import argparse
import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from services.bench.drive.meshes import running
from services.config import GatewayConfig, MeshConfig, SchedulerConfig
from services.launch.options import Launch
from tests.clients.environments import CLIENTS, INSTALLED, MissingError, install, version
from tests.clients.trying import Part, run_script

MESH = "clients"


class Tried(NamedTuple):
    """What came of one client. `version` is empty where it is not installed."""

    version: str
    parts: Sequence[Part]


def main() -> int:
    options = _options()
    results: dict[str, Tried] = {}
    for name in options.clients or CLIENTS:
        try:
            install(name, options.torch_index)
        except (MissingError, subprocess.CalledProcessError) as error:
            results[name] = Tried("", [Part("installing", str(error))])
        else:
            results[name] = Tried(version(name), ())
    if not options.install:
        results = asyncio.run(_run(results))
        _show(results)
    if options.page:
        Path(options.page).write_text(page(results))
    return 1 if any(part.error for one in results.values() for part in one.parts) else 0


async def _run(results: Mapping[str, Tried]) -> dict[str, Tried]:
    """Run the script of each client that is installed, one after another, on a mesh that splits every request."""
    options = Launch(config=MeshConfig(gateway=GatewayConfig(port=0), scheduler=SchedulerConfig(policy="round_robin")))
    async with running({MESH: options}) as supervisors:
        supervisor = supervisors[MESH]
        assert supervisor.checkpoint is not None
        found = dict(results)
        for name, tried in results.items():
            if tried.version:
                print(f"{name} {tried.version} …", flush=True)
                log = INSTALLED / f"{name}.log"
                log.parent.mkdir(exist_ok=True)
                parts = await asyncio.to_thread(run_script, name, supervisor.url, supervisor.checkpoint.name, log)
                found[name] = tried._replace(parts=parts)
        return found


def _show(results: Mapping[str, Tried]) -> None:
    table = Table("client", "version", "tried", "result", box=box.SIMPLE)
    for name, tried in results.items():
        for part in tried.parts:
            table.add_row(name, tried.version, part.what, part.error or "ok")
    Console().print(table)


def page(results: Mapping[str, Tried]) -> str:
    """Return `docs/clients.md`."""
    num_parts = sum(len(tried.parts) for tried in results.values())
    num_failed = sum(bool(part.error) for tried in results.values() for part in tried.parts)
    rows = [
        f"| {name} | {tried.version or 'not installed'} | {_cell([part for part in tried.parts if not part.error])} "
        f"| {_cell([part for part in tried.parts if part.error]) or '–'} |"
        for name, tried in results.items()
    ]
    return f"""{_HEAD}
{num_parts} things were tried with {len(results)} clients; {num_failed or "none"} of them failed.

| client | version | what works | what fails |
|---|---|---|---|
{chr(10).join(rows)}
"""


def _cell(parts: Sequence[Part]) -> str:
    return "<br>".join(f"{part.what}: {part.error}" if part.error else part.what for part in parts).replace("|", "\\|")


_HEAD = """# Clients

Written by `make clients-page`. It installs each client as it is published into an environment of its own (`.clients/`),
starts a mesh with the demo model, which splits every request, and runs a script of `tests/clients/scripts/` with each:
such as a person writes, with nothing in it that is ours. They run on other servers, too: `OPENAI_BASE_URL`,
`OPENAI_API_KEY` and `MODEL` say where.

The demo model follows no instructions. What is checked is that an answer has the form that was asked for: a tool's
arguments fit its schema, JSON is valid, logprobs are there, streams end as they should. `make test` runs two of them,
openai-python and openai-node.
"""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=", ".join(CLIENTS))
    parser.add_argument("--install", action="store_true", help="install, and run nothing")
    parser.add_argument("--page", default="", metavar="FILE", help="write the table into this file, too")
    parser.add_argument("--torch-index", default="", metavar="URL", help="where PyTorch is looked for first")
    options = parser.parse_args()
    if unknown := set(options.clients) - CLIENTS.keys():
        parser.error(f"there is no client {', '.join(sorted(unknown))}: {', '.join(CLIENTS)}")
    if options.page and (options.clients or options.install):
        parser.error("--page is of all clients")
    return options


if __name__ == "__main__":
    sys.exit(main())
