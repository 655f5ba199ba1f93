"""Whether a sequence's block tables can carry it to its end. Pure."""

from dataplane.blocks.layout import BlockTable, BlockTables, KVLayout, block_ids, num_blocks_for


def find_problem(
    layout: KVLayout, tables: BlockTables, *, num_computed: int, num_needed: int, chunk_tokens: int
) -> str | None:
    """Return what is wrong with the tables of a sequence, None where each group's can take KV of `num_needed` tokens.

    `num_computed` tokens' KV is there already; no step computes more than `chunk_tokens` of it.
    """
    if len(tables) != len(layout.groups):
        return f"has {len(tables)} block tables where the layout has {len(layout.groups)} cache groups"
    for group, table in zip(layout.groups, tables, strict=True):
        first_seen = max(0, num_computed - group.window + 1) if group.window else 0
        first_slot, end_slot = table.first_block * layout.block_size, table.end_block * layout.block_size
        if needed := max(0, num_needed - end_slot):
            return f"can come to need {num_needed} slots and lacks {needed} of them"
        if first_seen < first_slot:
            return f"sees its token {first_seen}, and its table begins at token {first_slot}"
        in_view = num_needed
        if group.window:
            in_view = group.window - 1 + min(chunk_tokens, num_needed - num_computed)
        if _repeats_within(table, num_blocks_for(in_view + layout.block_size - 1, layout.block_size)):
            return f"has a block twice among those that hold {in_view} tokens, all of which one step sees"
    return None


def _repeats_within(table: BlockTable, distance: int) -> bool:
    """Return whether any `distance` blocks in a row name one twice."""
    last: dict[int, int] = {}
    for at, block in enumerate(block_ids(table.segments)):
        if at - last.get(block, -distance) < distance:
            return True
        last[block] = at
    return False
