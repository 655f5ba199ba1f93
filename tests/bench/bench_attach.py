"""Stock vLLM servers that attach to a holder, beside servers that do not: `make attach-bench`, in .venv-vllm.

    load      TTFT of a prompt that another server has computed, beside computing one on the same server, and beside
              finding this one in the server's own cache
    nothing   a server that is attached and finds nothing, beside one that is not, and beside one whose connector does
              nothing; times of the connector's hooks
    gaps      gaps of an answer beside loads of 57 MB, and beside hits of the server's own cache
    turns     later turns of conversations over two servers behind round robin, attached and not
    restart   the first turn after a server's restart, beside computing it
    pd        prefill and decode behind a proxy, beside a server alone
    nixl      the same with NIXL's connector in place of ours
    memory    what the holder takes beside its arena, and a connector in a server

Every server has one thread to compute with; no process is pinned. What is compared is up at the same time, and has its
load in turn. Ratios are of each round, and then their median.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import httpx
import msgspec
from rich.console import Console

from services.bench.drive.http_client import Client, Completion, open_http
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import SHAPE, make_model
from services.bench.drive.stats import percentile
from services.bench.drive.workload import random_tokens
from services.bench.multiturn import converse, make_conversations
from services.engine.vllm_engine.formats import BLOCK_SIZE, installed_version
from services.errors import UserError
from services.ports import free_port
from tests.attach.servers import Holder
from tests.bench.attach_timed import HOOKS
from tests.bench.bench_vllm import MODELS, VOCABULARIES, table
from tests.bench.gpu_report import Row
from tests.bench.vllm_load import SETTLE_S, Load, Period, compared, in_turn
from tests.bench.vllm_peers import (
    NIXL,
    NUM_THREADS,
    ROOT,
    Process,
    ServerOptions,
    missing_nixl,
    proxy,
    server,
    started,
)

SIZE = "30 M"
VOCAB = VOCABULARIES[SIZE]
LOAD_AIMS = {500: 0.15, 1_500: 0.08, 8_000: 0.05}
ATTACHED, ALONE, IDLE = "attached", "alone", "idle connector"
HOOK_MEDIAN_MS, HOOK_P99_MS = 0.3, 2.0
HOLDER_MIB = 60
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"


class Sizes(NamedTuple):
    """How much is measured. `starts`: so often servers are started anew with nothing to load: one is faster than
    another that is the same by more than what is looked for. `gap_tokens`: of each load beside an answer of
    `gap_answer` tokens. `answers`: of a turn."""

    lengths: tuple[int, ...]
    rounds: int
    loads: tuple[Load, ...]
    starts: int
    load_rounds: int
    gap_tokens: int
    gap_answer: int
    gap_rounds: int
    sessions: int
    history: int
    turns: int
    answers: tuple[int, int]


FULL = Sizes(
    lengths=(500, 1_500, 8_000),
    rounds=7,
    loads=(Load(1, 10, 1_000, 32), Load(0, 32, 1_000, 32, at_once=16)),
    starts=4,
    load_rounds=2,
    gap_tokens=3_500,
    gap_answer=400,
    gap_rounds=3,
    sessions=11,
    history=1_500,
    turns=4,
    answers=(100, 200),
)
QUICK = Sizes((200,), 1, (Load(0, 4, 200, 8, at_once=4),), 1, 1, 300, 64, 1, 3, 200, 3, (8, 16))


class Bench:
    """What the parts share: a model, a holder, servers, prompts that nobody has sent."""

    def __init__(self, model: str, folder: Path, http: httpx.AsyncClient) -> None:
        self.model = model
        self.folder = folder
        self.http = http
        # The holder runs in kvmesh's own environment, as docs/attach.md has it, where there is one.
        python = str(OWN_PYTHON if OWN_PYTHON.exists() else sys.executable)
        flags = ("--model", model, "--prefix-port", str(free_port()))
        self.holder = Holder(folder, memory_gib=2, arguments=flags, python=python)
        self.rng = random.Random(20261129)

    def server(self, name: str, *, is_attached: bool, module: str = "", connector: str = "") -> Process:
        """`module`, `connector`: in place of ours, or of none."""
        port = free_port()
        transfer = self.holder.config(port, check_every=1 << 30) if is_attached else {}
        if module:
            transfer |= {"kv_connector_module_path": module, "kv_connector": connector, "kv_role": "kv_both"}
        return server(ServerOptions(name=name, model=self.model, transfer=transfer, port=port), self.folder)

    async def client(self, process: Process) -> Client:
        return await Client.open(self.http, process.url)

    def prompt(self, num_tokens: int) -> list[int]:
        return random_tokens(self.rng, num_tokens, VOCAB)

    async def await_proven(self, num_servers: int) -> None:
        """Wait until so many servers share: their canaries are over, and no step of theirs beside what is measured."""
        while sum(each["sharing"] == "on" for each in await asyncio.to_thread(self.holder.servers)) != num_servers:
            await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)

    async def await_held(self, prompt: Sequence[int]) -> None:
        """Wait until the holder has all of a prompt that can be loaded."""
        port = self.holder.arguments[-1]
        whole = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
        while True:
            reply = await self.http.post(f"http://127.0.0.1:{port}/v1/kv/prefix", json={"tokens": list(prompt)})
            if reply.json()["tokens"] >= whole:
                return
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(bench: Bench, servers: Sequence[Process], num_attached: int) -> AsyncGenerator[list[Client]]:
    """Have these servers up, and so many of them proven."""
    async with contextlib.AsyncExitStack() as stack:
        with progress(f"starting {', '.join(each.name for each in servers)}"):
            await stack.enter_async_context(started(servers))
            await bench.await_proven(num_attached)
            clients = [await bench.client(each) for each in servers]
        yield clients


def attached(bench: Bench, *names: str) -> contextlib.AbstractAsyncContextManager[list[Client]]:
    """Have servers of these names up and attached."""
    return running(bench, [bench.server(name, is_attached=True) for name in names], len(names))


async def compute(client: Client, prompt: Sequence[int]) -> Completion:
    """Ask for one token: of a random model, whose text may be empty."""
    return await client.complete(prompt, 1, return_token_ids=True)


async def first_token_ms(client: Client, prompt: Sequence[int]) -> float:
    await asyncio.sleep(SETTLE_S)
    return (await compute(client, prompt)).ttft_ms


async def measure_load(bench: Bench, sizes: Sizes) -> list[Row]:
    """One server computes, and the other one loads; beside it this one computes another prompt, and answers the first
    one once more, from its own cache: what it takes where nothing is computed and nothing loaded."""
    rows: list[Row] = []
    async with attached(bench, "one", "other") as (one, other):
        for length in sizes.lengths:
            times: dict[str, list[float]] = {kind: [] for kind in ("loaded", "own hit", "computed")}
            with progress(f"prompts of {length:,} tokens", sizes.rounds + 1) as on_step:
                for number in range(sizes.rounds + 1):
                    prompt = bench.prompt(length)
                    await compute(one, prompt)
                    await bench.await_held(prompt)
                    for kind, side in times.items():
                        asked = bench.prompt(length) if kind == "computed" else prompt
                        found = await first_token_ms(other, asked)
                        if number:  # the first warms up
                            side.append(found)
                    on_step()
            what, loaded, aim = f"TTFT, {length:,} tokens", times["loaded"], LOAD_AIMS.get(length)
            rows.append(compared(what, ("loaded", "computed"), (loaded, times["computed"]), "ms", aim))
            rows.append(compared(f"{what}: against a hit", ("loaded", "own hit"), (loaded, times["own hit"]), "ms"))
    return rows


async def measure_nothing(bench: Bench, sizes: Sizes) -> list[Row]:
    """Prompts that nobody has sent before, on a server that is attached, on one that is not, and on one that has a
    connector which does nothing: what vLLM itself takes for having one."""
    names = (ATTACHED, ALONE, IDLE)
    periods: dict[Load, dict[str, list[Period]]] = {load: {name: [] for name in names} for load in sizes.loads}
    with progress("rounds of `nothing`", sizes.starts * sizes.load_rounds * len(sizes.loads) * len(names)) as on_period:
        for start in range(sizes.starts):
            servers = [bench.server(name, is_attached=name == ATTACHED) for name in (ATTACHED, ALONE)]
            module = "tests.bench.idle_connector"
            servers.append(bench.server("idle", is_attached=False, module=module, connector="IdleConnector"))
            async with running(bench, servers, 1) as clients:
                sides = dict(zip(names, clients, strict=True))
                found = await in_turn(sides, sizes.loads, sizes.load_rounds, VOCAB, on_period, seed=start)
            for load, of_load in found.items():
                for name, some in of_load.items():
                    periods[load][name] += some
    rows: list[Row] = []
    for load, of_load in periods.items():
        ttft, token, rate = (
            [[getattr(one, name) for one in side] for side in of_load.values()]
            for name in ("ttft_ms", "ms_per_token", "tokens_per_s")
        )
        for at, (ttft_aim, token_aim, rate_aim) in ((1, (1.03, 1.01, 0.98)), (2, (None, None, None))):
            sides, behind = (names[0], names[at]), f", beside {names[at]}"
            rows.append(compared(f"TTFT mean, {load.words}{behind}", sides, (ttft[0], ttft[at]), "ms", ttft_aim))
            rows.append(compared(f"per token, {load.words}{behind}", sides, (token[0], token[at]), "ms", token_aim))
            if not load.per_s:
                what = f"throughput, {load.words}{behind}"
                rows.append(compared(what, sides, (rate[0], rate[at]), "tokens/s", rate_aim, "more"))
    return [*rows, *await _measure_hooks(bench, sizes)]


async def _measure_hooks(bench: Bench, sizes: Sizes) -> list[Row]:
    """Times of the connector's hooks, on a server of their own: a clock in each costs something itself."""
    times = bench.folder / "hooks.txt"
    os.environ["KVMESH_HOOK_TIMES"] = str(times)
    one = bench.server("timed", is_attached=True, module="tests.bench.attach_timed", connector="TimedConnector")
    calls: dict[Load, defaultdict[str, list[float]]] = {}
    async with running(bench, [one], 1) as (client,):
        for number, load in enumerate(sizes.loads):
            times.write_text("")
            await in_turn({"timed": client}, [load], sizes.load_rounds, VOCAB, lambda: None, seed=1_000 + number)
            calls[load] = defaultdict(list)
            for line in times.read_text("ascii").splitlines():
                name, seconds = line.split()
                calls[load][name].append(1e3 * float(seconds))
    rows: list[Row] = []
    for name in HOOKS:
        told: list[str] = []
        worst = 0.0
        for load, of_load in calls.items():
            half, late = median(of_load[name]), percentile(of_load[name], 99) or 0.0
            worst = max(worst, half / HOOK_MEDIAN_MS, late / HOOK_P99_MS)
            told.append(f"{load.words}: median {half:.3f}, p99 {late:.3f} of {len(of_load[name])}")
        result = f"{'; '.join(told)}; aims {HOOK_MEDIAN_MS:g} and {HOOK_P99_MS:g} ms"
        rows.append(Row(what=name, result=result, ratio=worst, aim=1.0, better="less"))
    return rows


