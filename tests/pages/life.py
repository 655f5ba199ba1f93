"""Writes the map of what requests pass through: `make life`, `python -m tests.pages.life PAGE`.

One mesh runs in this process, under the simulator's virtual time: every service as it is, the demo
checkpoint on the real engine, nothing that goes wrong but what the story tells. While the request of the story is under
way, every call of a function of ours is noted. `--counts` prints the numbers alone.
"""

import ast
import asyncio
import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from msgspec.structs import replace

import schemas
from dataplane.blocks.layout import uniform_shape
from schemas.worker import WorkerRole
from services.engine.batch import Batch
from services.engine.checkpoint import read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.torch_engine.model import load_engine
from services.gateway.service import load_model
from services.sim.client import Exchange, post
from services.sim.mesh import GRAMMARS, MeshShape, Service, SimMesh, memory_arena
from services.sim.platform.bus import SimBroker
from services.sim.platform.clock import VirtualTime, installed
from services.sim.platform.engine import Pace, SimEngineThread, SimSteps
from services.sim.platform.loop import PROCESS, SimLoop
from services.sim.platform.plane import SimNetwork
from services.sim.world import undisturbed
from services.trust.credentials import HolderCredentials
from services.worker.parts import WorkerParts, info_of

REPOSITORY = Path(schemas.__file__).parents[1]
ROOTS = ("schemas", "dataplane", "services")
MEANS = ("services/sim/", "services/cli/", "services/launch/", "tests/pages/", "services/bench/")
"""What only makes the run: it is no part of a request's life."""

SEED = 1
READY_S = 2.0
IDLE_S = 12.0
"""How long the mesh is watched while nobody asks anything: every timer of a service goes off in it."""
LOOK_EVERY_S = 0.001
REQUEST_WITHIN_S = 10.0
AFTERMATH_S = 4.5
"""What follows the last word of an answer: leases are given back, and those of the dead run out."""
LEASE_MS = 3_000
BLOCK_SIZE = 16
NUM_BLOCKS = 512
SHAPE = MeshShape(num_prefill=2, num_decode=2, lease_ms=LEASE_MS)
PLANE_BYTES_PER_S = 1e9
PACE = Pace(base_s=0.002, prefill_token_s=0.001)

FACTS = " ".join(
    f"The code of {name} Brook is 741{number}." for number, name in enumerate(["Ada", "Alan", "Amos", "Anna"])
)
QUESTION = " Q: What is the code of Ada Brook? A:"
WARM_UP = "Nobody asks this twice. " * 12 + QUESTION
PROMPT = f"{FACTS} " * 3 + QUESTION
OTHER_PROMPT = "The quiet mill has a blue door. " * 9 + QUESTION
MORE = " The old harbour waits near the quiet mill." * 3 + QUESTION
NUM_TOKENS = 80
MODEL = "demo_model"

HEAD = """# The life of a request

Generated (`make life`, `tests/pages/life.py`): the functions of ours that take part in three requests, in the order
of their first call, as they ran. The mesh is whole and lives in one process under virtual time (a gateway, a scheduler,
a directory, two prefill and two decode workers with the demo checkpoint on the CPU). The simulator stands in for the
message bus, the clock, the HTTP server and the network; so neither the NATS client nor sockets are met here.

- Counted: every named function in `schemas/`, `dataplane/` and `services/`, methods and nested functions too. Left out:
  lambdas, comprehensions, generated code, modules' bodies, and what only makes the run (the simulator, the commands).
- A function that a service runs while nobody asks anything (timers, load reports, pings) is left out for that service.
- A request before these has warmed what is done once in a process.
- A function that runs in several services stands at its first call, with all of them.
- `+`: not met in a split request.
"""


class Place(NamedTuple):
    """A function: where it stands, below the repository, and its qualified name."""

    file: str
    line: int
    function: str


Steps = dict[Place, list[str]]
"""Functions in the order of their first call, each with the services that ran it."""


class Walk:
    """Notes which functions run, and in which services."""

    def __init__(self) -> None:
        self._noted: dict[tuple[CodeType, str], None] = {}
        self._is_on = False

    @contextmanager
    def running(self) -> Generator[None]:
        """Let the interpreter report calls. Greenlets made inside report theirs too."""
        before = sys.getprofile()
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(before)

    def begin(self) -> None:
        """Note what runs from now on, from an empty page."""
        self._noted = {}
        self._is_on = True

    def end(self) -> Steps:
        """Note no more; return what was noted."""
        self._is_on = False
        steps: Steps = {}
        for code, service in self._noted:
            place = place_of(code)
            if place is not None and service not in steps.setdefault(place, []):
                steps[place].append(service)
        return steps

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and self._is_on and (process := PROCESS.get()) is not None:
            self._noted.setdefault((frame.f_code, process.name.rpartition("-")[0]))


