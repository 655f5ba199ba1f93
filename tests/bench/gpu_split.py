"""Whole meshes on one card: what the split costs a client, and what of each hand-over the prefill did not hide.

Two meshes side by side as in `kvmesh bench ttft`: a prefill and a decode worker, and two workers that do both. All four
processes share the card, and one request is under way at a time.
"""

import asyncio
from collections.abc import Iterator, Sequence

from services.bench.drive.meshes import SPLIT, WHOLE, running, urls_of
from services.bench.drive.stats import percentile
from services.bench.ttft import TtftRow, alternate
from services.cli.trace import load_spans
from services.config import GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.launch.options import Launch
from services.settings import changed
from services.telemetry import Key, SpanName, SpanRecord
from tests.bench.gpu_report import Row, share, with_and_without
from tests.bench.known_models import checkpoint_of

LENGTHS = (1000, 4000)
TOKEN_BUDGET = 2048
KV_BYTES = 4 << 30
REQUESTS = (8, 20)
"""A length and mesh, quick and not."""
SPANS_AFTER_S = 2.0
"""Services write their spans every half second."""
AIM, EXPOSED_AIM = 1.05, 0.05


def rows(device: str, models: Sequence[str], *, quick: bool) -> Iterator[Row]:
    """Yield this section's rows."""
    for model in models:
        yield from asyncio.run(measure_model(model, device, REQUESTS[0] if quick else REQUESTS[1]))


async def measure_model(model: str, device: str, num_requests: int) -> list[Row]:
    lengths, kv_bytes = (LENGTHS, KV_BYTES) if model != "tiny" else ((100,), 64 << 20)
    split = Launch(
        devices=(device,),
        config=MeshConfig(
            model=ModelConfig(path=checkpoint_of(model), dtype="checkpoint"),
            gateway=GatewayConfig(port=0),
            worker=WorkerConfig(kv_bytes=kv_bytes, token_budget=TOKEN_BUDGET),
        ),
    )
    whole = changed(split, {"num_prefill": 0, "num_decode": 0, "num_aggregated": 2})
    async with running({SPLIT: split, WHOLE: whole}) as supervisors:
        timed = await alternate(urls_of(supervisors), list(lengths), num_requests)
        await asyncio.sleep(SPANS_AFTER_S)
        spans = load_spans(supervisors[SPLIT].trace_dir)
    return [row for each in timed for row in rows_of(model, each, spans)]


def rows_of(model: str, timed: TtftRow, spans: list[SpanRecord]) -> Iterator[Row]:
    """Yield the rows of one prompt length."""
    at = f"{model}, {timed.length:,} tokens"
    yield with_and_without(
        f"{at}: first token, with / without the split", timed.with_split_ms, timed.without_split_ms, AIM
    )
    yield with_and_without(
        f"{at}: second token, with / without", timed.second_with_split_ms, timed.second_without_split_ms, AIM
    )
    overs = handovers(spans, timed.length)
    exposed = percentile([ms for ms, _ in overs], 50)
    by = ", ".join(sorted({carrier for _, carrier in overs})) or "no hand-over seen"
    yield share(
        f"{at}: exposed of a hand-over ({by}), of the first token's time", exposed, timed.with_split_ms, EXPOSED_AIM
    )


def handovers(spans: list[SpanRecord], length: int) -> list[tuple[float, str]]:
    """Return of each hand-over of prompts of this length what was exposed, in milliseconds, and how it crossed."""
    wanted = {span.trace_id for span in spans if span.attributes.get(Key.INPUT_TOKENS) == length}
    found: list[tuple[float, str]] = []
    for span in spans:
        exposed, carrier = span.attributes.get(Key.EXPOSED_MS), span.attributes.get(Key.CARRIER)
        is_read = span.name == SpanName.KV_TRANSFER and span.attributes.get(Key.END) == "target"
        if is_read and span.trace_id in wanted and isinstance(exposed, int | float) and isinstance(carrier, str):
            reason = span.attributes.get(Key.CARRIER_REASON, "")
            found.append((float(exposed), f"`{carrier}`, {reason}" if reason else f"`{carrier}`"))
    return found
