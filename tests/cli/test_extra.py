"""`kvmesh[sim]`: measurements and simulations are an extra, and whoever lacks it is told how to get it."""

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest
from typer.testing import CliRunner

from services.cli.app import app
from services.errors import UserError

PARTS = ("services.bench", "services.sim", "greenlet", "httpx", "matplotlib")
WITHOUT = """
import sys
for name in ("services.bench", "services.sim", "greenlet", "matplotlib"):
    sys.modules[name] = None
from services.cli.main import main
main()
"""


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "words", [["bench", "ttft"], ["bench", "replay"], ["simulate"], ["simulate", "--sweep"]], ids=" ".join
)
def test_without_a_part_of_it_its_commands_say_how_to_get_it(
    part: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def lacking(name: str) -> ModuleSpec | None:
        return None if name == part else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    ran = CliRunner().invoke(app, words)
    assert isinstance(ran.exception, UserError), ran.output
    assert f"({part})" in str(ran.exception) and "pip install 'kvmesh[sim]'" in str(ran.exception)


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["up", "--help"],
        ["bench", "--help"],
        ["simulate", "--help"],
        ["serve", "--help"],
        ["status", "--nats", "nats://127.0.0.1:1"],
    ],
    ids=" ".join,
)
def test_without_it_the_other_commands_are_there(words: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT, *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if words[0] == "status":
        assert ran.returncode == 2 and "nats://127.0.0.1:1" in ran.stderr, ran.stderr
    else:
        assert ran.returncode == 0 and "Usage" in ran.stdout, ran.stderr