@functools.cache
def place_of(code: CodeType) -> Place | None:
    """Return where a function of ours stands. None: not ours, a means of the run, or without a name of its own (a
    module's body, a lambda, a comprehension, code that a library has generated)."""
    path = Path(code.co_filename)
    if code.co_name.startswith("<") or not path.is_relative_to(REPOSITORY):
        return None
    file = path.relative_to(REPOSITORY).as_posix()
    if not file.startswith(tuple(f"{root}/" for root in ROOTS)) or file.startswith(MEANS):
        return None
    if (file, code.co_firstlineno) not in _docstrings(file):
        return None  # a class body, which looks like a call
    return Place(file, code.co_firstlineno, code.co_qualname.replace(".<locals>", ""))


@functools.cache
def _docstrings(file: str) -> dict[tuple[str, int], str]:
    """Return the first docstring line of every function in a file, by the line where its code begins."""
    texts: dict[tuple[str, int], str] = {}
    for node in ast.walk(ast.parse((REPOSITORY / file).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, *more = (ast.get_docstring(node) or "").splitlines() or [""]
            line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            texts[file, line] = f"{first} …" if more and more[0] else first
    return texts


class LifeMesh(SimMesh):
    """The simulator's mesh with the real engine and the demo checkpoint."""

    def __init__(self, loop: SimLoop, rng: random.Random, broker: SimBroker, network: SimNetwork) -> None:
        super().__init__(loop, rng, SHAPE, broker, network)
        worker = replace(self.config.worker, block_size=BLOCK_SIZE, device="cpu")
        self.config = replace(self.config, worker=worker)
        self._model = load_model(self.config)
        self._shape = uniform_shape(self._model.layout, NUM_BLOCKS)
        self._checkpoint = read_checkpoint(str(DEMO_MODEL_DIR))

    def _parts(self, service: Service, role: WorkerRole, host: str, credentials: HolderCredentials) -> WorkerParts:
        parts = super()._parts(service, role, host, credentials)
        arena = memory_arena(self._shape, host)
        engine = load_engine(self._checkpoint, arena_buffer=arena.buffer, shape=self._shape)
        limits = dataclasses.replace(
            parts.limits,
            fingerprint=self._model.layout.fingerprint,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            context_length=self._model.context_length,
            vocab_size=self._model.vocab_size,
            eos_token_ids=self._model.eos_token_ids,
        )
        batch = Batch(self.config.worker.token_budget, context_length=self._model.context_length)
        steps = SimSteps(engine, batch, PACE)
        make_engine = functools.partial(SimEngineThread, steps, GRAMMARS.compile)
        info = info_of(limits, role, parts.info.model, parts.info.incarnation)
        return dataclasses.replace(
            parts, info=info, arena=arena, shape=self._shape, make_engine=make_engine, limits=limits
        )


class Stage:
    """A running mesh and its client, and who watches."""

    def __init__(self, walk: Walk, loop: SimLoop) -> None:
        self.walk = walk
        self._loop = loop
        broker = SimBroker(random.Random(SEED))
        network = SimNetwork(random.Random(SEED), bytes_per_s=PLANE_BYTES_PER_S)
        self._mesh = LifeMesh(loop, random.Random(SEED), broker, network)
        self._sends_tokens = ""
        """The service that sent the last tokens."""
        broker.taps.append(self._hear)

    async def make_ready(self) -> None:
        """Start the mesh, and let one request warm what is done once in a process."""
        self._mesh.start_all()
        await asyncio.sleep(READY_S)
        await self.answer(WARM_UP)

    def ask(self, prompt: str) -> Exchange:
        """Send a request; its answer is streamed."""
        gateway = self._mesh.services["gateway-0"]
        assert gateway.app is not None, "the gateway is not ready"
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        return post(self._loop, gateway.process, gateway.app, "/v1/completions", body)

    async def answer(self, prompt: str) -> str:
        """Send a request; return its answer once nothing more follows from it."""
        return await self.rest_of(self.ask(prompt))

    async def rest_of(self, exchange: Exchange) -> str:
        """Return the answer of a request under way once nothing more follows from it."""
        async with asyncio.timeout(REQUEST_WITHIN_S):
            await exchange.ended.wait()
        assert exchange.done and len(exchange.choices[0].token_ids) == NUM_TOKENS, exchange
        await asyncio.sleep(AFTERMATH_S)
        return exchange.choices[0].text

    def kill_sender(self) -> None:
        """End the process that sends tokens, as SIGKILL does."""
        self._mesh.kill(self._mesh.services[self._sends_tokens])

    def _hear(self, subject: str, source: str) -> None:
        if ".tokens." in subject:
            self._sends_tokens = source


async def split_request(stage: Stage) -> str:
    """From the client's request to the last lease given back. Returns the conversation."""
    stage.walk.begin()
    return PROMPT + await stage.answer(PROMPT)


async def prefix_from_a_peer(stage: Stage, conversation: str) -> None:
    """Its next turn: the last answer's KV lies with the worker that decoded it."""
    stage.walk.begin()
    await stage.answer(conversation + MORE)


async def death_of_a_decode_worker(stage: Stage) -> None:
    """From the death, in the middle of an answer, to the end of that answer."""
    exchange = stage.ask(OTHER_PROMPT)
    while not exchange.choices or len(exchange.choices[0].token_ids) < NUM_TOKENS // 2:
        await asyncio.sleep(LOOK_EVERY_S)
    stage.kill_sender()
    stage.walk.begin()
    await stage.rest_of(exchange)


@dataclass(frozen=True)
class Story:
    """A title, what is told, the functions in order of their first call with the services that ran them, and those
    among them that a split request does not meet (none: it is the split request)."""

    title: str
    tells: str
    steps: Steps
    new: frozenset[Place] = frozenset()

    @property
    def counts(self) -> str:
        text = _count(self.steps)
        return f"{text}; {_count(self.new)} of these not in a split request" if self.new else text


_runs = itertools.count()
"""Ids are new in each run: what is kept by an id must not be found by the next run in this process."""


def tell() -> list[Story]:
    """Run the mesh and return its stories."""
    walk, clock = Walk(), VirtualTime()
    ids = random.Random(f"{SEED} {next(_runs)}")
    with undisturbed(), installed(clock, ids), walk.running():
        split, death, prefix = _play(walk, clock)
    return [
        Story(
            "A split request",
            "One worker computes the prompt, another decodes: from the client's request to the last lease given back.",
            split,
        ),
        Story(
            "A decode worker dies in mid-stream",
            "From its death to the end of the answer, which goes on elsewhere, and of what it had leased. All other "
            "services find out meanwhile.",
            death,
            frozenset(death) - frozenset(split),
        ),
        Story(
            "A prefix is read from a peer",
            "The next turn of a conversation: the KV of the last answer is read, under a lease, from the worker that "
            "decoded it; the rest is a split request.",
            prefix,
            frozenset(prefix) - frozenset(split),
        ),
    ]


def page(stories: Iterable[Story]) -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for story in stories for line in _chapter(story))])


