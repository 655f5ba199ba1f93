"""Whatever decodes, no core raises: each hears messages with the largest and smallest numbers that a message may have.
What does not fit is no message."""

import math
from functools import partial
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas import directory, handoff, kv, request, worker
from schemas.block import BLOCK_HASH_BYTES
from schemas.ids import RequestId
from schemas.message import Message, UndecodableMessageError, decode, encode
from services.config import MeshConfig, SchedulerConfig
from services.directory.core import DirectoryCore
from services.directory.events import BlocksChanged, PageRead, ReadPage
from services.directory.service import _worker_seen
from services.gateway.fleet import Fleet
from services.gateway.request.core import RequestCore
from services.gateway.request.events import PlaceGranted, Submitted, TokensReceived
from services.holder.core.attempt import AttemptTimes
from services.holder.core.copies import CopyCore, num_spare
from services.holder.core.events import AttemptAsked, CopyOffered, LeaseAsked
from services.holder.core.leases import LeaseTable
from services.holder.core.lending import LendCore
from services.presence import FailureDetector
from services.scheduler.core import SchedulerCore
from services.times import DirectoryTimes, PresenceTimes
from services.worker.core import AttemptCore
from tests.share import examples
from tests.store.test_blocks import make_memory
from tests.worker import worker_cases as case

NAMES = ("a", "b", case.PREFILL, case.DECODE, "f", "r1", "r1-1", "")
NOW = 1_000
quick = settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))


def numbers(low: float | None, high: float | None) -> list[Any]:
    assert low is not None and high is not None, "every number of a message has bounds"
    middle = [number for number in (0, 1, 2, 3, 4, 16, 2_000) if low <= number <= high]
    return [low, high, *middle]


def values(kind: types.Type) -> st.SearchStrategy[Any]:
    """Return the extreme values of a field."""
    match kind:
        case types.IntType():
            return st.sampled_from(numbers(kind.ge, kind.le))
        case types.FloatType():
            low = math.nextafter(kind.gt, math.inf) if kind.gt is not None else -1e308 if kind.ge is None else kind.ge
            high = 1e308 if kind.le is None else kind.le
            return st.sampled_from([low, high, max(low, 0.0), max(low, 5e-324), max(low, 1.0)])
        case types.StrType():
            return st.sampled_from(NAMES)
        case types.BytesType():
            return st.sampled_from(
                [b"", bytes(BLOCK_HASH_BYTES), bytes(range(2 * BLOCK_HASH_BYTES)), b"123", b"12" * 9]
            )
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.LiteralType():
            return st.sampled_from(kind.values)
        case types.EnumType():
            return st.sampled_from([member.value for member in kind.cls])
        case types.VarTupleType():
            return st.lists(values(kind.item_type), min_size=kind.min_length or 0, max_size=2)
        case types.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case types.UnionType():
            return st.one_of(*(values(each) for each in kind.types))
        case types.StructType():
            fields = {field.encode_name: values(field.type) for field in kind.fields}
            tag = {kind.tag_field: st.just(kind.tag)} if kind.tag_field else {}
            return st.fixed_dictionaries(fields | tag)
        case other:
            raise AssertionError(f"a message has a field of another type: {other}")


def messages(*kinds: type[Message]) -> st.SearchStrategy[Any]:
    """Return such messages as they are decoded."""

    def of(kind: type[Message]) -> st.SearchStrategy[Any]:
        return values(types.type_info(kind)).map(lambda raw: decode(msgspec.json.encode(raw), kind))

    return st.one_of(*(of(kind) for kind in kinds))


FLEET = (worker.WorkerJoined, worker.WorkerLoad, worker.WorkerDraining, worker.WorkerLeft)


@quick
@given(
    st.lists(messages(*FLEET), max_size=6),
    messages(request.PlaceRequest),
    messages(directory.BlocksLocated),
    st.sampled_from(["cost", "least_loaded"]),
)
def test_the_scheduler(heard: list[Any], asked: Any, located: Any, policy: str) -> None:
    core = SchedulerCore(SchedulerConfig(policy=policy), PresenceTimes())
    for message in heard:
        core.handle(message, NOW)
    asked = msgspec.structs.replace(asked, deadline_ms=NOW + 1)
    for _ in range(2):
        encode(core.place(asked, NOW, located.holders))
    encode(core.describe_fleet(NOW))
    core.tick(NOW)
    core.tick(2**60)


@quick
@given(
    st.lists(messages(*FLEET[:2]), max_size=3),
    st.lists(messages(directory.BlocksStored, directory.BlocksEvicted), max_size=5),
    messages(directory.Inventory),
)
def test_the_directory(heard: list[Any], changed: list[Any], page: Any) -> None:
    core = DirectoryCore(DirectoryTimes())
    for message in heard:
        core.handle(_worker_seen(message), NOW)
    for message in changed:
        if not len(message.block_hashes) % BLOCK_HASH_BYTES:  # the shell drops the others
            core.handle(BlocksChanged(message), NOW)
    if not len(page.block_hashes) % BLOCK_HASH_BYTES:
        core.handle(PageRead(ReadPage(page.worker_id, page.incarnation, 0, 1), page), NOW)
    core.locate(b"")
    core.tick(2**60)
    core.check_integrity()


