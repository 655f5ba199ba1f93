"""What one stream carries of a sequence: which tokens of which layer, which heads, and in how many bytes. Pure."""

from functools import cached_property
from typing import NamedTuple

import msgspec

from dataplane.codec import BlockCodec, WireDtype
from dataplane.layout import ITEM_BYTES, BlockTable, KVLayout, block_ids


class HeadRange(NamedTuple):
    """A run of the model's KV heads, over all shards."""

    first: int
    num_heads: int

    def holds(self, other: "HeadRange") -> bool:
        """Say whether `other` is a range that lies in this one."""
        end, other_end = self.first + self.num_heads, other.first + other.num_heads
        return other.num_heads > 0 and self.first <= other.first and other_end <= end


NO_HEADS = HeadRange(0, 0)


def heads_of(layout: KVLayout) -> HeadRange:
    """Return the heads that a worker with this layout holds."""
    return HeadRange(layout.first_head, layout.num_kv_heads)


class Extent(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Tokens [first_token, num_tokens) of `heads`. Of layers with a window only what that can still see."""

    layout: KVLayout
    """Either end's: they differ in the heads held, which does not matter here."""
    first_token: int
    num_tokens: int
    heads: HeadRange
    wire_dtype: WireDtype = "same"

    @cached_property
    def group_starts(self) -> tuple[int, ...]:
        """The first token that crosses, per cache group."""
        layout = self.layout
        return tuple(
            max(self.first_token, layout.first_needed_block(group, self.num_tokens) * layout.block_size)
            for group in range(len(layout.groups))
        )

    @cached_property
    def layer_starts(self) -> tuple[int, ...]:
        """The first token that crosses, per layer."""
        return tuple(self.group_starts[group] for group in self.layout.group_of_layer)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's keys (or values) of these heads in one layer of an arena."""
        return self.heads.num_heads * self.layout.head_dim * ITEM_BYTES[self.layout.dtype]

    @cached_property
    def codec(self) -> BlockCodec | None:
        """What packs the bytes for the wire, if anything does."""
        if self.wire_dtype == "same":
            return None
        layout = self.layout
        return BlockCodec(self.wire_dtype, layout.dtype, self.heads.num_heads, layout.head_dim, layout.block_size)

    @cached_property
    def cut_tokens(self) -> int:
        """Frames end at a multiple of so many tokens where they can: a block that is cut would need two scales."""
        return 1 if self.codec is None else self.layout.block_size

    def memory_bytes(self, num_layers: int, num_tokens: int) -> int:
        """Return the bytes of so many tokens of so many layers in an arena."""
        return num_layers * num_tokens * 2 * self.row_bytes

    def payload_bytes(self, num_layers: int, first_token: int, num_tokens: int) -> int:
        """Return the bytes of a frame."""
        if self.codec is None:
            return self.memory_bytes(num_layers, num_tokens)
        return num_layers * 2 * self.codec.num_bytes(first_token, num_tokens)


def first_kept_block(table: BlockTable, end_block: int) -> int:
    """Return the block from which on, up to `end_block`, none lies where a later one was written: of a ring the last
    round, of any other table all."""
    blocks = block_ids(table.segments)[: max(0, end_block - table.first_block)]
    seen: set[int] = set()
    for index in range(len(blocks) - 1, -1, -1):
        if blocks[index] in seen:
            return table.first_block + index + 1
        seen.add(blocks[index])
    return table.first_block
