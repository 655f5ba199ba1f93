"""KV: who holds blocks, for whom, and what crossed."""

from panels import Panel, Query, Steps, bars, lines, mean, page, quantile, quantiles, rate

BLOCKS = 'max by (worker, state) (kvmesh_kv_blocks{state!="orphaned"})'
"""A gateway reports the workers' blocks too, as it last received them."""

IN_USE = 'state=~"running|leased"'
HOLDS: list[Panel] = [
    bars(
        "Blocks in use",
        "Share of each worker's blocks that requests hold. Near 1: requests queue for blocks, add workers.",
        "percentunit",
        Query(
            f"sum by (worker) (max by (worker, state) (kvmesh_kv_blocks{{{IN_USE}}})) / sum by (worker) "
            '(max by (worker, state) (kvmesh_kv_blocks{state=~"free|cached|running|leased"}))',
            "{{worker}}",
        ),
        steps=Steps(0.8, 0.95),
    ),
    lines(
        "Blocks by state",
        "free + cached + running + leased are all blocks, always. `leased` that stays while nothing moves is stranded.",
        "short",
        Query(f"sum by (state) ({BLOCKS})", "{{state}}"),
        stacked=True,
    ),
    lines(
        "Leases by age",
        "A lease lives for one read. Old ones: a reader is slow or stopped; it is renewed only while bytes move.",
        "short",
        Query("sum by (age) (kvmesh_leases)", "{{age}}"),
        stacked=True,
    ),
    lines(
        "Leases by how they ended",
        "`landed` is right. `reader_left`, `silent`, `expired`: the reader died or never came. `cancelled`: the "
        "request ended first.",
        "short",
        Query(rate("kvmesh_leases_ended_total", "outcome"), "{{outcome}} a second"),
        stacked=True,
    ),
    lines(
        "Stranded blocks",
        "`unread`: leased for over a second with no stream on them. `taken back`: leases whose reader was gone. If "
        "it does not fall by itself within `lease_ms`, restart the holder, and keep its log.",
        "short",
        Query("sum by (worker) (kvmesh_unread_blocks)", "{{worker}} unread"),
        Query("sum by (worker) (increase(kvmesh_stranded_blocks_total[1m]))", "{{worker}} taken back in a minute"),
        steps=Steps(1, 64),
    ),
    lines(
        "Orphaned bytes",
        "KV in use that no request knows of: a bug of ours. Drain the worker (SIGTERM), and report it with its log.",
        "bytes",
        Query("max by (worker) (kvmesh_kv_orphaned_bytes)", "{{worker}}"),
        steps=Steps(1, 1),
    ),
]
MOVED: list[Panel] = [
    lines(
        "Bytes by pair and carrier",
        "`shm` within a machine, `tcp` between machines. A pair on one machine that uses `tcp`: its shared memory is"
        " not shared.",
        "Bps",
        Query(
            rate("kvmesh_transfer_bytes_total", "source", "worker", "carrier"),
            "{{source}} → {{worker}} {{carrier}}",
        ),
    ),
    lines(
        "Rate of reads by pair and carrier",
        "How quickly the last read brought its bytes. One pair far below its like: look at its network.",
        "Bps",
        Query(
            "max by (source, worker, carrier) (kvmesh_transfer_rate_bytes_per_second)",
            "{{source}} → {{worker}} {{carrier}}",
        ),
    ),
    lines(
        "Reads by outcome",
        "`landed` is right. `digest`: damaged bytes were caught, look for bad memory or a bad network. `closed`: a "
        "holder died. `deadline`: slower than computing. `refused`: a stale hint.",
        "short",
        Query(rate("kvmesh_transfers_total", "outcome") + " > 0", "{{outcome}} a second"),
        stacked=True,
    ),
    lines(
        "Time of reads, p95",
        "A `handover` lasts as long as its prompt is computed; a `fetch` should be short.",
        "s",
        Query(quantile(0.95, "kvmesh_transfer_seconds", "kind"), "{{kind}}", exemplars=True),
    ),
    lines(
        "Exposed hand-over",
        "What a hand-over takes beyond the prompt's computation. Rising: the wire is full; `--wire-dtype auto`.",
        "s",
        *quantiles("kvmesh_handover_exposed_seconds", exemplars=True),
    ),
    lines(
        "Size of reads, mean",
        "KV of one read. Small fetches cost more than computing: raise `--pull-tokens-min`.",
        "bytes",
        Query(mean("kvmesh_transfer_size_bytes", "kind"), "{{kind}}"),
    ),
    lines(
        "Bytes saved on the wire",
        "1 − crossed / read. 0: nothing is compressed; on a slow network try `--wire-dtype auto`.",
        "percentunit",
        Query(
            f"1 - {rate('kvmesh_transfer_wire_bytes_total', 'carrier')}"
            f" / {rate('kvmesh_transfer_bytes_total', 'carrier')}",
            "{{carrier}}",
        ),
    ),
    lines(
        "Reads that a holder refused",
        "Tickets that are expired, forged or of another epoch, and what is no KV stream. Steadily above 0: somebody "
        "unknown knocks at the data plane's port.",
        "short",
        Query(rate("kvmesh_plane_refused_reads_total", "worker"), "{{worker}} a second"),
        steps=Steps(0.1, 1),
    ),
]
KNOWS: list[Panel] = [
    lines(
        "Prompt tokens by source",
        "cached where they were needed, transferred from others, recomputed. More workers and less reuse: look "
        "whether the directory answers.",
        "short",
        Query(rate("kvmesh_gateway_prompt_tokens_by_source_total", "source"), "{{source}} a second"),
        stacked=True,
    ),
    lines(
        "What the directory knows",
        "Blocks and holders. 0 holders while workers live: it cannot hear them, look at the bus.",
        "short",
        Query("max(kvmesh_directory_blocks)", "blocks"),
        Query("max(kvmesh_directory_holders)", "holders"),
    ),
]
ATTACHED: list[Panel] = [
    lines(
        "Tokens of attached servers",
        "Asked for, and loaded in place of computing. Few are: `kvmesh status HOLDER` says why servers do not share.",
        "short",
        Query(rate("kvmesh_attach_tokens_total", "what"), "{{what}} a second"),
    ),
    lines(
        "Attached servers",
        "One that is off shares no more until it is started again; `kvmesh status HOLDER` says why.",
        "short",
        Query("sum by (sharing) (kvmesh_attach_servers)", "{{sharing}}"),
        Query("sum(kvmesh_attach_held_blocks)", "blocks held"),
    ),
    lines(
        "Blocks of attached servers",
        "Saved, compared with what was computed anew, and found damaged. Any that are damaged: check the memory.",
        "short",
        Query(rate("kvmesh_attach_blocks_total", "what"), "{{what}} a second"),
        Query(rate("kvmesh_attach_not_shared_total", "reason"), "not shared: {{reason}}"),
    ),
    lines(
        "Time of their loads, p95",
        "Grows with a prompt's length. Much longer than before: the machine's memory is busy.",
        "s",
        Query(quantile(0.95, "kvmesh_attach_load_seconds"), "load"),
    ),
]
ROWS = [
    ("Who holds what", HOLDS),
    ("What moved", MOVED),
    ("What was reused", KNOWS),
    ("Servers that are attached", ATTACHED),
]
PAGE = page("kvmesh-kv", "KV: who holds what, what moved", "Who holds blocks, for whom, and what crossed.", ROWS)
