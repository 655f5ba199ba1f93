"""Tables that would give wrong tokens are found before anything is computed; the fake engine finds them as well."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.cache import ring_blocks
from dataplane.blocks.layout import BlockTable, BlockTables, KVLayout, Segment, segments_of, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.fake import FakeEngine, fake_answer
from services.engine.interface import Sequence
from services.engine.table_checks import find_problem
from tests.engine.rig import new_number, run_batch

BLOCK_SIZE = 8
WINDOW = 20
CHUNK = 12
LAYOUT = KVLayout(
    weights="fake", dtype="float32", num_layers=3, num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE,
    windows=(WINDOW, 0, WINDOW),
)  # fmt: skip
FULL_TABLE = BlockTable((Segment(0, 16),))


def ring(num_physical: int, first_block: int = 0, end_block: int = 16) -> BlockTable:
    """Logical block b lies in physical block b mod `num_physical`."""
    return BlockTable(segments_of([block % num_physical for block in range(first_block, end_block)]), first_block)


def problem(tables: BlockTables, *, num_computed: int = 0, num_needed: int = 128) -> str | None:
    return find_problem(LAYOUT, tables, num_computed=num_computed, num_needed=num_needed, chunk_tokens=CHUNK)


@pytest.mark.parametrize(
    ("tables", "num_computed", "expected"),
    [
        ((FULL_TABLE, ring(6)), 0, None),
        ((FULL_TABLE, ring(6, first_block=5)), 59, None),
        ((FULL_TABLE,), 0, "1 block tables where the layout has 2"),
        ((BlockTable((Segment(0, 15),)), ring(6)), 0, "128 slots and lacks 8"),
        ((FULL_TABLE, ring(6, end_block=15)), 0, "128 slots and lacks 8"),
        ((BlockTable((Segment(1, 15),), 1), ring(6)), 60, "sees its token 0, and its table begins at token 8"),
        ((FULL_TABLE, ring(6, first_block=6)), 66, "sees its token 47, and its table begins at token 48"),
        ((FULL_TABLE, ring(6, first_block=6)), 67, None),
        ((FULL_TABLE, ring(4)), 0, "a block twice among those that hold 31 tokens"),
        ((BlockTable((Segment(0, 8), Segment(3, 8))), ring(6)), 0, "a block twice"),
    ],
)
def test_problems_are_told(tables: BlockTables, num_computed: int, expected: str | None) -> None:
    found = problem(tables, num_computed=num_computed)
    assert found is None if expected is None else expected in (found or "")


@given(
    window=st.integers(1, 60),
    chunk=st.integers(2, 40),
    num_prompt_tokens=st.integers(1, 150),
    num_physical=st.integers(1, 16),
)
def test_a_ring_without_a_problem_gives_the_right_tokens(
    window: int, chunk: int, num_prompt_tokens: int, num_physical: int
) -> None:
    """And a cache's own rings never have one."""
    layout = KVLayout(
        weights="fake", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE,
        windows=(window, 0),
    )  # fmt: skip
    prompt = [(3 * at + window) % 256 for at in range(num_prompt_tokens)]
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    num_blocks = -(-(num_prompt_tokens + 20) // BLOCK_SIZE)
    tables = (BlockTable((Segment(0, num_blocks),)), ring(num_physical, end_block=num_blocks))
    num_needed = num_prompt_tokens + 19
    found = find_problem(layout, tables, num_computed=0, num_needed=num_needed, chunk_tokens=chunk)
    if found is not None:
        assert num_physical < min(num_blocks, ring_blocks(window, chunk, BLOCK_SIZE)), found
        return
    shape = uniform_shape(layout, max(num_blocks, num_physical))
    engine = FakeEngine(shape, memoryview(bytearray(shape.arena_bytes)))
    batch = Batch(chunk)
    batch.add(
        Sequence(
            request_id=RequestId("r"),
            number=new_number("r"),
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            tables=tables,
        )
    )
    assert run_batch(engine, batch)["r"] == fake_answer(layout, prompt, sampling)


def test_the_fake_fails_where_a_step_overwrites_what_it_still_sees() -> None:
    shape = uniform_shape(LAYOUT, 16)
    engine = FakeEngine(shape, memoryview(bytearray(shape.arena_bytes)))
    batch = Batch(CHUNK)
    batch.add(
        Sequence(
            request_id=RequestId("r"),
            number=new_number("r"),
            token_ids=list(range(100)),
            num_prompt_tokens=100,
            sampling=SamplingParams(max_tokens=5, temperature=0.0),
            tables=(FULL_TABLE, ring(3)),
        )
    )
    with pytest.raises(AssertionError, match="overwrite what they still see"):
        run_batch(engine, batch)
