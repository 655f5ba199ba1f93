"""Messages and engine results for the tests of the worker cores."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables, KVLayout, block_ids, uniform_shape
from schemas.block import hash_blocks, join_hashes, pack_tokens, split_hashes, unpack_tokens
from schemas.handoff import BlocksReserved, HandoffAborted, KVLanded, KVOffered
from schemas.ids import BlockHash, GatewayId, HandoffId, LeaseId, RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.logprobs import TokenLogprob
from schemas.message import Message
from schemas.request import (
    AttemptAccepted,
    CancelRequest,
    FinishReason,
    KVSource,
    OtherEnd,
    RunAttempt,
    SamplingParams,
    TransferReport,
)
from services.engine.messages import SampledToken, StepResult, SubmitSequence
from services.holder.core.actions import Action, AttemptEnded, Publish, SendReply
from services.holder.core.attempt import Attempt, AttemptTimes, KVRead
from services.holder.core.checks import WorkerLimits
from services.holder.core.content import ReadOutcome
from services.holder.core.copies import BlockCopy
from services.holder.core.events import AttemptAsked, Event, ReadEnded, TimePassed
from services.holder.core.leases import LeaseTable
from services.holder.core.rules import Rules, RuleTable
from services.times import Times
from services.worker.core import AttemptCore

PREFILL, DECODE, GATEWAY = WorkerId("p0"), WorkerId("d0"), GatewayId("g0")
DEADLINE_MS = 60_000
WHOLE = ReadOutcome(num_landed_tokens=6, num_bytes=100, carrier="shm", is_whole=True)
"""A hand-over of `run_prefill` that has landed."""


def limits(worker_id: WorkerId, *, num_blocks: int = 8, max_queued: int = 4, lease_ms: int = 1_000) -> WorkerLimits:
    return WorkerLimits(
        worker_id=worker_id,
        fingerprint="f",
        num_blocks=num_blocks,
        block_size=4,
        context_length=100,
        vocab_size=1000,
        eos_token_ids=frozenset({0}),
        max_queued=max_queued,
        lease_ms=lease_ms,
        times=Times(),
    )


def run_prefill(
    number: int = 1,
    *,
    num_tokens: int = 6,
    first: int = 1,
    max_tokens: int = 5,
    split: bool = True,
    deadline_ms: int = DEADLINE_MS,
    sources: tuple[KVSource, ...] = (),
) -> RunAttempt:
    """`first`: the prompt's first token."""
    return RunAttempt(
        request_id=RequestId(f"r{number}"),
        attempt=1,
        deadline_ms=deadline_ms,
        gateway_id=GATEWAY,
        prompt=pack_tokens(range(first, first + num_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        downstream=OtherEnd(worker_id=DECODE, handoff_id=HandoffId(f"r{number}-1")) if split else None,
        sources=sources,
    )


def with_sampling(request: RunAttempt, **sampling: Any) -> RunAttempt:
    """Return the request with these sampling parameters."""
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, **sampling))


def source(worker_id: str, first_block: int, num_blocks: int) -> KVSource:
    return KVSource(worker_id=WorkerId(worker_id), first_block=first_block, num_blocks=num_blocks)


