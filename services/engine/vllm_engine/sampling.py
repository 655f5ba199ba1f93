"""Our sampling over vLLM's logits: one definition of what is drawn, for every engine.

vLLM is always told to take the best token. This processor chooses with `services.engine.sampler` and leaves the chosen
token alone, so that an answer's tokens depend on seed and index and neither on the batch nor on the attempt.
"""

# pyright: basic, reportMissingImports=false
from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from schemas.request import SamplingParams
from services.engine.sampler import sample
from services.engine.vllm_engine.link import link_of

EXTRA_KEY = "kvmesh"


class _SampledRow(NamedTuple):
    sampling: SamplingParams
    first_index: int
    output: list[int]
    """vLLM's own list, which grows."""


class MeshSampling(LogitsProcessor):
    """A request says in its `extra_args` what it samples with: `(SamplingParams, index of its first token)`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _SampledRow] = {}
        self._link = link_of(vllm_config.kv_transfer_config.kv_connector_extra_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return logits
        rows = sorted(self._rows)
        chosen = [self._rows[row] for row in rows]
        params = [(row.sampling, row.first_index + len(row.output)) for row in chosen]
        wanted = logits[rows].float()
        if self._link.on_logits is not None:
            self._link.on_logits(wanted.numpy().copy())
        token_ids = sample(wanted, params)
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
        return logits


def _row_of(params: Any, prompt: list[int] | None, output: list[int]) -> _SampledRow | None:
    extra = params.extra_args or {}
    if EXTRA_KEY not in extra:
        return None
    sampling, first_index = extra[EXTRA_KEY]
    return _SampledRow(sampling, first_index, output)
