"""The class that a stock `vllm serve` loads: `--kv-transfer-config` names it, and this module.

vLLM makes one in its scheduler and one in its worker, in processes of their own. Hooks that are not here are vLLM's own
defaults; those that are, with their parameters, are what a version of vLLM must have (`tests/attach/test_surface.py`).
"""

# pyright: basic, reportMissingImports=false
import itertools
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from schemas.attach import PROTOCOL, Half, Hello
from services.attach.connector.client import HolderClient
from services.attach.connector.identity import Machine, NotServedError, identity_of
from services.attach.connector.plan import StepPlan
from services.attach.connector.scheduler_half import SchedulerHalf
from services.attach.connector.settings import read_api_key, read_settings
from services.attach.connector.worker_half import WorkerHalf

_LAYER = re.compile(r"\.(\d+)\.")


class StepMetadata(KVConnectorMetadata):
    """A `StepPlan`, as vLLM wants it."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KvmeshConnector(KVConnectorBase_V1, SupportsHMA):
    """Raises UserError where this server cannot be attached: then it does not start, and the log has the line."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = read_settings(transfer.kv_connector_extra_config)
        identity = identity_of(vllm_config, kv_cache_config, Machine(vllm.__version__, _packing))
        self._groups: Any = kv_cache_config.kv_cache_groups
        is_scheduler = role is KVConnectorRole.SCHEDULER
        names = vllm_config.model_config.served_model_name
        hello = Hello(
            protocol=PROTOCOL,
            half=Half.SCHEDULER if is_scheduler else Half.WORKER,
            server=transfer.engine_id,
            identity=identity,
            tenant=settings.tenant,
            url=settings.url,
            model=names if isinstance(names, str) else names[0],
            api_key=read_api_key(settings),
        )
        self._client = HolderClient(settings.socket, hello)
        if is_scheduler:
            step_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self._scheduler = SchedulerHalf(
                self._client,
                identity,
                check_every=settings.check_every,
                step_tokens=step_tokens,
                handoff_wait_s=settings.handoff_wait_s,
            )
        else:
            self._worker = WorkerHalf(self._client, identity)
        self._client.start(required=settings.required)

    @property
    def requires_kv_delivery(self) -> bool:
        """A request that is preempted goes on: what was saved of it is the holder's."""
        return False

    # The scheduler's half.

    def on_new_request(self, request: Any) -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(
            request, blocks.get_block_ids()[0] if num_external_tokens else [], num_external_tokens
        )

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._scheduler.plan_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.loads_ended(
            set(connector_output.finished_recving or ()), set(connector_output.failed_recving or ())
        )

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request)

    def reset_cache(self) -> bool | None:
        """Asked for when weights are changed: what the identity says is not so any more."""
        self._scheduler.weights_changed()
        return True

    # The worker's half.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        names = [name for group in self._groups for name in group.layer_names]
        if sorted(names) != sorted(kv_caches):
            raise NotServedError(f"vLLM has KV of {sorted(kv_caches)}, and its groups name {sorted(names)}")
        self._worker.register_pages(pages_of(kv_caches))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded within a step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All is saved at the end of the step."""

    def wait_for_save(self) -> None:
        if sys.exception() is None:  # it is called after a step that has failed, too: its pages hold nothing
            self._worker.save(self._plan())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended, failed = self._worker.take_ended()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    def shutdown(self) -> None:
        if self.role is KVConnectorRole.WORKER:
            self._worker.close()
        self._client.close()

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata), "it is our scheduler half's"
        return metadata.plan


def pages_of(caches: Mapping[str, torch.Tensor]) -> dict[int, Any]:
    """Return each layer's pages as bytes, [pages, bytes]. Raises NotServedError unless these are all of the memory that
    vLLM has its KV in, each byte once: then a page's bytes would not be all of its KV, or be another's as well."""
    num_bytes: Counter[int] = Counter()
    spans: list[tuple[int, int]] = []
    for name, cache in caches.items():
        if not cache.is_contiguous():
            raise NotServedError(f"vLLM's KV of {name} has gaps")
        num_bytes[cache.untyped_storage().data_ptr()] += cache.nbytes
        spans.append((cache.data_ptr(), cache.data_ptr() + cache.nbytes))
    sizes = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in caches.values()}
    spans.sort()
    if num_bytes != sizes or any(end > start for (_, end), (start, _) in itertools.pairwise(spans)):
        raise NotServedError("vLLM's layers have KV in memory of each other's, or beside what they show")
    return {
        _number_of(name): cache.view(cache.shape[0], -1).view(torch.uint8).numpy() for name, cache in caches.items()
    }


def _number_of(name: str) -> int:
    """Return the number of a layer from vLLM's name of it, like "model.layers.3.self_attn.attn"."""
    found = _LAYER.findall(name)
    if len(found) != 1:
        raise NotServedError(f"vLLM has a layer {name!r}: no number can be told from it")
    return int(found[0])


def _packing(dtype: str, block_size: int, head_size: int) -> str:
    return _get_attn_isa(getattr(torch, dtype), block_size, head_size, "auto")
