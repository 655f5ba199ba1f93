"""Takes the README's pictures of `kvmesh top` and `kvmesh trace`: `python -m tests.pages.shots FOLDER`."""

import asyncio
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, RenderableType
from rich.terminal_theme import MONOKAI

from services.bus.nats import NatsBus
from services.cli import top
from services.cli.board import Board
from services.cli.recorded import find_trace, load_spans
from services.cli.trace import render_waterfall
from services.config import GatewayConfig, MeshConfig, WorkerConfig
from services.launch.options import Launch
from services.trust.keys import BusAccess
from tests.pages.limits import SETTLE_S, WATCH_S
from tests.pages.scene import Scene, running_mesh

OPTIONS = Launch(
    num_prefill=2,
    num_decode=2,
    config=MeshConfig(gateway=GatewayConfig(port=0), worker=WorkerConfig(kv_bytes=48 * 1024 * 1024)),
)
TOP_WIDTH, TRACE_WIDTH = 80, 120
NUM_CLIENTS = 10
PROMPT_TOKENS = (100, 400, 900)
ANSWER_TOKENS = 48
TRACED_TOKENS = 1_500

_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "Fira Code", "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: {char_height}px;
  line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix" xml:space="preserve">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own, without the fonts that it would load from elsewhere."""


def picture(title: str, width: int, draw: Callable[[Console], None]) -> str:
    """Return what `draw` prints as an SVG."""
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False, force_terminal=True)
    draw(console)
    return console.export_svg(title=title, theme=MONOKAI, code_format=_FORMAT, unique_id="kvmesh")


async def take(folder: Path) -> None:
    """Write `top.svg` and `trace.svg` of a mesh at work into a folder. Raises UserError where none can be started."""
    async with running_mesh(OPTIONS) as supervisor:
        bus = await NatsBus.connect(supervisor.access(), "kvmesh-shots")
        async with Scene(supervisor, bus) as scene:
            drawn = await _watch(supervisor.access(), scene)
            shown = picture("kvmesh top", TOP_WIDTH, lambda console: console.print(drawn))
            (folder / "top.svg").write_text(shown, "utf-8")
            request_id = await scene.complete(scene.prompt(TRACED_TOKENS), ANSWER_TOKENS)
        await bus.close()
        await asyncio.sleep(SETTLE_S)
        spans = load_spans(supervisor.trace_dir)
    trace, recorded = find_trace(spans, request_id), {span.span_id: span for span in spans}
    shown = picture("kvmesh trace", TRACE_WIDTH, lambda console: render_waterfall(trace, console, recorded))
    (folder / "trace.svg").write_text(shown, "utf-8")


async def _watch(access: BusAccess, scene: Scene) -> RenderableType:
    """Return a frame of `kvmesh top` of a mesh at work."""
    board, ends = Board(time.monotonic()), asyncio.Event()

    async def client(number: int) -> None:
        while not ends.is_set():
            await scene.complete(scene.prompt(PROMPT_TOKENS[number % len(PROMPT_TOKENS)]), ANSWER_TOKENS)

    async with asyncio.TaskGroup() as tasks, top.listening(access, board):
        for number in range(NUM_CLIENTS):
            tasks.create_task(client(number), name=f"client {number}")
        await asyncio.sleep(WATCH_S)
        drawn = top.frame(board, time.monotonic(), "nats://127.0.0.1:4222")
        ends.set()
    return drawn


def main() -> None:
    """Write the pictures into the folder named on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(take(folder))


if __name__ == "__main__":
    main()
