"""The kernels compute what the CPU's attention computes, over the same arena, tables and rows."""

import numpy as np
import pytest
import torch

from services.engine.cuda import paged_ops
from services.engine.cuda.device_attention import DeviceStepAttention, step_inputs
from services.engine.cuda.step_plan import StepPlanner, pack
from tests.engine.attention_cases import CASES, arenas, compare, make_items


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_parts", [1, 4])
def test_attention_is_that_of_the_cpu(name: str, num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_ops, "num_parts", lambda *_: num_parts)
    compare(CASES[name])


def test_rows_of_padding_write_nothing_and_come_out_as_zeros() -> None:
    case = CASES["mixed"]._replace(items=((20, 1), (50, 1)))
    items = make_items(case, np.random.default_rng(3))
    _, arena = arenas(case, items, 0)
    plan = StepPlanner(arena.layout).plan(items)
    buffer = torch.full((1 << 16,), 0xEE, dtype=torch.uint8)
    attention = DeviceStepAttention(arena, step_inputs(buffer, pack(plan, buffer.numpy(), num_rows=4, tile_tokens=32)))
    before = arena.keys[0].clone()
    output = attention.attend(
        0, torch.randn(case.heads, 4, case.dim), *torch.randn(2, case.kv_heads, 4, case.dim), 0.2, None
    )
    assert not output[:2].isnan().any()
    assert torch.equal(output[2:], torch.zeros_like(output[2:]))
    changed = (arena.keys[0].view(torch.int32) != before.view(torch.int32)).flatten(1).any(dim=1)
    assert int(changed.sum()) == 2, "the slots of the two sequences"
