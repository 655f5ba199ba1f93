"""Machines without a graphics card need none of its libraries, and those that have them need no card."""

import subprocess
import sys

import pytest

_IMPORT_ALL = """
import importlib, importlib.abc, pkgutil, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
names = []
for root in ("schemas", "dataplane", "services"):
    package = importlib.import_module(root)
    names += [module.name for module in pkgutil.walk_packages(package.__path__, root + ".")]
names = [name for name in names if not name.endswith(".__main__") and not name.startswith({left_out!r})]
for name in names:
    importlib.import_module(name)
loaded = sorted(set(sys.modules) & set({absent!r}))
assert not loaded, loaded
print(len(names))
"""


VLLM_MODULES = (
    "services.attach.connector.connector",
    "services.engine.vllm_engine.connector",
    "services.engine.vllm_engine.sampling",
)
"""They import vLLM, as is meant, and are imported by it alone."""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_module_imports_where_cupy_is_not_installed() -> None:
    """The same run sees that none of them loads it where it is: it would have raised."""
    assert int(run(_IMPORT_ALL.format(absent=("cupy", "cupy_backends"), left_out=VLLM_MODULES))) > 100


def test_the_modules_of_a_card_import_without_one() -> None:
    modules = "dataplane.cards.cupy_card, dataplane.cards.arena"
    run(f"import sys, {modules}; assert not {{'cupy', 'torch'}} & set(sys.modules)")


def test_who_runs_without_a_card_loads_nothing_of_one() -> None:
    run(
        "import sys, dataplane.ends.reader, dataplane.ends.server, services.worker.service, services.store.service;"
        "assert not [name for name in sys.modules if name.startswith('dataplane.cards')]"
    )


def test_cupy_itself_imports_without_a_card() -> None:
    pytest.importorskip("cupy")
    run("import cupy; from cupy.cuda import nccl, runtime")


def test_a_machine_without_cupy_is_told_so() -> None:
    code = """
import sys
sys.modules["cupy"] = None
from dataplane.cards.card import CardError
from dataplane.cards.cupy_card import CupyCard
try:
    CupyCard()
except CardError as error:
    print(error)
"""
    assert run(code).startswith("CUDA: CuPy is not installed")
