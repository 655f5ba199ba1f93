"""One worker: what it does, holds and moves."""

from panels import Panel, Query, Steps, lines, mean, page, process, quantile, rate

WORKER = '{worker="$worker"}'

DOES: list[Panel] = [
    lines(
        "Requests",
        "Queued: it has no blocks for them, see *Blocks*. More workers, or more memory for KV.",
        "short",
        Query(f"sum by (phase) (kvmesh_worker_requests{WORKER})", "{{phase}}"),
        stacked=True,
    ),
    lines(
        "Prompt tokens that wait",
        "To be computed here, or to be received from another worker. Growing to compute: add workers of this role.",
        "short",
        Query(f"sum by (what) (kvmesh_worker_waiting_tokens{WORKER})", "to {{what}}"),
        stacked=True,
    ),
    lines(
        "Engine steps",
        "By what they compute. Long decode steps: the batch is large, or its contexts are long.",
        "s",
        Query(quantile(0.5, "kvmesh_engine_step_seconds", "phase", where=WORKER), "{{phase}} p50"),
        Query(quantile(0.95, "kvmesh_engine_step_seconds", "phase", where=WORKER), "{{phase}} p95"),
    ),
    lines(
        "Sequences of a step",
        "The batch. 1 on a busy decode worker: it is not busy, the prefill workers are.",
        "short",
        Query(mean("kvmesh_engine_batch_sequences", where=WORKER), "mean"),
        Query(quantile(0.95, "kvmesh_engine_batch_sequences", where=WORKER), "p95"),
    ),
    lines(
        "Tokens computed",
        "By phase. None on a worker with requests: its engine hangs, look at its log.",
        "short",
        Query(rate("kvmesh_engine_tokens_total", "phase", where=WORKER), "{{phase}} a second"),
    ),
    lines(
        "Engine",
        "Deaths: its process was killed or has failed; the worker lends what it holds, and starts another one.",
        "short",
        Query(f"kvmesh_engine_starts_total{WORKER}", "starts"),
        Query(f"kvmesh_engine_deaths_total{WORKER}", "deaths"),
        Query(f"kvmesh_engine_ready_seconds{WORKER}", "s to ready"),
        Query(f"kvmesh_engine_spares{WORKER}", "spares"),
    ),
    lines(
        "Processor and memory",
        "Processors in use; resident memory grows with the arena's pages once, then stays.",
        "short",
        Query(process("rate(process_cpu_seconds_total[$__rate_interval])", "$worker"), "processors"),
        Query(process("process_resident_memory_bytes / 1073741824", "$worker"), "GiB"),
    ),
]
HOLDS: list[Panel] = [
    lines(
        "Blocks",
        "By state. No free and no cached ones: requests queue.",
        "short",
        Query('max by (state) (kvmesh_kv_blocks{worker="$worker", state!="orphaned"})', "{{state}}"),
        stacked=True,
    ),
    lines(
        "Leases by age",
        "What others read here. Old ones: their reader is slow or stopped.",
        "short",
        Query(f"sum by (age) (kvmesh_leases{WORKER})", "{{age}}"),
        stacked=True,
    ),
    lines(
        "Leases by how they ended",
        "`reader_left`, `silent`, `expired`: the reader was gone, look for the worker that died.",
        "short",
        Query(rate("kvmesh_leases_ended_total", "outcome", where=WORKER), "{{outcome}} a second"),
        stacked=True,
    ),
    lines(
        "Unread and orphaned",
        "Above 0 for longer than seconds: restart the worker, and keep its log.",
        "short",
        Query(f"sum(kvmesh_unread_blocks{WORKER})", "unread blocks"),
        Query(f"sum(kvmesh_kv_orphaned_bytes{WORKER})", "orphaned bytes"),
        steps=Steps(1, 64),
    ),
]
MOVES: list[Panel] = [
    lines(
        "Read by it",
        "From whom, by which carrier. `tcp` from a worker on the same machine: its shared memory is not shared.",
        "Bps",
        Query(rate("kvmesh_transfer_bytes_total", "source", "carrier", where=WORKER), "{{source}} {{carrier}}"),
        Query(rate("kvmesh_transfer_bytes_total", where=WORKER) + " or vector(0)", "all"),
    ),
    lines(
        "Read from it",
        "By whom. One worker that everybody reads from is a bottleneck: `--replicate` spreads its blocks.",
        "Bps",
        Query(rate("kvmesh_transfer_bytes_total", "worker", where='{source="$worker"}'), "{{worker}}"),
        Query(rate("kvmesh_transfer_bytes_total", where='{source="$worker"}') + " or vector(0)", "all"),
    ),
    lines(
        "Its reads by outcome",
        "`digest`: damaged bytes were caught, look for bad memory. `closed`: holders die.",
        "short",
        Query(rate("kvmesh_transfers_total", "outcome", where=WORKER) + " > 0 or vector(0)", "{{outcome}} a second"),
        stacked=True,
    ),
    lines(
        "Refusals and new incarnations",
        "A new incarnation: the worker stood still for seconds (swap, a stopped machine) and began anew.",
        "short",
        Query(rate("kvmesh_refusals_total", "what", where=WORKER), "refused: {{what}} a second"),
        Query(f"sum(increase(kvmesh_worker_fences_total{WORKER}[5m]))", "new incarnations in 5 minutes"),
    ),
]
ROWS = [("What it does", DOES), ("What it holds", HOLDS), ("What it moves", MOVES)]
PAGE = page("kvmesh-worker", "One worker", "What one worker does, holds and moves.", ROWS, worker=True)
