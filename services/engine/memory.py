"""Whether there is memory for what is to be started: reported in a line, in place of a kill by the kernel."""

from dataplane.blocks.layout import ITEM_BYTES
from dataplane.machine import available_bytes
from services.config import MeshConfig, dtype_of
from services.engine.checkpoint import Checkpoint, default_shape, layout_for
from services.engine.vllm_engine import formats
from services.errors import UserError

GIB = 1 << 30
PROCESS_BYTES = 250 << 20
"""What a worker and our own engine beside it take at least, without weights and KV."""


def check_memory(
    config: MeshConfig, checkpoint: Checkpoint, available: int | None, *, num_workers: int, store_bytes: int = 0
) -> None:
    """Raise UserError where so many workers on the CPU, and stores, need more than `available` bytes; None: nobody
    knows."""
    each = {"of arena": config.worker.kv_bytes, **_engine_bytes(config, checkpoint)}
    if spares := config.engine.spares:
        each[f"of {spares} spare engine(s)"] = spares * sum(_engine_bytes(config, checkpoint).values())
    needed = num_workers * sum(each.values()) + store_bytes
    if available is not None and needed > available:
        parts = ", ".join(f"{size / GIB:.1f} {what}" for what, size in each.items())
        store = f", the store {store_bytes / GIB:.1f}" if store_bytes else ""
        fewer = "lower --kv-mib, --spare-engines" if spares else "lower --kv-mib"
        raise UserError(
            f"{num_workers} worker(s) need about {needed / GIB:.1f} GiB (each has {parts}{store}) and "
            f"{available / GIB:.1f} are free: {fewer} or the number of workers"
        )


def has_room(config: MeshConfig, checkpoint: Checkpoint) -> bool:
    """Return whether there is memory for one more engine in an arena that is there."""
    available = available_bytes()
    return available is None or sum(_engine_bytes(config, checkpoint).values()) <= available


def _engine_bytes(config: MeshConfig, checkpoint: Checkpoint) -> dict[str, int]:
    dtype = dtype_of(config, checkpoint.dtype)
    weights = checkpoint.num_bytes * ITEM_BYTES[dtype] // ITEM_BYTES.get(checkpoint.dtype, ITEM_BYTES[dtype])
    if config.engine.name != "vllm":
        return {"of weights": weights, "of its own": PROCESS_BYTES}
    budget = config.worker.token_budget
    layout = layout_for(config, checkpoint)
    shape = default_shape(layout, config.worker.kv_bytes, context_length=checkpoint.context_length, token_budget=budget)
    pool = config.engine.kv_bytes or formats.pool_bytes(shape, budget)
    return {"of weights": weights, "of vLLM's own KV": pool, "of its own": formats.PROCESS_BYTES}
