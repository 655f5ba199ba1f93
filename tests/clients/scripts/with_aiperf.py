"""aiperf. TOKENIZER: a folder or a name that its tokenizer is loaded from."""

import json
import os
import tempfile
from pathlib import Path

from tried import MODEL, call, run, tries

NUM_REQUESTS = 8
NEVER_EMPTY = ("--extra-inputs", "min_tokens:1")
"""An answer that ends at once is no answer to it; neither is one of tokens without text, as token 0 is."""


def profile(endpoint: str, *options: str) -> None:
    """Measure with so many requests; each must be answered."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["--ui", "none", "--artifact-dir", folder]
        command += ["--model", MODEL, "--url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1")]
        command += ["--api-key", os.environ["OPENAI_API_KEY"], "--tokenizer", os.environ["TOKENIZER"]]
        command += ["--endpoint-type", endpoint, "--request-count", str(NUM_REQUESTS), "--concurrency", "4"]
        command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16", *options]
        # It looks for a tokenizer's folder only where it may also ask the hub.
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        call("aiperf", "profile", *command, env=environment)
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_bytes())
    assert not found.get("error_summary"), found["error_summary"]
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["request_count"]
    if "--streaming" in options:
        assert found["time_to_first_token"]["avg"] > 0 and found["output_token_throughput"]["avg"] > 0


@tries("chat")
def _() -> None:
    profile("chat", *NEVER_EMPTY)


@tries("chat, streamed, with the server's own counts of tokens in each chunk")
def _() -> None:
    profile("chat", "--streaming", "--use-server-token-count", "--per-chunk-usage", *NEVER_EMPTY)


@tries("completions, streamed, all answers of one length")
def _() -> None:
    options = ("--extra-inputs", json.dumps({"ignore_eos": True, "min_tokens": 16, "logit_bias": {"0": -100}}))
    options += ("--use-legacy-max-tokens",)
    profile("completions", "--streaming", *options)


@tries("responses, streamed")
def _() -> None:
    profile("responses", "--streaming", *NEVER_EMPTY)


run()
