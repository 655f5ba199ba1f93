"""Runs the holder that stock servers attach to: a store whose socket they bring blocks by and take them.

Which KV it holds the first server says: its version, its backend and its arguments decide what a block's bytes mean.
The model is known before, and a server of another one is refused.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.memory.arena import ArenaTooLargeError, check_room
from schemas.attach import Hello
from services.attach.bringing import Bringer
from services.attach.connector.identity import layout_of
from services.attach.core import AttachCore
from services.attach.door import Door, Listener, bound_socket
from services.attach.prefix import Prefixes, served
from services.bus.base import Bus
from services.config import AttachConfig, MeshConfig, state_dir
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.metrics import Metrics
from services.ports import bind
from services.runtime import ended_before
from services.store.load import check_memory, make_parts
from services.store.service import Guests, Store, run_store
from services.telemetry import Telemetry
from services.trust.credentials import HolderCredentials, holder_credentials

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttachParts:
    """What is made before the event loop. `sock` and `prefix_sock`, where routers ask, listen already; they go with
    `held`."""

    name: str
    checkpoint: Checkpoint
    credentials: HolderCredentials
    sock: socket.socket
    held: contextlib.ExitStack
    prefix_sock: socket.socket | None = None


def load_attach(config: MeshConfig, name: str) -> AttachParts:
    """Take the sockets, and read what the model is. Raises UserError: another holder has the socket, a port is in use,
    too little memory, no such checkpoint."""
    credentials = holder_credentials(config)
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), "vllm")
    check_memory(config.store)
    try:
        check_room(config.store.memory_bytes)
    except ArenaTooLargeError as error:
        raise UserError(str(error)) from error
    held = contextlib.ExitStack()
    sock = held.enter_context(bound_socket(socket_path(config.attach)))
    prefix_sock, attach = None, config.attach
    if attach.prefix_port >= 0:
        prefix_sock = held.enter_context(bind(attach.prefix_host, attach.prefix_port))
    return AttachParts(
        name=name, checkpoint=checkpoint, credentials=credentials, sock=sock, held=held, prefix_sock=prefix_sock
    )


def socket_path(settings: AttachConfig) -> Path:
    """Return where servers attach."""
    return Path(settings.socket) if settings.socket else state_dir() / "attach.sock"


async def run_attach(
    config: MeshConfig,
    parts: AttachParts,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Serve until `stop` is set. It is ready before the first server is there, and part of the mesh after that. Takes
    ownership of the parts."""
    times = config.times.attach
    listener = Listener(lambda hello: refusal(parts.checkpoint, config.attach.tenant, hello), times)
    server = await asyncio.start_unix_server(listener.serve_half, sock=parts.sock)
    prefixes = Prefixes(config.attach.tenant)
    serving = contextlib.AsyncExitStack()
    try:
        if parts.prefix_sock is not None:
            await serving.enter_async_context(served(prefixes, parts.prefix_sock, config))
        if on_ready is not None:
            on_ready()
        if not await ended_before(stop, listener.first_server()):
            return
        identity = listener.first.identity
        log.info("holds KV of %s: %s", parts.checkpoint.name, identity.kv_format)
        # Taking and clearing the memory may take seconds.
        store_parts = await asyncio.to_thread(
            lambda: make_parts(
                config,
                parts.name,
                layout_of(identity),
                parts.credentials,
                model=config.model.name or parts.checkpoint.name,
                context_length=parts.checkpoint.context_length,
            )
        )

        def make_guests(store: Store) -> Guests:
            core = AttachCore(store_parts.memory, identity, round(1000 * config.attach.canary_s), times, brings=True)
            prefixes.answer_of(core, identity)
            bringer = Bringer(store, store.bus, config.attach.tenant, times)
            return Door(listener, core, store, store_parts.values.contents, bringer, times).guests

        await run_store(config, store_parts, connection, telemetry, stop, None, metrics, make_guests)
    finally:
        await serving.aclose()
        server.close()
        await listener.close()
        parts.held.close()


def refusal(checkpoint: Checkpoint, tenant: str, hello: Hello) -> str:
    """Return why a server cannot be attached to a holder of this model; "": it can."""
    identity = hello.identity
    if identity.weights != checkpoint.weights:
        return (
            f"the server's weights are not those of {checkpoint.path}, which this holder has: "
            "start `kvmesh attach --model` with the folder that `vllm serve` has"
        )
    if hello.tenant != tenant:
        return f"the server's tenant is {hello.tenant!r}, and this holder keeps {tenant!r}'s KV: set both alike"
    ours = (checkpoint.num_layers, checkpoint.num_kv_heads, checkpoint.head_dim)
    if (theirs := (identity.num_layers, identity.num_kv_heads, identity.head_dim)) != ours:
        return f"the server's KV has {theirs} layers, heads and values, and by config.json it is {ours}"
    return ""
