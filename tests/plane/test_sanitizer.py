"""The kernels under NVIDIA's compute-sanitizer, where it is installed: no access out of bounds, no race."""

import shutil
import subprocess
import sys

import pytest

from tests.gpu import needs_gpu

# Of calls that return an error only we know which are wrong: NCCL asks the card for kernels that it may not have.
TOOLS = {"memcheck": ["--report-api-errors=no"], "racecheck": [], "synccheck": []}
FOUND = 9


@needs_gpu
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("tool", TOOLS)
def test_the_card_s_own_tests_are_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed: it comes with the CUDA toolkit")
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "gpu", "tests/plane/test_device.py", "-k", "move"]
    options = [f"--tool={tool}", *TOOLS[tool], "--target-processes=application-only", f"--error-exitcode={FOUND}"]
    done = subprocess.run([sanitizer, *options, *tests], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
