"""Prints `kvmesh bench links`."""

import sys

import msgspec
from rich.console import Console
from rich.table import Column, Table

from services.bench.drive.arguments import parse_lengths
from services.bench.links import LINKS, MODELS, handover, link_table, markdown

MAX_TOKENS = 1 << 20
HEADINGS = ("link", "KV, MiB", "prefill ms", "all at once ms", "exposed ms")


def run_links(lengths: str, tflops: float, chunk_tokens: int, *, as_json: bool, as_markdown: bool) -> None:
    """Print the time of hand-overs over each link. Raises UserError for invalid lengths."""
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
