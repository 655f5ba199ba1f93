"""Writes the containers' mesh.toml: the template, secrets that nobody has to choose, and the model asked for.

What was drawn once is kept, so that services added later agree with those that run.
"""

import sys
from pathlib import Path

import msgspec

from services.config import ModelConfig, fresh_secret, load_config, write_config
from services.credentials import TenantSigner
from services.files import write_private

MODEL_DIR = Path("/model")


def make_config(template: Path, target: Path, model: str, model_dir: Path = MODEL_DIR) -> None:
    """Write `target` whole or not at all, readable by its owner only.

    `model`: the checkpoint's folder on the host, mounted at `model_dir`; its last part is what clients call it. Empty:
    what the template says.
    """
    secret, seed = _kept(target.with_name("secret")), _kept(target.with_name("tenant_seed"))
    config = load_config(template)
    if model:
        config = msgspec.structs.replace(config, model=_own_model(config.model, Path(model), model_dir))
    whole = target.with_name("mesh.toml.new")
    secrets = {
        "ticket_secrets": config.ticket_secrets or (secret,),
        "tenant_seed": config.tenant_seed or seed,
        "tenant_public_key": TenantSigner(config.tenant_seed or seed).public_key,
    }
    write_config(msgspec.structs.replace(config, **secrets), whole)
    whole.replace(target)  # a service that restarts now reads the old file or the new one, never half of it


def _kept(path: Path) -> str:
    """Return the secret in a file; a new one where there is none, which is kept there."""
    secret = (path.read_text() if path.exists() else "") or fresh_secret()
    write_private(path, secret)
    return secret


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
