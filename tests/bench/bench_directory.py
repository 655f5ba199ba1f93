"""What the directory costs: `python -m tests.bench.bench_directory`.

A million blocks loaded from events, located in, rebuilt from inventories, dropped. `--json` prints one object instead
of the table.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from schemas import subjects
from schemas.block import BLOCK_HASH_BYTES, join_hashes, split_hashes
from schemas.directory import BlocksLocated, BlocksStored, Inventory, LocateBlocks
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.message import decode, encode
from schemas.worker import LeftReason, WorkerInfo, WorkerLeft
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import TypedBus
from services.directory.core import DirectoryCore
from services.directory.service import run_directory

PREFIX_BLOCKS = 625
"""10,000 tokens in blocks of 16."""
EVENT_BLOCKS = 64
"""A prompt of a thousand tokens."""
NUM_HOLDERS = 8
NUM_MANY_HOLDERS = 1_000
DROPPED_BLOCKS = 100_000
REBUILD_BLOCKS = 100_000
REBUILD_GOAL_S = 2.0


def report(doing: str) -> None:
    sys.stderr.write(f"\r\033[K{doing}")
    sys.stderr.flush()


def random_hashes(num_blocks: int) -> bytes:
    return os.urandom(num_blocks * BLOCK_HASH_BYTES)


def holder(number: int) -> WorkerId:
    return WorkerId(f"worker-{number}")


def stored(worker_id: WorkerId, sequence: int, hashes: bytes) -> BlocksStored:
    return BlocksStored(worker_id=worker_id, incarnation="1", sequence=sequence, block_hashes=hashes)


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_ms": statistics.median(ordered) * 1e3, "p99_ms": ordered[int(0.99 * (len(ordered) - 1))] * 1e3}


def load(num_blocks: int) -> tuple[DirectoryCore, dict[str, float]]:
    """Load that many blocks, spread over the holders. The events are made and dropped outside the clock."""
    core, sequences, spent_s = DirectoryCore(), [0] * NUM_HOLDERS, 0.0
    before = resident_bytes()
    for first in range(0, num_blocks, EVENT_BLOCKS):
        number = first // EVENT_BLOCKS % NUM_HOLDERS
        sequences[number] += 1
        event = stored(holder(number), sequences[number], random_hashes(min(EVENT_BLOCKS, num_blocks - first)))
        spent_s += timed(lambda event=event: core.changed(event))
        if first % (EVENT_BLOCKS * 1_000) == 0:
            report(f"loading {first:,} of {num_blocks:,} blocks")
    assert core.num_blocks == num_blocks
    memory = (resident_bytes() - before) / num_blocks
    return core, {"load_blocks_per_s": num_blocks / spent_s, "resident_bytes_per_block": memory}


def hold_prefixes(core: DirectoryCore, prefix: list[BlockHash], workers: list[tuple[WorkerId, int]]) -> None:
    """Let each of these workers hold some prefix, with its event of this sequence number."""
    lengths = random.Random(1)
    for worker_id, sequence in workers:
        held = prefix[: lengths.randint(1, len(prefix))]
        assert core.changed(stored(worker_id, sequence, join_hashes(held))) == []


def measure_locate(core: DirectoryCore, prefix: list[BlockHash], num_rounds: int) -> dict[str, float]:
    assert core.locate(prefix)
    return percentiles([timed(lambda: core.locate(prefix)) for _ in range(num_rounds)])


async def measure_service(num_rounds: int) -> dict[str, float]:
    """Locate over the bus of one process: encoding, routing and decoding included."""
    broker, stop, ready = MemoryBroker(), asyncio.Event(), asyncio.Event()
    prefix = random_hashes(PREFIX_BLOCKS)
    question = LocateBlocks(request_id=RequestId("r"), attempt=1, deadline_ms=0, block_hashes=prefix)
    lengths, spent_s = random.Random(1), list[float]()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run_directory(MemoryBus(broker), stop, ready.set))
        await ready.wait()
        bus = TypedBus(MemoryBus(broker), "bench")
        for number in range(NUM_HOLDERS):
            held = prefix[: lengths.randint(1, PREFIX_BLOCKS) * BLOCK_HASH_BYTES]
            await bus.publish(subjects.STORED, (holder(number),), stored(holder(number), 1, held))
        for _ in range(num_rounds):
            started = time.perf_counter()
            located = await bus.ask(subjects.LOCATE, (), question, 5)
            spent_s.append(time.perf_counter() - started)
            assert isinstance(located, BlocksLocated) and located.holders
        stop.set()
        await bus.close()
    return percentiles(spent_s)


def rebuild(num_blocks: int) -> float:
    """Return the seconds from the first word of each worker to the whole map, with reading the messages."""
    core = DirectoryCore()
    each = num_blocks // NUM_HOLDERS
    pages: dict[WorkerId, bytes] = {}
    for number in range(NUM_HOLDERS):
        worker_id = holder(number)
        page = Inventory(worker_id=worker_id, incarnation="1", sequence=1, block_hashes=random_hashes(each))
        pages[worker_id] = encode(page)

    def run() -> None:
        for worker_id, page in pages.items():
            info = WorkerInfo(
                worker_id=worker_id, incarnation="1", role="prefill", model="m", fingerprint="f",
                num_blocks=each, block_size=16, context_length=10_000,
            )  # fmt: skip
            (asked,) = core.heard(info)
            core.inventory(asked, decode(page, Inventory))

    spent_s = timed(run)
    assert core.num_blocks == num_blocks
    return spent_s


def drop(core: DirectoryCore, num_blocks: int) -> dict[str, float]:
    """Return how long it takes until a holder is out of the answers, and until its blocks are gone from the map."""
    worker_id, before = WorkerId("dropped"), core.num_blocks
    for at in range(0, num_blocks, 1_000):
        core.changed(stored(worker_id, at // 1_000 + 1, random_hashes(1_000)))
    left_s = timed(lambda: core.left(WorkerLeft(worker_id=worker_id, incarnation="1", reason=LeftReason.STOPPED)))
    slices = list[float]()
    while core.needs_sweep:
        slices.append(timed(core.sweep))
    assert core.num_blocks == before
    return {"out_of_answers_ms": left_s * 1e3, "swept_ms": sum(slices) * 1e3, "longest_slice_ms": max(slices) * 1e3}


def run(num_blocks: int, num_rounds: int) -> dict[str, object]:
    core, loaded = load(num_blocks)
    report("locating")
    prefix = split_hashes(random_hashes(PREFIX_BLOCKS))
    sequences = -(-num_blocks // EVENT_BLOCKS)
    each, rest = divmod(sequences, NUM_HOLDERS)
    hold_prefixes(core, prefix, [(holder(n), each + (n < rest) + 1) for n in range(NUM_HOLDERS)])
    few = measure_locate(core, prefix, num_rounds)
    report("dropping a holder")
    dropped = drop(core, DROPPED_BLOCKS)
    report("locating among many")
    crowd = DirectoryCore()
    hold_prefixes(crowd, prefix, [(holder(n), 1) for n in range(NUM_MANY_HOLDERS)])
    many = measure_locate(crowd, prefix, num_rounds)
    report("asking the service")
    service = asyncio.run(measure_service(num_rounds))
    report("rebuilding")
    rebuild_s = rebuild(REBUILD_BLOCKS)
    report("")
    return {
        "num_blocks": num_blocks,
        **loaded,
        "locate_among_8_in_all_blocks": few,
        "locate_among_1000": many,
        "locate_by_service": service,
        "rebuild_100000_s": rebuild_s,
        "rebuild_within_goal": rebuild_s <= REBUILD_GOAL_S,
        "drop_100000": dropped,
    }


def table(figures: dict) -> str:
    few, many, service = (
        figures[key] for key in ("locate_among_8_in_all_blocks", "locate_among_1000", "locate_by_service")
    )
    dropped, million = figures["drop_100000"], f"{figures['num_blocks']:,} blocks"
    verdict = "pass" if figures["rebuild_within_goal"] else "FAIL"
    rows = [
        (f"{million} from events", f"{figures['load_blocks_per_s']:,.0f} blocks/s"),
        ("resident memory per block", f"{figures['resident_bytes_per_block']:.0f} bytes"),
        (f"locate 625 blocks, 8 holders, {million}", f"p50 {few['p50_ms']:.3f} ms   p99 {few['p99_ms']:.3f} ms"),
        ("locate 625 blocks, 1,000 holders", f"p50 {many['p50_ms']:.3f} ms   p99 {many['p99_ms']:.3f} ms"),
        (
            "locate 625 blocks, 8 holders, over the bus of one process",
            f"p50 {service['p50_ms']:.3f} ms   p99 {service['p99_ms']:.3f} ms",
        ),
        (
            f"rebuild 100,000 blocks from {NUM_HOLDERS} inventories",
            f"{figures['rebuild_100000_s']:.3f} s   (aim {REBUILD_GOAL_S:g} s: {verdict})",
        ),
        ("drop a holder of 100,000 blocks: out of all answers", f"{dropped['out_of_answers_ms']:.3f} ms"),
        (
            f"  … swept from {million}",
            f"{dropped['swept_ms']:.0f} ms, the longest slice {dropped['longest_slice_ms']:.1f} ms",
        ),
    ]
    return "".join(f"  {name:58}{value}\n" for name, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    figures = run(arguments.blocks, arguments.rounds)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n" if arguments.json else table(figures))


if __name__ == "__main__":
    main()