async def measure_gaps(bench: Bench, sizes: Sizes) -> list[Row]:
    """A long answer, alone; beside loads, one after another, of prompts that another server has computed; and beside
    the same prompts once more, which the server finds in its own cache."""
    late: dict[str, list[float]] = {kind: [] for kind in ("alone", "loads", "own hits")}
    steps_ms: list[float] = []
    num_loads = 6
    async with attached(bench, "one", "other") as (one, other):
        with progress("answers beside loads", sizes.gap_rounds * (num_loads + len(late))) as on_step:
            await other.complete(bench.prompt(64), sizes.gap_answer)  # warms up
            for _ in range(sizes.gap_rounds):
                prompts: list[list[int]] = []
                for _ in range(num_loads):
                    prompts.append(bench.prompt(sizes.gap_tokens))
                    await compute(one, prompts[-1])
                    await bench.await_held(prompts[-1])
                    on_step()
                for kind, gaps in late.items():
                    await asyncio.sleep(SETTLE_S)
                    asking = asyncio.create_task(other.complete(bench.prompt(64), sizes.gap_answer))
                    for prompt in prompts if kind != "alone" else []:
                        await asyncio.sleep(0.1)
                        await compute(other, prompt)
                    answer = await asking
                    gaps.append(percentile(answer.gaps_ms, 99) or 0.0)
                    if kind == "alone":
                        steps_ms.append(median(answer.gaps_ms))
                    on_step()
    what = f"p99 gap of an answer, {num_loads} loads of {sizes.gap_tokens * 16 / 1024:.0f} MiB"
    return [
        compared(f"{what}: in steps", ("beside loads", "a step"), (late["loads"], steps_ms), "ms", 2.0),
        compared(f"{what}: alone, in steps", ("alone", "a step"), (late["alone"], steps_ms), "ms"),
        compared(
            f"{what}: against hits of vLLM's own cache",
            ("beside loads", "beside such hits"),
            (late["loads"], late["own hits"]),
            "ms",
        ),
    ]


