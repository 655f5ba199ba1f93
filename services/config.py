"""Configuration: one typed file, `mesh.toml`, and the only place that reads the environment."""

import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from dataplane.addresses import EVERYWHERE, is_loopback, ports_of
from dataplane.times import PaceMs, Wait, WaitMs
from schemas.ids import MAX_SUBJECT_TOKEN, is_subject_token
from services.errors import UserError
from services.files import write_private
from services.presence import OVERDUE_PINGS
from services.settings import Flag, Variable, changed, settings_of
from services.times import Times, scaled

Carrier = Literal["auto", "shm", "tcp", "cuda", "nccl"]
WireDtype = Literal["auto", "same", "int8", "fp8"]
PlaneEncryption = Literal["auto", "on", "off"]
Ways = Literal["off", "warn", "require"]
SplitMode = Literal["auto", "always"]
EngineName = Literal["transformers", "vllm"]
ToolFormat = Literal["hermes", "llama3", "mistral", "deepseek"]
Dtype = Literal["auto", "checkpoint", "float32", "bfloat16", "float16"]
_API_KEY = re.compile(r"[!-~]{1,256}")
_ORIGIN = re.compile(r"\*|https?://[^/\s*]+")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")

MIB = 1 << 20
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
SampleRatio = Annotated[float, msgspec.Meta(ge=0, le=1)]
BLOCK_SIZES: dict[EngineName, int] = {"transformers": 16, "vllm": 32}
"""Tokens of a block, where nobody has set how many."""

TRACES_PATH = "/v1/traces"
OTLP_TIMEOUT_S = 5.0
"""So long it is tried again to send some spans, by default: then it is logged that they are lost."""
MIN_SECRET_CHARS = 16
"""A shorter secret can be guessed."""


def check_device(device: str) -> str:
    """Return the device unchanged. Raises ValueError where it is invalid."""
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"a device is cpu, cuda, cuda:N or auto, not {device!r}")
    return device


def _toml_value(value: object) -> str:
    """Strings, numbers and booleans are written the same way in TOML as in JSON; a dict becomes an inline table. Raises
    ValueError for what TOML has no word for, and UserError for what is no text."""
    if isinstance(value, dict):
        entries = cast("dict[str, object]", value).items()
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(entry)}" for key, entry in entries) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml_value, cast("list[object]", value))) + "]"
    try:
        text = msgspec.json.encode(value).decode()
    except UnicodeEncodeError as error:
        raise UserError(f"the name {value!r} is not in UTF-8: rename that file or folder") from error
    if text == "null":
        raise ValueError(f"{value} cannot be written in TOML: leave it out")
    return text


