"""Puts a worker together: its shell, and the roles that it plays."""

import asyncio
from collections.abc import Callable

from services.bus.base import Bus
from services.config import MeshConfig
from services.decode.service import decode_role
from services.metrics import Metrics
from services.prefill.service import prefill_role
from services.telemetry import Telemetry
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
) -> None:
    """Run the worker until `stop` is set; then leave in order. Takes ownership of the parts' arena."""
    # A decode worker, too, may compute a prompt: of a request whose KV it holds alone.
    make_roles = (prefill_role, decode_role) if parts.role == "decode" else (prefill_role,)
    await run_roles(make_roles, parts, config, connection, telemetry, stop, on_ready, metrics)
