"""Whatever is lost, repeated or reordered, and whoever is declared dead: no block is lost, and every run ends."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.block import hash_blocks, join_hashes
from schemas.ids import RequestId, WorkerId
from schemas.kv import RequestLease
from tests.share import examples
from tests.worker import worker_cases as case
from tests.worker.worker_world import World

Event = tuple[str, int, int]
EVENTS = (
    *("request",) * 10,
    *("deliver",) * 50,
    *("step",) * 30,
    *("end_read", "tick") * 12,
    *("alone", "repeat", "lose", "start_read", "end_fetch", "lend", "end_lent") * 4,
    *("cancel", "unwanted", "cut", "engine_fails") * 2,
    *("fence", "left", "drain", "hand_back"),
)
events = st.tuples(st.sampled_from(EVENTS), st.integers(0, 11), st.integers(0, 11))


def lease_request(number: int) -> RequestLease:
    hashes = hash_blocks(list(range(1, 25)), 4, model_fingerprint="f")
    return RequestLease(
        request_id=RequestId(f"lend{number}"), attempt=1, deadline_ms=case.DEADLINE_MS, reader=WorkerId("d9"),
        fingerprint="f", first_block=number % 3, block_hashes=join_hashes(hashes[number % 3 :]),
    )  # fmt: skip


def request(world: World, size: int, *, split: bool) -> None:
    """A gateway sends a request's messages, some of an answer that goes on."""
    number = world.num_requests = world.num_requests + 1
    changes = {"num_answered_tokens": min(size, 3) if number % 2 else 0}
    num_tokens, max_tokens = 3 + 2 * size, 4 + size % 3
    sources = (case.source("s0", 0, 3), case.source("p0" if size % 2 else "d0", 1, 9))[: number % 3]
    deadline_ms = world.now_ms + (60_000, 400)[size % 5 == 0]
    run = case.run_prefill(
        number, num_tokens=num_tokens, max_tokens=max_tokens, split=split, deadline_ms=deadline_ms, sources=sources
    )
    world.bus.append(msgspec.structs.replace(run, **changes))
    if split:
        reserve = case.reserve(
            number, num_tokens=num_tokens, max_tokens=max_tokens, deadline_ms=deadline_ms, sources=sources
        )
        world.bus.append(msgspec.structs.replace(reserve, **changes, spare_blocks=10 * (number % 3)))


def apply(world: World, event: Event) -> None:
    kind, a, b = event
    now_ms = world.now_ms
    match kind:
        case "request" | "alone":
            request(world, b, split=kind == "request")
        case "deliver" | "repeat":
            world.deliver(a, keep=kind == "repeat")
        case "lose":
            world.lose(a)
        case "tick":
            world.advance((0, 10, 100, 250, 600, 2_000)[a % 6])
        case "step" | "engine_fails":
            world.worker(a).step(now_ms, fails=kind == "engine_fails")
        case "start_read":
            world.start_read(a)
        case "end_read" | "cut":
            world.end_read(a, whole=kind == "end_read")
        case "end_fetch":
            world.worker(a).end_fetch(a, b, now_ms)
        case "cancel":
            world.bus.append(case.cancel(max(0, world.num_requests - a)))
        case "lend":
            world.lend(a, lease_request(b))
        case "unwanted":
            world.unwanted(a, max(0, world.num_requests - b))
        case "end_lent" | "fence" | "left" | "drain" | "hand_back":
            getattr(world, kind)(a)
        case _:
            raise AssertionError(kind)


@settings(max_examples=examples(150), deadline=None)
@given(
    num_blocks=st.sampled_from([10, 16, 40]),
    whole_blocks=st.booleans(),
    chosen=st.lists(events, min_size=20, max_size=250),
)
def test_no_block_is_lost_whatever_happens_and_all_ends(
    num_blocks: int, whole_blocks: bool, chosen: list[Event]
) -> None:
    world = World(num_blocks, whole_blocks=whole_blocks)
    for event in chosen:
        apply(world, event)
        world.check()
    world.settle()
