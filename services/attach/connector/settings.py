"""The connector's settings: `kv_connector_extra_config` in vLLM's `--kv-transfer-config`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from services.errors import UserError

HANDOFF_WAIT_S = 1.0
"""So long a request waits for blocks that another server has computed, and that are on their way to the holder."""
CHECK_EVERY = 64
"""One in so many requests is computed although it could be loaded, and compared."""


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`socket`: of the holder (`kvmesh attach`). `url`: where the holder reaches this server's API, for its canary.
    `api_key_file`: a file with the key for it. `tenant`: whose the KV of this server is. `required`: a server without a
    holder does not start."""

    socket: str
    url: str = ""
    tenant: str = ""
    api_key_file: str = ""
    check_every: Annotated[int, msgspec.Meta(ge=1)] = CHECK_EVERY
    handoff_wait_s: Annotated[float, msgspec.Meta(ge=0, le=5)] = HANDOFF_WAIT_S
    required: bool = False


MODULE = "kvmesh_vllm"
"""The wheel's (`services/attach/wheel.py`)."""


def transfer_config(settings: ConnectorSettings, module: str = MODULE) -> dict[str, Any]:
    """Return what `vllm serve --kv-transfer-config` gets."""
    return {
        "kv_connector": "KvmeshConnector",
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": msgspec.to_builtins(settings),
    }


def read_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Return the settings. Raises UserError: a key that there is not, or a value that cannot be."""
    try:
        return msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise UserError(
            f"kv_connector_extra_config: {error}. `kvmesh attach --print-config` prints what belongs there"
        ) from error


def read_api_key(settings: ConnectorSettings) -> str:
    """Return the key for the server's own API; "": it wants none. Raises UserError."""
    if not settings.api_key_file:
        return ""
    try:
        return Path(settings.api_key_file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"api_key_file {settings.api_key_file} cannot be read: {error}") from error
