"""FlashInfer's paged prefill, as its documentation says it computes, on the CPU."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class BatchPrefillWithPagedKVCacheWrapper:
    made = 0
    planned = 0

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8
        type(self).made += 1

    def plan(
        self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, sm_scale: float,
        window_left: int, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        for ints in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert ints.dtype == torch.int32
        assert causal and q_data_type == kv_data_type
        type(self).planned += 1
        self.queries = qo_indptr.tolist()
        self.pages = [paged_kv_indices[a:b].long() for a, b in pairwise(paged_kv_indptr.tolist())]
        self.last = paged_kv_last_page_len.tolist()
        self.group, self.page_size = num_qo_heads // num_kv_heads, page_size
        self.scale, self.window_left = sm_scale, window_left

    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        assert query.is_contiguous() and len(query) == self.queries[-1]
        for at, (indices, last) in enumerate(zip(self.pages, self.last, strict=True)):
            rows = slice(self.queries[at], self.queries[at + 1])
            end = (len(indices) - 1) * self.page_size + last
            key, value = (kind[indices].flatten(0, 1)[:end].float() for kind in pages)
            out[rows] = self._attend(query[rows].float(), key, value).to(out.dtype)
        return out

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (kind.repeat_interleave(self.group, 1) for kind in (key, value))
        scores = torch.einsum("nhd,mhd->hnm", query, key) * self.scale
        distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
        seen = distance >= 0
        if self.window_left >= 0:
            seen &= distance <= self.window_left
        return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), value)


class Wrong(BatchPrefillWithPagedKVCacheWrapper):
    def run(self, query: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return super().run(query * 2, pages, out=out)


class Failing(BatchPrefillWithPagedKVCacheWrapper):
    def run(self, query: Tensor, pages: Any, *, out: Tensor) -> Tensor:
        raise RuntimeError("no kernel image is available")
