"""What the directory costs, up to ten million blocks of a thousand holders: `python -m tests.bench.bench_directory`.

Each row is a mesh of its own: sequences of 16 to 500 blocks, most of them held once or twice, and beginnings that many
holders share, each as far as it has them. The directory starts with nothing and reads all inventories, over the bus of
one process, while somebody goes on asking. Then its core is measured alone. All times are processor time of this one
process, which has one thread: other work on the machine does not count. `--json` prints one object instead of the
table.
"""

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES
from schemas.directory import BlocksEvicted, BlocksStored, Inventory, LocateBlocks, ReadInventory
from schemas.ids import RequestId, WorkerId
from schemas.worker import WorkerInfo, WorkerJoined
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.directory import limits
from services.directory.core import DirectoryCore
from services.directory.events import BlocksChanged, WorkerGone
from services.directory.service import Directory
from services.holder.limits import INVENTORY_PAGE_BLOCKS
from services.telemetry import Telemetry
from services.times import DirectoryTimes

BLOCKS = (100_000, 1_000_000, 10_000_000)
HOLDERS = (8, 64, 1_000)
PROMPT_BLOCKS = (100, 625, 2_000, 8_000)
NUM_SHARED = 50
"""Beginnings that many holders have: the first all of them, the second half, the third a third …"""
NUM_PROMPTS = 2_000
"""So many sequences are kept to ask for."""
PAUSE_S = 0.005
"""Between an answer and the next question, while inventories are read."""
TIMES = DirectoryTimes(inventory_timeout_s=60.0)
"""Who is asked for an inventory shares the loop of who asks."""
EVENT_BLOCKS = (4, 64)
"""What a few answers fill in a step; a prompt of a thousand tokens."""


def report(doing: str) -> None:
    sys.stderr.write(f"\r\033[K{doing}")
    sys.stderr.flush()


def random_hashes(num_blocks: int) -> bytes:
    return os.urandom(num_blocks * BLOCK_HASH_BYTES)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def timed(run: Callable[[], object]) -> float:
    started = time.process_time()
    run()
    return time.process_time() - started


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_ms": statistics.median(ordered) * 1e3, "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3}


@dataclass
class World:
    """What the holders of a mesh have, and prompts to ask for."""

    held: dict[WorkerId, bytearray]
    num_blocks: int = 0
    num_held: int = 0
    shared: list[bytes] = field(default_factory=list[bytes])
    sequences: list[bytes] = field(default_factory=list[bytes])

    def prompt(self, rng: random.Random, num_blocks: int) -> bytes:
        """A beginning that many holders share, then sequences that few have."""
        prompt = rng.choice(self.shared[:3])
        while len(prompt) < num_blocks * BLOCK_HASH_BYTES:
            prompt += rng.choice(self.sequences)
        return prompt[: num_blocks * BLOCK_HASH_BYTES]