def _play(walk: Walk, clock: VirtualTime) -> tuple[Steps, Steps, Steps]:
    loop = SimLoop(clock, random.Random(SEED))

    async def live() -> tuple[Steps, Steps, Steps]:
        stage = Stage(walk, loop)
        await stage.make_ready()
        walk.begin()
        await asyncio.sleep(IDLE_S)
        idle = walk.end()
        conversation = await split_request(stage)
        split = _without(walk.end(), idle)
        await prefix_from_a_peer(stage, conversation)
        prefix = _without(walk.end(), idle)
        await death_of_a_decode_worker(stage)
        return split, _without(walk.end(), idle), prefix

    return loop.run_to_end(live())


def _without(steps: Steps, idle: Steps) -> Steps:
    """Return the steps without those that the same services take while nobody asks anything."""
    own = {place: [name for name in names if name not in idle.get(place, ())] for place, names in steps.items()}
    return {place: names for place, names in own.items() if names}


def _chapter(story: Story) -> list[str]:
    rows: list[str] = []
    for number, (place, services) in enumerate(story.steps.items(), 1):
        mark = " +" if place in story.new else ""
        text = _docstrings(place.file)[place.file, place.line].replace("|", "\\|") or "–"
        rows.append(f"| {number}{mark} | {', '.join(services)} | `{place.file}:{place.function}` | {text} |")
    header = ["| # | service | where | what it says of itself |", "|--:|---|---|---|"]
    return [f"## {story.title}", "", story.tells, "", f"{story.counts}.", "", *header, *rows, ""]


def _count(places: Iterable[Place]) -> str:
    listed = list(places)
    return f"{len(listed)} functions in {len({place.file for place in listed})} files"


def main() -> None:
    """Write the page named on the command line, or print the numbers."""
    argument = sys.argv[1]
    stories = tell()
    if argument == "--counts":
        print("\n".join(f"{story.title}: {story.counts}" for story in stories))
    else:
        Path(argument).write_text(page(stories), "utf-8")


if __name__ == "__main__":
    main()