async def measure_turns(bench: Bench, sizes: Sizes) -> list[Row]:
    """The same conversations on two servers behind round robin, attached and not. In each turn they come in another
    order: half of them come to the server that had their last turn."""
    kinds = (ATTACHED, ALONE)
    servers = {
        kind: [bench.server(f"{kind}-{number}", is_attached=kind == ATTACHED) for number in range(2)] for kind in kinds
    }
    held: dict[str, list[list[Completion]]] = {kind: [[] for _ in range(sizes.sessions)] for kind in kinds}
    conversations = make_conversations(
        7, sizes.history, num_turns=sizes.turns, count=sizes.sessions, output=sizes.answers, vocab_size=VOCAB
    )
    # By turn, which of the servers each conversation comes to.
    places: list[dict[int, int]] = []
    for _ in range(sizes.turns):
        order = bench.rng.sample(range(sizes.sessions), sizes.sessions)
        places.append({at: number % 2 for number, at in enumerate(order)})
    async with running(bench, [each for pair in servers.values() for each in pair], 2):
        clients = {kind: [await bench.client(each) for each in pair] for kind, pair in servers.items()}
        with progress("turns", 2 * sizes.turns * sizes.sessions) as on_step:
            for turn, order in enumerate(places, 1):
                for kind, pair in clients.items():
                    for at, place in order.items():
                        await asyncio.sleep(SETTLE_S)
                        held[kind][at] = await converse(pair[place], conversations[at], 0, held[kind][at], turn)
                        on_step()
    later = [(turn, at) for turn in range(1, sizes.turns) for at in range(sizes.sessions)]
    moved = [(turn, at) for turn, at in later if places[turn][at] != places[turn - 1][at]]
    return [_turn_row(held, later, "", 0.3), _turn_row(held, moved, " that come to the other server", None)]


