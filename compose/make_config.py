"""Writes the containers' mesh.toml, which is the template with the model asked for, and keys that nobody has to choose.

What was drawn once is kept, so that services added later agree with those that run.
"""

import sys
from pathlib import Path

import msgspec

from schemas.permissions import GUESTS
from schemas.subjects import Role
from services.config import ModelConfig, load_config, write_config
from services.files import write_private
from services.trust.certificates import CA_FILE
from services.trust.keys import MeshKeys
from services.trust.routes import SERVER_FILES

MODEL_DIR = Path("/model")
BROKERS = ("nats", "nats-1", "nats-2")
"""What the containers call it, and the further servers of `ha.yaml`."""
AT_BROKER = Path("/etc/nats/keys")
"""Where the broker's container has its folder of keys."""


def make_config(template: Path, target: Path, model: str, keys: Path, model_dir: Path = MODEL_DIR) -> None:
    """Write `target` whole or not at all, readable by its owner only, and the keys where there are none.

    `model`: the checkpoint's folder on the host, mounted at `model_dir`; its last part is what clients call it. Empty:
    what the template says. `keys`: has a folder for each role, one for people and one for the broker: each is a volume,
    so that a container sees its own only. Everybody but the broker has the certificate of the CA.
    """
    config = load_config(template)
    if model:
        config = msgspec.structs.replace(config, model=_own_model(config.model, Path(model), model_dir))
    if not all((keys / "broker" / name).exists() for name in SERVER_FILES):
        for name, content in MeshKeys.fresh(BROKERS, has_routes=True).files(AT_BROKER).items():
            for folder in _whose(name):
                write_private(keys / folder / name, content)
    whole = target.with_name("mesh.toml.new")
    write_config(config, whole)
    whole.replace(target)  # a service that restarts now reads the old file or the new one, never half of it


def _whose(name: str) -> tuple[str, ...]:
    """Return the folders of a file of keys."""
    if name == CA_FILE:
        return ("people", *(role for role in Role if role not in GUESTS))
    if name in SERVER_FILES:
        return ("broker",)
    return ("people",) if name.endswith(".creds") else (name.partition(".")[0],)


def _own_model(config: ModelConfig, on_host: Path, model_dir: Path) -> ModelConfig:
    try:
        is_checkpoint = (model_dir / "config.json").is_file()
    except PermissionError:
        is_checkpoint = False
    if not is_checkpoint:
        raise SystemExit(f"KVMESH_MODEL={on_host} has no config.json that user 10001 may read: no checkpoint's folder?")
    return msgspec.structs.replace(config, path=str(model_dir), name=config.name or on_host.name)


if __name__ == "__main__":
    make_config(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
