"""Every metric of the mesh on one page. The table in docs/metrics.md is generated from METRICS.

`gen_ai_*` follow OpenTelemetry's semantic conventions for generative AI (dots become underscores, the unit a suffix),
with buckets added below and above theirs. Units are seconds, bytes, tokens and blocks.
"""

from typing import Any

from schemas import subjects
from schemas.attach import NotSaved
from schemas.kv import LeaseEnd, ReadEnd
from schemas.request import RefusalReason
from services.metrics import Labels, MetricName
from services.telemetry.names import TTFT_PARTS

GATEWAY: Labels = ("gateway",)
SCHEDULER: Labels = ("scheduler",)
DIRECTORY: Labels = ("directory",)
WORKERS: Labels = ("prefill", "decode", "aggregated")
ATTACH: Labels = ("attach",)
HOLDERS: Labels = (*WORKERS, "store", *ATTACH)
ALL: Labels = ("gateway", "scheduler", "directory", *HOLDERS)

PROVIDER = "kvmesh"
AGES: tuple[tuple[str, float], ...] = (("<1s", 1), ("1-5s", 5), ("5-30s", 30), ("30-120s", 120))
"""Upper bounds in seconds; what is older is OLDEST."""
OLDEST = ">120s"
AGE_NAMES: Labels = (*(name for name, _ in AGES), OLDEST)
BLOCK_STATES: Labels = ("free", "cached", "running", "leased", "orphaned")
TRANSFER_OUTCOMES: Labels = tuple(ReadEnd)
LEASE_OUTCOMES: Labels = tuple(end for end in LeaseEnd if end is not LeaseEnd.UNNEEDED)
STRANDED: Labels = (LeaseEnd.READER_LEFT, LeaseEnd.SILENT, LeaseEnd.EXPIRED)
"""Ends of a lease that its reader did not cause: until then its blocks were held for nothing."""
REASONS: Labels = tuple(RefusalReason)
ATTACH_TOKEN_KINDS: Labels = ("asked", "loaded")
ATTACH_BLOCK_KINDS: Labels = ("saved", "brought", "compared", "damaged")

_MESSAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_PART_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60)
_TPOT_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_REQUEST_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 600)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BYTES = tuple(float(4**power) for power in range(7, 18))


def label_of(subject: subjects.Subject[Any, Any]) -> str:
    """Return a subject's pattern with wildcards: the label of its messages, of which there are few."""
    return subject.pattern.replace("{}", "*")


_GEN_AI: Labels = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


# Requests. Served by the gateway.

TTFT = MetricName(
    "histogram",
    "gen_ai_server_time_to_first_token_seconds",
    "From the request's body being read to token 0 being written",
    _GEN_AI,
    buckets=_TTFT_BUCKETS,
    roles=GATEWAY,
)
TPOT = MetricName(
    "histogram",
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time of an answer's tokens after its first",
    _GEN_AI,
    buckets=_TPOT_BUCKETS,
    roles=GATEWAY,
)
DURATION = MetricName(
    "histogram",
    "gen_ai_server_request_duration_seconds",
    "From the request's body being read to its end; error_type is empty for what went well",
    (*_GEN_AI, "error_type"),
    buckets=_REQUEST_BUCKETS,
    roles=GATEWAY,
)
TOKEN_USAGE = MetricName(
    "histogram",
    "gen_ai_client_token_usage",
    "Tokens of a request: input, output",
    (*_GEN_AI, "gen_ai_token_type"),
    buckets=_TOKENS,
    roles=GATEWAY,
)
TTFT_PART = MetricName(
    "histogram",
    "kvmesh_ttft_part_seconds",
    "Where the time to first token went: its parts add up to it",
    ("part",),
    (TTFT_PARTS,),
    _PART_BUCKETS,
    GATEWAY,
)
ITL = MetricName(
    "histogram",
    "kvmesh_gateway_itl_seconds",
    "Gap between two writes of tokens of one choice",
    buckets=_MESSAGE_BUCKETS,
    roles=GATEWAY,
)
REQUESTS = MetricName(
    "counter",
    "kvmesh_gateway_requests",
    "HTTP requests that have ended",
    ("route", "status", "outcome"),
    roles=GATEWAY,
)
PROMPT_TOKENS = MetricName(
    "counter",
    "kvmesh_gateway_prompt_tokens_by_source",
    "Where the KV of prompts came from: cached there, transferred, recomputed",
    ("source",),
    (("cached", "transferred", "recomputed"),),
    roles=GATEWAY,
)
RETRIES = MetricName("counter", "kvmesh_gateway_retries", "Attempts after a request's first", roles=GATEWAY)
RESUMES = MetricName(
    "counter", "kvmesh_resumes", "Attempts that went on with an answer", roles=GATEWAY, is_sampled=True
)
PROGRESS_ASKED = MetricName(
    "counter",
    "kvmesh_progress_asked",
    "Questions after requests that had been quiet",
    roles=GATEWAY,
    is_sampled=True,
)
RUNNING = MetricName("gauge", "kvmesh_gateway_running_requests", "Requests under way", roles=GATEWAY, is_sampled=True)
UNFINISHED = MetricName(
    "gauge", "kvmesh_unfinished_requests", "Requests under way by age", ("age",), roles=GATEWAY, is_sampled=True
)
OLDEST_REQUEST = MetricName(
    "gauge",
    "kvmesh_unfinished_requests_oldest_seconds",
    "Age of the oldest request under way",
    roles=GATEWAY,
    is_sampled=True,
)
OVERDUE = MetricName(
    "gauge",
    "kvmesh_unfinished_requests_overdue_seconds",
    "How long the request that should have ended first is over its deadline; 0: none is",
    roles=GATEWAY,
    is_sampled=True,
)
HTTPS_DAYS = MetricName(
    "gauge",
    "kvmesh_gateway_certificate_days_left",
    "Days until the certificate of --tls-cert ends",
    roles=GATEWAY,
    is_sampled=True,
)

