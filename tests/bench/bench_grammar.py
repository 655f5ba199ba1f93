"""What a JSON Schema costs a token, in one run, interleaved, medians: `python -m tests.bench.bench_grammar [--json]`.

A batch of answers is decoded by the engine alone, plain and held to a schema with free strings and numbers, which the
random model fills for as long as it may. The grammars are understood beforehand, as prompts are computed meanwhile.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.grammar import Grammars
from services.engine.interface import Sequence
from services.engine.tokenizer import read_tokenizer
from services.engine.torch_engine.model import TransformersEngine
from tests.bench.bench_engine import BLOCK_SIZE, SHAPE, make_engine

PROMPT = 100
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 20},
        "points": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "required": ["name", "tags", "points"],
    "additionalProperties": False,
}
GRAMMAR = f"start: %json {json.dumps(SCHEMA)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    grammars = Grammars(read_tokenizer(DEMO_MODEL_DIR).tokenizer, SHAPE["vocab"], [0])
    grammars.compile(GRAMMAR).result()
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(Path(folder), options.threads)
        for batch_size in (1, 8):
            plain: list[float] = []
            held: list[float] = []
            for number in range(options.rounds + 1):
                for times, with_grammar in ((plain, None), (held, grammars)):
                    step_s = decode(engine, batch_size, options.tokens, number, with_grammar)
                    if number:  # the first round warms up
                        times.append(step_s)
            first, second = statistics.median(plain), statistics.median(held)
            rows.append({"batch": batch_size, "plain_ms": 1e3 * first, "held_ms": 1e3 * second, "x": second / first})
            if not options.json:
                text = "batch {batch}: a step {plain_ms:.2f} ms, with a schema {held_ms:.2f} ms, x {x:.3f}\n"
                sys.stdout.write(text.format(**rows[-1]))
                sys.stdout.flush()
    if options.json:
        json.dump({"shape": SHAPE, "tokens": options.tokens, "threads": options.threads, "rows": rows}, sys.stdout)


def decode(engine: TransformersEngine, batch_size: int, num_tokens: int, seed: int, grammars: Grammars | None) -> float:
    """Return the median seconds of a step in which every answer gets a token."""
    batch = Batch(PROMPT * batch_size, context_length=8192)
    num_blocks = num_blocks_for(PROMPT + num_tokens, BLOCK_SIZE)
    for number in range(batch_size):
        sequence = Sequence(
            request_id=RequestId(f"r{number}"),
            number=number,
            token_ids=[(at * 7919 + number) % SHAPE["vocab"] for at in range(PROMPT)],
            num_prompt_tokens=PROMPT,
            sampling=SamplingParams(
                max_tokens=num_tokens, temperature=1.0, seed=seed * 100 + number, grammar=GRAMMAR if grammars else ""
            ),
            tables=(BlockTable((Segment(number * num_blocks, num_blocks),)),),
            grammar=grammars.compile(GRAMMAR) if grammars else None,
        )
        batch.add(sequence)
    times: list[float] = []
    while items := batch.plan():
        started = time.perf_counter()
        batch.commit(items, engine.compute(items), 0, 0)
        if all(item.num_tokens == 1 for item in items) and len(items) == batch_size:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
