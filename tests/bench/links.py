"""`python -m tests.bench.links`: the time of a hand-over over a link, and what of it no prefill hides. Calculated.

    hand-over, all at once    fixed + frames · (frame overhead + bytes of a frame / (raw rate · efficiency))
    exposed, layer by layer   each layer of each chunk crosses once it is computed and its predecessor has crossed: what
                              is left of the last of them when the prompt is computed, + fixed

Rates of links and efficiencies are published ones (dataplane/SCALING.md names the sources); we measured nothing here.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec
import typer
from rich.console import Console
from rich.table import Column, Table

from services.bench.drive.arguments import parse_lengths
from services.cli.bench import Json

FRAME_BYTES = 8 << 20
"""Most bytes of one frame, as `nccl` cuts them."""
FIXED_MS = 0.5
"""Of one read: opening the stream, its ticket, the last Commit. README: a read of one block takes 300 to 470 µs."""
FRAME_US = 30.0
"""Of one frame: NCCL's time for a small message between two nodes, 31 µs (nccl-tests #214)."""
TFLOPS = 400.0
"""What a prefill gets out of a card: an assumption, two fifths of an H100's 989 dense bf16 TFLOP/s."""
CHUNK_TOKENS = 512
"""`worker.token_budget`."""
LENGTHS = (1_000, 4_000, 32_000)
MAX_TOKENS = 1 << 20
"""The longest prompt that may be asked for."""
HEADINGS = ("link", "KV, MiB", "prefill ms", "all at once ms", "exposed ms")


def main(
    lengths: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "1000,4000,32000",
    tflops: Annotated[float, typer.Option(min=1, help="What a prefill gets out of a card, in TFLOP/s.")] = 400.0,
    chunk_tokens: Annotated[int, typer.Option("--chunk", min=1, help="Tokens of a prefill's chunk.")] = 512,
    *,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="As the table of dataplane/SCALING.md.")] = False,
    as_json: Json = False,
) -> None:
    """What a hand-over takes over links of cards and nodes, by calculation (dataplane/SCALING.md). Measures nothing."""
    wanted = parse_lengths(lengths, "--lengths", MAX_TOKENS)
    if as_markdown:
        sys.stdout.write(markdown(link_table(wanted, tflops, chunk_tokens)) + "\n")
        return
    cases = [(model, n, link) for model in MODELS for n in wanted for link in LINKS]
    over = [handover(m, n, link, tflops=tflops, chunk_tokens=chunk_tokens) for m, n, link in cases]
    if as_json:
        rows = [
            {"model": model.name, "num_tokens": n, "link": link.name, **each._asdict()}
            for (model, n, link), each in zip(cases, over, strict=True)
        ]
        sys.stdout.buffer.write(msgspec.json.encode({"rows": rows}) + b"\n")
        return
    console = Console(highlight=False)
    console.print(f"calculated; layer by layer in chunks of {chunk_tokens} tokens, prefill at {tflops:g} TFLOP/s")
    table = Table("prompt", *(Column(heading, justify="right") for heading in HEADINGS))
    shown = ""
    for (model, n, link), each in zip(cases, over, strict=True):
        prompt = f"{model.name}, {n:,}"
        times = (f"{value:,.1f}" for value in each[1:])
        table.add_row("" if prompt == shown else prompt, link.name, f"{each.num_bytes / 2**20:,.0f}", *times)
        shown = prompt
    console.print(table)


