"""The wheel for a server's environment: whole, the same each time, and needing nothing of ours beside it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from services.attach.wheel import NEEDS, OURS, PACKAGE, modules, write_wheel

CHECK = """
import importlib, importlib.abc, pathlib, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in OURS:
            raise AssertionError(f"{name} is imported, and is not in the wheel")

sys.meta_path.insert(0, Nothing())
folder = pathlib.Path(sys.path[0])
names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")]
for name in sorted(names):
    if not name.endswith(("connector.connector", "__init__")):
        importlib.import_module(name)
used = {name.split(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
print(*sorted(used - BEFORE), sep="\\n")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_same_modules_make_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    assert write_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_its_record_names_each_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (record,) = [name for name in files.namelist() if name.endswith("/RECORD")]
        lines = files.read(record).decode().splitlines()
        assert [line.split(",")[0] for line in lines] == files.namelist()
        metadata = files.read(record.replace("RECORD", "METADATA")).decode()
    assert [f"Requires-Dist: {name}" in metadata for name in NEEDS] == [True] * len(NEEDS)


def test_it_needs_nothing_of_ours_and_no_more_than_it_says(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
    # vLLM is not here: what names the class is read, and not run.
    (tmp_path / PACKAGE / "__init__.py").write_text("")
    code = f"OURS = {OURS!r}\nimport sys\nBEFORE = {{name.split('.')[0] for name in sys.modules}}\n{CHECK}"
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); exec(sys.stdin.read())"],
        input=code, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    beside = {"typing_extensions"}  # msgspec uses it where there is one
    assert set(ran.stdout.split()) - {PACKAGE} <= {*NEEDS, *beside}


def test_it_has_the_connector_and_what_that_imports(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names, first = files.namelist(), files.read(f"{PACKAGE}/__init__.py").decode()
        connector = files.read(f"{PACKAGE}/services/attach/connector/connector.py").decode()
    assert f"from {PACKAGE}.services.attach.connector.connector import KvmeshConnector" in first
    assert f"from {PACKAGE}.schemas.attach import" in connector and "\nfrom schemas" not in connector
    assert len(names) == len(modules()) + 4
    assert not [name for name in names if "gateway" in name or "/bus/" in name or "telemetry" in name]
