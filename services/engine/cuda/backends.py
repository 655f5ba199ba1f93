"""Who computes the attention of chunks: FlashInfer where it is installed and fit, else the Triton kernel of ours.

Only chunks: decodes run in CUDA graphs, for which FlashInfer would have to plan on the host before each replay. It
plans a step once for each cache group; it does not know the arena, but its pages `[page, token, head, dim]` are ours.
"""

import importlib
import importlib.util
import logging
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dataplane.blocks.layout import KVLayout
from services.engine.cpu.attention import KVTensors
from services.engine.cuda.device_attention import ChunkAttention
from services.engine.cuda.step_plan import StepPlan

log = logging.getLogger(__name__)

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's own examples give it for partial results."""
HEAD_DIMS = frozenset({64, 128, 256})
"""Those that FlashInfer is built for."""


class ChunkBackend(Protocol):
    def plan(self, arena: KVTensors, plan: StepPlan) -> ChunkAttention | None:
        """Return what computes the chunks of this step; None: our kernel."""
        ...


def find_backend(layout: KVLayout, device: torch.device) -> ChunkBackend | None:
    """Return FlashInfer's backend where that is installed and serves this layout; None: our kernel does it."""
    if layout.dtype not in ("bfloat16", "float16") or layout.head_dim not in HEAD_DIMS:
        return None
    if importlib.util.find_spec("flashinfer") is None:
        return None
    try:
        return FlashInferBackend(importlib.import_module("flashinfer"), device)
    except Exception as error:  # noqa: BLE001 - it loads libraries of its own, and our kernel does without it
        log.warning("FlashInfer is installed and cannot be used (%s: %s)", type(error).__name__, error)
        return None


class FlashInferBackend:
    """Plans chunks with `flashinfer.BatchPrefillWithPagedKVCacheWrapper`."""

    def __init__(self, flashinfer: Any, device: torch.device) -> None:
        self._make_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[_PlanKey, Any] = {}

    def plan(self, arena: KVTensors, plan: StepPlan) -> ChunkAttention | None:
        """None when the chunks' rows are not side by side in the batch."""
        chunks = np.flatnonzero(plan.counts > 1)
        if not len(chunks) or chunks[-1] - chunks[0] + 1 != len(chunks):
            return None
        return _FlashInferStep(self, arena, plan, chunks)

    def wrapper(self, key: "_PlanKey") -> Any:
        """Return the wrapper of a cache group; each keeps what it planned last, so groups must not share one."""
        if key not in self._wrappers:
            self._wrappers[key] = self._make_wrapper(self._workspace, "NHD")
        return self._wrappers[key]


class _PlanKey(NamedTuple):
    """What a plan of FlashInfer's is made for."""

    group: int
    scale: float
    window: int


class _FlashInferStep:
    """One step's chunks. Plans at the first layer that asks: only layers know their scale."""

    def __init__(self, backend: FlashInferBackend, arena: KVTensors, plan: StepPlan, chunks: Any) -> None:
        self._backend = backend
        self._arena = arena
        self._plan = plan
        self._chunks = chunks
        self._rows = slice(int(plan.first_rows[chunks[0]]), int(plan.first_rows[chunks[-1]] + plan.counts[chunks[-1]]))
        self._planned: set[_PlanKey] = set()

    def attend(self, layer: int, query: Tensor, output: Tensor, scale: float, window: int) -> None:
        layout = self._arena.layout
        key = _PlanKey(layout.group_of_layer[layer], scale, window)
        wrapper = self._backend.wrapper(key)
        if key not in self._planned:
            self._plan_group(wrapper, key, query)
            self._planned.add(key)
        page = (-1, layout.block_size, layout.num_kv_heads, layout.head_dim)
        pages = self._arena.keys[layer].view(page), self._arena.values[layer].view(page)
        wrapper.run(query[self._rows].contiguous(), pages, out=output[self._rows])

    def _plan_group(self, wrapper: Any, key: _PlanKey, query: Tensor) -> None:
        """Tell FlashInfer whose queries see which pages. A late table only moves where a sequence begins."""
        layout, plan, chunks = self._arena.layout, self._plan, self._chunks
        group, block_size = plan.groups[key.group], layout.block_size
        group_window = layout.groups[key.group].window
        starts, ends = (plan.ends - plan.counts)[chunks], plan.ends[chunks]
        first = np.maximum(starts - group_window + 1, 0) // block_size if group_window else np.zeros_like(starts)
        lengths = -(-ends // block_size) - first
        at = group.bases[chunks] + first
        entries = np.arange(int(lengths.sum())) + np.repeat(at - (np.cumsum(lengths) - lengths), lengths)
        wrapper.plan(
            _indptr(plan.counts[chunks]),
            _indptr(lengths),
            _ints(group.table[entries]).to(query.device, non_blocking=True),
            _ints((ends - 1) % block_size + 1),
            query.shape[1],
            layout.num_kv_heads,
            layout.head_dim,
            block_size,
            causal=True,
            sm_scale=key.scale,
            window_left=key.window - 1 if key.window else -1,
            q_data_type=query.dtype,
            kv_data_type=self._arena.dtype,
        )


def _indptr(counts: Any) -> Tensor:
    """Return where each begins, and the end, on the host: FlashInfer plans there."""
    return _ints(np.concatenate(([0], np.cumsum(counts))))


def _ints(numbers: Any) -> Tensor:
    return torch.as_tensor(numbers, dtype=torch.int32)
