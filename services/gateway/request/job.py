"""One choice of an HTTP request as it is sent to the scheduler and the workers."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from schemas.block import hash_blocks, join_hashes, pack_tokens, unpack_tokens
from schemas.ids import GatewayId, RequestId, TokenIds, WorkerId
from schemas.logprobs import Logprobs, TokenLogprob, unpack_logprobs
from schemas.request import (
    CARRIED_GRAMMAR_BYTES,
    AttemptFailure,
    FinishReason,
    PlaceRequest,
    RequestFailure,
    RequestTokens,
    RunAttempt,
    SamplingParams,
    digest_of_grammar,
)
from services.gateway import limits
from services.gateway.request.events import AskPlacement, SendAttempt, TokensReceived


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKey:
    """What makes equal text equal blocks."""

    block_size: int
    model_fingerprint: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """A prompt as it travels, and its block hashes, joined."""

    token_ids: TokenIds
    block_hashes: bytes
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice, ready to be placed."""

    request_id: RequestId
    prompt: PackedPrompt
    key: BlockKey
    sampling: SamplingParams
    deadline_ms: int
    trace: str
    """Its spans lie under this one."""
    must_split: bool = False
    """It fails where one worker would serve it alone, or its prompt is computed twice."""

    def held_to(self, grammar: str) -> "Job":
        """Return the same, whose answer must be what a grammar allows."""
        return replace(self, sampling=msgspec.structs.replace(self.sampling, grammar=grammar))

    def sampling_sent(self) -> SamplingParams:
        """Return `sampling` as it travels: with the digest of a long grammar in place of it."""
        digest = _digest_of_long(self.sampling.grammar)
        if not digest:
            return self.sampling
        return msgspec.structs.replace(self.sampling, grammar="", grammar_digest=digest)


@lru_cache(maxsize=limits.MAX_CHOICES)
def _digest_of_long(grammar: str) -> bytes:
    """Return the digest of a grammar that is too long to travel with each attempt; of another one nothing."""
    is_short = len(msgspec.json.encode(grammar)) <= CARRIED_GRAMMAR_BYTES
    return b"" if is_short else digest_of_grammar(grammar)


def pack_prompt(prompt: Sequence[int], key: BlockKey) -> PackedPrompt:
    """Pack and hash a prompt."""
    hashes = hash_blocks(prompt, key.block_size, model_fingerprint=key.model_fingerprint, tenant=key.tenant)
    return PackedPrompt(pack_tokens(prompt), join_hashes(hashes), len(prompt))


async def continue_prompt(job: Job, answered: Sequence[int]) -> PackedPrompt:
    """Return the prompt of an attempt that goes on after the tokens that were answered. A long one is packed in a
    thread."""
    if not answered:
        return job.prompt
    prompt = [*unpack_tokens(job.prompt.token_ids), *answered]
    if len(prompt) <= limits.MAX_INLINE_TOKENS:
        return pack_prompt(prompt, job.key)
    return await asyncio.to_thread(pack_prompt, prompt, job.key)


def tokens_received(job: Job, worker_id: WorkerId, share: RequestTokens) -> TokensReceived:
    """Return what a worker's message has of a job. Raises ValueError where it is malformed, or lacks a logprob that
    is wanted."""
    tokens, sampling = tuple(unpack_tokens(share.tokens)), job.sampling
    logprobs = _logprobs(share.logprobs, len(tokens)) if sampling.logprobs is not None else ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    if sampling.prompt_logprobs is not None and tokens and share.index == 0:
        prompt_logprobs = _logprobs(share.prompt_logprobs, job.prompt.num_tokens - 1)
    finish_reason, failure = share.finish_reason, share.failure
    if finish_reason is FinishReason.OTHER:
        finish_reason, failure = None, failure or _UNKNOWN_END
    return TokensReceived(
        share.attempt,
        worker_id,
        share.index,
        tokens,
        finish_reason,
        failure,
        share.report,
        logprobs,
        prompt_logprobs,
    )


_UNKNOWN_END = RequestFailure(
    code=AttemptFailure.OTHER, detail="its answer has ended as only a later release knows", retryable=True
)


def _logprobs(packed: Logprobs | None, num_tokens: int) -> tuple[TokenLogprob, ...]:
    found = tuple(unpack_logprobs(packed)) if packed is not None else ()
    if len(found) != num_tokens:
        raise ValueError(f"{len(found)} logprobs of {num_tokens} tokens")
    return found


def computes_whole(job: Job, num_answered: int) -> bool:
    """Return whether nothing of the prompt may come from elsewhere, as its own logprobs are wanted."""
    return job.sampling.prompt_logprobs is not None and not num_answered


def place_request(job: Job, action: AskPlacement, prompt: PackedPrompt) -> PlaceRequest:
    return PlaceRequest(
        request_id=job.request_id,
        attempt=action.attempt,
        deadline_ms=job.deadline_ms,
        num_prompt_tokens=prompt.num_tokens,
        max_tokens=job.sampling.max_tokens - action.num_answered,
        block_hashes=b"" if computes_whole(job, action.num_answered) else prompt.block_hashes,
        excluded_workers=action.excluded_workers,
        tenant=job.key.tenant,
        moved_from=None if computes_whole(job, action.num_answered) else action.moved_from,
        must_split=job.must_split and not action.num_answered,
    )


def attempt_message(
    job: Job, proof: bytes, gateway_id: GatewayId, action: SendAttempt, prompt: PackedPrompt
) -> RunAttempt:
    return RunAttempt(
        request_id=job.request_id,
        attempt=action.attempt,
        deadline_ms=job.deadline_ms,
        gateway_id=gateway_id,
        prompt=prompt.token_ids,
        sampling=job.sampling_sent(),
        upstream=action.upstream,
        downstream=action.downstream,
        sources=action.sources,
        num_answered_tokens=action.num_answered,
        tenant=job.key.tenant,
        signature=proof,
        replica=action.replica,
        spare_blocks=action.spare_blocks,
    )