# Placement. Served by the scheduler and the directory.

DECISIONS = MetricName(
    "counter",
    "kvmesh_scheduler_decisions",
    "Placements by kind: split over two workers or alone on one, reading KV from others or not",
    ("kind",),
    (("split", "split_reading", "alone", "alone_reading", "refused"),),
    roles=SCHEDULER,
)
REFUSALS = MetricName(
    "counter",
    "kvmesh_refusals",
    "What was refused: a placement, an attempt (run), a lease",
    ("what", "reason"),
    (("place", "run", "lease"), REASONS),
    roles=(*SCHEDULER, *HOLDERS),
    is_own=True,
)
WORKERS_KNOWN = MetricName(
    "gauge",
    "kvmesh_workers",
    "Workers that the scheduler knows",
    ("worker_role", "state"),
    roles=SCHEDULER,
    is_sampled=True,
)
WORKERS_LEFT = MetricName(
    "counter",
    "kvmesh_workers_declared_left",
    "Workers that the scheduler declared left: died, silent, restarted",
    ("reason",),
    (("died", "silent", "restarted"),),
    roles=SCHEDULER,
)
POLICY_FALLBACKS = MetricName(
    "counter",
    "kvmesh_policy_fallbacks",
    "Requests that least_loaded has placed, as the policy raised, took too long, or answered nonsense",
    roles=SCHEDULER,
)
DIRECTORY_BLOCKS = MetricName(
    "gauge", "kvmesh_directory_blocks", "Blocks that the directory knows", roles=DIRECTORY, is_sampled=True
)
DIRECTORY_HOLDERS = MetricName(
    "gauge", "kvmesh_directory_holders", "Holders that the directory knows", roles=DIRECTORY, is_sampled=True
)

# Blocks and leases.

KV_BLOCKS = MetricName(
    "gauge",
    "kvmesh_kv_blocks",
    "KV blocks: free + cached + running + leased are all; orphaned, of the running, are 0",
    ("worker", "state"),
    roles=(*GATEWAY, *HOLDERS),
    is_sampled=True,
)
ORPHANED_BYTES = MetricName(
    "gauge",
    "kvmesh_kv_orphaned_bytes",
    "KV in use that no request knows of: a leak",
    roles=HOLDERS,
    is_sampled=True,
    is_own=True,
)
LEASES = MetricName(
    "gauge", "kvmesh_leases", "Active leases by age", ("age",), roles=HOLDERS, is_sampled=True, is_own=True
)
UNREAD_BLOCKS = MetricName(
    "gauge",
    "kvmesh_unread_blocks",
    "Blocks that could be read under a lease for a second, and that no stream reads",
    roles=HOLDERS,
    is_sampled=True,
    is_own=True,
)
LEASES_ENDED = MetricName(
    "counter",
    "kvmesh_leases_ended",
    "Leases by how they ended",
    ("outcome",),
    (LEASE_OUTCOMES,),
    roles=HOLDERS,
    is_own=True,
)
STRANDED_BLOCKS = MetricName(
    "counter",
    "kvmesh_stranded_blocks",
    "Blocks that a lease held for a reader that left, fell silent or never came, until they were taken back",
    ("reason",),
    (STRANDED,),
    roles=HOLDERS,
    is_own=True,
)