def parse_list(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas between."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""


def _json_object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except msgspec.DecodeError as error:
        raise ValueError(f'it is a JSON object, like \'{{"quantization": "awq"}}\': {error}') from error


def _read_tenants(path: str) -> dict[str, str]:
    if not path:
        return {}
    try:
        keys = msgspec.toml.decode(Path(path).read_bytes(), type=dict[str, str])
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f'{path} must be lines of KEY = "TENANT": {error}') from error
    if not keys:
        raise ValueError(f"{path} has no keys")
    return keys


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: Annotated[str, Variable("KVMESH_NATS_URL")] = "nats://127.0.0.1:4222"
    """The broker; a list, or a text with commas, for the servers of a cluster."""
    keys: str = "keys"
    """Folder of the roles' keys (`kvmesh bus-config`); a relative one lies beside this file."""
    open: Annotated[
        bool, Flag("--open-bus", "Take a server that lets anybody in: whoever reaches it owns the mesh.")
    ] = False
    """The broker lets anybody in, and no keys are used."""
    connect_timeout_s: Wait = 5.0


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`path`: empty is the demo checkpoint. `name`: what clients call it.

    `dtype`: of weights and KV, and part of the KV's identity: gateway, store and workers must agree on it, so it
    follows from this file and never from the machine. "checkpoint": what the files have. "auto": that where
    `worker.device` names a card, else float32.
    """

    path: Annotated[str, Flag("--model", "Checkpoint folder or hub id; the demo model if left out.")] = ""
    name: str = ""
    dtype: Annotated[Dtype, Flag("--dtype", "Of weights and KV; auto: float32, the checkpoint's on cards.")] = "auto"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: Annotated[str, Flag("--host", "Address to serve HTTP on; others reach all but loopback.")] = "127.0.0.1"
    port: Annotated[Port, Flag("--port", "HTTP port; 0 finds one.")] = 8000
    request_timeout_s: float = 600.0
    """A request's deadline, from its arrival to its last token."""
    accept_timeout_s: Wait = 2.0
    """How long a worker may take to answer that it has taken a request; after it the worker is asked what it knows."""
    split: Annotated[
        SplitMode, Flag("--split", "always: what is not served by a prefill and a decode worker fails, and says why.")
    ] = "auto"
    max_attempts: int = 5
    """Attempts in a row that give the client nothing. Where one worker died and the machine stalls, two or three others
    may look dead for a moment."""
    tool_format: ToolFormat | Literal["auto"] = "auto"
    """How the model writes calls of tools, where its chat template does not show it ("auto")."""
    place_wait_s: Wait = 5.0
    """How long a request that nobody has begun may wait for a scheduler, or for workers that take it."""
    resume_wait_s: Wait = 30.0
    """How long an answer under way may wait for workers or a scheduler to come back."""
    progress_after_ms: WaitMs = 1_000
    """A worker that has sent nothing of a request for this long is asked what it has come to."""
    worker_silent_ms: WaitMs = 3_000
    """A worker that does not answer that for this long is taken for lost."""
    tenants: Annotated[
        dict[str, str],
        Flag("--tenants", 'TOML file with a line KEY = "TENANT" for each API key.', parse=_read_tenants, shown=""),
    ] = {}
    """API key to tenant. Empty: no key is asked for, and everybody is one tenant."""
    no_auth: Annotated[bool, Flag("--no-auth", "Ask nobody for a key, whoever reaches --host.")] = False
    hosts: Annotated[
        tuple[str, ...], Flag("--hosts", "Names by which clients call it, with commas between.", parse=parse_list)
    ] = ()
    """Beside the loopback's names and the addresses that it listens on."""
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "--cors-origins",
            "Sites whose pages may ask from a browser, https://… with commas between.",
            parse=parse_list,
        ),
    ] = ()
    """ "*" is every site."""
    tls_cert: Annotated[
        str, Flag("--tls-cert", "Serve https with the certificate of this PEM file.", parse=_absolute)
    ] = ""
    """Its chain behind it; empty: http."""
    tls_key: Annotated[str, Flag("--tls-key", "Its private key, a PEM file without a password.", parse=_absolute)] = ""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 1_024
    """So many clients may be connected, where the process may have as many descriptors (`ulimit -n`)."""

    def __post_init__(self) -> None:
        for tenant in self.tenants.values():
            if not is_subject_token(tenant):
                rule = f"a word of 1 to {MAX_SUBJECT_TOKEN} letters, digits, - and _"
                raise ValueError(f"a tenant's name is {rule}, not {tenant[:40]!r} of {len(tenant)} characters")
        if not all(_API_KEY.fullmatch(key) for key in self.tenants):
            raise ValueError("an API key is a word of 1 to 256 visible ASCII characters")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"cors_origins are like https://chat.example.org, without a path, not {origin!r}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key go together: https needs both")
        if self.no_auth and self.tenants:
            raise ValueError("no_auth says that nobody is asked for a key, and tenants has keys: leave one out")
        if not (is_loopback(self.host) or self.tenants or self.no_auth):
            raise ValueError(
                f"host {self.host!r} lets others in, and no API key is asked for: "
                "set tenants, or no_auth = true if that is meant"
            )


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policy: Annotated[
        str, Flag("--policy", "Placement: cost, least_loaded, round_robin, affinity, or package.module:name.")
    ] = "cost"
    pull_tokens_min: Annotated[
        int, msgspec.Meta(ge=0), Flag("--pull-tokens-min", "Fewer tokens than this are computed, not read.")
    ] = 64
    unsplit_tokens_max: int = 512
    """A decode worker that lacks at most this many tokens of a prompt, and holds most of it, may serve it alone."""
    silent_after_ms: WaitMs = 3_000
    """A worker that has sent nothing for this long is taken for dead."""
    ping_interval_ms: PaceMs = 200
    """A worker that has sent nothing for two of these is asked whether it lives, and again after each."""
    suspect_after_ms: WaitMs = 600
    """A worker that neither answers nor speaks for this long gets nothing new while another one could take it."""
    max_queue_ms: int = 30_000
    """A request that would wait longer is refused, where rates are measured."""
    max_queued_requests: int = 256
    """The same while they are not: the most requests that may wait on every worker."""
    replicate: Annotated[
        bool, Flag("--replicate/--no-replicate", "Copy the KV of answers elsewhere, so that it outlives its worker.")
    ] = False
    wait_for_duplicates: bool = True
    """Place a prompt where another one that begins alike is being computed, or have it read from there."""


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    block_size: Annotated[
        int, msgspec.Meta(ge=0, le=1024), Flag("--block-size", "Tokens of a block; 0: 16, with vLLM 32.")
    ] = 0
    kv_bytes: Annotated[int, msgspec.Meta(ge=1), Flag("--kv-mib", "KV memory of one worker, in MiB.", unit=MIB)] = (
        512 * MIB
    )
    """Size of its arena. Pages are touched only as blocks are used."""
    token_budget: Annotated[int, msgspec.Meta(ge=16), Flag("--token-budget", "Most tokens of one engine step.")] = 512
    """A longer prompt is computed in chunks of this size."""
    max_queued: int = 1_024
    """Requests that may wait for blocks on one worker; one more is refused."""
    num_threads: Annotated[
        int, msgspec.Meta(ge=0), Flag("--threads", "Threads of one worker; 0 shares the cores out.")
    ] = 0
    """Of its tensor operations. A worker that is served alone has for 0 all the cores that the process may use."""
    device: Annotated[str, Variable("KVMESH_DEVICE")] = "auto"
    """Where the model runs and its KV lies: cpu, cuda (the first card), cuda:N, or auto (a card if there is one)."""
    carrier: Annotated[Carrier, Flag("--carrier", "How KV crosses.")] = "auto"
    plane_host: Annotated[
        str, Flag("--plane-host", "Address where KV is read; one that other machines reach, for them.")
    ] = "127.0.0.1"
    """Where the data plane listens."""
    plane_encryption: Annotated[
        PlaneEncryption, Flag("--plane-encryption", "Encrypt KV that crosses tcp; auto: to any address but loopback.")
    ] = "auto"
    plane_ports: Annotated[
        str, Flag("--plane-ports", "Ports for that, one a worker or store, as 7000-7015; any if left out.")
    ] = ""
    ways: Ways = "warn"
    """What is done where another machine's holder and this one cannot read from each other, as it starts: nothing, a
    line in the log, or it does not start ("require")."""
    advertise_host: Annotated[
        str,
        Variable("KVMESH_ADVERTISE_HOST"),
        Flag("--advertise-host", "The address that others are given to read it; --plane-host if left out."),
    ] = ""
    """Of this machine, as other machines reach it."""
    lease_ms: WaitMs = 30_000
    digests: bool = True
    prefix_cache: Annotated[
        bool, Flag("--prefix-cache/--no-prefix-cache", "Keep the KV of earlier requests and serve from it.")
    ] = True
    wait_for_duplicates: bool = True
    """Wait for blocks that another request of the same prompt fills, in place of filling them as well."""
    drain_s: Annotated[float, msgspec.Meta(ge=0), Flag("--drain-s", "How long a worker may take to leave at most.")] = (
        30.0
    )
    """To finish what runs; what is left then goes on elsewhere."""
    leave_bytes: int = 512 * MIB
    """A worker that leaves offers so much of what it keeps to a store or its peers, first what the directory was asked
    for most, then what was used last; 0: nothing."""
    leave_s: float = 10.0
    """How long it waits at most until they have read it."""
    fence_after_ms: WaitMs = 2_500
    """A worker whose clock stood still for this long takes itself for lost, before anybody else does."""
    wire_dtype: Annotated[
        WireDtype,
        Flag("--wire-dtype", "How KV is read over tcp: as it is, compressed, or (auto) where that is quicker."),
    ] = "same"

    def __post_init__(self) -> None:
        check_device(self.device)
        ports_of(self.plane_ports)
        if self.advertise_host and self.advertise_host in EVERYWHERE:
            raise ValueError(f"advertise_host {self.advertise_host!r} is nowhere that others could connect to")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What computes on the workers. `kv_format`, `kv_bytes` and `args` are vLLM's."""

    name: Annotated[EngineName, Flag("--engine", "What computes: transformers with our attention, or vLLM.")] = (
        "transformers"
    )
    process: bool = True
    """In a process of its own beside each worker, or else on a thread in it. On a card it is on a thread."""
    step_timeout_s: Annotated[
        float,
        msgspec.Meta(ge=0.1),
        Flag("--step-timeout-s", "An engine whose step takes longer hangs, and is started again."),
    ] = 300.0
    """As long as vLLM waits for its own workers."""
    spares: Annotated[
        int,
        msgspec.Meta(ge=0),
        Flag("--spare-engines", "Idle engines of each worker, loaded: one takes over where an engine dies."),
    ] = 0
    kv_format: str = ""
    """What the bytes of its KV mean, which no other format is mixed with; `kvmesh up` fills it in."""
    kv_bytes: Annotated[
        int, msgspec.Meta(ge=0), Flag("--engine-kv-mib", "vLLM's own KV memory, in MiB; 0: as --kv-mib.", unit=MIB)
    ] = 0
    """Beside the worker's arena."""
    args: Annotated[
        dict[str, Any],
        Flag("--engine-args", "Further arguments of vLLM's engine, as a JSON object.", parse=_json_object, shown=""),
    ] = {}

    def __post_init__(self) -> None:
        if self.name == "transformers" and (self.kv_format or self.kv_bytes or self.args):
            raise ValueError('engine.kv_format, kv_bytes and args are for engine.name = "vllm": leave them out')
        if self.spares and not self.process:
            raise ValueError("engine.spares need engine.process = true")
        try:
            _toml_value(self.args)
        except ValueError as error:
            raise ValueError(f"engine.args: {error}") from error


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV store. `url`: empty for host memory alone, `disk`, `redis://host:port/0` or `valkey://…`."""

    url: str = ""
    path: Annotated[
        str, Flag("--store-dir", "Folder of `--store disk`; .kvmesh/store if left out.", parse=_absolute)
    ] = ""
    memory_bytes: Annotated[
        int, msgspec.Meta(ge=1), Flag("--memory-gib", "Memory for what others bring, in GiB.", unit=1 << 30)
    ] = 512 * MIB
    max_bytes: Annotated[
        int, msgspec.Meta(ge=1), Flag("--store-mib", "Bound of the store's tier behind memory, in MiB.", unit=MIB)
    ] = 4096 * MIB
    timeout_ms: WaitMs = 1_000
    """How long a reader may be kept waiting for the tier behind memory; what is not there by then is a miss."""
    ttl_s: int = 7 * 24 * 3600
    """After so long without a use a server's copy ends by itself, should no store be there to end it."""


class AttachConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The holder that `vllm serve` attaches to; its memory is `store.memory_bytes`."""

    socket: Annotated[str, Flag("--socket", "Unix socket that servers attach at.", parse=_absolute)] = ""
    """Empty: attach.sock in the state folder."""
    tenant: str = ""
    """Whose the blocks of all attached servers are."""
    canary_s: Annotated[float, msgspec.Meta(ge=10)] = 600.0
    """So often a server that shares proves itself again."""
    prefix_port: Annotated[
        int,
        msgspec.Meta(ge=-1, le=65_535),
        Flag("--prefix-port", "Port where routers ask what is held of a prompt (/v1/kv/prefix)."),
    ] = -1
    """0 finds a port, -1: nowhere. Whoever asks learns whether somebody has sent a prompt."""
    prefix_host: str = "127.0.0.1"


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Spans go to files in `trace_dir`, to `otlp_endpoint`, or to both."""

    otlp_endpoint: Annotated[str, Flag("--otlp", "OTLP/HTTP endpoint for traces; they go to files too.")] = ""
    trace_dir: str = ""
    trace_mib: Annotated[int, msgspec.Meta(ge=1)] = 64
    """What one service's span files may take, in MiB; the oldest go first."""
    metrics_port: Annotated[int, msgspec.Meta(ge=-1, le=65_535), Variable("KVMESH_METRICS_PORT")] = -1
    """Where every service serves its metrics; 0 finds a port, -1: nowhere."""
    metrics_host: str = "127.0.0.1"
    sample_ratio: Annotated[
        SampleRatio,
        Flag("--sample-ratio", "Share of traces that is kept; what fails or is slow always is."),
        Variable("KVMESH_SAMPLE_RATIO"),
    ] = 1.0
    """Of those that begin here; a client's traceparent decides for itself."""
    slow_ttft_ms: int = 5_000
    """A request whose first token took longer is kept, sampled or not; so is one that failed or was resumed."""
    slow_request_ms: int = 60_000
    """The same of its whole answer."""


