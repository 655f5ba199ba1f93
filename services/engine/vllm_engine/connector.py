"""vLLM's hooks, translated. Both halves of the connector run in the worker's process, on the engine's thread.

The order of the hooks is vLLM's own (`vllm/v1/core/sched/scheduler.py`, `vllm/v1/worker/kv_connector_model_runner_mixin
.py`): the scheduler asks what is there and plans a step; each layer's hook runs once its KV is written, in compiled
models too; a step with something to load calls `start_load_kv` before its forward.
"""

# pyright: basic, reportMissingImports=false
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from services.engine.interface import EngineLostError
from services.engine.vllm_engine.link import EngineLayer, link_of
from services.engine.vllm_engine.plan import Copies

_LAYER = re.compile(r"\.(\d+)\.")


class StepCopies(KVConnectorMetadata):
    """What the scheduler's half plans for the worker's. It goes by the link; vLLM wants an object."""


class MeshConnector(KVConnectorBase_V1, SupportsHMA):
    """Named in vLLM's configuration (`loading.py`). An exception in any hook ends the engine, which is meant."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._link = link_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._groups: Any = kv_cache_config.kv_cache_groups

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted goes on: what was saved of it is in the arena."""
        return False

    # The scheduler's half.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        tracked = self._link.tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        return tracked.num_matched(request.num_tokens, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracked = self._link.tracked.get(request.request_id)
        if tracked is not None:
            tracked.promised(request.num_tokens, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        starts: dict[str, int] = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        step: list[Copies] = []
        for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
            tracked = self._link.tracked.get(name)
            if tracked is not None:
                block_ids = scheduler_output.kv_connector_block_state.get_block_ids(name)
                step.append(tracked.plan(starts[name], num_tokens, block_ids))
        self._link.begin_step(step, len(scheduler_output.preempted_req_ids or ()))
        return StepCopies()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    # The worker's half.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """A layer's number is taken from its name: vLLM has its groups' layers in orders of its own."""
        layers: dict[int, EngineLayer] = {}
        for number, group in enumerate(self._groups):
            for name in group.layer_names:
                cache = kv_caches[name]
                pages = cache.view(cache.shape[0], -1).view(torch.uint8).numpy()
                layers[layer_of(name)] = EngineLayer(pages, number, window_of(group.kv_cache_spec, name))
        self._link.attach(layers)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._link.copy_in()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded by now."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._link.save(layer_of(layer_name))

    def wait_for_save(self) -> None:
        if sys.exception() is None:  # it is called after a step that has failed, too: then that error is to be reported
            self._link.check_saved()


def layer_of(name: str) -> int:
    """Return the number of a layer from vLLM's name of it, like "model.layers.3.self_attn.attn"."""
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise EngineLostError(f"vLLM has a layer {name!r}: no number can be told from it")
    return int(found[0])


def window_of(spec: Any, name: str) -> int:
    """Return how many tokens a query of a layer sees by vLLM's description of its cache; 0: all."""
    spec = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    if getattr(spec, "attention_chunk_size", None):
        raise EngineLostError(f"vLLM attends in chunks in {name}, which is not served")
    return getattr(spec, "sliding_window", None) or 0
