"""Where did TTFT go: which part of the time to first token is the long one?"""

from panels import PART, TTFT, Panel, Query, bars, lines, mean, page, quantile, quantiles, rate

WHOLE: list[Panel] = [
    lines(
        "Time to first token",
        "A dot is one request and leads to its trace: begin with a slow one.",
        "s",
        *quantiles(TTFT, exemplars=True),
    ),
    lines(
        "Its parts, mean",
        "They add up to the time to first token. The tallest is where to look: the rows below, in order.",
        "s",
        Query(mean(PART, "part"), "{{part}}"),
        stacked=True,
    ),
    bars(
        "Share of each part",
        "Of all time spent on first tokens. `prefill.compute` should have most of it.",
        "percentunit",
        Query(
            f"sum by (part) (rate({PART}_sum[$__rate_interval])) / on () group_left () "
            f"sum(rate({PART}_sum[$__rate_interval]))",
            "{{part}}",
        ),
    ),
    lines(
        "Each part, p95",
        "What the unlucky wait for: the row of the highest line, below, says what to do.",
        "s",
        Query(quantile(0.95, PART, "part"), "{{part}}"),
    ),
]
BEFORE: list[Panel] = [
    lines(
        "Asking the scheduler",
        "`place` is one question to the scheduler, which asks the directory. Slow: more schedulers, or a sick "
        "directory.",
        "s",
        Query(
            quantile(
                0.95, "kvmesh_bus_request_seconds", "subject", where='{subject=~"mesh.v1.(schedule|directory).*"}'
            ),
            "{{subject}}",
        ),
    ),
    lines(
        "Handing the request to workers",
        "`dispatch`: until a worker has said that it took the request. Slow: its event loop has no time.",
        "s",
        Query(
            quantile(0.95, "kvmesh_bus_request_seconds", "subject", where='{subject=~".*run"}'),
            "{{subject}}",
        ),
    ),
]
QUEUE: list[Panel] = [
    lines(
        "Prompt tokens that wait",
        "`prefill.queue` grows with what waits to be computed: add prefill workers.",
        "short",
        Query('sum by (worker) (kvmesh_worker_waiting_tokens{what="compute"})', "{{worker}}"),
    ),
    lines(
        "Requests that wait for blocks",
        "Above 0: pools are full. More memory (`--kv-mib`) or more workers.",
        "short",
        Query('sum by (worker) (kvmesh_worker_requests{phase="queued"})', "{{worker}}"),
    ),
]
COMPUTE: list[Panel] = [
    lines(
        "Engine steps, p95",
        "A `mixed` step computes a chunk of a prompt beside others' tokens: a smaller token budget shortens it.",
        "s",
        Query(quantile(0.95, "kvmesh_engine_step_seconds", "worker", "phase"), "{{worker}} {{phase}}"),
    ),
    lines(
        "Prompt tokens by source",
        "What is cached or transferred need not be computed. All recomputed though conversations go on: KV is "
        "evicted too early, or the directory is away.",
        "short",
        Query(rate("kvmesh_gateway_prompt_tokens_by_source_total", "source"), "{{source}} a second"),
        stacked=True,
    ),
]
AFTER: list[Panel] = [
    lines(
        "Exposed hand-over",
        "What a hand-over takes beyond the prompt's computation: it delays the second token, never the first. Above "
        "tens of milliseconds: see *KV: who holds what, what moved* for the carrier's rate.",
        "s",
        *quantiles("kvmesh_handover_exposed_seconds", exemplars=True),
    ),
    lines(
        "Gap between writes",
        "Between two writes of tokens of one answer. Long tails: steps of long prompts run on decode workers.",
        "s",
        *quantiles("kvmesh_gateway_itl_seconds"),
    ),
]
ROWS = [
    ("The whole, and its parts", WHOLE),
    ("tokenize · place · dispatch", BEFORE),
    ("prefill.queue", QUEUE),
    ("prefill.compute", COMPUTE),
    ("first_token, and what comes after it", AFTER),
]
PAGE = page("kvmesh-ttft", "Where did TTFT go", "Which part of the time to first token is the long one?", ROWS)
