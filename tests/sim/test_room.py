"""Bursts beyond the room for answers, in the simulator: a prompt is computed once, when its reader has room or soon
will."""

import dataclasses

import pytest

from dataplane.blocks.layout import num_blocks_for
from services.sim.mesh import BLOCK_SIZE, MeshShape
from tests.sim.test_inflight import burst, computed

NUM_TOKENS, MAX_TOKENS = 100, 24
PROMPTS = [tuple(1 + (number * 11 + at * (number + 1)) % 53 for at in range(NUM_TOKENS)) for number in range(64)]
ROOM = num_blocks_for(NUM_TOKENS + MAX_TOKENS, BLOCK_SIZE)
"""Blocks of one request."""
SHAPE = MeshShape(num_prefill=1, num_decode=1, num_blocks=4 * ROOM, step_s=0.05)


@pytest.mark.parametrize(
    ("shape", "num_requests"),
    [
        (SHAPE, 64),
        (dataclasses.replace(SHAPE, num_prefill=2, num_decode=2), 64),
        (dataclasses.replace(SHAPE, num_decode=3), 64),
        (dataclasses.replace(SHAPE, num_blocks=ROOM + 3), 16),
        (dataclasses.replace(SHAPE, num_decode=2, num_blocks=ROOM + 3), 16),
        (dataclasses.replace(SHAPE, windows=(0, 8)), 64),
    ],
    ids=["one pair", "two pairs", "three readers", "room for one", "two readers, room for one", "windows"],
)
def test_a_prompt_is_computed_once_however_long_its_reader_has_no_room(shape: MeshShape, num_requests: int) -> None:
    report, spans = burst(shape, prompts=PROMPTS[:num_requests], max_tokens=MAX_TOKENS)
    assert report.verdict.num_finished == num_requests
    assert computed(spans) <= 1.1 * num_requests * NUM_TOKENS