def _turn_row(
    held: dict[str, list[list[Completion]]], which: list[tuple[int, int]], words: str, aim: float | None
) -> Row:
    """Return the row of these turns, each (turn, conversation), by their mean: few of them cost nearly all."""

    def mean_ms(kind: str, turns: set[int]) -> float:
        return fmean(held[kind][at][turn].ttft_ms for turn, at in which if turn in turns)

    turns = {turn for turn, _ in which}
    means = {kind: mean_ms(kind, turns) for kind in held}
    by_turn = [f"{mean_ms(ATTACHED, {turn}) / mean_ms(ALONE, {turn}):.2f}" for turn in sorted(turns)]
    shown = f"attached {means[ATTACHED]:.1f}, alone {means[ALONE]:.1f} ms; turn by turn {', '.join(by_turn)}"
    what = f"mean TTFT of {len(which)} later turns{words}"
    return Row(what=what, result=shown, ratio=means[ATTACHED] / means[ALONE], aim=aim, better="less")


async def measure_restart(bench: Bench, sizes: Sizes) -> list[Row]:
    length = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    one = bench.server("one", is_attached=True)
    loaded: list[float] = []
    computed: list[float] = []
    async with running(bench, [one], 1) as (client,):
        with progress("restarts", 3) as on_step:
            for _ in range(3):
                prompt = bench.prompt(length)
                await compute(client, prompt)
                await bench.await_held(prompt)
                await one.restart()
                await bench.await_proven(1)
                loaded.append(await first_token_ms(client, prompt))
                computed.append(await first_token_ms(client, bench.prompt(length)))
                on_step()
    what = f"TTFT after a restart, {length:,} tokens"
    return [compared(what, ("loaded", "computed"), (loaded, computed), "ms", 0.15)]


async def measure_pd(bench: Bench, sizes: Sizes) -> list[Row]:
    """Attached servers as prefill and decode behind a proxy."""
    pair = [bench.server(name, is_attached=True) for name in ("prefill", "decode")]
    return await _behind_proxy(bench, sizes, "attached", pair, 2, 1.15)


