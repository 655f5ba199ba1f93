"""Connectors with a mistake in each: what a version of vLLM that has changed, or a mistake of ours, would do. They are
named in vLLM's configuration, as the right one is."""

# pyright: basic, reportMissingImports=false
from typing import Any

import numpy as np

from services.attach.connector.connector import KvmeshConnector
from services.attach.connector.plan import Load, StepPlan
from services.attach.connector.worker_half import WorkerHalf


class SwapsHalves(WorkerHalf):
    """A page that is loaded has its keys where its values belong."""

    def _load(self, attachment: str, load: Load) -> bool:
        is_right = super()._load(attachment, load)
        for pages in self._pages:
            half = pages.shape[1] // 2
            for page in load.pages:
                pages[page] = np.concatenate((pages[page, half:], pages[page, :half]))
        return is_right


class SavesNeighbours(WorkerHalf):
    """The page beside the one that a step fills is saved."""

    def save(self, plan: StepPlan) -> None:
        plan.saves[:] = [each._replace(page=max(1, each.page - 1)) for each in plan.saves]
        super().save(plan)


class LoadsNothing(WorkerHalf):
    """It says that it has loaded, and has not."""

    def _load(self, attachment: str, load: Load) -> bool:
        return True


class _Planted(KvmeshConnector):
    half: type[WorkerHalf]

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if hasattr(self, "_worker"):
            self._worker = self.half(self._client, self._worker._identity)


class SwapsHalvesConnector(_Planted):
    half = SwapsHalves


class SavesNeighboursConnector(_Planted):
    half = SavesNeighbours


class LoadsNothingConnector(_Planted):
    half = LoadsNothing
