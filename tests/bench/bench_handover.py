"""Where the time of a hand-over goes, phase by phase: `python -m tests.bench.bench_handover`.

A mesh of one prefill and one decode worker serves requests one at a time, each with a fresh prompt; the phases are
those of the spans that it writes anyway (docs/tracing.md). It also says what could be gained at most if the decode
worker began its first step while the last layers still land: that step needs token 0, so no more than the time from
token 0 to the last byte.
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import Client, open_http
from services.bench.drive.meshes import model_folder, running
from services.bench.drive.progress_bar import progress
from services.bench.drive.random_model import LARGE_KV_SHAPE, SHAPE
from services.bench.drive.workload import random_tokens
from services.cli.recorded import find_trace, load_spans
from services.config import Carrier, GatewayConfig, MeshConfig, ModelConfig, WorkerConfig
from services.errors import UserError
from services.launch.options import Launch
from services.telemetry import Key, SpanName, SpanRecord

NUM_TOKENS, WARM_UP_REQUESTS = 4, 2
SPANS_TIMEOUT_S, SPANS_INTERVAL_S = 20.0, 0.5
"""Spans are written some half a second after they have ended."""


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """One request's, in milliseconds. From `reserve_ms` to `stream_ms` they follow one another while the prompt is
    being computed; `copy_ms` and `digest_ms` are what of the stream the reader moved and digested bytes. From `late_ms`
    to `first_step_ms` they follow one another after token 0 has been computed."""

    ttft_ms: float
    reserve_ms: float
    """The gateway has asked the decode worker for room, and been answered."""
    offer_ms: float
    """From there until the offer of the prefill worker is there."""
    open_ms: float
    """A connection, the ticket checked, the stream accepted."""
    first_byte_ms: float
    """Until the first layer of the first chunk is computed and its frame is there."""
    stream_ms: float
    """From the first frame to the last."""
    copy_ms: float
    digest_ms: float
    late_ms: float
    """From token 0 having been computed until the last byte is there; 0: it was there before."""
    commit_ms: float
    """From token 0 and the last byte until it is proved that the lease held to the end: all has landed."""
    submit_ms: float
    """From there until the sequence is the engine's."""
    engine_wait_ms: float
    """Until the engine begins its first step."""
    first_step_ms: float

    @property
    def exposed_ms(self) -> float:
        """From token 0 having been computed until the decode worker computes: what was not hidden."""
        return self.late_ms + self.commit_ms + self.submit_ms + self.engine_wait_ms


NAMES: dict[str, Callable[[Phases], float]] = {
    "reserve": lambda of: of.reserve_ms,
    "offer": lambda of: of.offer_ms,
    "open, accept": lambda of: of.open_ms,
    "first byte": lambda of: of.first_byte_ms,
    "stream": lambda of: of.stream_ms,
    "  of it copying": lambda of: of.copy_ms,
    "  of it digests": lambda of: of.digest_ms,
    "token 0 → last byte": lambda of: of.late_ms,
    "commit, landed": lambda of: of.commit_ms,
    "submit to the engine": lambda of: of.submit_ms,
    "wait for the engine": lambda of: of.engine_wait_ms,
    "token 0 → first step": lambda of: of.exposed_ms,
    "first decode step": lambda of: of.first_step_ms,
    "time to first token": lambda of: of.ttft_ms,
}
"""The rows of the table."""


def phases_of(trace: Sequence[SpanRecord]) -> Phases:
    """Return the phases of a request whose prompt was handed over in one attempt. Raises KeyError for any other."""
    root = next(span for span in trace if Key.TTFT_MS in span.attributes)
    target = next(span for span in trace if span.attributes.get(Key.END) == "target")
    named = {span.name: span for span in trace if span.attributes.get(Key.ROLE) != "prefill"}
    reserve, decode, step = named[SpanName.DISPATCH], named[SpanName.DECODE], named[SpanName.DECODE_FIRST_STEP]
    opened, first = named[SpanName.KV_LEASE_WAIT], named[SpanName.KV_FIRST_BYTE]
    stream, landed_ns = named[SpanName.KV_STREAM], named[SpanName.KV_VERIFY].end_ns
    token_0_ns = named[SpanName.PREFILL_COMPUTE].end_ns
    last_ns = max(stream.end_ns, token_0_ns)
    return Phases(
        ttft_ms=float(root.attributes[Key.TTFT_MS]),
        reserve_ms=_ms(reserve.start_ns, reserve.end_ns),
        offer_ms=_ms(reserve.end_ns, target.start_ns),
        open_ms=_ms(opened.start_ns, opened.end_ns),
        first_byte_ms=_ms(first.start_ns, first.end_ns),
        stream_ms=_ms(stream.start_ns, stream.end_ns),
        copy_ms=float(target.attributes[Key.COPY_MS]),
        digest_ms=float(target.attributes[Key.VERIFY_MS]),
        late_ms=_ms(token_0_ns, last_ns),
        commit_ms=_ms(last_ns, landed_ns),
        submit_ms=_ms(landed_ns, decode.start_ns),
        engine_wait_ms=_ms(decode.start_ns, step.start_ns),
        first_step_ms=_ms(step.start_ns, step.end_ns),
    )


