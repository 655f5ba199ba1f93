"""An engine without a model, exact by construction, for tests of everything around it. No torch.

It writes bytes made of (token, position, layer) where a real engine writes KV, and makes each token from what it
*reads* in the arena, over all layers and all positions that each layer sees: KV that is wrong, missing or misplaced
gives another token. A step that would write over what one of its queries still sees fails.

Where blocks are only whole of use (`KVLayout.whole_blocks`) each byte of a token lies `block_size` bytes from its next,
as vLLM's keys do on the CPU: a block that was cut is wrong everywhere.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.blocks.layout import KEY, VALUE, ArenaShape, KVLayout, slot_spans
from schemas.request import SamplingParams
from services.engine.interface import StepItem

AllRows = Seq[bytes]
"""For each layer the bytes of its keys and then of its values, one token after another."""
Rows = npt.NDArray[np.uint8]
MAX_ROWS_KEPT = 16_384


class FakeEngine:
    """Implements `Engine` over `arena_buffer`, an arena of `shape`.

    `before_step` is called with each step's items before anything is computed, `before_layer` before each layer, and
    with the number of layers before the tokens are made: tests delay, block or fail there.
    """

    def __init__(
        self,
        shape: ArenaShape,
        arena_buffer: memoryview,
        *,
        vocab_size: int = 256,
        before_step: Callable[[Seq[StepItem]], None] | None = None,
        before_layer: Callable[[Seq[StepItem], int], None] | None = None,
    ) -> None:
        self.layout = shape.layout
        self._shape = shape
        self.vocab_size = vocab_size
        self.before_step = before_step
        self.before_layer = before_layer
        self._arena: memoryview | None = arena_buffer.cast("B")

    def step(self, items: Seq[StepItem]) -> list[int]:
        """Write the items' rows layer by layer, tell the listeners, and return a token per sampling item."""
        if self.before_step is not None:
            self.before_step(items)
        for item in items:
            self._check(item)
        rows = [
            _rows(self.layout, item.sequence.token_ids[item.start :][: item.num_tokens], item.start) for item in items
        ]
        for layer in range(self.layout.num_layers):
            if self.before_layer is not None:
                self.before_layer(items, layer)
            for item, values in zip(items, rows, strict=True):
                self._write(item, layer, values)
                listener = item.sequence.layer_listener
                if listener is not None:
                    end = item.start + item.num_tokens
                    listener.advance(layer, self.layout.padded(end) if item.samples else self.layout.usable(end))
        if self.before_layer is not None:
            self.before_layer(items, self.layout.num_layers)
        return [self._next_token(item) for item in items if item.samples]

    def close(self) -> None:
        """Let go of the arena."""
        self._arena = None

    def _write(self, item: StepItem, layer: int, rows: AllRows) -> None:
        end = item.start + item.num_tokens
        table = item.sequence.tables[self.layout.group_of_layer[layer]]
        spans = slot_spans(table, self.layout.block_size, item.start, end)
        token_bytes = self.layout.token_bytes
        for key_or_value in (KEY, VALUE):
            values = rows[layer * 2 + key_or_value]
            written = 0
            for slot, count in spans:
                num_bytes = count * token_bytes
                self._put(layer, key_or_value, slot, values[written : written + num_bytes])
                written += num_bytes

    def _put(self, layer: int, key_or_value: int, slot: int, rows: bytes) -> None:
        """Write tokens' rows from this slot on."""
        assert self._arena is not None, "the engine is closed"
        if not self.layout.whole_blocks:
            at = self._shape.offset(layer, key_or_value, slot)
            self._arena[at : at + len(rows)] = rows
            return
        values = np.frombuffer(rows, np.uint8).reshape(-1, self.layout.token_bytes)
        written = 0
        for tokens in self._tokens_in_blocks(layer, key_or_value, slot, len(values)):
            tokens[...] = values[written : written + len(tokens)]
            written += len(tokens)

    def _get(self, layer: int, key_or_value: int, slot: int, count: int) -> memoryview | bytes:
        """Return tokens' rows from this slot on."""
        assert self._arena is not None, "the engine is closed"
        if not self.layout.whole_blocks:
            at = self._shape.offset(layer, key_or_value, slot)
            return self._arena[at : at + count * self.layout.token_bytes]
        return b"".join(t.tobytes() for t in self._tokens_in_blocks(layer, key_or_value, slot, count))

    def _tokens_in_blocks(self, layer: int, key_or_value: int, slot: int, count: int) -> Iterator[Rows]:
        """Yield a view [token, byte] of these tokens in each of their blocks, where a token's bytes lie apart."""
        assert self._arena is not None, "the engine is closed"
        size, token_bytes = self.layout.block_size, self.layout.token_bytes
        while count:
            first = slot % size
            num_tokens = min(count, size - first)
            at = self._shape.offset(layer, key_or_value, slot - first)
            block = np.frombuffer(self._arena, np.uint8, size * token_bytes, at).reshape(token_bytes, size)
            yield block[:, first : first + num_tokens].T
            slot, count = slot + num_tokens, count - num_tokens

    def _check(self, item: StepItem) -> None:
        """Raise AssertionError if the item's rows would lie on what its first query still sees."""
        end = item.start + item.num_tokens
        for group, table in enumerate(item.sequence.tables):
            layer = self.layout.group_of_layer.index(group)
            first = _first_seen(self.layout, layer, item.start + 1)
            seen = sorted(slot_spans(table, self.layout.block_size, first, end))
            distinct = all(span.first_slot + span.num_tokens <= after.first_slot for span, after in pairwise(seen))
            assert distinct, f"tokens {item.start} to {end} of layer {layer} overwrite what they still see"

    def _next_token(self, item: StepItem) -> int:
        digest = xxhash.xxh3_64()
        end = item.start + item.num_tokens
        for layer in range(self.layout.num_layers):
            table = item.sequence.tables[self.layout.group_of_layer[layer]]
            spans = slot_spans(table, self.layout.block_size, _first_seen(self.layout, layer, end), end)
            for key_or_value in (KEY, VALUE):
                for slot, count in spans:
                    digest.update(self._get(layer, key_or_value, slot, count))
        return _choose(digest.intdigest(), item.sequence.sampling, item.sequence.index, self.vocab_size)


