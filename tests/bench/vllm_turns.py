"""Later turns of conversations: a mesh on vLLM beside two vLLM servers, of which each keeps its own conversations.

Both sides have as much memory for KV: a worker's arena and vLLM's pool behind it are together as large as a server's
pool. Conversations are held turn by turn, a turn of all of them on one side and then on the other. They begin two at a
time, so that a mesh has reason to spread them; later turns, which are measured, come one at a time. A router with
session affinity is the best that stands before servers that share nothing: here the client is that router.
"""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from services.bench.drive.http_client import Client, Completion, open_http
from services.bench.drive.meshes import model_folder, restart_worker, rotated, running
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import SHAPE
from services.bench.drive.sources import shares_of
from services.bench.multiturn import Conversation, converse, make_conversations
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from tests.bench.gpu_report import Row
from tests.bench.vllm_load import SETTLE_S, compared
from tests.bench.vllm_peers import OURS, THEIRS, Process, ServerOptions, on_vllm, server, started

CONTEXT_LENGTH = 4_096
ANSWER = (32, 32)
FIRST_AT_ONCE = 2
SEED = 20261123
POOL_BYTES = 28 << 20
"""Of a worker's memory for KV, vLLM's own: the longest conversation fits. The arena has the rest."""


class TurnsPlan(NamedTuple):
    """`num_groups`: of conversations, each in a seed of its own; a worker is restarted in each."""

    num_groups: int
    num_sessions: int
    history: int
    num_turns: int
    room_bytes: int
    """For KV, of each worker and server: all conversations fit."""
    full_bytes: int
    """The same where one server has all conversations but one: these do not fit, half of them do."""


class Sides(NamedTuple):
    http_clients: tuple[Client, Client]
    """Of vLLM's servers."""
    servers: tuple[Process, Process]
    mesh: Client
    supervisor: Supervisor


class Turn(NamedTuple):
    """Medians of one turn. `reused`: the share of our prompts' tokens that was not computed again."""

    ours_ms: float
    theirs_ms: float
    reused: float


class Group:
    """The same conversations on both sides, turn by turn. `home`: the server of each."""

    def __init__(self, sides: Sides, conversations: list[Conversation], home: Sequence[int]) -> None:
        self._sides = sides
        self._conversations = conversations
        self.home = home
        self.held: dict[str, list[list[Completion]]] = {side: [[] for _ in conversations] for side in (OURS, THEIRS)}

    async def turn(self, number: int, on_turn: Callable[[], object]) -> None:
        """Hold one turn of all; turns count from 1."""
        for side in rotated((OURS, THEIRS), number):
            await asyncio.sleep(SETTLE_S)
            gate = asyncio.Semaphore(FIRST_AT_ONCE if number == 1 else 1)
            numbers = range(len(self._conversations))
            await asyncio.gather(*(self._converse(side, at, number, gate) for at in numbers))
            on_turn()

    async def _converse(self, side: str, at: int, number: int, gate: asyncio.Semaphore) -> None:
        client = self._sides.mesh if side == OURS else self._sides.http_clients[self.home[at]]
        async with gate:
            self.held[side][at] = await converse(client, self._conversations[at], 0, self.held[side][at], number)

    def measured(self, number: int, hit: Sequence[int], lost: Sequence[int]) -> Turn:
        """Return what a turn came to, of some conversations on our side and some on the other."""
        mine = [self.held[OURS][at][number - 1] for at in hit]
        theirs = [self.held[THEIRS][at][number - 1] for at in lost]
        sources = shares_of([answer.usage for answer in mine])
        return Turn(
            median(answer.ttft_ms for answer in mine), median(answer.ttft_ms for answer in theirs), sources.reused_share
        )

    def computed_by(self, worker: str, number: int) -> list[int]:
        """Return the conversations whose prompt of that turn this worker of ours computed."""
        return [
            at
            for at, answers in enumerate(self.held[OURS])
            if answers[number - 1].usage.kvmesh.prefill_worker == worker
        ]


