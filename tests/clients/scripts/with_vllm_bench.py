"""vLLM's bench client, `vllm bench serve`. TOKENIZER: a folder or a name that its tokenizer is loaded from."""

import argparse
import json
import os
import tempfile
from pathlib import Path

from tried import MODEL, run, tries
from vllm.benchmarks.serve import add_cli_args, main

NUM_REQUESTS = 8


def bench(backend: str, endpoint: str, *options: str) -> None:
    """Measure with so many requests; each must be answered."""
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--backend", backend, "--endpoint", endpoint, "--model", MODEL]
        arguments += ["--base-url", os.environ["OPENAI_BASE_URL"].removesuffix("/v1")]
        arguments += ["--tokenizer", os.environ["TOKENIZER"], "--num-prompts", str(NUM_REQUESTS)]
        arguments += ["--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16"]
        arguments += ["--save-result", "--result-dir", folder, "--result-filename", "result.json", *options]
        # Not by the command `vllm`: that of the build for CPUs looks for a package of another name.
        main(parser.parse_args(arguments))
        found = json.loads((Path(folder) / "result.json").read_bytes())
    assert found["completed"] == NUM_REQUESTS, f"{found['failed']} requests failed"
    assert found["total_output_tokens"] == NUM_REQUESTS * 16 and found["mean_ttft_ms"] > 0


@tries("completions")
def _() -> None:
    bench("openai", "/v1/completions", "--ignore-eos")


@tries("completions, sampled with penalties")
def _() -> None:
    sampling = ("--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.05")
    bench(
        "openai",
        "/v1/completions",
        "--ignore-eos",
        *sampling,
        "--presence-penalty",
        "0.1",
        "--repetition-penalty",
        "1.1",
    )


@tries("chat")
def _() -> None:
    bench("openai-chat", "/v1/chat/completions", "--ignore-eos", "--max-concurrency", "4")


run()
