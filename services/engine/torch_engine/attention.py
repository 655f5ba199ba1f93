"""Paged attention over an arena, as transformers' attention function: ours are the KV and the batch, theirs the model.

A step is a flat ragged batch: the tokens of all its items in one row. Per layer the new keys and values go into the
arena, the layer listeners are notified (a transfer overlaps with the attention), and each item attends over its own
slots, read in place where they are contiguous, gathered where they are not. Attention is PyTorch's own. On the
CPU only sliding-window layers past their window take a mask: a prefill chunk is causal attention over itself merged
with unmasked attention over its past, through their log-sum-exps (Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018), which a mask would slow down by 5 to 30 %.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from dataplane.blocks.layout import KEY, VALUE, ArenaShape, KVLayout, SlotSpan, slot_spans
from services.engine.interface import StepItem

ATTENTION_NAME = "kvmesh_paged"
STEP_ARGUMENT = "kvmesh_step"
WINDOW_QUERIES = 256
"""Queries of a sliding-window chunk that share one mask: bounds it to 256 × (window + 255)."""
WARMED_BYTES = range(128 << 10, 2 << 20)
"""A decode's keys of this size are first read once in order: the kernel's thin products wait for memory at every step,
where a plain reduction streams it into the cache (measured: a quarter off a step of 32 sequences of 1,000 tokens).
Smaller ones are likely in a cache already, larger ones would not stay there."""
HARMLESS_ARGUMENTS = frozenset({"position_ids", "position_embeddings", "is_causal", "cache_position"})
"""What models pass along that changes nothing here: positions are in q and k already, and all is causal."""

_flash = cast(Callable[..., tuple[Tensor, Tensor]], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
"""(q [b, h, n, d], k and v [b, kv_h, m, d]) → (output [b, h, n, d], log-sum-exp [b, h, n] in float32).

