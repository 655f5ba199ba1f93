"""Two of the clients; and that a client which fails is seen to fail. `make clients` runs all of them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.config import GatewayConfig, MeshConfig, SchedulerConfig
from services.launch.options import Launch
from tests.clients import trying
from tests.clients.__main__ import Tried, page
from tests.clients.environments import CLIENTS, SCRIPTS, is_installed
from tests.clients.trying import Part, run_script
from tests.mesh.processes import Mesh, RunningMesh


@pytest.fixture(scope="module")
def mesh(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One that splits every request, as that of `make clients`."""
    with running_mesh(
        tmp_path_factory.mktemp("clients"),
        Launch(config=MeshConfig(gateway=GatewayConfig(port=0), scheduler=SchedulerConfig(policy="round_robin"))),
    ) as mesh:
        yield mesh


@pytest.mark.parametrize("name", ["openai-python", "openai-node"])
def test_all_that_its_script_tries_works(name: str, mesh: Mesh, tmp_path: Path) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed: make nightly does it")
    parts = run_script(name, mesh.url, mesh.model, tmp_path / "log")
    assert [part for part in parts if part.error] == []
    assert len(parts) >= (SCRIPTS / CLIENTS[name].script).read_text().count(
        "async () =>" if name == "openai-node" else "@tries("
    )
    mesh.assert_no_blocks_held()


def test_each_client_has_a_script_and_a_way_to_install_it() -> None:
    for name, client in CLIENTS.items():
        assert (SCRIPTS / client.script).is_file(), name
        assert sum(map(bool, (client.pip, client.npm, client.venv))) == 1, name
        for pin in (*client.pip, *client.npm):
            assert "==" in pin or "@" in pin[1:], f"{name}: {pin} is not pinned"
    assert {path.name for path in SCRIPTS.glob("with_*")} == {client.script for client in CLIENTS.values()}


SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
from tried import run, tries
@tries("chat")
def _():
    print("a line of the client's own")
@tries("tools: named")
async def _():
    raise KeyError("two\\n\\tlines")
@tries("usage")
def _():
    assert 1 > 2
run()
"""


def test_what_a_script_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(trying, "command", lambda _: [sys.executable, str(script)])
    assert run_script("litellm", "http://127.0.0.1:1", "model", tmp_path / "log") == [
        Part("chat"),
        Part("tools: named", "KeyError: 'two\\n\\tlines'"),
        Part("usage", "AssertionError: assert 1 > 2"),
    ]
    assert "Traceback" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("", "it ended with 0"),  # nothing was tried
        ("print('ok', 'chat', sep='\\t'); raise SystemExit(3)", "it ended with 3"),
        ("print('ok', 'chat', sep='\\t', flush=True); import time; time.sleep(60)", "not within 2 s"),
    ],
)
def test_a_script_that_does_not_come_to_its_end(
    code: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trying, "command", lambda _: [sys.executable, "-c", code])
    monkeypatch.setattr(trying, "SCRIPT_S", 2)
    *_, last = run_script("litellm", "http://127.0.0.1:1", "model", tmp_path / "log")
    assert problem in last.error


def test_the_page_says_what_fails() -> None:
    tried = {
        "litellm": Tried("1.0", [Part("chat"), Part("tools", "KeyError: 'a|b'")]),
        "vllm-bench": Tried("", [Part("installing", "no")]),
    }
    text = page(tried)
    assert "| litellm | 1.0 | chat | tools: KeyError: 'a\\|b' |" in text and "| vllm-bench | not installed |" in text
    assert "3 things were tried with 2 clients; 2 of them failed." in text
