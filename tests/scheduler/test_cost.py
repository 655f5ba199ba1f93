"""Policy `cost`: what is held where, loads and rates in; workers, sources and split out."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.directory import HolderPrefix, Tier
from schemas.ids import RequestId, WorkerId
from schemas.request import Placement, PlaceRequest, Refused, Reuse
from schemas.worker import (
    BlockCounts,
    LeftReason,
    PrefillRate,
    TransferRate,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRates,
    WorkerRole,
)
from services.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import (
    MAX_BORDERS,
    MAX_SOURCES,
    START_DECODE_STEP_MS,
    START_PREFILL_TOKENS_PER_S,
    START_TOKEN_BYTES,
    TRUST_HALF_LIFE_MS,
)
from services.scheduler.placement.cost import DEFAULT_LIMITS, CostLimits
from services.scheduler.placement.fleet_view import FleetView
from services.scheduler.placement.known_rates import START_LINKS, Link
from services.times import PresenceTimes
from tests.share import examples

BLOCK_SIZE = 16
Source = tuple[str, int, int]


def worker(
    name: str,
    *,
    waiting: int = 0,
    unreceived: int = 0,
    running: int = 0,
    free: int = 1_000,
    kept: int = 0,
    tokens_per_s: float = 0,
    reads: dict[str, tuple[float, float]] | None = None,
    fingerprint: str = "f",
) -> WorkerLoad:
    """A worker whose role is its initial. `reads`: MB/s and latency by source."""
    roles: dict[str, WorkerRole] = {"p": "prefill", "d": "decode", "a": "aggregated", "s": "store"}
    info = WorkerInfo(
        worker_id=WorkerId(name), incarnation="1", role=roles[name[0]], model="m", fingerprint=fingerprint,
        num_blocks=1_000, block_size=BLOCK_SIZE, context_length=16_000,
    )  # fmt: skip
    speeds = (PrefillRate(context_tokens=0, tokens_per_s=tokens_per_s),) if tokens_per_s else ()
    transfers = tuple(
        TransferRate(source=WorkerId(source), carrier="tcp", bytes_per_s=speed * 1e6, latency_ms=latency)
        for source, (speed, latency) in (reads or {}).items()
    )
    return WorkerLoad(
        worker=info,
        state="ready",
        blocks=BlockCounts(total=1_000, free=free, running=1_000 - free - kept, leased=0, cached=kept),
        num_running=running,
        num_queued=0,
        num_uncomputed_tokens=waiting + unreceived,
        num_unreceived_tokens=unreceived,
        rates=WorkerRates(prefill=speeds, transfers=transfers),
    )


def holds(
    name: str, num_blocks: int, first_block: int = 0, tier: Tier = "arena", incarnation: str = "1"
) -> HolderPrefix:
    return HolderPrefix(
        worker_id=WorkerId(name), incarnation=incarnation, num_blocks=num_blocks, first_block=first_block, tier=tier
    )


def ask(tokens: int = 1_000, max_tokens: int = 50, excluded: tuple[str, ...] = ()) -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId("r"),
        attempt=1,
        deadline_ms=10_000,
        num_prompt_tokens=tokens,
        max_tokens=max_tokens,
        excluded_workers=tuple(WorkerId(name) for name in excluded),
    )


def mesh(*workers: WorkerLoad, limits: CostLimits = DEFAULT_LIMITS, policy: str = "cost") -> SchedulerCore:
    core = SchedulerCore(SchedulerConfig(policy=policy, **limits._asdict()), PresenceTimes())
    for load in workers:
        core.handle(load, 0)
    return core


def placed(core: SchedulerCore, request: PlaceRequest, *holders: HolderPrefix) -> Placement:
    placement = core.place(request, 0, holders)
    assert isinstance(placement, Placement), placement
    return placement


def sources_of(placement: Placement) -> list[Source]:
    return [(s.worker_id, s.first_block, s.num_blocks) for s in placement.sources]


@dataclass(frozen=True)
class Row:
    """A prompt of 1,000 tokens has 62 blocks that need not be computed. Measured nowhere, 1,000 tokens take 333 ms to
    compute and 68 ms to read."""

    why: str
    workers: list[WorkerLoad]
    holders: list[HolderPrefix]
    ways: str
    sources: list[Source]
    tokens: int = 1_000
    limits: CostLimits = DEFAULT_LIMITS


P0, P1, D0, D1, S0, S1 = (worker(name) for name in ("p0", "p1", "d0", "d1", "s0", "s1"))
ROWS = [
    Row("nobody holds anything: the first of equals", [P0, P1, D0, D1], [], "p0→d0", []),
    Row("a queue of a few tokens is enough to go elsewhere", [worker("p0", waiting=50), P1, D0], [], "p1→d0", []),
    Row("a smaller batch decodes", [P0, worker("d0", running=3), worker("d1", running=2)], [], "p0→d1", []),
    Row(
        "the quicker of two idle workers",
        [worker("p0", tokens_per_s=3_000), worker("p1", tokens_per_s=6_000), D0], [], "p1→d0", [],
    ),
    Row(
        "a worker that has measured nothing is taken to be like the others",
        [P0, worker("p1", tokens_per_s=6_000), D0], [], "p0→d0", [],
    ),
    Row(
        "the quicker one while its queue is short",
        [worker("p0", tokens_per_s=3_000), worker("p1", tokens_per_s=6_000, waiting=900), D0],
        [], "p1→d0", [],
    ),
    Row(
        "the slower one once that is quicker",
        [worker("p0", tokens_per_s=3_000), worker("p1", tokens_per_s=6_000, waiting=1_100), D0],
        [], "p0→d0", [],
    ),
    Row("who holds the prompt computes the rest of it", [P0, P1, D0], [holds("p1", 62)], "p1→d0", []),
    Row(
        "its queue is longer than a read: another one reads from it",
        [P0, worker("p1", waiting=3_000), D0], [holds("p1", 62)], "p0→d0", [("p1", 0, 62)],
    ),
    Row(
        "its queue is longer than a read, but the read is slower than computing",
        [worker("p0", reads={"p1": (50, 3)}), worker("p1", waiting=3_000), D0], [holds("p1", 62)], "p0→d0", [],
    ),
    Row("an idle decode worker that holds most does it alone", [P0, D0, D1], [holds("d1", 60)], "d1 alone", []),
    Row(
        "others decode there: their pauses cost more than reading back",
        [P0, worker("d0", running=8), D1], [holds("d0", 31)], "p0→d1", [("d0", 0, 31)],
    ),
    Row("one pauses for 400 tokens: still less than the read", [P0, worker("d0", running=1)], [holds("d0", 37)],
        "d0 alone", []),
    Row("two would pause for 400 tokens: reading back is less", [P0, worker("d0", running=2)], [holds("d0", 37)],
        "p0→d0", [("d0", 0, 37)]),
    Row(
        "it holds less than half: the split, with a read in the other direction",
        [P0, D0], [holds("d0", 25)], "p0→d0", [("d0", 0, 25)],
    ),
    Row(
        "half of it is held, the rest is too much for a decode worker",
        [P0, D0], [holds("d0", 125)], "p0→d0", [("d0", 0, 125)], tokens=2_100,
        limits=CostLimits(unsplit_tokens_max=64),
    ),
    Row(
        "the operator wants every request split",
        [P0, D0], [holds("d0", 62)], "p0→d0", [("d0", 0, 62)], limits=CostLimits(unsplit_tokens_max=0),
    ),
    Row(
        "it holds half and can read the rest: still alone",
        [P0, D0, S0], [holds("d0", 40), holds("s0", 62)], "d0 alone", [("s0", 40, 22)],
    ),
    Row(
        "all of it could be read but nothing is held: a decode worker does not fetch to compute",
        [P0, D0, S0], [holds("s0", 62)], "p0→d0", [("s0", 0, 62)],
    ),
    Row(
        "the decode worker that has most of the prompt reads least",
        [P0, D0, D1], [holds("d1", 30)], "p0→d1", [("d1", 0, 30)],
    ),
    Row(
        "prefix from one, continuation from another",
        [P0, D0, S0, S1], [holds("s0", 20), holds("s1", 40, 10)], "p0→d0", [("s0", 0, 20), ("s1", 20, 30)],
    ),
    Row(
        "its own prefix, continued by a run that began before its end",
        [P0, D0, S0], [holds("p0", 20), holds("s0", 52, 10)], "p0→d0", [("s0", 20, 42)],
    ),
    Row(
        "its own blocks behind a hole are nobody else's to lend",
        [P0, D0, S0], [holds("p0", 20), holds("p0", 22, 40), holds("s0", 20, 20)], "p0→d0", [("s0", 20, 20)],
    ),
    Row("a run behind a hole is of no use", [P0, D0, S0], [holds("s0", 32, 30)], "p0→d0", []),
    Row(
        "no more sources than four",
        [P0, D0, *(worker(f"s{n}") for n in range(6))], [holds(f"s{n}", 8, 8 * n) for n in range(6)],
        "p0→d0", [(f"s{n}", 8 * n, 8) for n in range(MAX_SOURCES)],
    ),
    Row("less than the floor is computed", [P0, D0, S0], [holds("s0", 3)], "p0→d0", []),
    Row(
        "the operator's floor is higher",
        [P0, D0, S0], [holds("s0", 62)], "p0→d0", [], limits=CostLimits(pull_tokens_min=1_000),
    ),
    Row(
        "a prompt of whole blocks: the last one is computed, for its last token",
        [P0, D0, S0], [holds("s0", 10)], "p0→d0", [("s0", 0, 9)], tokens=160,
    ),
    Row(
        "the quicker of two holders, as measured",
        [worker("p0", reads={"s0": (100, 3), "s1": (900, 3)}), D0, S0, S1], [holds("s0", 62), holds("s1", 62)],
        "p0→d0", [("s1", 0, 62)],
    ),
    Row(
        "a quick holder of a part, then the slow one of all",
        [worker("p0", reads={"s0": (300, 3), "s1": (2_000, 3)}), D0, S0, S1], [holds("s0", 62), holds("s1", 31)],
        "p0→d0", [("s1", 0, 31), ("s0", 31, 31)],
    ),
    Row(
        "memory before disk while neither is measured",
        [P0, D0, S0, S1], [holds("s0", 62, tier="disk"), holds("s1", 62, tier="memory")],
        "p0→d0", [("s1", 0, 62)],
    ),
    Row(
        "a wait of seconds for the first byte is worth no read",
        [worker("p0", reads={"s0": (5_000, 2_000)}), D0, S0], [holds("s0", 62)], "p0→d0", [],
    ),
    Row(
        "a prefill worker that computes quickly reads nothing",
        [worker("p0", tokens_per_s=50_000), D0, S0], [holds("s0", 62)], "p0→d0", [],
    ),
    Row("no room on the one: the other decodes", [P0, worker("d0", free=60), worker("d1", running=2)], [], "p0→d1", []),
    Row(
        "kept blocks are room",
        [P0, worker("d0", free=0, kept=100), worker("d1", running=2)], [], "p0→d0", [],
    ),
    Row("a store serves nothing by itself", [P0, D0, S0], [holds("s0", 4)], "p0→d0", [("s0", 0, 4)]),
    Row(
        "aggregated: who holds it",
        [worker("a0"), worker("a1")], [holds("a1", 50)], "a1 alone", [],
    ),
    Row(
        "aggregated: who holds it is busy, another one reads from it",
        [worker("a0"), worker("a1", waiting=2_000)], [holds("a1", 62)], "a0 alone", [("a1", 0, 62)],
    ),
    Row(
        "aggregated: many decode there, few here",
        [worker("a0", running=10), worker("a1", running=1)], [], "a1 alone", [],
    ),
    Row(
        "a split spares those who decode the pause",
        [worker("a0", running=10), P0, D0], [], "p0→d0", [],
    ),
    Row(
        "KV of another model cannot be handed over",
        [worker("p0", fingerprint="g"), worker("p1", waiting=500), D0], [], "p1→d0", [],
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.why)
def test_the_table(row: Row) -> None:
    placement = placed(mesh(*row.workers, limits=row.limits), ask(row.tokens), *row.holders)
    way = f"{placement.prefill_worker}→{placement.decode_worker}"
    assert (way.replace("→None", " alone"), sources_of(placement)) == (row.ways, row.sources), placement.terms


def test_the_terms_say_why() -> None:
    core = mesh(worker("p0", waiting=300), worker("p1", waiting=900), D0)
    placement = placed(core, ask(), holds("p0", 10), holds("d0", 31))
    terms = placement.terms
    assert terms is not None and placement.policy == "cost"
    assert (terms.cached_tokens, terms.pulled_tokens, terms.computed_tokens) == (160, 336, 504)
    assert terms.queue_ms == pytest.approx(100) and terms.compute_ms == pytest.approx(168)
    assert terms.pull_ms == pytest.approx(3 + 336 * START_TOKEN_BYTES / 1e6, rel=1e-3)
    assert terms.ttft_ms == pytest.approx(terms.queue_ms + terms.pull_ms + terms.compute_ms, abs=0.01)
    assert terms.stall_ms == 0 and terms.handover_ms > 0
    assert terms.alternatives.startswith("p1→d0 ") and terms.alternatives.endswith(" ms")


def test_at_most_three_alternatives_the_best_first() -> None:
    workers = [worker(f"p{n}", waiting=100 * n) for n in range(6)]
    terms = placed(mesh(*workers, D0), ask()).terms
    assert terms is not None
    assert [other.split("→")[0] for other in terms.alternatives.split("; ")] == ["p1", "p2", "p3"]


def test_equals_take_turns() -> None:
    core = mesh(P0, P1, D0, D1)
    pairs = []
    for _ in range(4):
        placement = placed(core, ask())
        pairs.append((placement.prefill_worker, placement.decode_worker))
        for load in (P0, P1, D0, D1):
            core.handle(load, 0)
    assert pairs == [("p0", "d0"), ("p1", "d1")] * 2


def test_what_was_placed_counts_until_the_worker_speaks_and_only_what_it_computes() -> None:
    core = mesh(P0, P1, D0)
    assert placed(core, ask(), holds("p0", 60)).prefill_worker == "p0"
    assert placed(core, ask(tokens=600)).prefill_worker == "p1"
    assert placed(core, ask(tokens=600)).prefill_worker == "p0", "40 tokens in line beside 600"
    core.handle(P1, 1)
    assert placed(core, ask(tokens=600)).prefill_worker == "p1"


def test_a_pending_handover_is_no_queue_for_a_decode_worker() -> None:
    on_its_way, in_line = worker("d0", unreceived=9_000), worker("d0", waiting=9_000)
    assert placed(mesh(P0, on_its_way), ask(), holds("d0", 60)).decode_worker is None
    assert placed(mesh(P0, in_line), ask(), holds("d0", 60)).decode_worker == "d0", "there it would wait"


@pytest.mark.parametrize("gone", ["left", "restarted", "unknown", "excluded", "old entry"])
def test_nobody_reads_from_who_is_not_there(gone: str) -> None:
    core, request, holder = mesh(P0, D0, S0), ask(), holds("s0", 62)
    match gone:
        case "left":
            core.handle(WorkerLeft(worker_id=WorkerId("s0"), incarnation="1", reason=LeftReason.SILENT), 0)
        case "restarted":
            info = WorkerInfo(
                worker_id=WorkerId("s0"), incarnation="2", role="store", model="m", fingerprint="f", num_blocks=1,
                block_size=16, context_length=1,
            )  # fmt: skip
            core.handle(WorkerJoined(worker=info), 0)
        case "unknown":
            holder = holds("s9", 62)
        case "excluded":
            request = ask(excluded=("s0",))
        case _:
            holder = holds("s0", 62, incarnation="0")
    assert placed(core, request, holder).sources == ()


def test_a_draining_worker_lends_but_does_not_serve() -> None:
    core = mesh(P0, P1, D0)
    core.handle(WorkerDraining(worker_id=WorkerId("p1"), incarnation="1"), 0)
    placement = placed(core, ask(), holds("p1", 62))
    assert (placement.prefill_worker, sources_of(placement)) == ("p0", [("p1", 0, 62)])


def test_the_simple_policies_name_no_sources() -> None:
    for policy in ("least_loaded", "round_robin"):
        core = mesh(P0, D0, S0, policy=policy)
        assert not core.asks_directory
        placement = placed(core, ask(), holds("s0", 62))
        assert placement.sources == () and placement.terms is None


HASHES = bytes(62 * 16)


@pytest.mark.parametrize(
    ("policy", "holders", "hashes", "expected"),
    [
        ("cost", [holds("p0", 62)], HASHES, Reuse.USED),
        ("cost", [holds("s0", 62)], HASHES, Reuse.USED),
        ("cost", [holds("d0", 3)], HASHES, Reuse.USED),
        ("cost", [], b"", Reuse.COMPUTED_WHOLE),
        ("cost", None, HASHES, Reuse.WITHOUT_DIRECTORY),
        ("cost", [], HASHES, Reuse.NOTHING_HELD),
        ("cost", [holds("s9", 62)], HASHES, Reuse.NOTHING_HELD),
        ("cost", [holds("s0", 3)], HASHES, Reuse.BELOW_THRESHOLD),
        ("cost", [holds("s0", 62, first_block=8)], HASHES, Reuse.BELOW_THRESHOLD),
        ("cost", [holds("s1", 62)], HASHES, Reuse.NOT_QUICKER),
        ("least_loaded", [holds("s0", 62)], HASHES, Reuse.NOT_ASKED),
        ("least_loaded", None, HASHES, Reuse.NOT_ASKED),
        ("tests.scheduler.policies:last", [holds("s0", 62)], HASHES, Reuse.NOT_QUICKER),
        ("tests.scheduler.policies:last", [holds("s0", 1)], HASHES, Reuse.NOT_QUICKER),
        ("tests.scheduler.policies:last", [holds("p0", 1)], HASHES, Reuse.USED),
        ("tests.scheduler.policies:last", None, HASHES, Reuse.WITHOUT_DIRECTORY),
    ],
)
def test_a_placement_says_what_it_makes_of_what_others_have(
    policy: str, holders: list[HolderPrefix] | None, hashes: bytes, expected: Reuse
) -> None:
    reader = worker("p0", reads={"s0": (1_000, 1), "s1": (0.001, 2_000)})
    core = mesh(reader, D0, S0, S1, policy=policy)
    held = None if holders is None else tuple(holders)
    placement = core.place(replace(ask(), block_hashes=hashes), 0, held)
    assert isinstance(placement, Placement) and placement.reuse is expected


def test_the_page_explains_every_reason() -> None:
    page = (Path(__file__).parents[2] / "docs/tracing.md").read_text()
    table = page.partition("| `reuse` | what it means |\n")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(Reuse)


NAMES = ["p0", "p1", "p2", "d0", "d1", "a0", "s0", "s1"]
HOLDERS = st.builds(
    holds,
    st.sampled_from([*NAMES, "s9"]),
    num_blocks=st.integers(1, 80),
    first_block=st.one_of(st.just(0), st.integers(0, 70)),
    tier=st.sampled_from(["arena", "memory", "disk", "remote"]),
    incarnation=st.sampled_from(["1", "1", "1", "2"]),
)
WORKERS = st.builds(
    worker,
    st.sampled_from(NAMES),
    waiting=st.integers(0, 5_000),
    running=st.integers(0, 12),
    free=st.integers(0, 500),
    kept=st.integers(0, 500),
    tokens_per_s=st.sampled_from([0, 300, 3_000, 30_000]),
    reads=st.dictionaries(
        st.sampled_from(NAMES), st.tuples(st.sampled_from([0.0, 1.0, 100.0, 3_000.0]), st.floats(0, 2_000))
    ),
    fingerprint=st.sampled_from(["f", "f", "f", "g"]),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    workers=st.lists(WORKERS, unique_by=lambda load: load.worker.worker_id),
    holders=st.lists(HOLDERS, max_size=12),
    tokens=st.integers(1, 1_200),
    limits=st.builds(CostLimits, st.integers(1, 400), st.integers(0, 1_000)),
    excluded=st.lists(st.sampled_from(NAMES), max_size=3),
)
def test_sources_cover_the_prompt_in_order_and_placing_never_fails_where_least_loaded_would_not(
    workers: list[WorkerLoad],
    holders: list[HolderPrefix],
    tokens: int,
    limits: CostLimits,
    excluded: list[str],
) -> None:
    request = ask(tokens, excluded=tuple(excluded))
    placement = mesh(*workers, limits=limits).place(request, 0, tuple(holders))
    simple = mesh(*workers, policy="least_loaded").place(request, 0)
    if not isinstance(placement, Placement):
        assert placement == simple
        return
    roles = {load.worker.worker_id: load.worker.role for load in workers}
    reader, terms = placement.prefill_worker, placement.terms
    assert terms is not None
    if not {reader, placement.decode_worker}.isdisjoint(excluded):
        others = [load for load in workers if load.worker.worker_id not in excluded]
        assert isinstance(mesh(*others, limits=limits).place(request, 0, tuple(holders)), Refused), "others could serve"
    split = placement.decode_worker is not None
    assert roles[reader] == "prefill" if split else roles[reader] in ("aggregated", "decode")
    assert placement.decode_worker is None or roles[placement.decode_worker] == "decode"

    end_block = (tokens - 1) // BLOCK_SIZE
    own = [h.num_blocks for h in holders if (h.worker_id, h.first_block, h.incarnation) == (reader, 0, "1")]
    at = min(max(own, default=0), end_block)
    assert terms.cached_tokens == at * BLOCK_SIZE
    for source in placement.sources:
        assert source.worker_id != reader and source.worker_id in roles and source.worker_id not in excluded
        assert source.first_block == at and source.num_blocks * BLOCK_SIZE >= limits.pull_tokens_min
        at += source.num_blocks
        assert any(
            h.worker_id == source.worker_id and h.incarnation == "1"
            and h.first_block <= source.first_block and at <= h.first_block + h.num_blocks
            for h in holders
        ), "somebody is said to hold it"  # fmt: skip
    assert at <= end_block and len(placement.sources) <= MAX_SOURCES
    assert terms.pulled_tokens == sum(s.num_blocks for s in placement.sources) * BLOCK_SIZE
    assert terms.cached_tokens + terms.pulled_tokens + terms.computed_tokens == tokens and terms.computed_tokens >= 1
    if roles[reader] == "decode":
        assert terms.computed_tokens <= limits.unsplit_tokens_max and 2 * terms.cached_tokens >= tokens


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(WORKERS, unique_by=lambda load: load.worker.worker_id), st.lists(HOLDERS, max_size=6))
def test_the_same_is_decided_twice(workers: list[WorkerLoad], holders: list[HolderPrefix]) -> None:
    decisions = [[mesh(*order).place(ask(), 0, tuple(holders)) for _ in range(2)] for order in (workers, workers[::-1])]
    assert decisions[0] == decisions[1] and decisions[0][0] == decisions[0][1]


def fleet_of(*loads: WorkerLoad) -> FleetView:
    fleet = FleetView()
    for load in loads:
        fleet.add_worker(load.worker)
        fleet.note_load(load, 0)
    return fleet


def compute_ms(fleet: FleetView, name: str, first_token: int, end_token: int) -> float:
    (found,) = fleet.compute_ms(fleet.slots([WorkerId(name)]), first_token, end_token)
    return float(found)


def link(fleet: FleetView, reader: str, source: str, tier: Tier = "arena") -> Link:
    links = fleet.links(fleet.slots([WorkerId(source)]), fleet.slots([WorkerId(reader)]), [tier])
    return Link(float(links.latency_ms[0, 0]), float(links.bytes_per_s[0, 0]))


def test_starting_values() -> None:
    fleet = fleet_of(P0, S0)
    p0 = fleet.slots([WorkerId("p0")])
    assert compute_ms(fleet, "p0", 0, 3_000) == pytest.approx(3_000 / START_PREFILL_TOKENS_PER_S * 1e3)
    assert link(fleet, "p0", "s0") == START_LINKS["arena"]
    assert link(fleet, "p0", "s0", "disk") == START_LINKS["disk"]
    assert (fleet.step_ms(p0), fleet.token_bytes(p0)) == (START_DECODE_STEP_MS, START_TOKEN_BYTES)


def computing(name: str, *points: tuple[int, float]) -> WorkerLoad:
    speeds = tuple(PrefillRate(context_tokens=at, tokens_per_s=speed) for at, speed in points)
    return replace(worker(name), rates=WorkerRates(prefill=speeds))


def test_tokens_are_computed_at_the_speed_of_their_context() -> None:
    fleet = fleet_of(computing("p0", (0, 1_000), (1_000, 500)))
    assert compute_ms(fleet, "p0", 0, 2_000) == pytest.approx(1_000 + 2_000)
    assert compute_ms(fleet, "p0", 900, 1_100) == pytest.approx(100 + 200)
    assert compute_ms(fleet, "p0", 5_000, 5_000) == 0


def test_what_a_worker_has_not_measured_is_the_fleets_scaled_by_how_it_compares() -> None:
    slow, fast, new = computing("p0", (0, 1_000), (1_000, 500)), computing("p1", (0, 3_000)), computing("p2")
    fleet = fleet_of(slow, fast, new)
    assert compute_ms(fleet, "p2", 0, 1_000) == pytest.approx(500), "the mean of both"
    assert compute_ms(fleet, "p1", 1_000, 2_000) == pytest.approx(1_000 / (500 * 1.5) * 1e3)


def test_no_more_context_positions_are_told_apart_than_the_bound() -> None:
    points = [(at, 1_000.0) for at in range(3 * MAX_BORDERS)]
    fleet = fleet_of(computing("p0", *points))
    assert compute_ms(fleet, "p0", 0, 3 * MAX_BORDERS) == pytest.approx(3 * MAX_BORDERS)


def test_a_pair_that_was_never_measured_is_like_the_readers_others() -> None:
    measured = [worker("p0", reads={"s0": (100, 2), "s1": (300, 4)}), worker("p1", reads={"s0": (900, 1)})]
    fleet = fleet_of(*measured, worker("p9"), D0)
    assert link(fleet, "p0", "d0") == Link(3, 200e6)
    assert link(fleet, "p0", "d0", "remote") == Link(10, 200e6)
    assert link(fleet, "p9", "d0") == pytest.approx((7 / 3, 1_300e6 / 3))


def test_a_source_may_be_measured_before_it_is_known() -> None:
    fleet = fleet_of(worker("p0", reads={"s0": (100, 2), "s1": (300, 4)}), S1)
    assert link(fleet, "p0", "s1") == Link(4, 300e6)
    fleet.add_worker(S0.worker)
    assert link(fleet, "p0", "s0") == Link(2, 100e6)
    fleet.leave(WorkerId("s1"))
    fleet.add_worker(D0.worker)  # in its place
    assert link(fleet, "p0", "d0") == Link(3, 200e6)


def test_a_pair_that_was_slow_long_ago_is_tried_again() -> None:
    """A slow pair is not read from, so nothing but time can tell that it has recovered."""
    slow = worker("p0", reads={"s0": (1, 500), "s1": (1_000, 3)})
    fleet = fleet_of(slow, S0)
    speeds = []
    for minutes in range(8):
        fleet.note_load(slow, minutes * TRUST_HALF_LIFE_MS)
        speeds.append(link(fleet, "p0", "s0").bytes_per_s)
    assert speeds[0] == pytest.approx(1e6) and speeds[1] == pytest.approx(1e6 * 1_000**0.5)
    assert speeds == sorted(speeds) and speeds[-1] > 900e6
    fleet.note_load(worker("p0", reads={"s0": (2, 500), "s1": (1_000, 3)}), 8 * TRUST_HALF_LIFE_MS)
    assert link(fleet, "p0", "s0").bytes_per_s == pytest.approx(2e6), "measured just now"
    fleet.leave(WorkerId("p0"))
    fleet.add_worker(slow.worker)
    assert link(fleet, "p0", "s0") == START_LINKS["arena"], "and forgotten with its worker"
