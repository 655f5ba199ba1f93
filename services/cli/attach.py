"""`kvmesh attach`: a holder beside the `vllm serve` processes of a host, and what these are to be given."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

from services.attach.connector.settings import ConnectorSettings, transfer_config
from services.attach.service import socket_path
from services.attach.wheel import write_wheel
from services.config import (
    AttachConfig,
    MeshConfig,
    ModelConfig,
    NatsConfig,
    StoreConfig,
    state_dir,
    write_config,
)
from services.engine.checkpoint import find_checkpoint
from services.errors import UserError
from services.files import private_folder
from services.launch.serve import run_service

GIB = 1 << 30


class AttachOptions(NamedTuple):
    """As on the command line; empty: the default."""

    model: str
    memory_gib: int
    bus: str
    keys: str
    id: str
    socket: str

    @property
    def config(self) -> MeshConfig:
        """What the holder reads. Raises CheckpointError."""
        keys = str(Path(self.keys).absolute()) if self.keys else ""
        return MeshConfig(
            nats=NatsConfig(url=self.bus, keys=keys or "keys", open=not keys),
            model=ModelConfig(path=str(find_checkpoint(self.model)) if self.model else ""),
            store=StoreConfig(memory_bytes=self.memory_gib * GIB),
            attach=AttachConfig(socket=str(Path(self.socket).absolute()) if self.socket else ""),
        )


def run_attach(options: AttachOptions) -> None:
    """Hold KV until a signal. Raises UserError."""
    folder = state_dir() / "attach"
    private_folder(folder)
    write_config(options.config, folder / "mesh.toml")
    run_service("attach", folder / "mesh.toml", service_id=options.id, supervised=False)


def run_print_config(options: AttachOptions, url: str, api_key_file: str) -> None:
    """Print one line of JSON. Raises UserError."""
    if not url:
        raise UserError("--print-config needs --url, where this server serves its API: http://127.0.0.1:8000, say")
    settings = ConnectorSettings(
        socket=str(socket_path(AttachConfig(socket=options.socket)).absolute()),
        url=url,
        api_key_file=str(Path(api_key_file).absolute()) if api_key_file else "",
    )
    sys.stdout.write(json.dumps(transfer_config(settings)) + "\n")


def run_wheel(folder: Path) -> None:
    """Write the wheel. Raises UserError."""
    try:
        sys.stdout.write(f"{write_wheel(folder)}\n")
    except OSError as error:
        raise UserError(f"the wheel cannot be written to {folder}: {error.strerror}") from error
