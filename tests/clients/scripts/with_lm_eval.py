"""lm-eval, with tasks from files. TOKENIZER: a folder or a name that its tokenizer is loaded from."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from tried import MODEL, call, run, tries

TASKS = Path(__file__).parent / "lm_eval_tasks"


def evaluate(
    task: str, model: str = "local-completions", route: str = "completions", *options: str, **arguments: str
) -> dict[str, Any]:
    """Return what it found for a task."""
    fields = {
        "model": MODEL,
        "base_url": f"{os.environ['OPENAI_BASE_URL']}/{route}",
        "tokenizer_backend": "huggingface",
        "tokenizer": os.environ["TOKENIZER"],
        "num_concurrent": "4",
        "max_retries": "1",
        **arguments,
    }
    with tempfile.TemporaryDirectory() as out:
        arguments_text = ",".join(f"{name}={value}" for name, value in fields.items())
        command = ["run", "--model", model, "--model_args", arguments_text, "--tasks", task]
        call("lm-eval", *command, "--include_path", ".", "--output_path", out, *options, cwd=TASKS)
        [found] = Path(out).rglob("results_*.json")
        return json.loads(found.read_bytes())["results"][task]


@tries("multiple choice, local-completions")
def _() -> None:
    assert 0 <= evaluate("codes_choice")["acc,none"] <= 1


@tries("multiple choice, prompts as text")
def _() -> None:
    assert 0 <= evaluate("codes_choice", tokenized_requests="False")["acc,none"] <= 1


@tries("generate_until, local-completions")
def _() -> None:
    assert 0 <= evaluate("codes_generate")["exact_match,number"] <= 1


@tries("perplexity (loglikelihood_rolling), local-completions")
def _() -> None:
    assert math.isfinite(evaluate("codes_perplexity")["word_perplexity,none"])


@tries("generate_until, local-chat-completions")
def _() -> None:
    found = evaluate("codes_generate", "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert 0 <= found["exact_match,number"] <= 1


run()