# Servers that are attached to a holder.

ATTACH_SERVERS = MetricName(
    "gauge", "kvmesh_attach_servers", "Attached servers: that share, that are yet to prove themselves, that are off",
    ("sharing",), roles=ATTACH, is_sampled=True, is_own=True,
)  # fmt: skip
ATTACH_TOKENS = MetricName(
    "counter", "kvmesh_attach_tokens", "Tokens of their requests, and those of them that were loaded", ("what",),
    (ATTACH_TOKEN_KINDS,), roles=ATTACH, is_own=True,
)  # fmt: skip
ATTACH_BLOCKS = MetricName(
    "counter", "kvmesh_attach_blocks", "Blocks that they saved, had brought, compared, found damaged", ("what",),
    (ATTACH_BLOCK_KINDS,), roles=ATTACH, is_own=True,
)  # fmt: skip
ATTACH_NOT_SHARED = MetricName(
    "counter", "kvmesh_attach_not_shared", "Blocks or requests that were not shared", ("reason",), (tuple(NotSaved),),
    roles=ATTACH, is_own=True,
)  # fmt: skip
ATTACH_MISMATCHES = MetricName(
    "counter", "kvmesh_attach_mismatches", "Servers that were found wrong, and share no more", roles=ATTACH, is_own=True
)
ATTACH_LOAD_SECONDS = MetricName(
    "histogram", "kvmesh_attach_load_seconds", "A load, from its turn to its last digest", buckets=_PART_BUCKETS,
    roles=ATTACH, is_own=True,
)  # fmt: skip
ATTACH_HELD_BLOCKS = MetricName(
    "gauge", "kvmesh_attach_held_blocks", "Blocks that are pinned for servers, or empty and their own", roles=ATTACH,
    is_sampled=True, is_own=True,
)  # fmt: skip

# A worker's engine.

ENGINE_STARTS = MetricName(
    "counter", "kvmesh_engine_starts", "Engines that a worker has started", roles=WORKERS, is_sampled=True, is_own=True
)
ENGINE_DEATHS = MetricName(
    "counter", "kvmesh_engine_deaths", "Engines that have died under a worker, which goes on", roles=WORKERS,
    is_sampled=True, is_own=True,
)  # fmt: skip
ENGINE_READY_SECONDS = MetricName(
    "gauge", "kvmesh_engine_ready_seconds", "From when the last engine was wanted until it was ready", roles=WORKERS,
    is_sampled=True, is_own=True,
)  # fmt: skip

ENGINE_SPARES = MetricName(
    "gauge", "kvmesh_engine_spares", "Engines that are loaded, and take over where one dies", roles=WORKERS,
    is_sampled=True, is_own=True,
)  # fmt: skip

# Transfers. Served by the reader.

TRANSFERS = MetricName(
    "counter",
    "kvmesh_transfers",
    "Reads of KV by how they ended; `digest`: damaged bytes were caught",
    ("outcome",),
    (TRANSFER_OUTCOMES,),
    roles=WORKERS,
    is_own=True,
)
TRANSFER_BYTES = MetricName(
    "counter",
    "kvmesh_transfer_bytes",
    "KV that was read, as it lies in memory",
    ("source", "carrier"),
    roles=WORKERS,
    is_own=True,
)
TRANSFER_WIRE_BYTES = MetricName(
    "counter",
    "kvmesh_transfer_wire_bytes",
    "The same as it crossed: less where it was compressed",
    ("source", "carrier"),
    roles=WORKERS,
    is_own=True,
)
TRANSFER_RATE = MetricName(
    "gauge",
    "kvmesh_transfer_rate_bytes_per_second",
    "How quickly the last read brought its bytes, while they came",
    ("source", "carrier"),
    roles=WORKERS,
    is_sampled=True,
    is_own=True,
)
TRANSFER_SECONDS = MetricName(
    "histogram",
    "kvmesh_transfer_seconds",
    "A read from asking to its end; of a hand-over this includes computing the prompt",
    ("kind",),
    (("handover", "fetch"),),
    _PART_BUCKETS,
    WORKERS,
    is_own=True,
)
TRANSFER_SIZE = MetricName(
    "histogram",
    "kvmesh_transfer_size_bytes",
    "KV of one read that landed",
    ("kind",),
    (("handover", "fetch"),),
    _BYTES,
    WORKERS,
    is_own=True,
)
EXPOSED = MetricName(
    "histogram",
    "kvmesh_handover_exposed_seconds",
    "What a hand-over took beyond the prompt's computation",
    buckets=_PART_BUCKETS,
    roles=WORKERS,
    is_own=True,
)
REFUSED_READS = MetricName(
    "counter",
    "kvmesh_plane_refused_reads",
    "Reads that a holder's port refused: bad tickets, and what is no KV stream",
    roles=HOLDERS,
    is_sampled=True,
    is_own=True,
)