class Time(NamedTuple):
    """A setting, as it is called and written."""

    name: str
    value: str
    ms: float

    @property
    def setting(self) -> str:
        """The name without what it is multiplied by."""
        return self.name.split()[-1]


def _set_ms(name: str, value: int) -> Time:
    return Time(name, f"{value}", value)


def _set_s(name: str, value: float) -> Time:
    return Time(name, f"{value:g}", value * 1000)


class Relation(NamedTuple):
    """Of two times, which the code relies on to be in this order. `because`: what would go wrong otherwise."""

    shorter: Time
    longer: Time
    because: str

    def check_order(self) -> None:
        """Raise ValueError with both names and values where the order is wrong."""
        if self.shorter.ms < self.longer.ms:
            return
        raise ValueError(
            f"{self.shorter.name} = {self.shorter.value} must be shorter than "
            f"{self.longer.name} = {self.longer.value}: {self.because}. "
            f"Lower {self.shorter.setting} or raise {self.longer.setting}"
        )


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a service of the mesh needs.

    `ticket_secrets`: the first signs the data plane's tickets, all of them verify; equal on all workers and stores, and
    read again from the file at a SIGHUP. `content_secrets`: the first proves which content a block has, all of them are
    believed; as long as a store's blocks are to be believed, its secret stays here. Empty: the ticket secrets.
    `tenant_seed`: from it gateways have the key with which they sign whose a
    request is; no one else needs it. `tenant_public_key`: what verifies that; empty: the seed's.

    Times that rely on each other are checked wherever one is made: from a file, in code, or by replacing a part.
    """

    ticket_secrets: tuple[str, ...] = ()
    content_secrets: tuple[str, ...] = ()
    tenant_seed: str = ""
    tenant_public_key: str = ""
    nats: NatsConfig = NatsConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    worker: WorkerConfig = WorkerConfig()
    engine: EngineConfig = EngineConfig()
    store: StoreConfig = StoreConfig()
    attach: AttachConfig = AttachConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    times: Times = Times()

    def __post_init__(self) -> None:
        for relation in relations_of(self):
            relation.check_order()
        if self.engine.name == "vllm" and self.worker.wire_dtype != "same":
            raise ValueError(
                f'worker.wire_dtype = "{self.worker.wire_dtype}" compresses token by token, and KV of engine.name = '
                f'"{self.engine.name}" has only whole blocks: set worker.wire_dtype = "same"'
            )

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.worker.block_size or BLOCK_SIZES[self.engine.name]


def relations_of(config: MeshConfig) -> list[Relation]:
    """Return every order of two times that the code relies on."""
    # Name each time as mesh.toml does: an error about two of them names the settings to change.
    ping_ms = config.scheduler.ping_interval_ms
    overdue = Time(
        f"{OVERDUE_PINGS} × scheduler.ping_interval_ms", f"{OVERDUE_PINGS * ping_ms}", OVERDUE_PINGS * ping_ms
    )
    suspect = _set_ms("scheduler.suspect_after_ms", config.scheduler.suspect_after_ms)
    silent = _set_ms("scheduler.silent_after_ms", config.scheduler.silent_after_ms)
    fence = _set_ms("worker.fence_after_ms", config.worker.fence_after_ms)
    lease = _set_ms("worker.lease_ms", config.worker.lease_ms)
    accept = _set_s("gateway.accept_timeout_s", config.gateway.accept_timeout_s)
    request = _set_s("gateway.request_timeout_s", config.gateway.request_timeout_s)
    progress = _set_ms("gateway.progress_after_ms", config.gateway.progress_after_ms)
    worker_silent = _set_ms("gateway.worker_silent_ms", config.gateway.worker_silent_ms)
    store = _set_ms("store.timeout_ms", config.store.timeout_ms)
    times = config.times
    # A load comes every two beats. Two loads are written as four beats, because only the beat is a setting.
    loads_ms = 2 * times.presence.load_interval_ms
    two_loads = Time("4 × times.presence.beat_interval_ms", f"{loads_ms}", loads_ms)
    partitioned = _set_ms("times.presence.partitioned_after_ms", times.presence.partitioned_after_ms)
    tick = _set_ms("times.worker.tick_ms", times.worker.tick_ms)
    lease_answer = _set_ms("times.worker.lease_answer_ms", times.worker.lease_answer_ms)
    forget = _set_ms("times.directory.forget_after_ms", times.directory.forget_after_ms)
    idle = _set_s("times.plane.max_idle_s", times.plane.max_idle_s)
    holder_idle = _set_s("times.plane.holder_idle_s", times.plane.holder_idle_s)
    return [
        Relation(overdue, suspect, "a worker is suspect when a ping was not answered"),
        Relation(suspect, silent, "a worker is suspect before it is dead"),
        Relation(two_loads, silent, "a worker that answers no pings is judged by its loads"),
        Relation(fence, silent, "a worker that stood still must notice before the scheduler gives its work to others"),
        Relation(
            fence, worker_silent, "a worker that stood still must notice before a gateway gives its work to others"
        ),
        Relation(tick, fence, "a worker would take every pause between two ticks for standing still"),
        Relation(tick, lease, "a lease whose stream moves is renewed by the timer"),
        Relation(suspect, worker_silent, "the worker that a gateway gives up must get nothing new meanwhile"),
        Relation(progress, worker_silent, "a worker is asked before it is taken for lost"),
        Relation(accept, worker_silent, "a worker whose reply is missing is asked before it is taken for lost"),
        Relation(partitioned, worker_silent, "a gateway that is cut off would take its workers for lost"),
        Relation(accept, request, "a request must outlive one reply that is lost"),
        Relation(store, lease_answer, "who asked would have gone before the store answers"),
        Relation(two_loads, partitioned, "who hears only loads would take itself for cut off"),
        Relation(two_loads, forget, "a directory would forget holders that are well"),
        Relation(idle, holder_idle, "a holder would cut connections that its readers mean to use again"),
    ]


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices of a list with commas between. Raises ValueError."""
    try:
        return tuple(check_device(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{error}; one for all workers, or one each: cuda:0,cuda:1") from error


def dtype_of(config: MeshConfig, checkpoint_dtype: str) -> str:
    """Return the dtype of this mesh's weights and KV: the same for every service that reads the same mesh.toml.

    `checkpoint_dtype`: what the checkpoint's files have.
    """
    dtype = _settled_dtype(config)
    return checkpoint_dtype if dtype == "checkpoint" else dtype


def with_device(config: MeshConfig, device: str) -> MeshConfig:
    """Return the configuration of a worker that runs on another device than mesh.toml says. Its dtype stays the mesh's.

    Raises UserError for what is no device.
    """
    try:
        return changed(config, {"worker.device": device, "model.dtype": _settled_dtype(config)})
    except ValueError as error:
        raise UserError(f"--device: {error}") from error


def _settled_dtype(config: MeshConfig) -> Dtype:
    if config.model.dtype != "auto":
        return config.model.dtype
    return "checkpoint" if is_card(config.worker.device) else "float32"


def is_card(device: str) -> bool:
    """Return whether a device is named that is a card. "auto" names none."""
    return device.startswith("cuda")


def load_config(path: Path) -> MeshConfig:
    """Read `mesh.toml`; environment variables fill what containers set. Raises UserError for a bad file."""
    try:
        config = msgspec.convert(_with_one_url(msgspec.toml.decode(path.read_text("utf-8"))), MeshConfig)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; pass --config with a mesh.toml") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no valid mesh configuration: {error}") from error
    if config.engine.name == "vllm" and not config.engine.kv_format:
        raise UserError(f'{path}: engine.name = "vllm" needs an engine.kv_format: `kvmesh up` fills it in')
    return at_scale(apply_environment(config))


def _with_one_url(found: Any) -> Any:
    """Put commas between the servers of a list, as the flag and the variable have them."""
    nats = found.get("nats")
    if isinstance(nats, dict) and isinstance(urls := nats.get("url"), list):  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        nats["url"] = ",".join(map(str, urls))  # pyright: ignore[reportUnknownArgumentType]
    return found


def at_scale(config: MeshConfig) -> MeshConfig:
    """Return the configuration with every wait multiplied by `times.scale`. Raises UserError where times that rely on
    each other do not fit any more."""
    try:
        return scaled(config, config.times.scale)
    except ValueError as error:
        raise UserError(f"at times.scale = {config.times.scale:g}: {error}") from error


def apply_environment(config: MeshConfig) -> MeshConfig:
    """Return the configuration with the variables laid over it that its fields declare, and OpenTelemetry's variables
    of exporters and samplers. Raises UserError."""
    texts = {s.variable: (s, text) for s in settings_of(config) if (text := os.environ.get(s.variable, ""))}
    for variable, (setting, text) in texts.items():
        try:
            config = changed(config, {setting.path: msgspec.convert(text, setting.type, strict=False)})
        except (ValueError, msgspec.ValidationError) as error:
            raise UserError(f"{variable} = {text!r}: {error}") from error
    if (endpoint := _otlp_variable("ENDPOINT")) and not config.telemetry.otlp_endpoint:
        config = changed(config, {"telemetry.otlp_endpoint": endpoint})
    otlp_target(config.telemetry)
    if (ratio := _otel_ratio()) and "KVMESH_SAMPLE_RATIO" not in texts:
        try:
            config = changed(config, {"telemetry.sample_ratio": msgspec.convert(ratio, SampleRatio, strict=False)})
        except msgspec.ValidationError as error:
            raise UserError(f"OTEL_TRACES_SAMPLER_ARG = {ratio!r}: {error}") from error
    return config


class OtlpTarget(NamedTuple):
    """Where spans go. `timeout_s`: None where OpenTelemetry's variables set it."""

    url: str
    is_grpc: bool
    timeout_s: float | None


def otlp_target(telemetry: TelemetryConfig) -> OtlpTarget | None:
    """Return where spans go by the configuration and OpenTelemetry's variables; None: nowhere. Raises UserError.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is taken as it is; another address is completed for HTTP
    (https://opentelemetry.io/docs/specs/otel/protocol/exporter).
    """
    url = telemetry.otlp_endpoint
    check_endpoint(url)
    is_off = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    if not url or is_off:
        return None
    protocol = _otlp_variable("PROTOCOL") or "http/protobuf"
    if protocol not in ("http/protobuf", "grpc"):
        raise UserError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}: spans are sent by http/protobuf or grpc")
    timeout_s = None if _otlp_variable("TIMEOUT") else OTLP_TIMEOUT_S
    is_whole = url == os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or urlsplit(url).path.endswith(TRACES_PATH)
    is_complete = is_whole or protocol == "grpc"
    return OtlpTarget(url if is_complete else url.rstrip("/") + TRACES_PATH, protocol == "grpc", timeout_s)


