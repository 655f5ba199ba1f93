"""Steps of all kinds, over which a card's kernels and the CPU's attention are compared; NaN lies all around them."""

from typing import NamedTuple

import numpy as np
import torch

from dataplane.blocks.cache import ring_blocks
from dataplane.blocks.layout import KEY, VALUE, ArenaShape, BlockTable, KVLayout, segments_of, slot_spans
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.cpu.attention import KVTensors, StepAttention
from services.engine.cuda import paged_ops
from services.engine.cuda.device_attention import DeviceStepAttention, step_inputs
from services.engine.cuda.step_plan import StepPlanner, pack
from services.engine.interface import Sequence, StepItem

NUM_BLOCKS = 120
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    window: int
    dtype: str
    items: tuple[tuple[int, int], ...]
    """First token and number of tokens of each."""


CASES = {
    "mixed": Case(4, 2, 16, 8, 0, "float32", ((0, 37), (20, 1), (50, 1), (13, 40), (0, 1))),
    "no-groups": Case(2, 2, 24, 8, 0, "float32", ((0, 70), (130, 1), (7, 9), (31, 33))),
    "window": Case(4, 1, 16, 8, 24, "float32", ((0, 37), (20, 1), (150, 1), (113, 40), (23, 2), (24, 1))),
    "window-of-one": Case(2, 1, 16, 4, 1, "float32", ((5, 1), (9, 7))),
    "odd-dim": Case(8, 2, 80, 16, 0, "float32", ((0, 40), (200, 1), (64, 32))),
    "large-dim": Case(2, 1, 256, 16, 0, "float32", ((3, 20), (100, 1))),
    "half": Case(4, 2, 64, 16, 0, "float16", ((0, 130), (70, 1), (200, 65))),
    "bfloat": Case(4, 2, 128, 16, 40, "bfloat16", ((0, 130), (170, 1), (100, 35))),
    "odd-blocks": Case(3, 3, 16, 5, 0, "float32", ((0, 11), (77, 1))),
}


def layout_of(case: Case) -> KVLayout:
    return KVLayout(
        weights="w", dtype=case.dtype, num_layers=2, num_kv_heads=case.kv_heads, head_dim=case.dim,
        block_size=case.block_size, windows=(case.window,) * 2 if case.window else (),
    )  # fmt: skip


def make_items(case: Case, generator: np.random.Generator) -> list[StepItem]:
    """Return items in scattered blocks; windowed tables begin late and are rings where that is allowed."""
    free = generator.permutation(NUM_BLOCKS).tolist()
    items: list[StepItem] = []
    for number, (start, count) in enumerate(case.items):
        num_blocks = -(-(start + count) // case.block_size)
        first = max(0, start - case.window + 1) // case.block_size if case.window else 0
        ring = num_blocks - first
        if case.window:
            ring = min(ring, ring_blocks(case.window, count, case.block_size))
        blocks = [free.pop() for _ in range(ring)]
        table = BlockTable(segments_of([blocks[block % ring] for block in range(first, num_blocks)]), first)
        sequence = Sequence(
            RequestId(f"r{number}"),
            0,
            list(range(start + count)),
            start + count,
            SamplingParams(max_tokens=1),
            (table,),
        )
        items.append(StepItem(sequence, start, count, True))
    return items


def arenas(case: Case, items: list[StepItem], layer: int, device: str = "cpu") -> tuple[KVTensors, KVTensors]:
    """Return two arenas of NaN, the second on `device`, with the same random KV of what is still seen of the past."""
    shape = ArenaShape(layout=layout_of(case), num_blocks=(NUM_BLOCKS,))
    one = KVTensors(shape, torch.full((shape.num_bytes,), 0xFF, dtype=torch.uint8))
    other = KVTensors(shape, torch.full((shape.num_bytes,), 0xFF, dtype=torch.uint8, device=device))
    for item in items:
        first = max(0, item.start - case.window + 1) if case.window else 0
        for slot, count in slot_spans(item.sequence.tables[0], case.block_size, first, item.start):
            for kind in (KEY, VALUE):
                rows = torch.randn(count, case.kv_heads, case.dim).to(one.dtype)
                for arena in (one, other):
                    (arena.keys if kind == KEY else arena.values)[layer][slot : slot + count] = rows.to(
                        arena.keys[0].device
                    )
    return one, other


def compare(case: Case, device: str = "cpu") -> None:
    """Assert that the kernels on `device` compute and write what the CPU's attention does."""
    layer = 1
    torch.manual_seed(1)
    items = make_items(case, np.random.default_rng(3))
    cpu, card = arenas(case, items, layer, device)
    plan = StepPlanner(cpu.layout).plan(items)
    query, key, value = (
        torch.randn(plan.num_rows, heads, case.dim).to(cpu.dtype).transpose(0, 1)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    window = case.window or None
    expected = StepAttention(cpu, items).attend(layer, query, key, value, 0.2, window)

    launch = paged_ops.chunks_launch(case.dim, cpu.dtype.itemsize)
    host = torch.full((1 << 16,), 0xEE, dtype=torch.uint8)
    fields = pack(plan, host.numpy(), num_rows=plan.num_rows, tile_tokens=launch.queries)
    attention = DeviceStepAttention(card, step_inputs(host.to(device), fields))
    query, key, value = (tensor.to(device) for tensor in (query, key, value))
    output = attention.attend(layer, query, key, value, 0.2, window).cpu()
    assert not output.isnan().any()
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE[case.dtype])
    for layers in ("keys", "values"):
        ours, theirs = (getattr(arena, layers)[layer].view(torch.uint8).cpu() for arena in (card, cpu))
        assert torch.equal(ours, theirs), "the same slots were written, and no others"