HEARD_BY_WORKERS = (
    handoff.BlocksReserved, handoff.KVOffered, handoff.KVLanded, handoff.HandoffAborted, request.CancelRequest,
    worker.WorkerLeft, kv.ReturnLease,
)  # fmt: skip


@quick
@given(
    st.lists(messages(request.RunAttempt, *HEARD_BY_WORKERS), max_size=6),
    st.lists(messages(kv.RequestLease, kv.ReplicateBlocks), max_size=3),
)
def test_a_worker(heard: list[Any], asked: list[Any]) -> None:
    cache, leases = case.block_cache(16), LeaseTable()
    case.keep(cache, 12)
    limits = case.limits(case.DECODE)
    lending = LendCore(limits, cache, leases)
    copies = CopyCore(limits, cache, partial(num_spare, cache), max_reads=2)
    cores = [AttemptCore(limits, cache, leases), copies, lending]
    for request_ in (case.run_prefill(1), case.reserve(2)):  # two attempts that are as they should be
        case.decide(cores[0], AttemptAsked(request_, AttemptTimes()), NOW)
    for message in heard:
        is_asked = isinstance(message, request.RunAttempt)
        for core in cores:
            case.decide(core, AttemptAsked(message, AttemptTimes()) if is_asked else message, NOW)
    for message in asked:
        if isinstance(message, kv.RequestLease):
            case.decide(lending, LeaseAsked(message), NOW)
        else:
            case.decide(copies, CopyOffered(message), NOW)
    for core in cores:
        case.tick(core, NOW)
        case.tick(core, 2**60)


@quick
@given(st.lists(messages(kv.EvictionCandidates, kv.ReplicateBlocks), max_size=6))
def test_a_store(heard: list[Any]) -> None:
    memory = make_memory()
    core = CopyCore(memory.limits, memory, lambda _: memory.num_spare, max_reads=2)
    for message in heard:
        case.decide(core, CopyOffered(message) if isinstance(message, kv.ReplicateBlocks) else message, NOW)
    case.tick(core, 2**60)
    memory.check_integrity()


@quick
@given(
    st.lists(messages(*FLEET[:2], worker.WorkerLeft), max_size=4),
    messages(request.Placement),
    st.lists(messages(request.TokensEmitted), max_size=4),
)
def test_a_gateway(heard: list[Any], placement: Any, emitted: list[Any]) -> None:
    detector = FailureDetector(PresenceTimes())
    fleet = Fleet(detector, MeshConfig())
    core = RequestCore(RequestId("r"), 5, MeshConfig(), detector)
    core.handle(Submitted(), NOW)
    core.handle(PlaceGranted(1, placement), NOW)
    for message in heard:
        for lost in fleet.apply(message, NOW):
            core.handle(lost, NOW)
    fleet.block_counts(NOW)
    for message in emitted:
        for share in message.requests:
            tokens = [1, 2]
            core.handle(
                TokensReceived(
                    1, message.worker_id, share.index, tokens, share.finish_reason, share.failure, share.report
                ),
                NOW,
            )
    core.tick(2**60)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_running", -1), ("num_uncomputed_tokens", 10**30), ("num_queued", 2**41),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_no_message(field: str, value: int) -> None:
    from tests.wire.examples import LOAD

    raw = msgspec.json.decode(encode(LOAD))
    assert decode(msgspec.json.encode(raw), worker.WorkerLoad) == LOAD
    with pytest.raises(UndecodableMessageError):
        decode(msgspec.json.encode(raw | {field: value}), worker.WorkerLoad)
    for rates in ({"prefill": [{"context_tokens": 0, "tokens_per_s": -1}]}, {"decode_step_ms": 1e300}):
        with pytest.raises(UndecodableMessageError):
            decode(msgspec.json.encode(raw | {"rates": rates}), worker.WorkerLoad)


def test_every_number_of_a_message_has_bounds() -> None:
    from tests.wire.examples import MESSAGE_TYPES

    def unbounded(kind: types.Type, seen: set[type]) -> bool:
        match kind:
            case types.IntType():
                return kind.ge is None or kind.le is None
            case types.StructType():
                if kind.cls in seen:
                    return False
                return any(unbounded(field.type, seen | {kind.cls}) for field in kind.fields)
            case types.VarTupleType():
                return unbounded(kind.item_type, seen)
            case types.UnionType():
                return any(unbounded(each, seen) for each in kind.types)
            case _:
                return False

    assert [each.__name__ for each in MESSAGE_TYPES if unbounded(types.type_info(each), set())] == []