# The engine.

WORKER_REQUESTS = MetricName(
    "gauge",
    "kvmesh_worker_requests",
    "Requests on a worker: running, or queued for blocks",
    ("phase",),
    roles=HOLDERS,
    is_sampled=True,
    is_own=True,
)
WAITING_TOKENS = MetricName(
    "gauge",
    "kvmesh_worker_waiting_tokens",
    "Prompt tokens that are still to be computed here, or to be received",
    ("what",),
    roles=WORKERS,
    is_sampled=True,
    is_own=True,
)
STEP_SECONDS = MetricName(
    "histogram",
    "kvmesh_engine_step_seconds",
    "An engine step, by what it computed",
    ("phase",),
    (("prefill", "decode", "mixed"),),
    _PART_BUCKETS,
    WORKERS,
    is_own=True,
)
BATCH_SIZE = MetricName(
    "histogram",
    "kvmesh_engine_batch_sequences",
    "Sequences of an engine step",
    buckets=_BATCH,
    roles=WORKERS,
    is_own=True,
)
ENGINE_TOKENS = MetricName(
    "counter",
    "kvmesh_engine_tokens",
    "Tokens that the engine computed",
    ("phase",),
    (("prefill", "decode"),),
    roles=WORKERS,
    is_own=True,
)
FENCES = MetricName(
    "counter",
    "kvmesh_worker_fences",
    "How often a worker or a store had to begin as a new incarnation",
    roles=HOLDERS,
    is_own=True,
)

# All services.

SERVICE_INFO = MetricName("gauge", "kvmesh_service_info", "1, with the service's name", ("name",), is_sampled=True)
CLOCK_AHEAD = MetricName(
    "gauge",
    "kvmesh_clock_ahead_seconds",
    "By how much the machine's clock is ahead of the scheduler's",
    is_sampled=True,
)
BUS_CA_DAYS = MetricName(
    "gauge",
    "kvmesh_bus_ca_days_left",
    "Days until the first certificate in ca.pem ends, by which the broker is believed",
    is_sampled=True,
)
BUS_SECONDS = MetricName(
    "histogram",
    "kvmesh_bus_request_seconds",
    "A question over NATS until its answer",
    ("subject",),
    buckets=_MESSAGE_BUCKETS,
)
BUS_FAILURES = MetricName(
    "counter",
    "kvmesh_bus_request_failures",
    "Questions over NATS without an answer",
    ("subject", "reason"),
    (
        tuple(label_of(subject) for subject in subjects.SUBJECTS if subject.reply),
        ("no_responders", "timed_out", "unreadable", "failed"),
    ),
)
BUS_CONNECTS = MetricName(
    "counter", "kvmesh_bus_connects", "How often the connection to NATS was made", is_sampled=True
)
DROPPED = MetricName(
    "counter",
    "kvmesh_dropped_messages",
    "Messages that were dropped",
    ("reason",),
    (("undecodable", "too_slow", "handler_failed", "too_many", "malformed", "over_bound", "late"),),
)

METRICS: tuple[MetricName, ...] = tuple(value for value in list(globals().values()) if isinstance(value, MetricName))


def metrics_of(role: str) -> tuple[MetricName, ...]:
    """Return the metrics that a service of this role serves."""
    return tuple(metric for metric in METRICS if not metric.roles or role in metric.roles)


def by_age(ages_s: list[float]) -> dict[str, int]:
    """Return the number of ages (seconds) in each class of AGE_NAMES."""
    counts = dict.fromkeys(AGE_NAMES, 0)
    for age_s in ages_s:
        counts[next((name for name, bound in AGES if age_s < bound), OLDEST)] += 1
    return counts
