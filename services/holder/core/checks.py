"""What a worker can take on, and the checks that every request must pass before it is taken. Pure."""

import itertools
from dataclasses import dataclass

from schemas.block import unpack_tokens
from schemas.ids import TokenIds, WorkerId, is_subject_token, is_tenant
from schemas.request import (
    RefusalReason,
    Refused,
    RunAttempt,
    SamplingParams,
    refuse,
)
from schemas.worker import WorkerState
from services.holder.limits import MAX_SOURCES, RETRY_AFTER_MS
from services.times import Times


@dataclass(slots=True, frozen=True, kw_only=True)
class HolderLimits:
    """`lease_ms`: how long a reader may be silent once its read could begin."""

    worker_id: WorkerId
    fingerprint: str
    block_size: int
    lease_ms: int
    times: Times


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerLimits(HolderLimits):
    """`num_blocks`: the most that one sequence may fill."""

    num_blocks: int
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_queued: int

    @property
    def num_tokens(self) -> int:
        """The most whose KV one sequence may have here."""
        return self.num_blocks * self.block_size

    def stop_token_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Return the tokens that end this request's answer."""
        eos = frozenset[int]() if sampling.ignore_eos else self.eos_token_ids
        return eos | frozenset(sampling.stop_token_ids)


def _ids_of(request: RunAttempt) -> list[str]:
    """Return the ids that become part of a subject or a ticket."""
    other = request.other_end
    ids: list[str] = [request.request_id, request.gateway_id]
    ids += [other.handoff_id, other.worker_id] if other is not None else []
    return ids + [source.worker_id for source in request.sources]


def num_kv_tokens(request: RunAttempt, num_prompt_tokens: int) -> int:
    """Return how many tokens need room here: the prompt's where they are handed over, else all but the answer's last
    one too."""
    if request.downstream is not None:
        return num_prompt_tokens
    return num_prompt_tokens - request.num_answered_tokens + request.sampling.max_tokens - 1


def read_prompt(packed: TokenIds) -> list[int]:
    """Return the prompt's token ids; none where the bytes are no token ids, which `check_request` refuses."""
    return [] if len(packed) % 4 else unpack_tokens(packed)


def named_tokens(sampling: SamplingParams) -> set[int]:
    """Return the tokens that a request's parameters name."""
    biased = (token_id for token_id, _ in sampling.logit_bias)
    return {*biased, *sampling.allowed_token_ids, *itertools.chain.from_iterable(sampling.bad_words)}


def check_request(
    request: RunAttempt,
    prompt: list[int],
    limits: WorkerLimits,
    now_ms: int,
    *,
    state: WorkerState,
    full: bool,
) -> Refused | None:
    """Return why this request cannot be taken, or None."""
    num_answered = request.num_answered_tokens
    num_tokens = len(prompt) - num_answered + request.sampling.max_tokens
    # The first reason counts. Load comes last: an invalid request is refused as such, and not asked to retry.
    reason: tuple[RefusalReason, str, int] | None = None
    if state == WorkerState.DRAINING:
        reason = (RefusalReason.DRAINING, f"{limits.worker_id} is draining", RETRY_AFTER_MS)
    elif state == WorkerState.STARTING:
        reason = (RefusalReason.STARTING, f"the engine of {limits.worker_id} is starting again", RETRY_AFTER_MS)
    elif request.deadline_ms <= now_ms:
        reason = (RefusalReason.DEADLINE, "the deadline has passed", 0)
    elif request.upstream is not None and request.downstream is not None:
        reason = (RefusalReason.INVALID, "an attempt is handed over once: from another worker, or to one", 0)
    elif not all(map(is_subject_token, _ids_of(request))) or not is_tenant(request.tenant):
        reason = (RefusalReason.INVALID, "an id or a tenant that is no word of letters, digits, - and _", 0)
    elif len(request.sources) > MAX_SOURCES:
        reason = (RefusalReason.INVALID, f"over {MAX_SOURCES} sources", 0)
    elif not prompt or request.sampling.max_tokens < 1 or max(prompt) >= limits.vocab_size:
        reason = (RefusalReason.INVALID, "an empty prompt, no tokens to generate, or a token outside the vocabulary", 0)
    elif (named := named_tokens(request.sampling)) and not 0 <= min(named) <= max(named) < limits.vocab_size:
        reason = (RefusalReason.INVALID, "a sampling parameter names a token outside the vocabulary", 0)
    elif not 0 <= num_answered < min(len(prompt), request.sampling.max_tokens):
        detail = f"{num_answered} tokens of the answer leave no prompt or no token to generate"
        reason = (RefusalReason.INVALID, detail, 0)
    elif num_tokens > limits.context_length or num_kv_tokens(request, len(prompt)) > limits.num_tokens:
        reason = (RefusalReason.TOO_LONG, f"{num_tokens} tokens do not fit", 0)
    elif full:
        reason = (
            RefusalReason.OVERLOADED,
            f"{limits.worker_id} has {limits.max_queued} requests waiting",
            RETRY_AFTER_MS,
        )
    return None if reason is None else refuse(request, *reason)
