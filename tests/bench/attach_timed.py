"""The attached connector with a clock on each hook of its scheduler half, for `bench_attach`.

`KVMESH_HOOK_TIMES` names the file that gets a line `HOOK SECONDS` for each call.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from services.attach.connector.connector import KvmeshConnector

HOOKS = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta",
    "update_connector_output", "request_finished_all_groups",
)  # fmt: skip


@cache
def _file() -> TextIO:
    """Return the file, which a server that is killed has written each line to."""
    return Path(os.environ["KVMESH_HOOK_TIMES"]).open("a", buffering=1, encoding="ascii")


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return hook(*args)
        finally:
            took_s = time.perf_counter() - began_s
            _file().write(f"{name} {took_s:.9f}\n")

    return call


class TimedConnector(KvmeshConnector):
    """Times what delays every request of the server."""


for _name in HOOKS:
    setattr(TimedConnector, _name, _timed(_name, getattr(KvmeshConnector, _name)))
