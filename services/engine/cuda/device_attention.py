"""The attention of one step on a card: the arena's tensors there, the step's numbers there, and who computes."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.engine.cpu.attention import KVTensors, check_layer
from services.engine.cuda import paged_ops
from services.engine.cuda.protocol import MarkSource
from services.engine.cuda.step_plan import Field, StepFields
from services.engine.interface import StepItem

_DTYPES = {"<i8": torch.int64, "<i4": torch.int32, "<f8": torch.float64}


class StepInputs(NamedTuple):
    """A step's numbers as tensors; see `StepFields`. `slots` and the `bases` are one tensor per cache group."""

    token_ids: Tensor
    positions: Tensor
    slots: Seq[Tensor]
    singles: Tensor
    single_bases: Seq[Tensor]
    chunks: Tensor
    chunk_bases: Seq[Tensor]
    tiles: Tensor
    table: Tensor
    """From its first entry to the end of the buffer: a graph's is the same whatever the tables' sizes."""
    sample_rows: Tensor
    draws: Tensor

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


def step_inputs(buffer: Tensor, fields: StepFields) -> StepInputs:
    """Return the fields of a packed step as views of `buffer` (bytes)."""

    def view(field: Field) -> Tensor:
        taken = buffer[field.first_byte : field.first_byte + field.num_bytes]
        return taken.view(_DTYPES[field.dtype]).view(field.shape)

    return StepInputs(
        token_ids=view(fields.token_ids),
        positions=view(fields.positions),
        slots=view(fields.slots).unbind(),
        singles=view(fields.singles),
        single_bases=view(fields.single_bases).unbind(),
        chunks=view(fields.chunks),
        chunk_bases=view(fields.chunk_bases).unbind(),
        tiles=view(fields.tiles),
        table=buffer[fields.table.first_byte :].view(torch.int32),
        sample_rows=view(fields.sample_rows),
        draws=view(fields.draws),
    )


class ChunkAttention(Protocol):
    """Computes the chunks' rows of a layer's output, in place of our kernel."""

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float, window: int) -> None:
        """Queries and output are `[rows, heads, dim]`; the layer's new keys and values are in the arena."""
        ...


class DeviceStepAttention:
    """As `StepAttention`, on a card. Nothing here waits for it."""

    def __init__(
        self,
        arena: KVTensors,
        inputs: StepInputs,
        *,
        chunk_attention: ChunkAttention | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> None:
        self.arena = arena
        self.inputs = inputs
        self.num_rows = inputs.num_rows
        self.layers_seen: list[int] = []
        self._chunk_attention = chunk_attention
        self._on_written = on_written

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
        """Return `[rows, heads, dim]` for q `[heads, rows, dim]` and k, v `[kv_heads, rows, dim]`."""
        layout, inputs = self.arena.layout, self.inputs
        check_layer(self.arena, self.num_rows, layer, (query, key, value), window)
        self.layers_seen.append(layer)
        group = layout.group_of_layer[layer]
        keys, values = self.arena.keys[layer], self.arena.values[layer]
        paged_ops.write_kv(_by_row(key), _by_row(value), keys, values, inputs.slots[group])
        if self._on_written is not None:
            self._on_written(layer)
        query = _by_row(query)
        output = query.new_empty(query.shape)
        if inputs.singles.shape[1]:
            paged_ops.attend_singles(
                query, keys, values, output, inputs.table, inputs.singles, inputs.single_bases[group],
                scale, window or 0, layout.block_size,
            )  # fmt: skip
        if not inputs.chunks.shape[1]:
            return output
        if self._chunk_attention is not None:
            self._chunk_attention.attend(layer, query, output, scale, window or 0)
        else:
            paged_ops.attend_chunks(
                query, keys, values, output, inputs.table, inputs.tiles, inputs.chunks, inputs.chunk_bases[group],
                scale, window or 0, layout.block_size,
            )  # fmt: skip
        return output


def _by_row(tensor: Tensor) -> Tensor:
    """Return `[rows, heads, dim]` for `[heads, rows, dim]`, each head's numbers side by side: kernels ask for that."""
    by_row = tensor.transpose(0, 1)
    return by_row if by_row.stride(2) == 1 else by_row.contiguous()


class Announcer:
    """Tells the layer listeners of a step, once a layer, with a mark on the engine's stream."""

    def __init__(self, items: Seq[StepItem], marks: MarkSource, stream_handle: int) -> None:
        self._ends = [
            (item.sequence.layer_listener, item.start + item.num_tokens)
            for item in items
            if item.sequence.layer_listener is not None
        ]
        self._marks = marks
        self._stream_handle = stream_handle

    def __call__(self, layer: int) -> None:
        mark = self._marks.mark(self._stream_handle)
        for listener, end in self._ends:
            listener.advance(layer, end, mark)


def has_listeners(items: Seq[StepItem]) -> bool:
    return any(item.sequence.layer_listener is not None for item in items)