def fake_answer(
    layout: KVLayout, prompt: Seq[int], sampling: SamplingParams, *, vocab_size: int = 256, eos: Seq[int] = ()
) -> list[int]:
    """Return the answer that a FakeEngine gives when all KV is right, computed without any arena."""
    tokens = list(prompt)
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
    rows = [bytearray(row) for row in _rows(layout, tokens, 0)]
    token_bytes = layout.token_bytes
    for index in range(sampling.max_tokens):
        digest = xxhash.xxh3_64()
        if index:
            for row, more in zip(rows, _rows(layout, tokens[-1:], len(tokens) - 1), strict=True):
                row += more
        for layer in range(layout.num_layers):
            first = _first_seen(layout, layer, len(tokens)) * token_bytes
            for key_or_value in (KEY, VALUE):
                digest.update(memoryview(rows[layer * 2 + key_or_value])[first:])
        tokens.append(_choose(digest.intdigest(), sampling, index, vocab_size))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def _first_seen(layout: KVLayout, layer: int, num_tokens: int) -> int:
    """Return the first of `num_tokens` tokens that the last of them sees in this layer."""
    window = layout.groups[layout.group_of_layer[layer]].window
    return max(0, num_tokens - window) if window else 0


def _rows(layout: KVLayout, tokens: Seq[int], start: int) -> AllRows:
    """Return what stands in the arena for `tokens` from position `start` on, in all layers."""
    if len(tokens) == 1:
        return _row(layout.num_layers, layout.token_bytes, tokens[0], start)
    return _rows_of(layout.num_layers, layout.token_bytes, tokens, start)


@lru_cache(MAX_ROWS_KEPT)
def _row(num_layers: int, token_bytes: int, token: int, position: int) -> AllRows:
    """Return one token's rows, which decoding asks for again and again."""
    return _rows_of(num_layers, token_bytes, (token,), position)


def _rows_of(num_layers: int, token_bytes: int, tokens: Seq[int], start: int) -> AllRows:
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    words = np.array(tokens, dtype=np.uint64) << np.uint64(32) ^ positions << np.uint64(8)
    words = words ^ np.arange(num_layers * 2, dtype=np.uint64)[:, None]
    # splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    num_words = -(-token_bytes // 8)
    rows = np.repeat(words[:, :, None], num_words, axis=2).view(np.uint8)[..., :token_bytes]
    return tuple(row.tobytes() for row in rows)


def _choose(digest: int, sampling: SamplingParams, index: int, vocab_size: int) -> int:
    """Greedy: the context alone decides. Otherwise seed and index do too."""
    if sampling.temperature <= 0:
        return digest % vocab_size
    return xxhash.xxh3_64_intdigest(f"{digest}:{sampling.seed}:{index}".encode()) % vocab_size
