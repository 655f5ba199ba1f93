"""What the host does for a step on a card before it can start: `python -m tests.bench.bench_step_plan`."""

import time

import numpy as np

from dataplane.blocks.layout import BlockTable, KVLayout, segments_of
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.cuda.step_plan import StepPlanner, pack
from services.engine.interface import Sequence, StepItem


def main() -> None:
    """Print what planning and packing a step of 256 decodes of 4,000 tokens takes."""
    kv = KVLayout(weights="w", dtype="bfloat16", num_layers=28, num_kv_heads=8, head_dim=128, block_size=16)
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=9, temperature=0.0)
    items = []
    for n in range(256):
        table = BlockTable(segments_of(rng.permutation(65_536)[:251].tolist()))
        items.append(StepItem(Sequence(RequestId(f"r{n}"), 0, [1] * 4001, 1, sampling, (table,)), 4000, 1, True))
    planner, host = StepPlanner(kv), np.empty(1 << 20, np.uint8)
    for name in ("first", "again"):
        times = []
        for _ in range(1 if name == "first" else 200):
            began = time.perf_counter()
            plan = planner.plan(items)
            planned = time.perf_counter()
            pack(plan, host, num_rows=256, tile_tokens=128)
            times.append((planned - began, time.perf_counter() - planned))
        plan_s, pack_s = np.median(np.array(times), axis=0)
        print(f"{name}: plan {plan_s * 1e6:.0f} µs, pack {pack_s * 1e6:.0f} µs")


if __name__ == "__main__":
    main()
