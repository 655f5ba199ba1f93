"""What the tests with stock vLLM servers share: one pair of servers, in an environment that is not kvmesh's own."""

import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest

from services.attach.wheel import PACKAGE
from tests.attach.servers import Pair, running
from tests.waiting import wait_until


@pytest.fixture(scope="session")
def wheel_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with all packages of this one but ours, which are editable (a `.pth`
    file's folder is searched, and its own `.pth` files are not read), and with the connector's wheel."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make attach-test")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (site / "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "services.cli.main", "attach", "--wheel", str(folder)]
    wheel = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    with zipfile.ZipFile(wheel) as files:
        files.extractall(site)
    return folder / "bin" / "python"


@pytest.fixture(scope="session")
def pair(wheel_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    both = Pair(tmp_path_factory.mktemp("a"), wheel_python, PACKAGE)
    try:
        with running(both.one, both.other):
            wait_until(both.is_proven)
            yield both
    finally:
        both.holder.stop()