class ModelShape(NamedTuple):
    """The properties of a model on which the size of its KV and the time of its prefill depend."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: float
    item_bytes: int = 2

    @property
    def token_bytes(self) -> int:
        """KV of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.item_bytes

    def prefill_flop(self, start: int, end: int) -> float:
        """Return the operations for tokens [start, end): two a parameter and token, and causal attention's two products
        of two operations a pair, head and dimension."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        attention = 4 * pairs * self.num_layers * self.num_heads * self.head_dim
        return 2 * self.num_parameters * (end - start) + attention


class LinkSpec(NamedTuple):
    """One direction of a link between two cards. `efficiency`: the measured share of the raw `gb_per_s`."""

    name: str
    gb_per_s: float
    efficiency: float
    fixed_ms: float = FIXED_MS
    frame_us: float = FRAME_US

    @property
    def bytes_per_ms(self) -> float:
        return self.gb_per_s * self.efficiency * 1e6

    def frames_ms(self, num_bytes: int) -> float:
        """Return how long the link is busy with frames of so many bytes together."""
        return math.ceil(num_bytes / FRAME_BYTES) * self.frame_us / 1e3 + num_bytes / self.bytes_per_ms


class Handover(NamedTuple):
    """Times in milliseconds. `whole_ms`: all KV at once, after the prefill. `exposed_ms`: what is left of it when the
    layers cross as they are computed."""

    num_bytes: int
    prefill_ms: float
    whole_ms: float
    exposed_ms: float


MODELS = (
    ModelShape("Qwen3-0.6B", 28, 16, 8, 128, 0.60e9),
    ModelShape("Qwen3-8B", 36, 32, 8, 128, 8.19e9),
    ModelShape("Llama-3-70B", 80, 64, 8, 128, 70.6e9),
)
OPT_66B = ModelShape("OPT-66B", 64, 72, 72, 128, 66e9)

NVLINK = LinkSpec("NVLink 4", 450.0, 380 / 450)
LINKS = (
    NVLINK,
    LinkSpec("400 Gb/s InfiniBand, RoCE", 50.0, 47 / 50),
    LinkSpec("PCIe 5 × 16 to the host", 64.0, 52.8 / 64),
    LinkSpec("200 Gb/s InfiniBand, RoCE", 25.0, 24 / 25),
    LinkSpec("25 Gb/s Ethernet, TCP", 3.125, 1460 / 1538),
)
MOONCAKE = LinkSpec("8 × 200 Gb/s RoCE, Mooncake", 200.0, 0.776, frame_us=0.0)
"""Efficiency and the fixed half millisecond are fitted to the nine times that it publishes."""


def whole_ms(model: ModelShape, num_tokens: int, link: LinkSpec) -> float:
    """Return how long the KV of a prompt takes once all of it is there."""
    return link.fixed_ms + link.frames_ms(num_tokens * model.token_bytes)


def handover(
    model: ModelShape, num_tokens: int, link: LinkSpec, *, tflops: float = TFLOPS, chunk_tokens: int = CHUNK_TOKENS
) -> Handover:
    """Return what handing a prompt over takes while and after it is computed in chunks, layer by layer."""
    ready_ms = crossed_ms = 0.0
    for start in range(0, num_tokens, chunk_tokens):
        end = min(start + chunk_tokens, num_tokens)
        layer_ms = model.prefill_flop(start, end) / tflops / 1e9 / model.num_layers
        frame_ms = link.frames_ms((end - start) * model.token_bytes // model.num_layers)
        for _ in range(model.num_layers):
            ready_ms += layer_ms
            crossed_ms = max(crossed_ms, ready_ms) + frame_ms
    return Handover(
        num_bytes=num_tokens * model.token_bytes,
        prefill_ms=ready_ms,
        whole_ms=whole_ms(model, num_tokens, link),
        exposed_ms=crossed_ms - ready_ms + link.fixed_ms,
    )


def hidden_from_gb_per_s(model: ModelShape, *, tflops: float = TFLOPS) -> float:
    """Return the rate at which a link keeps up with the prefill of a short context: a faster one exposes no more than
    the last layer."""
    return model.token_bytes / (model.prefill_flop(0, 1) / tflops / 1e12) / 1e9


class Published(NamedTuple):
    """A published figure and what the model says instead. `tolerance`: how far apart they may be, as a share."""

    what: str
    published: float
    modelled: float
    unit: str
    tolerance: float


QWEN, LLAMA = MODELS[1], MODELS[2]
MOONCAKE_ROWS = (
    (128, 20, 0.54), (256, 38, 0.61), (512, 74, 0.92), (1024, 146, 1.50), (2048, 290, 2.51), (4096, 578, 4.75),
    (8192, 1.13 * 1024, 8.84), (16384, 2.25 * 1024, 16.43), (32768, 4.50 * 1024, 31.65),
)  # fmt: skip
"""Qwen3-8B: prompt tokens, MiB of KV, milliseconds. It sends one block of 16 tokens more than the prompt has."""


def published() -> Iterator[Published]:
    """Yield published figures, each beside what the formulas give."""
    for num_tokens, mib, ms in MOONCAKE_ROWS:
        sent, name = num_tokens + 16, f"Mooncake, Qwen3-8B, {num_tokens:,} tokens"
        yield Published(name, mib, sent * QWEN.token_bytes / 2**20, "MiB", 0.015)
        yield Published(name, ms, whole_ms(QWEN, sent, MOONCAKE), "ms", 0.10 if num_tokens >= 1024 else 0.25)
    yield Published("Mooncake, Llama-3-70B, 128 Ki tokens", 40, 2**17 * LLAMA.token_bytes / 2**30, "GiB", 0.005)
    yield Published("DistServe, OPT-66B, 512 tokens", 1.13, 512 * OPT_66B.token_bytes / 2**30, "GiB", 0.005)
    yield Published(
        "DistServe, ten of these a second", 90, 10 * 512 * OPT_66B.token_bytes * 8 / 2**30, "Gibit/s", 0.005
    )


def link_table(lengths: Sequence[int], tflops: float = TFLOPS, chunk_tokens: int = CHUNK_TOKENS) -> list[list[str]]:
    """Return the rows of the table, the heading first: for each model and prompt the KV, its prefill, and for each link
    all at once → exposed, in milliseconds."""
    rows = [["model", "tokens", "KV", "prefill ms", *(f"{link.name}, ms" for link in LINKS)]]
    for model in MODELS:
        for num_tokens in lengths:
            over = [handover(model, num_tokens, link, tflops=tflops, chunk_tokens=chunk_tokens) for link in LINKS]
            cells = [f"{_ms(each.whole_ms)} → {_ms(each.exposed_ms)}" for each in over]
            rows.append([model.name, f"{num_tokens:,}", _size(over[0].num_bytes), _ms(over[0].prefill_ms), *cells])
    return rows


def token_table(tflops: float = TFLOPS) -> list[list[str]]:
    """Return the rows of the table of a token's KV, the heading first."""
    return [
        ["model", "KV of a token", "of a token and layer", "hidden by the prefill from"],
        *(
            [m.name, _size(m.token_bytes), _size(m.token_bytes // m.num_layers),
             f"{hidden_from_gb_per_s(m, tflops=tflops):.1f} GB/s"]
            for m in MODELS
        ),
    ]  # fmt: skip


def published_table() -> list[list[str]]:
    """Return the rows of the comparison with published figures, the heading first."""
    rows = [["what", "published", "this model", "off by"]]
    for row in published():
        off = row.modelled / row.published - 1
        digits = 0 if row.published >= 100 else 2
        shown = [f"{value:,.{digits}f} {row.unit}" for value in (row.published, row.modelled)]
        rows.append([row.what, *shown, f"{off:+.1%}"])
    return rows


def markdown(rows: Sequence[Sequence[str]], num_left: int = 1) -> str:
    """Return the rows as a Markdown table. All columns but the first `num_left` are aligned right."""
    head, *body = rows
    rule = ["---"] * num_left + ["--:"] * (len(head) - num_left)
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body))


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _size(num_bytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        del units[0]
    digits = 0 if num_bytes >= 100 or num_bytes == int(num_bytes) else 1
    return f"{num_bytes:.{digits}f} {units[0]}"


if __name__ == "__main__":
    typer.run(main)