def _otlp_variable(name: str) -> str:
    """Return what OpenTelemetry's variables set for traces, or else for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def check_endpoint(url: str) -> None:
    """Raises UserError where this is neither empty nor the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        is_server = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_server = False
    if url and not is_server:
        raise UserError(f"--otlp or OTEL_EXPORTER_OTLP_ENDPOINT: {url!r} is no address like http://127.0.0.1:4318")


def environment_devices() -> tuple[str, ...]:
    """Return KVMESH_DEVICE, which stands for `--device`; empty where it is not set. Raises UserError."""
    text = os.environ.get("KVMESH_DEVICE", "")
    try:
        return parse_devices(text) if text else ()
    except ValueError as error:
        raise UserError(f"KVMESH_DEVICE = {text!r}: {error}") from error


def environment_broker() -> str:
    """Return KVMESH_NATS_URL, which stands for `--nats`; empty where it is not set."""
    return os.environ.get("KVMESH_NATS_URL", "")


def _otel_ratio() -> str:
    """Return the ratio that OpenTelemetry's own variables ask for, if their sampler is one that has a ratio."""
    sampler = os.environ.get("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    return os.environ.get("OTEL_TRACES_SAMPLER_ARG", "") if sampler.endswith("traceidratio") else ""


def require_secrets(config: MeshConfig) -> tuple[bytes, ...]:
    """Return the ticket secrets. Raises UserError where none is set: an unsigned data plane is not offered."""
    return _required("ticket", config.ticket_secrets)


def require_content_secrets(config: MeshConfig) -> tuple[bytes, ...]:
    """Return the content secrets. Raises UserError for one that is too short."""
    return _required("content", config.content_secrets or config.ticket_secrets)


def _required(name: str, secrets: tuple[str, ...]) -> tuple[bytes, ...]:
    if not secrets or min(map(len, secrets)) < MIN_SECRET_CHARS:
        raise UserError(
            f"no {name} secret: `{name}_secrets` of the holders' key file, which `kvmesh bus-config` writes, is a list "
            f"of texts of {MIN_SECRET_CHARS} characters or more"
        )
    return tuple(secret.encode() for secret in secrets)


def write_config(config: MeshConfig, path: Path) -> None:
    """Write `mesh.toml`, readable by its owner only (it carries the secrets)."""
    document = msgspec.to_builtins(config)
    lines = [
        f"{key} = {_toml_value(document.pop(key))}" for key, value in [*document.items()] if type(value) is not dict
    ]
    for section, values in document.items():
        if values:
            lines += ["", f"[{section}]"] + [f"{key} = {_toml_value(value)}" for key, value in values.items()]
    write_private(path, "\n".join(lines) + "\n")


def fresh_secret() -> str:
    return secrets.token_urlsafe(32)


STATE_DIR = ".kvmesh"


def state_dir() -> Path:
    """Return where a running mesh leaves its traces and its address: KVMESH_STATE_DIR, or `.kvmesh` here."""
    return Path(os.environ.get("KVMESH_STATE_DIR") or STATE_DIR).absolute()


def is_state_dir_named() -> bool:
    """Return whether KVMESH_STATE_DIR names the state folder."""
    return bool(os.environ.get("KVMESH_STATE_DIR"))


def set_environment(values: Mapping[str, str]) -> None:
    """Set what a library reads when it is imported."""
    os.environ.update(values)


READABLE_KEYS = "KVMESH_READABLE_KEYS"


def takes_readable_keys() -> bool:
    """Return whether keys are taken that others may read."""
    return os.environ.get(READABLE_KEYS) == "1"


def child_environment() -> dict[str, str]:
    """Return the environment for the processes that `kvmesh up` starts: it has decided on their devices and broker."""
    return {name: value for name, value in os.environ.items() if name not in ("KVMESH_DEVICE", "KVMESH_NATS_URL")}
