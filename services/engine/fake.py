"""An engine without a model, exact by construction, for tests of everything around it. No torch.

It writes bytes made of (token, position, layer) where a real engine writes KV, and makes each token from what it
*reads* in the arena, over all layers and all positions that each layer sees: KV that is wrong, missing or misplaced
gives another token, and other logprobs. A step that would write over what one of its queries still sees fails.

What may not come next (`shaping.permitted`) does not come. Bias and penalties need logits, of which it has none.

Where blocks are only whole of use (`KVLayout.whole_blocks`) each byte of a token lies `block_size` bytes from its next,
as vLLM's keys do on the CPU: a block that was cut is wrong everywhere.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.blocks.layout import KEY, VALUE, ArenaShape, KVLayout, slot_spans
from schemas.ids import RequestId
from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.interface import ChosenToken, Grammar, GrammarError, Outcome, Sequence, StepItem
from services.engine.rules import stop_token_ids
from services.engine.shaping import is_masked, permitted

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

    def compute(self, items: Seq[StepItem]) -> list[Outcome]:
        """Write the items' rows layer by layer, notify the listeners, and return an outcome per sampling item."""
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
        return self._outcomes(items)

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

    def _outcomes(self, items: Seq[StepItem]) -> list[Outcome]:
        """Return what comes of items whose KV is written."""
        for item in items:
            self._score_prompt(item)
        return [
            fake_outcome(self._digest(item.sequence, len(item.sequence.token_ids)), item.sequence, self.vocab_size)
            for item in items
            if item.samples
        ]

    def _score_prompt(self, item: StepItem) -> None:
        """Append the logprobs that are wanted of the item's part of a prompt."""
        sequence = item.sequence
        if not sequence.wants_prompt_logprobs:
            return
        num_top = sequence.sampling.prompt_logprobs or 0
        for end in range(item.start + 1, min(item.start + item.num_tokens + 1, sequence.num_prompt_tokens)):
            digest, token_id = self._digest(sequence, end), sequence.token_ids[end]
            sequence.prompt_logprobs.append(fake_logprob(digest, token_id, num_top, self.vocab_size))

    def _digest(self, sequence: Sequence, end: int) -> int:
        """Return a number made of all that the last of `end` tokens sees."""
        digest = xxhash.xxh3_64()
        for layer in range(self.layout.num_layers):
            table = sequence.tables[self.layout.group_of_layer[layer]]
            spans = slot_spans(table, self.layout.block_size, _first_seen(self.layout, layer, end), end)
            for key_or_value in (KEY, VALUE):
                for slot, count in spans:
                    digest.update(self._get(layer, key_or_value, slot, count))
        return digest.intdigest()


def fake_outcome(digest: int, sequence: Sequence, vocab_size: int) -> Outcome:
    """Return what comes next in a sequence whose tokens have this `digest`."""
    sampling = sequence.sampling
    number = digest
    if sampling.temperature > 0:  # else the context alone decides
        number = xxhash.xxh3_64_intdigest(f"{digest}:{sampling.seed}:{sequence.index}".encode())
    if is_masked(sequence):
        try:
            token_ids = np.flatnonzero(permitted(sequence, np.ones(vocab_size, np.bool_)))
        except GrammarError as error:
            return error
        token_id = int(token_ids[number % len(token_ids)])
    else:
        token_id = number % vocab_size
    if sampling.logprobs is None:
        return ChosenToken(token_id)
    return ChosenToken(token_id, fake_logprob(digest, token_id, sampling.logprobs, vocab_size))


def fake_logprob(digest: int, token_id: int, num_top: int, vocab_size: int) -> TokenLogprob:
    """Return a token's logprob, and those of the `num_top` likeliest, behind tokens that have this `digest`. They are
    numbers that float32 has, and of no distribution."""
    words = np.arange(vocab_size, dtype=np.uint64) ^ np.uint64(digest)
    values = _mix(words) % np.uint64(1 << 16) / -4096.0
    best = np.argsort(-values, kind="stable")[:num_top]
    return TokenLogprob(float(values[token_id]), tuple((int(at), float(values[at])) for at in best))


def fake_answer(
    layout: KVLayout,
    prompt: Seq[int],
    sampling: SamplingParams,
    *,
    vocab_size: int = 256,
    eos: Seq[int] = (),
    grammar: Grammar | None = None,
) -> list[int]:
    """Return the answer that a FakeEngine gives when all KV is right, computed without any arena. Raises GrammarError
    where it has none."""
    choices = fake_choices(layout, prompt, sampling, vocab_size=vocab_size, eos=eos, grammar=grammar)
    return [choice.token_id for choice in choices]


def fake_choices(
    layout: KVLayout,
    prompt: Seq[int],
    sampling: SamplingParams,
    *,
    vocab_size: int = 256,
    eos: Seq[int] = (),
    grammar: Grammar | None = None,
) -> list[ChosenToken]:
    """Return the tokens of `fake_answer`, with their logprobs where they are wanted. Raises GrammarError."""
    # A sequence without block tables, as `_Seen` holds its KV, and with a grammar that no step waits for.
    sequence = Sequence(
        RequestId("reference"), 1, list(prompt), len(prompt), sampling, (), stop_token_ids=frozenset(eos)
    )
    if grammar is not None:
        sequence.grammar = Future()
        sequence.grammar.set_result(grammar)
    # Generate token by token from what the arena would hold. A stop token is a part of the answer.
    seen = _Seen(layout)
    choices: list[ChosenToken] = []
    while len(choices) < sampling.max_tokens:
        outcome = fake_outcome(seen.digest(sequence.token_ids), sequence, vocab_size)
        if isinstance(outcome, GrammarError):
            raise outcome
        choices.append(outcome)
        sequence.token_ids.append(outcome.token_id)
        if outcome.token_id in stop_token_ids(sequence):
            break
    return choices


def fake_prompt_logprobs(
    layout: KVLayout, prompt: Seq[int], num_top: int, *, vocab_size: int = 256
) -> list[TokenLogprob]:
    """Return the logprobs of a prompt's tokens from the second on, as a FakeEngine gives them."""
    seen = _Seen(layout)
    return [fake_logprob(seen.digest(prompt[:end]), prompt[end], num_top, vocab_size) for end in range(1, len(prompt))]


class _Seen:
    """What stands in the arena for tokens that grow."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._rows = [bytearray() for _ in range(layout.num_layers * 2)]
        self._num_tokens = 0

    def digest(self, tokens: Seq[int]) -> int:
        """Return the digest of these tokens, the last ones with more behind them."""
        layout, start, self._num_tokens = self._layout, self._num_tokens, len(tokens)
        for row, more in zip(self._rows, _rows(layout, tokens[start:], start), strict=True):
            row += more
        digest = xxhash.xxh3_64()
        for layer in range(layout.num_layers):
            first = _first_seen(layout, layer, len(tokens)) * layout.token_bytes
            for key_or_value in (KEY, VALUE):
                digest.update(memoryview(self._rows[layer * 2 + key_or_value])[first:])
        return digest.intdigest()


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
    words = _mix(words ^ np.arange(num_layers * 2, dtype=np.uint64)[:, None])
    num_words = -(-token_bytes // 8)
    rows = np.repeat(words[:, :, None], num_words, axis=2).view(np.uint8)[..., :token_bytes]
    return tuple(row.tobytes() for row in rows)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the words mixed by splitmix64's finalizer (Steele, Lea, Flood: Fast splittable pseudorandom number
    generators, 2014)."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)
