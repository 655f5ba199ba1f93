"""The subcommands of `kvmesh`, a function each. A UserError is one line and exit code 2."""

import asyncio
import importlib.metadata
import io
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from schemas.permissions import ALL
from services.cli.bench import bench
from services.cli.flags import launch_of, taking_all_flags, taking_flags
from services.cli.simulate import simulate
from services.config import EngineName, parse_list
from services.ending import leaving_at_once
from services.errors import UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(simulate)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvmesh {importlib.metadata.version('kvmesh')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve a language model with prefill and decode on different workers."""


NatsOption = Annotated[str, typer.Option(help="The mesh's NATS server; that of the mesh that runs if left out.")]
CredsOption = Annotated[
    str, typer.Option(help="Your credentials for it (observer.creds); those of the mesh that runs if left out.")
]
OperatorOption = Annotated[
    bool, typer.Option("--operator", help="Hear everything, prompts too, with the mesh's operator.creds.")
]
OperatorCreds = Annotated[
    str, typer.Option(help="operator.creds of the mesh; those of the mesh that runs if left out.")
]
RoleName = Literal[
    "gateway", "scheduler", "directory", "prefill", "decode", "aggregated", "store", "attach", "broker", "joins"
]  # fmt: skip


@app.command()
@taking_all_flags
def up(**flags: Any) -> None:
    """Start a whole mesh on this machine and serve the OpenAI API. Ctrl-C stops it."""
    from services.cli.up import run_up

    raise typer.Exit(run_up(launch_of(flags)))


@app.command()
def serve(
    role: Annotated[RoleName, typer.Argument(help="Which service.")],
    config: Annotated[Path | None, typer.Option(help="The mesh's configuration, mesh.toml; a broker has none.")] = None,
    id: Annotated[str, typer.Option("--id", help="This service's name; role and host name if left out.")] = "",
    port: Annotated[
        int,
        typer.Option(min=0, max=65_535, help="A gateway's, mesh.toml's if 0; a broker's, 4222; that of joins, 7843."),
    ] = 0,
    host: Annotated[
        str, typer.Option(help="Address that a broker or joins listens on; all if it has a certificate.")
    ] = "",
    metrics_port: Annotated[
        int, typer.Option(min=-1, max=65_535, help="Where to serve metrics, 0 finds a port; mesh.toml's if -1.")
    ] = -1,
    device: Annotated[str, typer.Option(help="A worker's: auto, cpu, cuda, cuda:N; mesh.toml's if left out.")] = "",
    engine: Annotated[
        EngineName | None,
        typer.Option(help="What computes; mesh.toml's if left out. Workers, stores and gateways must agree."),
    ] = None,
    keys: Annotated[str, typer.Option(help="Folder of the roles' keys for the bus; mesh.toml's if left out.")] = "",
    supervised: Annotated[bool, typer.Option(hidden=True)] = False,
    starter: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one service of a mesh until SIGTERM."""
    if role == "broker":
        from services.launch.broker import run_broker

        if not keys:
            raise UserError("--keys names the folder with broker.conf: `kvmesh bus-config` makes it")
        run_broker(Path(keys), id, host, port)
        return
    if config is None:
        raise UserError("--config names the mesh.toml of the mesh")
    if role == "joins":
        from services.launch.joins import run_join_port

        run_join_port(config, Path(keys or "keys"), host, port, supervised=supervised)
        return
    from services.launch.serve import Overrides, run_service

    metrics = None if metrics_port < 0 else metrics_port
    overrides = Overrides(gateway=port or None, metrics=metrics, device=device, engine=engine, keys=keys)
    with leaving_at_once():
        run_service(role, config, service_id=id, overrides=overrides, supervised=supervised, starter=starter)


@app.command()
@taking_flags(
    "model", "memory_gib", "keys", "socket", "store", "store_dir", "store_mib", "prefix_port", "plane_host", "otlp"
)
def attach(
    bus: Annotated[str, typer.Option(help="URL of the mesh's NATS server.")] = "nats://127.0.0.1:4222",
    id: Annotated[str, typer.Option("--id", help="The holder's name; attach and the host's name if left out.")] = "",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print what `vllm serve --kv-transfer-config` gets, and end.")
    ] = False,
    url: Annotated[str, typer.Option(help="With --print-config: where the server serves its API.")] = "",
    api_key_file: Annotated[str, typer.Option(help="With --print-config: a file with the key of that API.")] = "",
    wheel: Annotated[
        Path | None, typer.Option(help="Write the wheel for the server's environment here, and end.")
    ] = None,
    **flags: Any,
) -> None:
    """Hold KV for the `vllm serve` processes of this host."""
    from services.cli.attach import run_attach, run_print_config, run_wheel

    launch = launch_of({"attach": True} | flags)
    if wheel is not None:
        run_wheel(wheel)
    elif print_config:
        run_print_config(launch.config.attach, url, api_key_file)
    else:
        with leaving_at_once():
            run_attach(launch, bus, id)