async def measure_nixl(bench: Bench, sizes: Sizes) -> list[Row]:
    """The same with vLLM's own connector. At another time: NIXL's threads never rest."""
    if missing := missing_nixl():
        return [Row(what="TTFT behind a proxy: NIXL", error=missing)]
    pair = [
        server(ServerOptions(name=name, model=bench.model, transfer=NIXL | {"kv_role": role}), bench.folder)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    return await _behind_proxy(bench, sizes, "NIXL", pair, 0, None)


async def _behind_proxy(
    bench: Bench, sizes: Sizes, kind: str, pair: Sequence[Process], num_attached: int, aim: float | None
) -> list[Row]:
    """A prompt through a proxy to a prefill and a decode server, beside the same length on a server alone."""
    length = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    times: dict[str, list[float]] = {kind: [], ALONE: []}
    async with running(bench, [*pair, bench.server(ALONE, is_attached=False)], num_attached) as (*_, alone):
        front = proxy(*pair, bench.folder)
        async with started([front]):
            sides = {kind: await bench.client(front), ALONE: alone}
            with progress(f"rounds behind a proxy, {kind}", (sizes.rounds + 1) * len(sides)) as on_step:
                for number in range(sizes.rounds + 1):
                    for name, client in sides.items():
                        found = await first_token_ms(client, bench.prompt(length))
                        if number:
                            times[name].append(found)
                        on_step()
    return [compared(f"TTFT behind a proxy, {length:,} tokens", tuple(times), tuple(times.values()), "ms", aim)]


async def measure_memory(bench: Bench, sizes: Sizes) -> list[Row]:
    pair = [bench.server(ATTACHED, is_attached=True), bench.server(ALONE, is_attached=False)]
    async with running(bench, pair, 1) as clients:
        for client in clients:
            for _ in range(50):
                await compute(client, bench.prompt(sizes.lengths[0]))
        holder = _anonymous_mib([bench.holder.pid])
        servers = [_anonymous_mib(_group(each.pid)) for each in pair]
    what = "memory of the holder beside its arena"
    of_connector = f"a server with the connector {servers[0]:,.0f}, without {servers[1]:,.0f} MiB"
    return [
        Row(what=what, result=f"{holder:.0f} of {HOLDER_MIB} MiB", ratio=holder / HOLDER_MIB, aim=1.0, better="less"),
        Row(what="memory of a server", result=of_connector, ratio=servers[0] / servers[1], better="less"),
    ]


def _group(leader: int) -> list[int]:
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, ProcessLookupError):
            if os.getpgid(int(folder.name)) == leader:
                found.append(int(folder.name))
    return found


def _anonymous_mib(pids: Sequence[int]) -> float:
    """Return these processes' own memory, shared pages by their share: what is no file and no arena."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                total += int(line.split()[1])
    return total / 1024


PARTS: dict[str, Callable[[Bench, Sizes], Awaitable[list[Row]]]] = {
    "load": measure_load,
    "nothing": measure_nothing,
    "gaps": measure_gaps,
    "turns": measure_turns,
    "restart": measure_restart,
    "pd": measure_pd,
    "nixl": measure_nixl,
    "memory": measure_memory,
}


async def _measure(
    names: Sequence[str], sizes: Sizes, on_part: Callable[[str, list[Row]], object]
) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="kvmesh-attach-") as place:
        shape = SHAPE | MODELS[SIZE] | {"vocab": VOCAB}
        model, _ = await asyncio.to_thread(make_model, Path(place), shape)
        for name in names:
            folder = Path(place) / name
            folder.mkdir()
            async with open_http() as http:
                bench = Bench(str(model), folder, http)
                try:
                    await asyncio.to_thread(bench.holder.start)
                    found[name] = await PARTS[name](bench, sizes)
                except UserError as error:
                    found[name] = [Row(what=name, error=str(error))]
                finally:
                    await asyncio.to_thread(bench.holder.stop)
            on_part(name, found[name])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts, with commas between")
    parser.add_argument("--quick", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    console = Console(highlight=False, stderr=options.json)
    names = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        sys.exit(f"--only {', '.join(unknown)}: choose of {', '.join(PARTS)}")
    try:
        version = installed_version()
    except UserError as error:
        sys.exit(str(error))
    began_s = time.monotonic()
    console.print(f"vLLM {version}; {os.cpu_count()} cores, {NUM_THREADS} thread a server, none pinned", soft_wrap=True)
    sizes = QUICK if options.quick else FULL
    found = asyncio.run(_measure(names, sizes, lambda name, rows: console.print(table(name, rows))))
    console.print(f"{(time.monotonic() - began_s) / 60:.0f} minutes")
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
