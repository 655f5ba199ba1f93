"""How KV lies in an arena: `[layer, k/v, block, token, head, dim]`, so that one layer of a run of blocks is one copy
and attention on the CPU reads a view.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

FORMAT_VERSION = 1
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KEY, VALUE = 0, 1


class Segment(NamedTuple):
    """A contiguous run of blocks."""

    first_block: int
    num_blocks: int


class SlotSpan(NamedTuple):
    """A contiguous run of token slots of an arena; slot = block_id · block_size + offset in the block."""

    first_slot: int
    num_tokens: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of one model's KV. Two arenas may exchange KV only when their fingerprints are equal."""

    weights: str
    """Identity of the weights that computed the KV."""
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys (or values) in one layer."""
        return self.num_kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        return self.num_layers * 2 * self.block_size * self.token_bytes

    @property
    def fingerprint(self) -> str:
        """Hex digest over every field and the format version."""
        text = msgspec.json.encode((FORMAT_VERSION, self))
        return hashlib.blake2b(text, digest_size=16).hexdigest()

    def offset(self, num_blocks: int, layer: int, key_or_value: int, slot: int) -> int:
        """Return the byte offset of a slot's keys (KEY) or values (VALUE) in an arena of `num_blocks` blocks."""
        return ((layer * 2 + key_or_value) * num_blocks * self.block_size + slot) * self.token_bytes


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks `num_tokens` tokens need."""
    return -(-num_tokens // block_size)


def slot_spans(segments: Sequence[Segment], block_size: int, start: int, end: int) -> list[SlotSpan]:
    """Return where tokens [start, end) of a request lie, in order.

    Raises ValueError when the segments hold fewer than `end` tokens.
    """
    spans: list[SlotSpan] = []
    passed = 0
    for segment in segments:
        size = segment.num_blocks * block_size
        first, last = max(start, passed), min(end, passed + size)
        if first < last:
            spans.append(SlotSpan(segment.first_block * block_size + first - passed, last - first))
        passed += size
    if end > passed:
        raise ValueError(f"token {end} lies past the {passed} slots of this request")
    return spans


def block_ids(segments: Iterable[Segment]) -> list[int]:
    """Return the block table that the segments stand for."""
    return [block for s in segments for block in range(s.first_block, s.first_block + s.num_blocks)]