@app.command()
def bus_config(
    folder: Annotated[Path, typer.Argument(help="Where to write them; only you may read it.")],
    host: Annotated[
        str, typer.Option(help="Names and addresses by which the server is reached, with commas between: TLS.")
    ] = "",
    routes: Annotated[
        bool,
        typer.Option("--routes", help="Each of the hosts is a server of one broker: what these need too."),
    ] = False,
    at: Annotated[
        Path | None, typer.Option(help="Where the server finds its files on its own machine; there if left out.")
    ] = None,
    member: Annotated[str, typer.Option(help="With keys made before: one for this name alone, as decode-0.")] = "",
    revoke: Annotated[str, typer.Option(help="The name of a member whose keys are to be of no use any more.")] = "",
    push: Annotated[
        bool, typer.Option("--push", help="Tell the servers of --nats what is revoked: they tell each other.")
    ] = False,
    nats: Annotated[str, typer.Option(help="With --push: the servers; KVMESH_NATS_URL if left out.")] = "",
    days: Annotated[int, typer.Option(min=1, max=3650, help="Keys of members and people end after so many.")] = 90,
) -> None:
    """Make the keys of a mesh whose NATS server is your own, and the part of its configuration that knows them."""
    from services.cli.bus_config import run_bus_config, run_member, run_push, run_revoke
    from services.config import environment_broker

    if sum(map(bool, (host or routes or at, member, revoke))) > 1:
        raise UserError("--host is for new keys, --member and --revoke are for those that there are: one of them")
    url = nats or environment_broker()
    if push and not url:
        raise UserError("--push needs to know the servers: --nats tls://nats-0:4222,tls://nats-1:4222")
    if member:
        run_member(folder, member, days)
    elif revoke:
        run_revoke(folder, revoke, url if push else "")
    elif push:
        run_push(folder, url)
    else:
        hosts = parse_list(host)
        if routes and len(hosts) < 2:
            raise UserError("--routes needs the names of all servers: --host nats-0,nats-1,nats-2")
        run_bus_config(folder, hosts, days, at, has_routes=routes)


KeysOption = Annotated[str, typer.Option(help="Folder of the mesh's keys; that of the mesh that runs if left out.")]
tokens = typer.Typer(invoke_without_command=True, help="Print a line with which another machine joins the mesh.")
app.add_typer(tokens, name="token")


@tokens.callback()
def token(
    context: typer.Context,
    role: Annotated[
        Literal["holder", "gateway"], typer.Option(help="What the machine's members may be: workers, or gateways.")
    ] = "holder",
    names: Annotated[str, typer.Option(help="Which members, a pattern as of file names: 'decode-*'.")] = "*",
    host: Annotated[str, typer.Option(help="For this machine alone; any if left out.")] = "",
    uses: Annotated[int, typer.Option(min=1, max=1000, help="How many machines may join with it.")] = 1,
    ttl: Annotated[str, typer.Option(help="How long it may be used: 30m, 1h, 7d.")] = "1h",
    url: Annotated[str, typer.Option(help="The join port; that of the mesh that runs if left out.")] = "",
    keys: KeysOption = "",
) -> None:
    """Print a line with which another machine joins the mesh."""
    from schemas.subjects import Role
    from services.cli.hosts import life_of, run_token

    if context.invoked_subcommand is None:
        run_token(keys, url, role=Role(role), names=names, host=host, num_uses=uses, life_s=life_of(ttl))


