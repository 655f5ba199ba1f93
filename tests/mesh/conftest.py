"""What one process says of the demo model, and who compares."""

import pytest

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.mesh.reference import Judge, SingleProcess


@pytest.fixture(scope="session")
def single() -> SingleProcess:
    return SingleProcess(DEMO_MODEL_DIR)


@pytest.fixture(scope="module")
def judge() -> Judge:
    """Its verdict is the module's."""
    return Judge(DEMO_MODEL_DIR)