def reserve(
    number: int = 1,
    *,
    num_tokens: int = 6,
    first: int = 1,
    max_tokens: int = 5,
    deadline_ms: int = DEADLINE_MS,
    sources: tuple[KVSource, ...] = (),
) -> RunAttempt:
    return RunAttempt(
        request_id=RequestId(f"r{number}"),
        attempt=1,
        deadline_ms=deadline_ms,
        gateway_id=GATEWAY,
        upstream=OtherEnd(worker_id=PREFILL, handoff_id=HandoffId(f"r{number}-1")),
        prompt=pack_tokens(range(first, first + num_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        sources=sources,
    )


def reserved(number: int = 1) -> BlocksReserved:
    return BlocksReserved(**_handoff(number), num_blocks=2)


def offered(number: int = 1, *, fingerprint: str = "f", num_tokens: int = 6) -> KVOffered:
    return KVOffered(
        **_handoff(number),
        lease_id=LeaseId(f"lease-r{number}-1"),
        epoch=1,
        lease_ms=1000,
        ticket="t",
        incarnation="p-1",
        fingerprint=fingerprint,
        num_tokens=num_tokens,
    )


def landed(number: int = 1) -> KVLanded:
    lease_id = LeaseId(f"lease-r{number}-1")
    return KVLanded(**_handoff(number), lease_id=lease_id, carrier="tcp", num_tokens=6, num_bytes=1)


def aborted(number: int = 1, reason: str = "gave up") -> HandoffAborted:
    return HandoffAborted(**_handoff(number), reason=reason)


def cancel(number: int = 1) -> CancelRequest:
    return CancelRequest(request_id=RequestId(f"r{number}"), attempt=1, deadline_ms=DEADLINE_MS, reason="client gone")


def sampled(
    sequence: SubmitSequence,
    index: int,
    token_id: int = 9,
    finish: FinishReason | None = None,
    *,
    local_end: bool = False,
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None,
) -> StepResult:
    """One step that sampled one token of one sequence."""
    token = SampledToken(sequence.number, index, token_id, finish, local_end, prompt_logprobs=prompt_logprobs)
    return StepResult(0, 1, 0, 1, ((sequence.number, sequence.num_prompt_tokens),), (token,))


def tokens_of(sequence: SubmitSequence) -> list[int]:
    return unpack_tokens(sequence.tokens)


def index_of(sequence: SubmitSequence) -> int:
    """The answer's index of the next token."""
    return len(tokens_of(sequence)) - sequence.num_prompt_tokens


def by_source(report: TransferReport) -> dict[str, int]:
    return {source.worker_id: source.num_tokens for source in report.transferred_from}


def block_cache(num_blocks: int = 8, *, whole_blocks: bool = False) -> BlockCache:
    layout = KVLayout(
        weights="w", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_size=4, whole_blocks=whole_blocks
    )
    return BlockCache(uniform_shape(layout, num_blocks), chunk_tokens=64)


class Core(Protocol):
    """Any of a worker's cores."""

    def rules(self) -> RuleTable: ...


def decide(core: Core, event: Event, now_ms: int = 0) -> list[Action]:
    """Return what a core does with an event, as if it were the worker's only one."""
    return Rules([core.rules()], [core.admit] if isinstance(core, AttemptCore) else []).decide(event, now_ms)


ActionT = TypeVar("ActionT", bound=Action)


def hear(core: Core, event: Event, now_ms: int = 0) -> list[Action]:
    """Let a core handle an event; return what it says beside that an attempt has ended."""
    return without_ends(decide(core, event, now_ms))


def tick(core: Core, now_ms: int) -> list[Action]:
    return without_ends(decide(core, TimePassed(), now_ms))


def without_ends(actions: list[Action]) -> list[Action]:
    return [action for action in actions if not isinstance(action, AttemptEnded)]


def asked(request: RunAttempt, now_ms: int = 0) -> AttemptAsked:
    return AttemptAsked(request, AttemptTimes(now_ms * 1_000_000))


def ask(core: Core, request: RunAttempt, now_ms: int = 0) -> tuple[Message, list[Action]]:
    """Ask a core for something; return its reply, and what it does."""
    first, *actions = hear(core, asked(request, now_ms), now_ms)
    assert isinstance(first, SendReply)
    return first.message, actions


def run(core: Core, request: RunAttempt, now_ms: int = 0) -> list[Action]:
    """Ask a core for a prompt's computation, which it accepts; return what it does."""
    reply, actions = ask(core, request, now_ms)
    assert isinstance(reply, AttemptAccepted), reply
    return actions


def published(actions: list[Action]) -> list[type]:
    return [type(action.message) for action in actions if isinstance(action, Publish)]


def one(actions: list[Action], kind: type[ActionT]) -> ActionT:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def wanted(read: KVRead) -> tuple[str, int, int]:
    """Return whom a lease is asked of, and for which blocks: the first, and how many."""
    assert isinstance(read.lease, RequestLease)
    return read.holder, read.lease.first_block, len(split_hashes(read.lease.block_hashes))


def lease_of(first_block: int, hashes: Sequence[BlockHash], deadline_ms: int) -> RequestLease:
    """Return the question for a lease on these blocks, for a first request's read."""
    return RequestLease(
        request_id=RequestId("r"), attempt=1, deadline_ms=deadline_ms, reader=DECODE, fingerprint="f",
        first_block=first_block, block_hashes=join_hashes(hashes),
    )  # fmt: skip


def brings(read: KVRead, *outcome: Any, **more: Any) -> ReadEnded:
    """Return the event of a read that has ended with this ReadOutcome."""
    return ReadEnded(read, ReadOutcome(*outcome, **more))


def tables_of(*cores: AttemptCore) -> list[BlockTables]:
    """Return the tables that the attempts of these cores hold references to."""
    attempts: list[Attempt] = [attempt for core in cores for attempt in core.records.values()]
    return [attempt.tables for attempt in attempts if attempt.tables]


def check_blocks(
    cache: BlockCache, leases: LeaseTable | None, *cores: AttemptCore, copies: Iterable[BlockCopy] = ()
) -> None:
    """The conservation law, exactly: total = free + cached + what runs own or leases hold."""
    cache.check_integrity()
    tables = [*tables_of(*cores), *(copy.tables for copy in copies)]
    tables += [lease.tables for lease in leases or ()]
    held = {(group, block) for groups in tables for group, t in enumerate(groups) for block in block_ids(t.segments)}
    assert cache.num_blocks == cache.num_free + cache.num_cached + len(held)


def keep(cache: BlockCache, num_tokens: int, *, base: int = 0) -> None:
    """Let the first `num_tokens` tokens of every test's prompt be cached; with a `base` those of another prompt."""
    tokens = list(range(base + 1, base + num_tokens + 1))
    allocation = cache.admit([], num_tokens, 0)
    assert allocation is not None
    cache.store(allocation.tables, hash_blocks(tokens, 4, model_fingerprint="f"), 0, num_tokens, 0, ended=True)
    cache.free(allocation.tables)


def _handoff(number: int) -> dict[str, object]:
    return {
        "request_id": RequestId(f"r{number}"),
        "attempt": 1,
        "deadline_ms": DEADLINE_MS,
        "handoff_id": HandoffId(f"r{number}-1"),
        "source_worker": PREFILL,
        "target_worker": DECODE,
    }