@tokens.command(name="list")
def list_tokens(keys: KeysOption = "") -> None:
    """Show the tokens that are of use, and the machines that have joined."""
    from services.cli.hosts import run_token_list

    run_token_list(keys)


@tokens.command(name="revoke")
def revoke_token(
    token_id: Annotated[str, typer.Argument(help="By `kvmesh token list`.")], keys: KeysOption = ""
) -> None:
    """Have a token be of no use any more."""
    from services.cli.hosts import run_token_revoke

    run_token_revoke(keys, token_id)


@app.command()
@taking_flags(
    "prefill", "decode", "aggregated", "gateways", "device", "model", "port", "kv_mib", "threads", "spare_engines",
    "plane_host", "plane_ports", "advertise_host",
)  # fmt: skip
def join(
    url: Annotated[str, typer.Argument(help="The join port of the mesh: tls://HOST:7843.")],
    token: Annotated[str, typer.Option(help="What `kvmesh token` has printed there; once, later it is known.")] = "",
    name: Annotated[str, typer.Option(help="What this machine is called there; its host name if left out.")] = "",
    systemd: Annotated[bool, typer.Option("--systemd", help="Print a unit that does this, and end.")] = False,
    **flags: Any,
) -> None:
    """Be part of a mesh on another machine: run workers for it. Ctrl-C stops them, without a lost answer."""
    from services.cli.join import run_join

    raise typer.Exit(run_join(url, token, name, flags, systemd=systemd))


@app.command()
def leave(
    forget: Annotated[bool, typer.Option("--forget", help="Also where the mesh's machine cannot be asked.")] = False,
) -> None:
    """Be no part of the mesh any more: workers leave, and this machine's keys are revoked."""
    from services.cli.join import run_leave

    run_leave(forget=forget)


@app.command()
def remove(
    machine: Annotated[str, typer.Argument(help="As it has joined; `kvmesh token list` names them.")],
    keys: KeysOption = "",
    nats: NatsOption = "",
) -> None:
    """Lock a machine out that has joined: its keys are revoked at once."""
    from services.cli.hosts import run_remove

    run_remove(keys, machine, nats)


@app.command()
def rotate(
    keys: KeysOption = "",
    within_s: Annotated[float, typer.Option(min=1, help="How long each machine is waited for at each step.")] = 30.0,
) -> None:
    """Replace the secret that tickets for KV are signed with, while all runs."""
    from services.cli.hosts import run_rotate

    run_rotate(keys, within_s)


