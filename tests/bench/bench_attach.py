"""Stock vLLM servers that attach to a holder, beside servers that do not: `make attach-bench`, in .venv-vllm.

    load      TTFT of a prompt that another server has computed, beside computing it on the same server
    nothing   a server that is attached and finds nothing, beside one that is not; times of the connector's hooks
    gaps      gaps of an answer beside loads of 57 MB
    turns     later turns of conversations over two servers behind round robin, attached and not
    restart   the first turn after a server's restart, beside computing it
    pd        prefill and decode behind a proxy: attached, with NIXL's connector, and the prefill server alone
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
from statistics import median
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
from tests.bench.vllm_load import SETTLE_S, Load, compared, in_turn
from tests.bench.vllm_peers import (
    NIXL,
    NUM_THREADS,
    Process,
    ServerOptions,
    missing_nixl,
    prefill_and_decode,
    proxy,
    server,
    started,
)

SIZE = "30 M"
VOCAB = VOCABULARIES[SIZE]
LOAD_AIMS = {500: 0.15, 1_500: 0.08, 8_000: 0.05}
ATTACHED, ALONE = "attached", "alone"
HOOK_MEDIAN_MS, HOOK_P99_MS = 0.3, 2.0
HOLDER_MIB = 60
MIB = 1 << 20


class Sizes(NamedTuple):
    """How much is measured. `gap_tokens`: of each load beside an answer of `gap_answer` tokens."""

    lengths: tuple[int, ...]
    rounds: int
    loads: tuple[Load, ...]
    load_rounds: int
    gap_tokens: int
    gap_answer: int
    sessions: int
    history: int
    turns: int


FULL = Sizes(
    lengths=(500, 1_500, 8_000),
    rounds=7,
    loads=(Load(1, 10, 1_000, 32), Load(0, 48, 1_000, 32, at_once=16)),
    load_rounds=5,
    gap_tokens=3_500,
    gap_answer=400,
    sessions=8,
    history=1_500,
    turns=4,
)
QUICK = Sizes((200,), 1, (Load(0, 4, 200, 8, at_once=4),), 1, 300, 64, 2, 200, 3)


class Bench:
    """What the parts share: a model, a holder, servers, prompts that nobody has sent."""

    def __init__(self, model: str, folder: Path, http: httpx.AsyncClient) -> None:
        self.model = model
        self.folder = folder
        self.http = http
        self.holder = Holder(folder, memory_gib=2, arguments=("--model", model, "--prefix-port", str(free_port())))
        self.rng = random.Random(20261129)

    def server(self, name: str, *, is_attached: bool, module: str = "", connector: str = "") -> Process:
        port = free_port()
        transfer = self.holder.config(port, check_every=1 << 30) if is_attached else {}
        if module:
            transfer |= {"kv_connector_module_path": module, "kv_connector": connector}
        return server(ServerOptions(name=name, model=self.model, transfer=transfer, port=port), self.folder)

    async def client(self, process: Process) -> Client:
        return await Client.open(self.http, process.url)

    def prompt(self, num_tokens: int) -> list[int]:
        return random_tokens(self.rng, num_tokens, VOCAB)

    async def await_proven(self, num_servers: int) -> None:
        """Wait until so many servers share: their canaries are over, and no step of theirs beside what is measured."""
        while sum(each["sharing"] == "on" for each in await asyncio.to_thread(self.holder.servers)) < num_servers:
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
async def attached(bench: Bench, *names: str) -> AsyncGenerator[list[Client]]:
    """Have servers of these names up and attached."""
    servers = [bench.server(name, is_attached=True) for name in names]
    with progress(f"starting {', '.join(names)}"):
        async with started(servers):
            await bench.await_proven(len(servers))
            yield [await bench.client(each) for each in servers]


async def compute(client: Client, prompt: Sequence[int]) -> Completion:
    """Ask for one token: of a random model, whose text may be empty."""
    return await client.complete(prompt, 1, return_token_ids=True)


async def first_token_ms(client: Client, prompt: Sequence[int]) -> float:
    await asyncio.sleep(SETTLE_S)
    return (await compute(client, prompt)).ttft_ms


async def measure_load(bench: Bench, sizes: Sizes) -> list[Row]:
    """One server computes, and the other one loads; beside it this one computes another prompt."""
    rows: list[Row] = []
    async with attached(bench, "one", "other") as (one, other):
        for length in sizes.lengths:
            loaded: list[float] = []
            computed: list[float] = []
            with progress(f"prompts of {length:,} tokens", 3 * sizes.rounds) as on_step:
                for number in range(sizes.rounds + 1):
                    prompt, fresh = bench.prompt(length), bench.prompt(length)
                    await compute(one, prompt)
                    await bench.await_held(prompt)
                    pair = [await first_token_ms(other, each) for each in (prompt, fresh)]
                    if number:  # the first warms up
                        loaded.append(pair[0])
                        computed.append(pair[1])
                    on_step()
            aim = LOAD_AIMS.get(length)
            rows.append(compared(f"TTFT, {length:,} tokens", ("loaded", "computed"), (loaded, computed), "ms", aim))
    return rows


async def measure_nothing(bench: Bench, sizes: Sizes) -> list[Row]:
    """Prompts that nobody has sent before, on a server that is attached and on one that is not."""
    times = bench.folder / "hooks.txt"
    os.environ["KVMESH_HOOK_TIMES"] = str(times)
    rows: list[Row] = []
    pair = [bench.server(ATTACHED, is_attached=True), bench.server(ALONE, is_attached=False)]
    with progress("starting two servers"):
        async with started(pair):
            await bench.await_proven(1)
            clients = {name: await bench.client(each) for name, each in zip((ATTACHED, ALONE), pair, strict=True)}
            with progress("rounds of `nothing`", sizes.load_rounds * len(sizes.loads) * 2) as on_period:
                found = await in_turn(clients, sizes.loads, sizes.load_rounds, VOCAB, on_period)
    for load, sides in found.items():
        ttft, token, rate = (
            [[getattr(one, name) for one in side] for side in sides.values()]
            for name in ("ttft_ms", "ms_per_token", "tokens_per_s")
        )
        rows.append(compared(f"TTFT mean, {load.words}", list(sides), ttft, "ms", 1.03))
        rows.append(compared(f"per token, {load.words}", list(sides), token, "ms", 1.01))
        if not load.per_s:
            rows.append(compared(f"throughput, {load.words}", list(sides), rate, "tokens/s", 0.98, "more"))
    # The hooks are timed on a server of their own: a clock in each costs something itself.
    one = bench.server("timed", is_attached=True, module="tests.bench.attach_timed", connector="TimedConnector")
    with progress("times of the connector's hooks"):
        async with started([one]):
            await bench.await_proven(1)
            client = await bench.client(one)
            await in_turn({"timed": client}, sizes.loads, max(1, sizes.load_rounds // 2), VOCAB, lambda: None)
    return [*rows, *_hook_rows(times)]


def _hook_rows(times: Path) -> list[Row]:
    calls: defaultdict[str, list[float]] = defaultdict(list)
    for line in times.read_text("ascii").splitlines():
        name, seconds = line.split()
        calls[name].append(1e3 * float(seconds))
    rows: list[Row] = []
    for name in HOOKS:
        half, late = median(calls[name]), percentile(calls[name], 99) or 0.0
        worst = max(half / HOOK_MEDIAN_MS, late / HOOK_P99_MS)
        of_what = f"of {HOOK_MEDIAN_MS:g}, p99 {late:.3f} of {HOOK_P99_MS:g} ms; {len(calls[name])} calls"
        result = f"median {half:.3f} {of_what}"
        rows.append(Row(what=name, result=result, ratio=worst, aim=1.0, better="less"))
    return rows


async def measure_gaps(bench: Bench, sizes: Sizes) -> list[Row]:
    """A long answer, alone and beside loads, one after another, of prompts that another server has computed."""
    async with attached(bench, "one", "other") as (one, other):
        alone = await other.complete(bench.prompt(64), sizes.gap_answer)
        prompts: list[list[int]] = []
        with progress("prompts for loads", 6) as on_step:
            for _ in range(6):
                prompts.append(bench.prompt(sizes.gap_tokens))
                await compute(one, prompts[-1])
                await bench.await_held(prompts[-1])
                on_step()
        await asyncio.sleep(SETTLE_S)
        answer = asyncio.create_task(other.complete(bench.prompt(64), sizes.gap_answer))
        num_loads = 0
        for prompt in prompts:
            await asyncio.sleep(0.1)
            if answer.done():
                break
            await compute(other, prompt)
            num_loads += 1
        beside = await answer
    step_ms = median(alone.gaps_ms)
    late, late_alone = percentile(beside.gaps_ms, 99) or 0.0, percentile(alone.gaps_ms, 99) or 0.0
    size = sizes.gap_tokens * 16 / 1024
    result = (
        f"p99 {late:.1f} ms beside {num_loads} loads of {size:.0f} MiB, {late_alone:.1f} alone; a step {step_ms:.1f} ms"
    )
    return [Row(what="gaps of an answer, p99 in steps", result=result, ratio=late / step_ms, aim=2.0, better="less")]


async def measure_turns(bench: Bench, sizes: Sizes) -> list[Row]:
    """The same conversations on two servers behind round robin, attached and not."""
    servers = {
        kind: [bench.server(f"{kind}-{number}", is_attached=kind == ATTACHED) for number in range(2)]
        for kind in (ATTACHED, ALONE)
    }
    medians: dict[str, list[float]] = {kind: [] for kind in servers}
    with progress("starting four servers"):
        async with started([each for pair in servers.values() for each in pair]):
            await bench.await_proven(2)
            clients = {kind: [await bench.client(each) for each in pair] for kind, pair in servers.items()}
            conversations = make_conversations(
                7, sizes.history, num_turns=sizes.turns, count=sizes.sessions, output=(32, 32), vocab_size=VOCAB
            )
            held: dict[str, list[list[Completion]]] = {kind: [[] for _ in conversations] for kind in clients}
            with progress("turns", 2 * sizes.turns) as on_turn:
                for turn in range(1, sizes.turns + 1):
                    for kind, pair in clients.items():
                        await asyncio.sleep(SETTLE_S)
                        for at, conversation in enumerate(conversations):
                            # Round robin over one conversation's turns, and over conversations.
                            answers = await converse(pair[(at + turn) % 2], conversation, 0, held[kind][at], turn)
                            held[kind][at] = answers
                        if turn > 1:
                            medians[kind].append(median(each[turn - 1].ttft_ms for each in held[kind]))
                        on_turn()
    return [compared("TTFT of later turns, medians by turn", (ATTACHED, ALONE), list(medians.values()), "ms", 0.3)]


async def measure_restart(bench: Bench, sizes: Sizes) -> list[Row]:
    length = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    one = bench.server("one", is_attached=True)
    loaded: list[float] = []
    computed: list[float] = []
    with progress("restarts", 3) as on_step:
        async with started([one]):
            await bench.await_proven(1)
            for _ in range(3):
                client, prompt = await bench.client(one), bench.prompt(length)
                await compute(client, prompt)
                await bench.await_held(prompt)
                await one.restart()
                await bench.await_proven(1)
                client = await bench.client(one)
                loaded.append(await first_token_ms(client, prompt))
                computed.append(await first_token_ms(client, bench.prompt(length)))
                on_step()
    what = f"TTFT after a restart, {length:,} tokens"
    return [compared(what, ("loaded", "computed"), (loaded, computed), "ms", 0.15)]


async def measure_pd(bench: Bench, sizes: Sizes) -> list[Row]:
    """A prompt through a proxy to a prefill and a decode server, beside the same length on the prefill server alone."""
    length = sizes.lengths[min(1, len(sizes.lengths) - 1)]
    pair = [bench.server(name, is_attached=True) for name in ("prefill", "decode")]
    times: dict[str, list[float]] = defaultdict(list)
    with progress("starting prefill and decode servers"):
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(started(pair))
            await bench.await_proven(2)
            front = proxy(pair[0], pair[1], bench.folder)
            await stack.enter_async_context(started([front]))
            sides = {ATTACHED: await bench.client(front), "P alone": await bench.client(pair[0])}
            if not (missing := missing_nixl()):
                logs = bench.folder / "nixl"
                logs.mkdir()
                url = await stack.enter_async_context(prefill_and_decode(bench.model, NIXL, logs))
                sides["NIXL"] = await Client.open(bench.http, url)
            with progress("rounds of `pd`", (sizes.rounds + 1) * len(sides)) as on_step:
                for number in range(sizes.rounds + 1):
                    for name, client in sides.items():
                        found = await first_token_ms(client, bench.prompt(length))
                        if number:
                            times[name].append(found)
                        on_step()
    what = f"TTFT behind a proxy, {length:,} tokens"
    rows = [compared(f"{what}: attached", (ATTACHED, "P alone"), (times[ATTACHED], times["P alone"]), "ms", 1.15)]
    if missing:
        return [*rows, Row(what=f"{what}: NIXL", error=missing)]
    rows.append(compared(f"{what}: NIXL", ("NIXL", "P alone"), (times["NIXL"], times["P alone"]), "ms"))
    return [*rows, compared(f"{what}: attached / NIXL", (ATTACHED, "NIXL"), (times[ATTACHED], times["NIXL"]), "ms")]


async def measure_memory(bench: Bench, sizes: Sizes) -> list[Row]:
    pair = [bench.server(ATTACHED, is_attached=True), bench.server(ALONE, is_attached=False)]
    with progress("starting two servers"):
        async with started(pair):
            await bench.await_proven(1)
            for each in pair:
                client = await bench.client(each)
                for _ in range(8):
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
