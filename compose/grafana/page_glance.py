"""Mesh at a glance: is the mesh well, and if not, where?"""

from panels import (
    DURATION,
    TPOT,
    TTFT,
    USAGE,
    Panel,
    Query,
    Steps,
    bars,
    figure,
    lines,
    page,
    process,
    quantile,
    quantiles,
    rate,
)

REQUESTS = "kvmesh_gateway_requests_total"

FAILING = f'sum(rate({REQUESTS}{{outcome!~"ok|invalid|client_gone"}}[$__rate_interval]))'
WELL: list[Panel] = [
    figure(
        "Requests", "HTTP requests that end in a second. 0 under load: see the alerts.", "reqps", Query(rate(REQUESTS))
    ),
    figure(
        "Failing",
        "Share of requests that end in an error of ours. Above 0: see *Requests by outcome* for the code, then "
        "`kvmesh trace` of one of them.",
        "percentunit",
        Query(f"({FAILING} or vector(0)) / (sum(rate({REQUESTS}[$__rate_interval])) > 0) or vector(0)"),
        steps=Steps(0.001, 0.01),
    ),
    figure(
        "TTFT p95",
        "Time to first token. Too long: *Where did TTFT go* says which part of it.",
        "s",
        Query(quantile(0.95, TTFT)),
        steps=Steps(2, 5),
    ),
    figure(
        "Oldest unfinished request",
        "Ages beyond the longest answers you serve: look for the request with `kvmesh top`, and whether a worker is "
        "stopped.",
        "s",
        Query("max(kvmesh_unfinished_requests_oldest_seconds)"),
        steps=Steps(120, 600),
    ),
    figure(
        "Stranded KV",
        "Blocks that nobody reads under a lease, or that no request knows of. Above 0 for longer than seconds: see "
        "*KV: who holds what* for the holder, and whether its reader is alive.",
        "short",
        Query('sum(kvmesh_unread_blocks) + sum(max by (worker) (kvmesh_kv_blocks{state="orphaned"}))'),
        steps=Steps(1, 64),
    ),
    figure(
        "Alerts",
        "Alerts that fire. Each one's description says what to do (Prometheus, page Alerts).",
        "short",
        Query('count(ALERTS{alertstate="firing"}) or vector(0)'),
        steps=Steps(1, 2),
    ),
    bars(
        "Workers",
        "Workers that a scheduler knows. A role without a ready one serves nothing: start one. `suspect`: it does "
        "not answer, and gets no new work; look whether its machine swaps or its process is stopped.",
        "short",
        Query("max by (worker_role, state) (kvmesh_workers) > 0", "{{worker_role}} {{state}}"),
    ),
    lines(
        "Services that do not answer",
        "Services whose metrics cannot be had. For longer than a restart: read the service's log; a service that "
        "ends ten times in a minute is given up.",
        "short",
        Query('count by (role) (up{role!=""} == 0) or vector(0)', "{{role}}"),
        steps=Steps(1, 1),
    ),
]
REQUESTS: list[Panel] = [
    lines(
        "Requests by outcome",
        "`overloaded`: add workers or lower the load. `worker_failed`: a worker died, look at its log. `deadline`: "
        "see *Where did TTFT go*.",
        "reqps",
        Query(rate(REQUESTS, "outcome"), "{{outcome}}"),
        stacked=True,
    ),
    lines(
        "Time to first token",
        "From the request's body being read to token 0 being written. A dot is one request: it leads to its trace.",
        "s",
        *quantiles(TTFT, exemplars=True),
    ),
    lines(
        "Time per output token",
        "Mean of an answer's tokens after the first. Rising: decode batches grow (*One worker*), add decode workers.",
        "s",
        *quantiles(TPOT, exemplars=True),
    ),
    lines(
        "Request duration",
        "Until the last token. Rising with steady time per token: answers got longer.",
        "s",
        *quantiles(DURATION, exemplars=True),
    ),
    lines(
        "Tokens",
        "Tokens of prompts and answers. Compare with *Engine tokens*: what is not computed was reused.",
        "short",
        Query(rate(f"{USAGE}_sum", "gen_ai_token_type"), "{{gen_ai_token_type}} a second"),
    ),
    lines(
        "Engine tokens",
        "Tokens that the engines compute. 0 with requests under way: an engine hangs, see *One worker*.",
        "short",
        Query(rate("kvmesh_engine_tokens_total", "phase"), "{{phase}} a second"),
    ),
]
WORK: list[Panel] = [
    lines(
        "Unfinished requests by age",
        "Old ones that do not go away: a worker holds them up, or a client reads slowly.",
        "short",
        Query("sum by (age) (kvmesh_unfinished_requests)", "{{age}}"),
        stacked=True,
    ),
    lines(
        "Requests on workers",
        "Queued for blocks: the pools are full, add workers or `--kv-mib`.",
        "short",
        Query("sum by (worker, phase) (kvmesh_worker_requests)", "{{worker}} {{phase}}"),
    ),
    lines(
        "Scheduler's decisions",
        "Split over two workers, or alone on one; with KV read from others, or without. Refused: see refusals.",
        "reqps",
        Query(rate("kvmesh_scheduler_decisions_total", "kind"), "{{kind}}"),
        stacked=True,
    ),
    lines(
        "Refusals",
        "`overloaded`: too much work. `no_worker`: a role is missing. `gone`: a hint was stale, which costs a "
        "recompute. `fingerprint`: workers of different models or settings share this mesh.",
        "reqps",
        Query(rate("kvmesh_refusals_total", "what", "reason") + " > 0 or vector(0)", "{{what}} {{reason}}"),
    ),
    lines(
        "Retries and resumed answers",
        "Attempts after a first, and answers that went on elsewhere. Steadily above 0: a worker keeps dying.",
        "reqps",
        Query(rate("kvmesh_gateway_retries_total"), "retries"),
        Query(rate("kvmesh_resumes_total"), "resumed"),
        Query(rate("kvmesh_workers_declared_left_total", "reason"), "worker {{reason}}"),
    ),
    lines(
        "Restarts",
        "Processes that were started again in the last quarter of an hour. Read the log of what keeps ending.",
        "short",
        Query(process("changes(process_start_time_seconds[15m])"), "{{name}}"),
        steps=Steps(1, 3),
    ),
]
BUS: list[Panel] = [
    lines(
        "NATS round trips, p95",
        "From a question to its answer, the answerer's work included. All of them slow: look at the broker. One of "
        "them: at who answers it.",
        "s",
        Query(quantile(0.95, "kvmesh_bus_request_seconds", "subject"), "{{subject}}"),
    ),
    lines(
        "Unanswered and dropped",
        "`no_responders`: who should answer is away. `timed_out`: alive, but drowning. `too_slow`: a service cannot "
        "read what it is sent. `undecodable`: somebody speaks another version.",
        "short",
        Query(rate("kvmesh_bus_request_failures_total", "reason"), "no answer: {{reason}}"),
        Query(rate("kvmesh_dropped_messages_total", "reason"), "dropped: {{reason}}"),
    ),
]
ROWS = [("Is it well?", WELL), ("What clients see", REQUESTS), ("What is done", WORK), ("The bus", BUS)]
PAGE = page("kvmesh-glance", "Mesh at a glance", "Is the mesh well, and if not, where?", ROWS)
