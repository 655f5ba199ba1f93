"""The attached connector with a clock on each hook of its scheduler half, for `bench_attach`.

`KVMESH_HOOK_TIMES` names the file that gets a line `HOOK SECONDS` for each call, as the server ends or every 256 calls.
"""

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.attach.connector.connector import KvmeshConnector

HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups",
)  # fmt: skip
_LINES: list[str] = []
_EVERY = 256


def _write() -> None:
    with Path(os.environ["KVMESH_HOOK_TIMES"]).open("a", encoding="ascii") as file:
        file.writelines(_LINES)
    _LINES.clear()


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return hook(*args)
        finally:
            _LINES.append(f"{name} {time.perf_counter() - began_s:.9f}\n")
            if len(_LINES) >= _EVERY:
                _write()

    return call


class TimedConnector(KvmeshConnector):
    """Times what delays every request of the server."""


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name, getattr(KvmeshConnector, _name)))
atexit.register(_write)
