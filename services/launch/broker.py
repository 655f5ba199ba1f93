"""`kvmesh serve broker`: one server of a mesh's broker, with the files that `kvmesh bus-config` has written."""

import asyncio
import os
import signal
from pathlib import Path

from dataplane.addresses import in_url, own_address
from services.bus.embedded import EmbeddedNats
from services.config import state_dir
from services.errors import UserError
from services.launch.serve import READY_LINE, say
from services.ports import bind
from services.runtime import run_until_signal
from services.trust.certificates import CERTIFICATE_FILE
from services.trust.routes import BROKER_PORT, has_routes, server_config

LAME_DUCK_S = 35.0
"""A server that was asked to end has so long; its clients have left within a second."""


def run_broker(keys: Path, name: str, host: str, port: int) -> None:
    """Run a server until SIGTERM. One of several then asks its clients to go to the others, and ends when they have.
    `name`: what the others and clients call it. `host`: where it listens; empty: on all addresses where it speaks TLS,
    else on loopback. Raises UserError."""
    port = port or BROKER_PORT
    host = host or ("0.0.0.0" if (keys / CERTIFICATE_FILE).exists() else own_address())
    state = state_dir() / "brokers" / (name or "broker")
    settings = server_config(keys.absolute(), state, host)
    is_one_of_several = has_routes(keys)
    if is_one_of_several and not name:
        raise UserError("--id says which one of the servers this is, by the name of --host that it has: --id nats-0")
    if is_one_of_several:  # clients compare what it advertises with their own list
        settings += f'client_advertise: "{in_url(name)}:{port}"\n'

    bind(host, port).close()

    async def serve(stop: asyncio.Event) -> None:
        # On this thread: the server ends with the thread that started it.
        server = EmbeddedNats.launch(port, state, settings, host=host, name=name or "kvmesh")
        ended = asyncio.get_running_loop().run_in_executor(None, server.wait_ended)
        ended.add_done_callback(lambda _: stop.set())
        say(READY_LINE)
        await stop.wait()
        if ended.done():
            raise UserError(f"nats-server has ended with code {ended.result()}; its log is {state / 'nats.log'}")
        if is_one_of_several:
            os.kill(server.pid, signal.SIGUSR2)  # "lame duck"
            await asyncio.wait((ended,), timeout=LAME_DUCK_S)
        await asyncio.to_thread(server.stop)
        await ended

    run_until_signal(serve)
