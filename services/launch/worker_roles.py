"""Puts a worker together: its shell, and the roles that it plays."""

import asyncio
from collections.abc import Callable
from typing import Any

from dataplane.blocks.cache import BlockCache
from services.bus.base import Bus
from services.config import MeshConfig
from services.decode.core import DecodeCore
from services.metrics import Metrics
from services.prefill.core import PrefillCore
from services.telemetry import Telemetry
from services.worker.core.checks import WorkerLimits
from services.worker.core.leases import LeaseTable
from services.worker.core.role import RoleCore
from services.worker.core.twins import Twins
from services.worker.parts import WorkerParts
from services.worker.service import run_roles


async def run_worker(
    parts: WorkerParts,
    config: MeshConfig,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> bool | None:
    """Run the worker until `stop` is set, or an operator says so; then leave in order. Takes ownership of the parts'
    arena. Return whether an operator wants it to be started again; None: no operator has told it to leave."""

    def make_roles(limits: WorkerLimits, cache: BlockCache, leases: LeaseTable) -> tuple[RoleCore[Any], ...]:
        twins = Twins(cache, config.worker.twins)
        prefill = PrefillCore(limits, cache, leases, twins)
        # A decode worker, too, may compute a prompt: of a request whose KV it holds alone.
        return (prefill, DecodeCore(limits, cache, leases, twins)) if parts.role == "decode" else (prefill,)

    return await run_roles(make_roles, parts, config, connection, telemetry, stop, on_ready, metrics)