def _ms(start_ns: int, end_ns: int) -> float:
    return max(0, end_ns - start_ns) / 1e6


async def measure(shape: dict[str, Any], carrier: Carrier, lengths: Sequence[int], num_requests: int):
    """Return the phases of each length's requests."""
    rng, ids = random.Random(20261123), dict[int, list[str]]()
    async with model_folder("", shape) as (model, _):
        meshes = {
            "split": Launch(
                config=MeshConfig(
                    model=ModelConfig(path=model), gateway=GatewayConfig(port=0), worker=WorkerConfig(carrier=carrier)
                )
            )
        }
        async with running(meshes) as supervisors, open_http() as http:
            [supervisor] = supervisors.values()
            client = await Client.open(http, supervisor.url)
            for length in lengths:
                answers: list[str] = []
                with progress(f"{length} tokens", num_requests + WARM_UP_REQUESTS) as advance:
                    for _ in range(num_requests + WARM_UP_REQUESTS):
                        answer = await client.complete(random_tokens(rng, length, shape["vocab"]), NUM_TOKENS)
                        answers.append(answer.usage.kvmesh.request_id)
                        advance()
                ids[length] = answers[WARM_UP_REQUESTS:]
            with progress("waiting for the spans"):
                return {length: await recorded(supervisor.trace_dir, ids[length]) for length in lengths}


async def recorded(folder: Path, request_ids: Sequence[str]) -> list[Phases]:
    """Return the phases of these requests, once all their spans are there. Raises UserError where they do not come."""
    deadline = time.monotonic() + SPANS_TIMEOUT_S
    while True:
        spans = await asyncio.to_thread(load_spans, folder)
        try:
            traces = [find_trace(spans, request_id) for request_id in request_ids]
            return [phases_of(trace) for trace in traces]
        except (UserError, KeyError, StopIteration) as error:
            if time.monotonic() > deadline:
                raise UserError(f"a request's spans were not written, or it was not handed over: {error!r}") from error
        await asyncio.sleep(SPANS_INTERVAL_S)


def table(found: dict[int, list[Phases]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, title="a hand-over's phases: medians, and their shares of TTFT")
    shown.add_column("phase")
    for length in found:
        shown.add_column(f"{length} tokens\nms", justify="right")
        shown.add_column("of\nTTFT", justify="right")
    for name, of in NAMES.items():
        cells: list[str] = []
        for each in found.values():
            cells += [f"{median(map(of, each)):.2f}", f"{median(of(one) / one.ttft_ms for one in each):.1%}"]
        shown.add_row(name, *cells)
    return shown


def early_start(length: int, each: Sequence[Phases]) -> str:
    """Return what an early start of the first step could gain at most."""
    late, exposed = sorted(one.late_ms for one in each), median(one.exposed_ms for one in each)
    return (
        f"{length} tokens: begun while the last layers land, the first step could gain at most {median(late):.2f} ms "
        f"(the largest of all requests: {late[-1]:.2f} ms) of the {exposed:.2f} ms from token 0 to that step."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="", help="in tokens; 100,1000,10000, with --large-kv 100,1000,3900")
    parser.add_argument("--requests", type=int, default=15, help="requests a length")
    parser.add_argument("--carrier", choices=("auto", "shm", "tcp"), default="auto")
    parser.add_argument("--large-kv", action="store_true", help="a model with KV of 128 KiB a token, as an 8B's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    shape, usual = (LARGE_KV_SHAPE, "100,1000,3900") if options.large_kv else (SHAPE, "100,1000,10000")
    lengths = parse_lengths(options.lengths or usual, "--lengths", shape["context_length"] - NUM_TOKENS)
    found = asyncio.run(measure(shape, options.carrier, lengths, options.requests))
    if options.json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        return
    console = Console(highlight=False)
    console.print(table(found))
    for length, each in found.items():
        console.print(early_start(length, each), soft_wrap=True)


if __name__ == "__main__":
    main()
