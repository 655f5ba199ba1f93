"""Our sampling over vLLM's logits: one definition of what is drawn, for every engine.

vLLM is always asked to take the best token, and given nothing that changes its logits before this processor sees
them. It chooses with `services.engine.sampler` and leaves the chosen token alone, so that an answer's tokens depend
neither on the batch nor on the attempt. What was chosen, or why nothing was, stands in the link.
"""

# pyright: basic, reportMissingImports=false
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from services.engine.interface import ChosenToken
from services.engine.sampler import sample
from services.engine.vllm_engine.link import link_of

EXTRA_KEY = "kvmesh"


class MeshSampling(LogitsProcessor):
    """A request has in its `extra_args` our name of its sequence."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._names: dict[int, str] = {}
        """Of each row."""
        self._link = link_of(vllm_config.kv_transfer_config.kv_connector_extra_config)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._names, batch_update, _name_of)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        sampled = self._link.sampled()
        rows = [row for row in sorted(self._names) if self._names[row] in sampled]
        if not rows:
            return logits
        names = [self._names[row] for row in rows]
        wanted = logits[rows].float()
        if self._link.on_logits is not None:
            self._link.on_logits(wanted.numpy().copy())
        outcomes = sample(wanted, [self._link.sequences[name] for name in names])
        self._link.outcomes |= zip(names, outcomes, strict=True)
        # A request that fails is taken out after this step, whatever its token is.
        token_ids = [outcome.token_id if isinstance(outcome, ChosenToken) else 0 for outcome in outcomes]
        logits[rows] = float("-inf")
        logits[rows, token_ids] = 0.0
        return logits


def _name_of(params: Any, prompt: list[int] | None, output: list[int]) -> str | None:
    return (params.extra_args or {}).get(EXTRA_KEY)
