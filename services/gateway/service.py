"""The gateway's shell: loads the model's text side, opens the bus and the port, and closes them in order."""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

from dataplane.blocks.cache import max_sequence_tokens
from schemas.ids import GatewayId, new_id
from services.bus.base import Bus
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.engine.checkpoint import default_shape, layout_for, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.tokenizer import read_tokenizer
from services.errors import CheckpointError, UserError
from services.gateway.api.grammars import GrammarProcess
from services.gateway.api.guard import HostGuard
from services.gateway.api.prepare import GatewayModel
from services.gateway.api.routes import Gateway, GatewayApp, make_gateway
from services.gateway.api.text import codec_of
from services.gateway.api.tools.formats import format_of
from services.gateway.server import Server, certificate_of, connections_for, tls_context
from services.metric_names import HTTPS_DAYS
from services.metrics import Metrics
from services.telemetry import Telemetry


async def run_gateway(
    config: MeshConfig,
    model: GatewayModel,
    connection: Bus,
    telemetry: Telemetry,
    stop: asyncio.Event,
    *,
    sock: socket.socket,
    on_ready: Callable[[], None] | None = None,
    metrics: Metrics | None = None,
    gateway_id: GatewayId | None = None,
) -> None:
    """Serve HTTP at `sock` until `stop` is set. Closes socket and bus.

    `gateway_id`: of this life only, and the name that the broker knows it by; None: a fresh one.

    Raises UserError for a certificate that cannot be used, too few descriptors, or no tenant seed.
    """
    # Check the settings first: errors in them are reported before anybody knows of this gateway.
    times = config.times.gateway
    connections = connections_for(config.gateway.max_connections, times)
    tls = tls_context(config.gateway.tls_cert, config.gateway.tls_key)
    gateway_id = gateway_id or GatewayId(new_id("gateway"))
    metrics = metrics or Metrics()
    bus = TypedBus(connection, "gateway", metrics, {"id": gateway_id})
    async with asyncio.TaskGroup() as tasks:
        # Subscribe on the bus before HTTP is served: after `flush` the subscriptions are live, before any tokens come.
        gateway = make_gateway(config, model, gateway_id, bus, telemetry, tasks)
        hosts = (config.gateway.host, *config.gateway.hosts)
        server = Server(HostGuard(GatewayApp(gateway), hosts, times.linger_s), connections, tls)
        await bus.announce("serves the OpenAI API, and owns each request until its end")
        await gateway.requests.listen()
        await connection.flush()
        serving = tasks.create_task(server.serve([sock]), name="http server")
        await server.ready.wait()
        if on_ready is not None:
            on_ready()
        # While the gateway serves, watch the certificate's files: a renewed one is loaded without a restart.
        with contextlib.ExitStack() as until_stop:
            if tls is not None:
                certificate = certificate_of(tls, config.gateway.tls_cert, config.gateway.tls_key)
                until_stop.enter_context(certificate.kept(config.times.bus.certificates_look_s))
                metrics.on_sample(lambda: metrics.set_series(HTTPS_DAYS, {(): certificate.days_left}))
            await stop.wait()
        # Close the bus last: running requests need it until they end.
        await _stop(gateway, server, serving)
        await bus.close()


async def _stop(gateway: Gateway, server: Server, serving: asyncio.Task[None]) -> None:
    """Stop intake; let running requests end for a while; end the others; close the connections."""
    gateway.stopping = True
    server.stop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(gateway.times.drain_s):
            await gateway.requests.wait_idle()
    gateway.requests.stop_all()
    await serving


def load_model(config: MeshConfig) -> GatewayModel:
    """Read what the gateway needs of the configured checkpoint. Raises UserError."""
    # Compute the shape of a worker's arena by the same rule as a worker: it bounds how long a request can be.
    try:
        checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), config.engine.name)
        layout = layout_for(config, checkpoint)
        shape = default_shape(
            layout,
            config.worker.kv_bytes,
            context_length=checkpoint.context_length,
            token_budget=config.worker.token_budget,
        )
        tokenizer = read_tokenizer(Path(checkpoint.path))
    except CheckpointError as error:
        raise UserError(str(error)) from error
    # Unless the configuration names the form of tool calls, recognize it by the template that shows it to the model.
    codec, ends = codec_of(tokenizer), tokenizer.ends(checkpoint)
    named = config.gateway.tool_format
    tool_format = format_of(codec.tools_template) if named == "auto" else named
    return GatewayModel(
        name=config.model.name or checkpoint.name,
        names=frozenset({checkpoint.name, config.model.name or checkpoint.name}),
        codec=codec,
        vocab_size=checkpoint.vocab_size,
        context_length=checkpoint.context_length,
        eos_token_ids=ends,
        layout=layout,
        num_worker_tokens=max_sequence_tokens(shape, config.worker.token_budget) or checkpoint.context_length,
        grammars=GrammarProcess(tokenizer.tokenizer, checkpoint.vocab_size, ends),
        tool_format=tool_format,
    )
