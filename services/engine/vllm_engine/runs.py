"""Blocks that are copied between the arena and vLLM's pages, as runs: one copy for each. Pure."""

from collections.abc import Iterable
from typing import NamedTuple


class Run(NamedTuple):
    """`num_blocks` blocks that lie one after another on both sides, from these on."""

    arena_block: int
    engine_block: int
    num_blocks: int


def runs_of(pairs: Iterable[tuple[int, int]]) -> list[Run]:
    """Join pairs of (arena block, engine block) that follow each other on both sides."""
    runs: list[Run] = []
    for arena_block, engine_block in pairs:
        if runs and (runs[-1].arena_block + runs[-1].num_blocks, runs[-1].engine_block + runs[-1].num_blocks) == (
            arena_block,
            engine_block,
        ):
            runs[-1] = runs[-1]._replace(num_blocks=runs[-1].num_blocks + 1)
        else:
            runs.append(Run(arena_block, engine_block, 1))
    return runs
