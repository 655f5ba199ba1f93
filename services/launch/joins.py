"""`kvmesh serve joins`: the service where other machines join a mesh."""

from functools import partial
from pathlib import Path

from services.errors import UserError
from services.join.service import run_joins
from services.launch.serve import READY_LINE, end_with, say


def run_join_port(config: Path, keys: Path, host: str, port: int, *, supervised: bool) -> None:
    """Serve until a signal. Raises UserError."""
    try:
        run_joins(config, keys, host or "0.0.0.0", port, partial(say, READY_LINE), supervised=supervised)
    except UserError as error:
        end_with(error, supervised=supervised)