def make_world(num_blocks: int, num_holders: int) -> World:
    rng = random.Random(1)
    holders = [WorkerId(f"worker-{number}") for number in range(num_holders)]
    world = World({holder: bytearray() for holder in holders})
    longest_shared = max(1, min(625, num_blocks // (4 * NUM_SHARED)))
    for number in range(NUM_SHARED):
        shared = random_hashes(rng.randint(max(1, longest_shared // 10), longest_shared))
        world.shared.append(shared)
        lengths = [len(shared)]  # somebody has the whole of it
        lengths += [
            rng.randint(1, len(shared) // BLOCK_HASH_BYTES) * BLOCK_HASH_BYTES
            for _ in range(num_holders // (number + 1) - 1)
        ]
        for holder, length in zip(rng.sample(holders, len(lengths)), lengths, strict=True):
            world.held[holder] += shared[:length]
            world.num_held += length // BLOCK_HASH_BYTES
        world.num_blocks += len(shared) // BLOCK_HASH_BYTES
    while world.num_blocks < num_blocks:
        sequence = random_hashes(min(rng.randint(16, 500), num_blocks - world.num_blocks))
        luck = rng.random()
        num_copies = 1 if luck < 0.6 else 2 if luck < 0.95 else rng.randint(3, 8)
        for holder in rng.sample(holders, min(num_copies, num_holders)):
            world.held[holder] += sequence
            world.num_held += len(sequence) // BLOCK_HASH_BYTES
        world.num_blocks += len(sequence) // BLOCK_HASH_BYTES
        if len(world.sequences) < NUM_PROMPTS:
            world.sequences.append(sequence)
        elif rng.random() < NUM_PROMPTS * 250 / num_blocks:
            world.sequences[rng.randrange(NUM_PROMPTS)] = sequence
    return world


async def speak(bus: TypedBus, world: World) -> None:
    """Let every worker say that it lives, about once a second."""
    workers = [
        WorkerInfo(
            worker_id=worker_id, incarnation="1", role="prefill", model="m", fingerprint="f",
            num_blocks=len(held) // BLOCK_HASH_BYTES + 10_000, block_size=16, context_length=131_072,
        )
        for worker_id, held in world.held.items()
    ]  # fmt: skip
    while True:
        await asyncio.gather(
            *(bus.publish(subjects.JOINED, (worker.worker_id,), WorkerJoined(worker=worker)) for worker in workers)
        )
        await asyncio.sleep(1)


async def rebuild(world: World, prompt: bytes) -> tuple[DirectoryCore, dict[str, float]]:
    """Return a directory that has read what all holders have, and how long that took; with what a question waited
    meanwhile, one after the other. Workers and directory share one process and one loop."""
    broker = MemoryBroker()
    bus = TypedBus(MemoryBus(broker), "bench")
    question = LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=prompt)
    waits = list[float]()

    async def inventory(received: Received[ReadInventory]) -> Inventory:
        worker_id, start = WorkerId(received.subject.split(".")[-2]), received.message.offset
        held, end = world.held[worker_id], start + INVENTORY_PAGE_BLOCKS
        return Inventory(
            worker_id=worker_id,
            incarnation="1",
            sequence=0,
            block_hashes=bytes(held[start * BLOCK_HASH_BYTES : end * BLOCK_HASH_BYTES]),
            next_offset=end if end * BLOCK_HASH_BYTES < len(held) else None,
        )

    async with asyncio.TaskGroup() as tasks:
        await bus.serve(tasks, subjects.INVENTORY, ("*",), inventory)
        before = resident_bytes()
        directory = Directory(TypedBus(MemoryBus(broker), "directory"), tasks, Telemetry("directory"), TIMES)
        await directory.begin_serving()
        started = time.process_time()
        speaking = tasks.create_task(speak(bus, world))
        holders = directory.core._holders
        while len(holders) < len(world.held) or any(each.is_reading or each.must_read for each in holders.values()):
            await asyncio.sleep(PAUSE_S)
            asked = time.process_time()
            await bus.ask(subjects.LOCATE, (), question, 60)
            waits.append(time.process_time() - asked)
            report(f"reading inventories: {directory.core.num_known_blocks:,} of {world.num_blocks:,} blocks")
        spent_s = time.process_time() - started
        speaking.cancel()
        await directory.close()
        await bus.close()
    gc.collect()
    memory = (resident_bytes() - before) / world.num_blocks
    assert directory.core.num_known_blocks == world.num_blocks and directory.core.num_passed_over == 0
    return directory.core, {
        "rebuild_s": spent_s,
        "longest_wait_ms": max(waits) * 1e3,
        "resident_bytes_per_block": memory,
    }


def measure_locate(core: DirectoryCore, world: World, num_blocks: int, num_rounds: int) -> dict[str, float]:
    rng = random.Random(2)
    prompts = [world.prompt(rng, num_blocks) for _ in range(num_rounds)]
    assert all(core.locate(prompt)[0].first_block == 0 for prompt in prompts[:10])
    return percentiles([timed(lambda prompt=prompt: core.locate(prompt)) for prompt in prompts])


def measure_events(core: DirectoryCore, sequences: dict[WorkerId, int], num_blocks: int, num_rounds: int) -> float:
    """Return how many events a second are handled: holders store new blocks, and evict them later."""
    spent_s, rng, num_before = 0.0, random.Random(3), core.num_known_blocks
    workers = rng.choices(list(sequences), k=num_rounds)
    stored = [(BlocksStored, worker_id, random_hashes(num_blocks)) for worker_id in workers]
    evicted = [(BlocksEvicted, worker_id, hashes) for _, worker_id, hashes in rng.sample(stored, num_rounds)]
    for kind, worker_id, hashes in [*stored, *evicted]:
        sequences[worker_id] += 1
        event = kind(worker_id=worker_id, incarnation="1", sequence=sequences[worker_id], block_hashes=hashes)
        spent_s += timed(lambda event=event: core.handle(BlocksChanged(event), 0))
    assert core.num_known_blocks == num_before
    return 2 * num_rounds / spent_s


def drop(core: DirectoryCore, world: World) -> dict[str, float]:
    """Return how long it takes until a holder is out of the answers, and until its blocks are gone from the map."""
    worker_id = next(iter(world.held))
    left_s = timed(lambda: core.handle(WorkerGone(worker_id, "1"), 0))
    slices = list[float]()
    more = True
    while more:
        started = time.process_time()
        more = core.sweep()
        slices.append(time.process_time() - started)
    return {"out_of_answers_ms": left_s * 1e3, "swept_ms": sum(slices) * 1e3, "longest_slice_ms": max(slices) * 1e3}


def measure(num_blocks: int, num_holders: int, num_rounds: int) -> dict[str, object]:
    """Return the figures of one mesh."""
    report(f"making {num_blocks:,} blocks of {num_holders:,} holders")
    world = make_world(num_blocks, num_holders)
    core, rebuilt = asyncio.run(rebuild(world, world.prompt(random.Random(4), 625)))
    located: dict[str, dict[str, float]] = {}
    for prompt_blocks in PROMPT_BLOCKS:
        report(f"locating prompts of {prompt_blocks:,} blocks")
        located[str(prompt_blocks)] = measure_locate(core, world, prompt_blocks, num_rounds)
    report("storing and evicting")
    sequences = dict.fromkeys(world.held, 0)
    events = {str(each): measure_events(core, sequences, each, num_rounds) for each in EVENT_BLOCKS}
    report("dropping a holder")
    dropped = drop(core, world)
    return {
        "blocks": num_blocks,
        "holders": num_holders,
        "held": world.num_held,
        **rebuilt,
        "locate": located,
        "events_per_s": events,
        "drop": dropped,
    }


def table(rows: list[dict]) -> str:
    """One column for each mesh."""
    labels = [
        ("blocks", lambda row: f"{row['blocks']:,}"),
        ("holders", lambda row: f"{row['holders']:,}"),
        ("resident memory a block, bytes", lambda row: f"{row['resident_bytes_per_block']:.0f}"),
        *(
            (
                f"locate {size:,} blocks, p50 / p99, ms",
                lambda row, size=size: "{p50_ms:.2f} / {p99_ms:.2f}".format(**row["locate"][str(size)]),
            )
            for size in PROMPT_BLOCKS
        ),
        *(
            (f"events of {size} blocks a second", lambda row, size=size: f"{row['events_per_s'][str(size)]:,.0f}")
            for size in EVENT_BLOCKS
        ),
        ("all inventories read, s", lambda row: f"{row['rebuild_s']:.2f}"),
        ("  … longest wait of a question meanwhile, ms", lambda row: f"{row['longest_wait_ms']:.0f}"),
        ("a holder leaves: out of all answers, ms", lambda row: f"{row['drop']['out_of_answers_ms']:.2f}"),
        ("  … swept from the map, ms", lambda row: f"{row['drop']['swept_ms']:.0f}"),
        ("  … the longest slice, ms", lambda row: f"{row['drop']['longest_slice_ms']:.1f}"),
    ]
    return "".join(f"  {name:46}" + "".join(f"{show(row):>15}" for row in rows) + "\n" for name, show in labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", default=",".join(map(str, BLOCKS)))
    parser.add_argument("--holders", default=",".join(map(str, HOLDERS)))
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    blocks, holders = ([int(size) for size in text.split(",")] for text in (arguments.blocks, arguments.holders))
    # Of one holder no more than that is known: fewer holders have no room for so many blocks.
    rows = [
        measure(num_blocks, num_holders, arguments.rounds)
        for num_blocks, num_holders in itertools.product(blocks, holders)
        if 2 * num_blocks / num_holders < limits.MAX_HOLDER_BLOCKS
    ]
    report("")
    sys.stdout.write(json.dumps({"rows": rows}, indent=1) + "\n" if arguments.json else table(rows))


if __name__ == "__main__":
    main()