async def measure_turns(plan: TurnsPlan, folder: Path) -> list[Row]:
    shape = SHAPE | {"context_length": CONTEXT_LENGTH}
    async with model_folder("", shape) as (model, _):
        split = Launch(num_prefill=1, num_decode=1)
        async with both_up(split, model, plan.room_bytes, folder) as sides:
            rows = await _with_a_restart(plan, sides)
        whole = Launch(num_prefill=0, num_decode=0, num_aggregated=2)
        async with both_up(whole, model, plan.full_bytes, folder) as sides:
            return [*rows, await _with_one_full(plan, sides)]


@asynccontextmanager
async def both_up(options: Launch, model: str, kv_bytes: int, folder: Path) -> AsyncGenerator[Sides]:
    options = on_vllm(options, model, kv_bytes - POOL_BYTES, POOL_BYTES)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(open_http())
        supervisors = await stack.enter_async_context(running({OURS: options}))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        servers = tuple(
            server(ServerOptions(name=f"server-{number}", model=model, pool_bytes=kv_bytes), logs)
            for number in range(2)
        )
        with progress("starting two vLLM servers"):
            await stack.enter_async_context(started(servers))
        clients = [await Client.open(http, one.url) for one in servers]
        mesh = await Client.open(http, supervisors[OURS].url)
        yield Sides((clients[0], clients[1]), (servers[0], servers[1]), mesh, supervisors[OURS])


async def _with_a_restart(plan: TurnsPlan, sides: Sides) -> list[Row]:
    """Hold all turns; before the last one kill a worker, and a server, and wait until it is back."""
    later: list[Turn] = []
    after: list[Turn] = []
    everybody = range(plan.num_sessions)
    with progress("turns", plan.num_groups * (2 * plan.num_turns + 1)) as on_step:
        for number in range(plan.num_groups):
            home = [at % 2 for at in range(plan.num_sessions)]
            group = Group(sides, _conversations(plan, SEED + number), home)
            for turn in range(1, plan.num_turns):
                await group.turn(turn, on_step)
                if turn > 1:
                    later.append(group.measured(turn, everybody, everybody))
            victim = group.held[OURS][0][-1].usage.kvmesh.prefill_worker
            hit = group.computed_by(victim, plan.num_turns - 1)
            await restart_worker(sides.supervisor, victim)
            await sides.servers[0].restart()
            on_step()
            await group.turn(plan.num_turns, on_step)
            lost = [at for at, server in enumerate(home) if server == 0]
            after.append(group.measured(plan.num_turns, hit, lost))
    return [
        _row("TTFT of later turns, 1 + 1 workers", later, 1.0),
        _row("TTFT of the turn after a restart, of its conversations", after, 0.5),
    ]


async def _with_one_full(plan: TurnsPlan, sides: Sides) -> Row:
    """One server has all conversations but one, as a hash of them may have it."""
    later: list[Turn] = []
    everybody = range(plan.num_sessions)
    home = [0] * (plan.num_sessions - 1) + [1]
    group = Group(sides, _conversations(plan, SEED + plan.num_groups), home)
    with progress("turns with a full server", 2 * plan.num_turns) as on_turn:
        for turn in range(1, plan.num_turns + 1):
            await group.turn(turn, on_turn)
            if turn > 1:
                later.append(group.measured(turn, everybody, everybody))
    return _row("TTFT of later turns, one server's pool too small, 2 workers", later, 0.5)


def _conversations(plan: TurnsPlan, seed: int) -> list[Conversation]:
    return make_conversations(
        seed,
        plan.history,
        num_turns=plan.num_turns,
        count=plan.num_sessions,
        output=ANSWER,
        vocab_size=SHAPE["vocab"],
    )


def _row(what: str, turns: Sequence[Turn], aim: float) -> Row:
    times = [turn.ours_ms for turn in turns], [turn.theirs_ms for turn in turns]
    row = compared(what, (OURS, THEIRS), times, "ms", aim)
    reused = median(turn.reused for turn in turns)
    return msgspec.structs.replace(row, result=f"{row.result}; ours had {reused:.0%} of the prompts")
