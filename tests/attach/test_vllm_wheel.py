"""A vLLM environment that has the connector's wheel and nothing else of ours, with the page's three commands."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from services.attach.wheel import PACKAGE
from tests.attach.servers import Holder, attached, running
from tests.attach.test_vllm_attach import needs_vllm, prompt, whole
from tests.waiting import wait_until

__all__ = ["needs_vllm"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def python(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with all packages of this one but ours, which are editable: a `.pth`
    file's folder is searched, and its own `.pth` files are not read."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "services.cli.main", "attach", "--wheel", str(folder)]
    wheel = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    return folder / "bin" / "python"


def test_two_servers_share_with_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours = subprocess.run([python, "-c", "import services"], cwd=tmp_path, env=environment, capture_output=True)
    assert b"No module named 'services'" in ours.stderr, "nothing else of ours is there"
    holder = Holder(tmp_path)
    holder.start()
    try:
        servers = [attached(holder, name, module=PACKAGE, python=python) for name in ("one", "other")]
        with running(*servers):
            wait_until(lambda: [each["sharing"] for each in holder.servers()] == ["on", "on"])
            one, other = servers
            tokens = prompt(1)
            one.ask(tokens)
            wait_until(lambda: other.ask(tokens).tokens and other.num_loaded() >= whole(len(tokens)))
            assert other.ask(tokens).tokens == other.computed(tokens)
    finally:
        holder.stop()
