"""Writes the containers' mesh.toml: the template with a ticket secret that nobody has to choose.

A secret once drawn is kept, so that workers added later agree with those that run.
"""

import sys
from pathlib import Path

import msgspec

from services.config import fresh_secret, load_config, write_config


def make_config(template: Path, target: Path) -> None:
    """Write `target` whole or not at all, readable by its owner only."""
    secret_path = target.with_name("secret")
    if not secret_path.exists():
        secret_path.touch(mode=0o600)
    secret = secret_path.read_text() or fresh_secret()
    secret_path.write_text(secret)
    config = load_config(template)
    whole = target.with_name("mesh.toml.new")
    write_config(msgspec.structs.replace(config, secret=config.secret or secret), whole)
    whole.replace(target)  # a service that restarts now reads the old file or the new one, never half of it


if __name__ == "__main__":
    make_config(Path(sys.argv[1]), Path(sys.argv[2]))
