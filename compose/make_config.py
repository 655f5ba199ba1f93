"""Writes the containers' mesh.toml: the template, a ticket secret that nobody has to choose, and the model asked for.

A secret once drawn is kept, so that workers added later agree with those that run.
"""

import sys
from pathlib import Path

import msgspec

from services.config import ModelConfig, fresh_secret, load_config, write_config

MODEL_DIR = Path("/model")


def make_config(template: Path, target: Path, model: str, model_dir: Path = MODEL_DIR) -> None:
    """Write `target` whole or not at all, readable by its owner only.

    `model`: the checkpoint's folder on the host, mounted at `model_dir`; its last part is what clients call it. Empty:
    what the template says.
    """
    secret_path = target.with_name("secret")
    if not secret_path.exists():
        secret_path.touch(mode=0o600)
    secret = secret_path.read_text() or fresh_secret()
    secret_path.write_text(secret)
    config = load_config(template)
    if model:
        config = msgspec.structs.replace(config, model=_own_model(config.model, Path(model), model_dir))
    whole = target.with_name("mesh.toml.new")
    write_config(msgspec.structs.replace(config, secret=config.secret or secret), whole)
    whole.replace(target)  # a service that restarts now reads the old file or the new one, never half of it


def _own_model(config: ModelConfig, on_host: Path, model_dir: Path) -> ModelConfig:
    try:
        is_checkpoint = (model_dir / "config.json").is_file()
    except PermissionError:
        is_checkpoint = False
    if not is_checkpoint:
        raise SystemExit(f"KVMESH_MODEL={on_host} has no config.json that user 10001 may read: no checkpoint's folder?")
    return msgspec.structs.replace(config, path=str(model_dir), name=config.name or on_host.name)


if __name__ == "__main__":
    make_config(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
