from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.rig import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a maker of tiny checkpoints, each made once a session."""
    made: dict[str, Path] = {}

    def make(architecture: str = "qwen3", **fields: Any) -> Path:
        name = "-".join([architecture, *(f"{key}={value}" for key, value in sorted(fields.items()))])
        if name not in made:
            made[name] = make_tiny(tmp_path_factory.mktemp("checkpoints") / f"m{len(made)}", architecture, **fields)
        return made[name]

    return make
