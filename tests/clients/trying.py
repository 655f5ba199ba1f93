"""Runs a client's script on a server, and reads what it says of each thing that it tried."""

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.clients.environments import command

SCRIPT_S = 600
OUTSIDE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
"""Clients that would fetch something, or tell somebody, are told not to."""


class Part(NamedTuple):
    """A thing that a script tried. `error`: empty where it worked."""

    what: str
    error: str = ""


def run_script(name: str, url: str, model: str, log: Path) -> list[Part]:
    """Run a client's script on the server at `url` (without `/v1`); what it says besides goes into `log`."""
    server = {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "MODEL": model,
        "TOKENIZER": str(DEMO_MODEL_DIR),
    }
    environment = dict(os.environ) | OUTSIDE | server
    environment.pop("PYTHONPATH", None)  # ours is not the client's
    with log.open("wb") as said:
        try:
            run = subprocess.run(
                command(name), env=environment, stdout=subprocess.PIPE, stderr=said, timeout=SCRIPT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            return [
                *_parts_of((error.stdout or b"").decode(errors="replace")),
                Part("the rest", f"not within {SCRIPT_S} s"),
            ]
    parts = _parts_of(run.stdout.decode(errors="replace"))
    if not parts or (run.returncode and not any(part.error for part in parts)):
        parts.append(Part("the script itself", f"it ended with {run.returncode}, see {log}"))
    return parts


def _parts_of(said: str) -> list[Part]:
    """Return what a script's output says of each thing, in order; clients may print lines of their own."""
    return [
        Part(what, error) for what, error in re.findall(r"^(?:ok|failed)\t([^\t\n]+)(?:\t(.+))?$", said, re.MULTILINE)
    ]
