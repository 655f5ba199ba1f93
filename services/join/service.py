"""`kvmesh serve joins`: the join port of a mesh, on the machine that has the mesh's own keys."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from services.asgi import Refusal, RefusedError, body_of, reply
from services.bus.push import push_account
from services.config import load_config
from services.engine.checkpoint import read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.gateway.server import Server, connections_for, tls_context
from services.join.head import Head
from services.join.messages import JOIN_PORT, MAX_BYTES, Asks, Done
from services.ports import bind
from services.runtime import configure_logging, run_until_signal, watch_parent
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import MESH_FILE, MeshKey, read_key

if TYPE_CHECKING:
    from litestar.types import Receive, Scope, Send

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64


class JoinPort:
    """Serves a head's answers (ASGI), one after another. `url`: of the broker, which is told of who has left."""

    def __init__(self, head: Head, keys: Path, url: str) -> None:
        self._head = head
        self._keys = keys
        self._url = url
        self._one_at_a_time = asyncio.Lock()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        """Serve one request."""
        try:
            asks = _asks_of(scope)
            if asks is Asks.CA:
                await reply(send, HTTPStatus.OK, self._head.ca)
                return
            body, address = await body_of(receive, MAX_BYTES), str((scope["client"] or ("",))[0])
            async with self._one_at_a_time:
                status, answer = await asyncio.to_thread(self._head.answer, asks, body, address)
                if isinstance(answer, Done):
                    await self._push()
        except RefusedError as error:
            status, answer = error.status, Refusal(str(error))
        if isinstance(answer, Refusal):
            log.warning("%s: %d %s", scope["path"], status, answer.error)
        await reply(send, status, answer)

    async def _push(self) -> None:
        """Tell the broker whose keys are of no use any more."""
        try:
            told = await push_account(self._keys, self._url)
        except UserError as error:
            told = {self._url: str(error)}
        for server, problem in told.items():
            if problem:
                log.warning("who has left is not off the bus yet: %s: %s", server, problem)


def _asks_of(scope: "Scope") -> Asks:
    """Return what is asked. Raises RefusedError."""
    asks = next((asks for asks in Asks if scope["type"] == "http" and asks == scope["path"]), None)
    if asks is None:
        raise RefusedError(HTTPStatus.NOT_FOUND, "machines join here: `kvmesh join`")
    if scope["type"] == "http" and scope["method"] != ("GET" if asks is Asks.CA else "POST"):
        raise RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, "machines join here: `kvmesh join`")
    return asks


def run_joins(
    config_path: Path, keys: Path, host: str, port: int, on_ready: Callable[[], None], *, supervised: bool
) -> None:
    """Serve until a signal, or, supervised, until standard input ends. Raises UserError."""
    configure_logging("joins")
    read_key(keys / MESH_FILE, MeshKey)
    if not (keys / CA_FILE).exists() or not (keys / CERTIFICATE_FILE).exists():
        raise UserError(
            f"{keys} has no certificate, and nobody joins in clear: `kvmesh bus-config --host NAME` makes one"
        )
    config = load_config(config_path)
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), config.engine.name)
    times = config.times.gateway
    connections = connections_for(MAX_CONNECTIONS, times)
    tls = tls_context(str(keys / CERTIFICATE_FILE), str(keys / KEY_FILE))
    sock = bind(host, port or JOIN_PORT)

    async def serve(stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(watch_parent(stop), name="watch parent") if supervised else None
            server = Server(JoinPort(Head(keys, config, checkpoint), keys, config.nats.url), connections, tls)
            tasks.create_task(server.serve([sock]), name="joins")
            await server.ready.wait()
            on_ready()
            await stop.wait()
            server.stop()
            if watching is not None:
                watching.cancel()

    run_until_signal(serve)
