"""`kvmesh attach`: a holder beside the `vllm serve` processes of a host, and what these are to be given."""

import json
import sys
from pathlib import Path

from services.attach.connector.settings import ConnectorSettings, transfer_config
from services.attach.service import socket_path
from services.attach.wheel import write_wheel
from services.config import AttachConfig, NatsConfig, state_dir, write_config
from services.engine.checkpoint import find_checkpoint
from services.errors import UserError
from services.files import private_folder
from services.launch.options import Launch
from services.launch.serve import run_service
from services.launch.supervisor import check_store, store_config
from services.settings import changed


def run_attach(launch: Launch, bus: str, name: str) -> None:
    """Hold KV until a signal. Raises UserError."""
    folder, model = state_dir() / "attach", launch.config.model.path
    private_folder(folder)
    store = store_config(launch)
    check_store(store)
    keys = str(Path(launch.keys).absolute()) if launch.keys else "keys"
    nats = NatsConfig(url=bus, keys=keys, open=not launch.keys)
    path = str(find_checkpoint(model)) if model else ""
    write_config(changed(launch.config, {"nats": nats, "model.path": path, "store": store}), folder / "mesh.toml")
    run_service("attach", folder / "mesh.toml", service_id=name, supervised=False)


def run_print_config(attach: AttachConfig, url: str, api_key_file: str) -> None:
    """Print one line of JSON. Raises UserError."""
    if not url:
        raise UserError("--print-config needs --url, where this server serves its API: http://127.0.0.1:8000, say")
    settings = ConnectorSettings(
        socket=str(socket_path(attach).absolute()),
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
