"""guidellm. TOKENIZER: a folder or a name that its tokenizer is loaded from."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from tried import MODEL, call, run, tries

NUM_REQUESTS = 8


def benchmark(route: str, profile: str) -> None:
    """Measure with so many requests; each must be answered."""
    backend = {
        "kind": "openai_http",
        "target": os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
        "model": MODEL,
        "request_format": route,
        "api_key": os.environ["OPENAI_API_KEY"],
    }
    tokenizer = {"kind": "huggingface_auto", "model": os.environ["TOKENIZER"]}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["--backend", json.dumps(backend), "--tokenizer", json.dumps(tokenizer), "--profile", profile]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
        command += ["--output", f"kind=json,path={report}"]
        call("guidellm", "run", "--disable-console-interactive", *command)
        [found] = json.loads(report.read_bytes())["benchmarks"]
    metrics: dict[str, Any] = found["metrics"]
    totals = metrics["request_totals"]
    assert totals["successful"] == NUM_REQUESTS and not totals["errored"], totals
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        assert metrics[name]["successful"]["mean"] > 0, name
    assert metrics["output_token_count"]["successful"]["mean"] == 16


@tries("chat, one after another")
def _() -> None:
    benchmark("/v1/chat/completions", "kind=synchronous")


@tries("completions, four at a time")
def _() -> None:
    benchmark("/v1/completions", "kind=concurrent,streams=4")


@tries("responses, one after another")
def _() -> None:
    benchmark("/v1/responses", "kind=synchronous")


run()
