"""What a step of vLLM's means for a sequence's blocks: which are copied, and what may be announced. Pure.

vLLM computes in blocks of its own and the mesh reads those of the arena, so each computed block is copied out once, in
the step that fills it, and blocks that were read from elsewhere are copied in before a request's first step. Blocks of
either side have `block_size` tokens, and only whole ones are copied (`KVLayout.whole_blocks`).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from dataplane.blocks.layout import KVLayout, block_ids, num_blocks_for
from services.engine.interface import EngineLostError, Sequence
from services.engine.vllm_engine.runs import Run, runs_of

NO_BLOCK = 0
"""vLLM's name for a block that no window sees any more."""


class GroupPair(NamedTuple):
    """Layers that have the same blocks on both sides: `group` is a cache group of the arena's layout, `engine_group`
    one of vLLM's. vLLM may have several for one of ours, as all of its have equally many layers."""

    group: int
    engine_group: int


@dataclass(slots=True, eq=False)
class TrackedSequence:
    """A sequence that vLLM has, and what of it is in the arena.

    `group_pairs`: those of the engine. `num_given`: its tokens when it came, a prompt and, of
    an attempt that is resumed, an answer's beginning. `num_present`: tokens whose KV is in the arena; what a step is to
    save counts from its plan on. `load_from`: the first token that vLLM was promised from the arena and has not yet.
    """

    sequence: Sequence
    layout: KVLayout
    group_pairs: Seq[GroupPair]
    num_given: int = field(init=False)
    num_present: int = field(init=False)
    load_from: int | None = None
    _tables: list[list[int]] = field(init=False)
    """By cache group the arena's block for each of the sequence's blocks from the table's first on."""

    def __post_init__(self) -> None:
        self.num_given = len(self.sequence.token_ids)
        self.num_present = self.sequence.num_computed_tokens
        self._tables = [block_ids(table.segments) for table in self.sequence.tables]

    def num_matched(self, num_tokens: int, num_local: int) -> int:
        """Return how many tokens of the request's `num_tokens` the arena has beyond the `num_local` that vLLM has
        cached itself. The last token is always computed."""
        return max(0, min(self.num_present, num_tokens - 1) - num_local)

    def promised(self, num_tokens: int, num_external: int) -> None:
        """vLLM has blocks for the `num_external` tokens of a match, and takes them for computed."""
        if num_external:
            self.load_from = min(self.num_present, num_tokens - 1) - num_external

    def plan(self, start: int, num_tokens: int, block_ids: Seq[Seq[int]]) -> "Copies":
        """Return what the step that computes tokens [start, start + num_tokens) copies. `block_ids`: vLLM's blocks, by
        its groups. Raises EngineLostError where either side lacks a block that the other needs.

        What vLLM had cached itself and the arena lacks is saved too: in the same step, as vLLM lets a request share
        blocks that another one of the same step computes. What is present already is never saved again: somebody may
        be reading it.
        """
        # A promise is loaded once: from the next step on vLLM has these blocks itself.
        size, end = self.layout.block_size, start + num_tokens
        loaded, self.load_from = self.load_from, None
        num_whole, announced = end // size, end // size * size
        if self.sequence.layer_listener is not None and end >= self.num_given:
            # A hand-over's last block goes as it is: nobody attends to what lies behind the prompt.
            num_whole = num_blocks_for(self.num_given, size)
            announced = num_whole * size
        # For each pair of groups, load what was promised up to `start`, and save what the arena lacks up to here.
        loads: list[tuple[Run, ...]] = []
        saves: list[tuple[Run, ...]] = []
        for pair in self.group_pairs:
            window = self.layout.groups[pair.group].window
            engine_blocks = block_ids[pair.engine_group]
            wanted = range(0)
            if loaded is not None:
                # Of what comes before a window's tokens vLLM has no blocks, and the arena need not have any.
                first = max(loaded, start - window + 1) if window else loaded
                wanted = range(first // size, num_blocks_for(start, size))
            loads.append(self._runs(pair, wanted, engine_blocks))
            saves.append(self._runs(pair, range(self.num_present // size, num_whole), engine_blocks))
        # The padding of a hand-over's last block is announced, but it holds no tokens of the sequence.
        self.num_present = max(self.num_present, min(announced, end))
        return Copies(self, start, end, tuple(loads), tuple(saves), announced)

    def _runs(self, pair: GroupPair, blocks: range, engine_blocks: Seq[int]) -> tuple[Run, ...]:
        if not blocks:
            return ()
        first_block = self.sequence.tables[pair.group].first_block
        table = self._tables[pair.group]
        if blocks.start < first_block or blocks.stop > first_block + len(table):
            raise EngineLostError(
                f"blocks {blocks.start} to {blocks.stop} of {self.sequence.request_id} are not all in the arena, which "
                f"has {first_block} to {first_block + len(table)}"
            )
        pairs = [(table[block - first_block], engine_blocks[block]) for block in blocks]
        if any(engine_block == NO_BLOCK for _, engine_block in pairs):
            raise EngineLostError(f"vLLM has no block for a part of what it computes of {self.sequence.request_id}")
        return tuple(runs_of(pairs))


class Copies(NamedTuple):
    """One sequence in one step. `loads`, `saves`: by pair. `announced`: tokens from the sequence's start whose KV a
    layer has in the arena once its saves are done."""

    tracked: TrackedSequence
    start: int
    end: int
    loads: tuple[tuple[Run, ...], ...]
    saves: tuple[tuple[Run, ...], ...]
    announced: int