What scaled_dot_product_attention itself calls on the CPU; only here does it return the log-sum-exp. kv_h divides h.
"""


class UnsupportedAttentionError(TypeError):
    """The model asks its attention for something that this function would compute wrongly."""


class KVTensors:
    """Tensor views of an arena: per layer the keys and the values, `[slot, kv_head, dim]`.

    `num_blocks`: of the cache group that has the fewest.
    """

    def __init__(self, shape: ArenaShape, buffer: memoryview | Tensor) -> None:
        """`buffer`: the arena's bytes, on a card as a tensor (uint8)."""
        layout = shape.layout
        if buffer.nbytes < shape.arena_bytes:
            raise ValueError(f"{shape.num_blocks} blocks need {shape.arena_bytes} bytes, the arena has {buffer.nbytes}")
        dtype = cast(torch.dtype, getattr(torch, layout.dtype))
        if isinstance(buffer, Tensor):
            flat = buffer[: shape.arena_bytes].view(dtype)
        else:
            # torch.frombuffer holds the object but not its memory: an arena that is closed would be unmapped under it
            flat = torch.as_tensor(np.frombuffer(buffer, np.uint8, shape.arena_bytes)).view(dtype)

        def view(layer: int, key_or_value: int) -> Tensor:
            num_slots = shape.num_blocks[layout.group_of_layer[layer]] * layout.block_size
            first = shape.first_bytes[layer][key_or_value] // dtype.itemsize
            row = layout.num_kv_heads * layout.head_dim
            return flat[first : first + num_slots * row].view(num_slots, layout.num_kv_heads, layout.head_dim)

        self.layout = layout
        self.dtype = dtype
        self.num_blocks = min(shape.num_blocks)
        self.device = flat.device
        self.keys = [view(layer, KEY) for layer in range(layout.num_layers)]
        self.values = [view(layer, VALUE) for layer in range(layout.num_layers)]

    def indices(self, numbers: Seq[int]) -> Tensor:
        """Return rows, slots, tokens or positions where the arena is."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device)


class _ItemPlan:
    """One item's rows of the flat batch and, by cache group, its slots of the arena: of its new tokens, and of all that
    it sees, which begins at token `first_seen`."""

    __slots__ = ("end", "first_row", "first_seen", "item", "last_row", "new_spans", "num_tokens", "spans", "start")

    def __init__(self, item: StepItem, first_row: int, layout: KVLayout) -> None:
        block_size, tables = layout.block_size, item.sequence.tables
        self.item = item
        self.start = item.start
        self.num_tokens = item.num_tokens
        self.end = item.start + item.num_tokens
        self.first_row = first_row
        self.last_row = first_row + item.num_tokens
        self.first_seen = [max(0, self.start - group.window + 1) if group.window else 0 for group in layout.groups]
        self.spans = [
            slot_spans(table, block_size, first, self.end) for table, first in zip(tables, self.first_seen, strict=True)
        ]
        self.new_spans = [slot_spans(table, block_size, self.start, self.end) for table in tables]


class StepAttention:
    """The attention of one step. `attend` is called once per layer with q, k and v of the flat batch.

    `mark`: makes a mark behind what was written so far, where that is only under way (on a card).
    """

    def __init__(self, arena: KVTensors, items: Seq[StepItem], mark: Callable[[], int] | None = None) -> None:
        self.arena = arena
        self._mark = mark
        self.layers_seen: list[int] = []
        self._plans: list[_ItemPlan] = []
        self.num_rows = 0
        for item in items:
            self._plans.append(_ItemPlan(item, self.num_rows, arena.layout))
            self.num_rows += item.num_tokens
        self._chunks = [plan for plan in self._plans if plan.num_tokens > 1]
        singles = [plan for plan in self._plans if plan.num_tokens == 1]
        self._single_rows = arena.indices([plan.first_row for plan in singles])
        self._single_slots = [
            arena.indices([plan.new_spans[group][0].first_slot for plan in singles])
            for group in range(len(arena.layout.groups))
        ]
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Return `[rows, heads, dim]` for q `[heads, rows, dim]` and k, v `[kv_heads, rows, dim]`.

        `window`: a query sees that many tokens, itself included; None: all before it.
        """
        check_layer(self.arena, self.num_rows, layer, (query, key, value), window)
        self.layers_seen.append(layer)
        self._write(layer, key.transpose(0, 1), value.transpose(0, 1))
        self._announce(layer)
        if len(self._plans) == 1 and self.num_rows > 1:
            return self._attend_item(self._plans[0], layer, query, scale, window)
        output = query.new_empty((self.num_rows, *query.shape[::2]))
        for plan in self._plans:
            rows = slice(plan.first_row, plan.last_row)
            output[rows] = self._attend_item(plan, layer, query[:, rows], scale, window)
        return output

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put k and v, `[rows, kv_heads, dim]`, where they belong: runs as slices, single tokens all in one go."""
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        group = self.arena.layout.group_of_layer[layer]
        single_slots = self._single_slots[group]
        for plan in self._chunks:
            row = plan.first_row
            for slot, count in plan.new_spans[group]:
                keys[slot : slot + count] = key[row : row + count]
                values[slot : slot + count] = value[row : row + count]
                row += count
        if len(self._single_rows) == self.num_rows:
            keys.index_copy_(0, single_slots, key)
            values.index_copy_(0, single_slots, value)
        elif len(self._single_rows):
            keys.index_copy_(0, single_slots, key[self._single_rows])
            values.index_copy_(0, single_slots, value[self._single_rows])

    def _announce(self, layer: int) -> None:
        """Notify the layer listeners that their tokens' keys and values are written, or will be by a mark."""
        written = [(plan.item.sequence.layer_listener, plan.end) for plan in self._plans]
        mark = self._mark() if self._mark and any(listener for listener, _ in written) else 0
        for listener, end in written:
            if listener is not None:
                listener.advance(layer, end, mark)

    def _attend_item(self, plan: _ItemPlan, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return `[n, heads, dim]` for an item's q `[heads, n, dim]`."""
        group = self.arena.layout.group_of_layer[layer]
        spans, first_seen = plan.spans[group], plan.first_seen[group]
        first = first_seen if window is None else max(first_seen, plan.start - window + 1)
        if first > first_seen:
            spans = _skip(spans, first - first_seen)
        key, value = _read(self.arena.keys[layer], spans), _read(self.arena.values[layer], spans)
        if plan.num_tokens == 1:
            if len(spans) == 1 and key.nbytes in WARMED_BYTES and key.device.type == "cpu":
                _ = key.amax(), value.amax()
            # A group's heads take the place of queries, so that its keys and values are read once for all of them.
            grouped = query.view(1, key.shape[1], -1, query.shape[2])
            return _attend(grouped, key, value, scale=scale).reshape(1, *query.shape[::2])
        if window is not None and plan.end > window:
            return self._attend_window(plan, query[None], key, value, scale, window)
        return self._attend_chunk(query[None], key, value, scale)[0].transpose(0, 1)

    def _attend_chunk(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return causal attention `[1, heads, n, dim]` of queries that are the last n of the keys' m tokens."""
        num_queries, num_keys = query.shape[2], key.shape[2]
        num_past = num_keys - num_queries
        if num_past == 0:
            return _attend(query, key, value, is_causal=True, scale=scale)
        if query.device.type != "cpu":
            mask = self._mask(num_queries, num_past, num_keys).to(query.dtype)
            return _attend(query, key, value, attn_mask=mask, scale=scale)
        past, past_sum = _flash(query, key[:, :, :num_past], value[:, :, :num_past], scale=scale)
        own, own_sum = _flash(query, key[:, :, num_past:], value[:, :, num_past:], is_causal=True, scale=scale)
        # e^a / (e^a + e^b) = sigmoid(a - b): the past's share of the softmax's denominator.
        share = torch.sigmoid(past_sum - own_sum).to(own.dtype)
        return torch.lerp(own, past, share[..., None])

    def _attend_window(
        self, plan: _ItemPlan, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """Return `[n, heads, dim]` for a chunk whose queries do not all see its whole past, under masks."""
        first_key = plan.end - key.shape[2]
        outputs: list[Tensor] = []
        for start in range(plan.start, plan.end, WINDOW_QUERIES):
            end = min(start + WINDOW_QUERIES, plan.end)
            first = max(first_key, start - window + 1)
            mask = self._mask(end - start, start - first, window).to(query.dtype)
            keys = slice(first - first_key, end - first_key)
            rows = slice(start - plan.start, end - plan.start)
            outputs.append(_attend(query[:, :, rows], key[:, :, keys], value[:, :, keys], attn_mask=mask, scale=scale))
        return torch.cat(outputs, dim=2)[0].transpose(0, 1)

    def _mask(self, num_queries: int, num_past: int, window: int) -> Tensor:
        """Return the additive mask of queries that follow `num_past` keys: built once a step, used by every layer."""
        mask = self._masks.get((num_queries, num_past, window))
        if mask is None:
            queries = torch.arange(num_queries, device=self.arena.device)[:, None]
            distance = queries + num_past - torch.arange(num_past + num_queries, device=self.arena.device)
            seen = (distance >= 0) & (distance < window)
            mask = torch.zeros(seen.shape, device=self.arena.device).masked_fill_(~seen, float("-inf"))
            self._masks[num_queries, num_past, window] = mask
        return mask


def check_layer(
    arena: KVTensors, num_rows: int, layer: int, tensors: tuple[Tensor, Tensor, Tensor], window: int | None
) -> None:
    """Raise UnsupportedAttentionError unless a layer's q, k and v `[heads, rows, dim]` are those of the arena."""
    layout = arena.layout
    query, key, value = tensors
    kept = layout.groups[layout.group_of_layer[layer]].window
    if kept and (window is None or window > kept):
        raise UnsupportedAttentionError(f"layer {layer} sees {window or 'all'} tokens, and only {kept} are kept")
    shape = (layout.num_kv_heads, num_rows, layout.head_dim)
    if key.shape != shape or value.shape != shape or key.dtype != arena.dtype:
        raise UnsupportedAttentionError(
            f"layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)} of {key.dtype}, "
            f"where its configuration means {shape} of {arena.dtype}"
        )
    if query.shape[0] % layout.num_kv_heads or query.shape[2] != layout.head_dim:
        raise UnsupportedAttentionError(f"layer {layer} has queries {tuple(query.shape)} for keys {shape}")


def _attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Return attention `[b, heads, n, dim]`, by PyTorch's kernel for the device."""
    if query.device.type == "cpu":
        return _flash(query, key, value, **how)[0]
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **how)


def _skip(spans: Seq[SlotSpan], num_tokens: int) -> list[SlotSpan]:
    """Return the spans without their first `num_tokens` slots."""
    rest: list[SlotSpan] = []
    for slot, count in spans:
        skipped = min(num_tokens, count)
        num_tokens -= skipped
        if skipped < count:
            rest.append(SlotSpan(slot + skipped, count - skipped))
    return rest


def _read(cache: Tensor, spans: Seq[SlotSpan]) -> Tensor:
    """Return `[1, kv_heads, n, dim]`: a view of the arena where the slots are one run, else a copy."""
    views = [cache[slot : slot + count] for slot, count in spans]
    tokens = views[0] if len(views) == 1 else torch.cat(views)
    return tokens.transpose(0, 1)[None]


def paged_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """The function that models call: q `[1, heads, rows, dim]` and so on → `[1, rows, heads, dim]`.

    Refuses, rather than ignores, every argument that it does not know. Raises UnsupportedAttentionError.
    """
    step: StepAttention | None = arguments.pop(STEP_ARGUMENT, None)
    scaling: float | None = arguments.pop("scaling", None)
    window: int | None = arguments.pop("sliding_window", None)
    dropout: float = arguments.pop("dropout", 0.0)
    if step is None:
        raise UnsupportedAttentionError(f"{type(module).__name__} does not pass the step on to its attention")
    unknown = [name for name, given in arguments.items() if given is not None and given is not False]
    unknown = [name for name in unknown if name not in HARMLESS_ARGUMENTS]
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("is_causal=False")
    if unknown or attention_mask is not None or dropout:
        names = ", ".join(unknown) or ("a mask of its own" if attention_mask is not None else "dropout")
        raise UnsupportedAttentionError(f"{type(module).__name__} asks its attention for {names}")
    layer = cast(int, module.layer_idx)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return step.attend(layer, query[0], key[0], value[0], scale, window)[None], None
