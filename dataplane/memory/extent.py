"""What one stream carries of a sequence: which tokens of which layer, and in how many bytes. Pure."""

from itertools import islice
from typing import Protocol

from dataplane.blocks.layout import BlockTable, KVLayout, iter_blocks
from dataplane.memory.codec import BlockCodec, WireDtype


class Frame(Protocol):
    """Some tokens of some layers that cross at once: `num_tokens` from `first_token`, `num_layers` from `layer` on."""

    @property
    def layer(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...


class Extent:
    """Tokens [first_token, num_tokens). Of layers with a window only what that can still see.

    `group_starts`, `layer_starts`: the first token that crosses. `row_bytes`: of one token's keys (or values) in one
    layer of an arena.
    `cut_tokens`: frames end at a multiple of so many tokens where they can, as a block that is cut needs two scales.
    `least_tokens`: of a frame; where blocks are only whole of use a block's, and then none is ever cut.
    """

    def __init__(self, layout: KVLayout, first_token: int, num_tokens: int, wire_dtype: WireDtype = "same") -> None:
        size = layout.block_size
        self.layout = layout
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.wire_dtype: WireDtype = wire_dtype
        needed = [layout.first_needed_block(group, num_tokens) for group in range(len(layout.groups))]
        self.group_starts = [max(first_token, block * size) for block in needed]
        self.layer_starts = [self.group_starts[group] for group in layout.group_of_layer]
        self.row_bytes = layout.token_bytes
        self.codec: BlockCodec | None = None
        self.least_tokens = self.cut_tokens = size if layout.whole_blocks else 1
        if wire_dtype != "same":
            self.codec = BlockCodec(wire_dtype, layout.dtype, layout.num_kv_heads, layout.head_dim, size)
            self.cut_tokens = size

    def over_wire(self, wire_dtype: WireDtype) -> "Extent":
        """Return the same, with its bytes as they cross."""
        if wire_dtype == self.wire_dtype:
            return self
        return Extent(self.layout, self.first_token, self.num_tokens, wire_dtype)

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest frame in an arena."""
        return self.memory_bytes(1, self.least_tokens)

    def refusal(self) -> str:
        """Return why nobody can read this, as it would cut a block that is only whole of use; "": it cuts none."""
        layout = self.layout
        if not layout.whole_blocks:
            return ""
        if self.first_token % layout.block_size or self.num_tokens % layout.block_size:
            tokens = f"tokens {self.first_token} to {self.num_tokens}"
            return f"{tokens} are no whole blocks of {layout.block_size}, and this KV has no other parts"
        if self.wire_dtype != "same":
            return f"wire_dtype {self.wire_dtype}: this KV crosses as it is"
        return ""

    def memory_bytes(self, num_layers: int, num_tokens: int) -> int:
        """Return the bytes of so many tokens of so many layers in an arena."""
        return num_layers * num_tokens * 2 * self.row_bytes

    def payload_bytes(self, num_layers: int, first_token: int, num_tokens: int) -> int:
        """Return the bytes of a frame."""
        if self.codec is None:
            return self.memory_bytes(num_layers, num_tokens)
        return num_layers * 2 * self.codec.wire_bytes(first_token, num_tokens)


def first_kept_block(table: BlockTable, end_block: int) -> int:
    """Return the block from which on, up to `end_block`, none lies where a later one was written: of a ring the last
    round, of any other table all."""
    # A holder's table may declare any number of blocks: only those up to `end_block` are ever listed.
    blocks = list(islice(iter_blocks(table.segments), max(0, end_block - table.first_block)))
    seen: set[int] = set()
    for index in range(len(blocks) - 1, -1, -1):
        if blocks[index] in seen:
            return table.first_block + index + 1
        seen.add(blocks[index])
    return table.first_block