@app.command()
def status(
    worker: Annotated[str, typer.Argument(help="What this worker or store is doing, and its last steps.")] = "",
    nats: NatsOption = "",
    creds: CredsOption = "",
    operator: OperatorOption = False,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show the workers and what they are doing."""
    from services.cli.running import BusOptions
    from services.cli.status import run_status

    run_status(BusOptions(nats, creds, operator), worker, as_json=json)


@app.command()
def purge(
    stores: Annotated[
        bool, typer.Option("--store", help="The stores forget all, also what lies on disk or a server.")
    ] = False,
    holder: Annotated[str, typer.Option(help="This worker or store forgets all that it keeps.")] = "",
    tenant: Annotated[str | None, typer.Option(help="Everybody forgets what is this tenant's.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everybody forgets all.")] = False,
    nats: NatsOption = "",
    creds: OperatorCreds = "",
) -> None:
    """Have KV forgotten that was kept for later prompts. What runs goes on; what comes is computed anew."""
    from services.cli.purge import Purge, run_purge
    from services.cli.running import BusOptions

    run_purge(BusOptions(nats, creds, operator=True), Purge(stores, holder, tenant, everything))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(help="Which one; `kvmesh status` names them.")],
    force: Annotated[bool, typer.Option("--force", help="Also the last of its role: what runs is finished.")] = False,
    nats: NatsOption = "",
    creds: OperatorCreds = "",
) -> None:
    """Have a worker leave at once: its answers go on elsewhere, its hottest KV too. It is not started again."""
    from services.cli.drain import run_drain
    from services.cli.running import BusOptions

    run_drain(BusOptions(nats, creds, operator=True), worker, forced=force)


@app.command()
def restart(
    rolling: Annotated[bool, typer.Option("--rolling", help="One after another; the only way there is.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also where nobody stands in for the last of a role.")] = False,
    nats: NatsOption = "",
    creds: OperatorCreds = "",
) -> None:
    """Start every worker again, one after another: answers go on, and what is cached is kept elsewhere meanwhile."""
    from services.cli.drain import run_restart
    from services.cli.running import BusOptions

    if not rolling:
        raise UserError("say --rolling: workers are started again one after another, never all at once")
    run_restart(BusOptions(nats, creds, operator=True), forced=force)


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="The last request if left out.")] = "",
    folder: Annotated[Path | None, typer.Option(help="Where span files lie; the last `kvmesh up` if left out.")] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="The one that waited longest for its first token.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="The last one that the mesh failed.")] = False,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="With `--failed`: those too in which the client was wrong (400).")
    ] = False,
    list_: Annotated[bool, typer.Option("--list", help="A line each; with --slowest or --failed those.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Of `--list`.")] = 20,
) -> None:
    """Show one request's trace as a waterfall."""
    from services.cli.running import trace_dir
    from services.cli.trace import show_chosen, show_trace

    spans = folder or trace_dir()
    # Options that do not go together are an error: none of them is ignored silently.
    if rejected and not failed:
        raise UserError("--rejected adds to --failed: pass both")
    if not (slowest or failed or list_):
        show_trace(spans, request_id or None)
    elif request_id:
        raise UserError("name a request, or have one chosen: not both")
    else:
        show_chosen(spans, slowest=slowest, failed=failed, rejected=rejected, limit=limit if list_ else 0)


@app.command()
def top(
    nats: NatsOption = "",
    creds: CredsOption = "",
    operator: OperatorOption = False,
    once: Annotated[bool, typer.Option("--once", help="Listen for a moment, print one frame, and end.")] = False,
) -> None:
    """Show what the mesh does, live. Ctrl-C ends it."""
    from services.cli.running import BusOptions, access_of
    from services.cli.top import watch
    from services.runtime import run_until_signal

    access = access_of(BusOptions(nats, creds, operator))
    run_until_signal(lambda stop: watch(access, stop, once=once))


@app.command()
def tail(
    request_id: Annotated[str, typer.Argument(help="All requests if left out.")] = "",
    nats: NatsOption = "",
    creds: CredsOption = "",
    operator: OperatorOption = False,
) -> None:
    """Follow what the bus says of a request, in order, until its end."""
    from services.cli.running import BusOptions, access_of
    from services.cli.tail import tail as follow
    from services.runtime import run_until_signal

    access = access_of(BusOptions(nats, creds, operator))
    run_until_signal(lambda stop: follow(access, request_id, stop))


@app.command()
def sub(
    subject: Annotated[str, typer.Argument(help="As in docs/protocol.md; * is any word, > all that follow.")] = ALL,
    nats: NatsOption = "",
    creds: CredsOption = "",
    operator: OperatorOption = False,
) -> None:
    """Print the messages of a subject of the bus as they come. Ctrl-C ends it."""
    from services.cli.messages import sub as hear
    from services.cli.running import BusOptions, access_of
    from services.runtime import run_until_signal

    access = access_of(BusOptions(nats, creds, operator))
    run_until_signal(lambda stop: hear(access, subject, stop))


@app.command()
def req(
    subject: Annotated[str, typer.Argument(help="A question of docs/protocol.md.")],
    message: Annotated[str, typer.Argument(help="Its fields, a JSON object; the defaults if left out.")] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, help="How long an answer is waited for.")] = 2.0,
    nats: NatsOption = "",
    creds: CredsOption = "",
    operator: OperatorOption = False,
) -> None:
    """Ask a subject of the bus, and print the answer."""
    from services.cli.messages import req as ask
    from services.cli.running import BusOptions, access_of

    asyncio.run(ask(access_of(BusOptions(nats, creds, operator)), subject, message, timeout_s))


def run() -> None:
    """Run the command. A UserError becomes one line on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a locale's encoding may have no arrow
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportUnknownMemberType]
    try:
        app()
    except UserError as error:
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[red]error:[/red] {escape(str(error))}")
        sys.exit(2)
