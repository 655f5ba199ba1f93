"""What is true of a sequence whoever computes it: what it needs, and what one more token means. Pure."""

from dataplane.blocks.layout import KVLayout
from schemas.request import FinishReason
from services.engine.interface import ChosenToken, InvalidSequenceError, Sequence
from services.engine.messages import SampledToken
from services.engine.table_checks import find_problem


def num_tokens_to_store(sequence: Sequence, context_length: int | None) -> int:
    """Return how many tokens' KV `sequence` can come to need here. Its last token's KV is never computed."""
    return max(len(sequence.token_ids) + num_tokens_left(sequence, context_length) - 1, len(sequence.token_ids))


def num_tokens_left(sequence: Sequence, context_length: int | None) -> int:
    """Return how many tokens may still be sampled here, unless a stop token ends them before."""
    left = sequence.sampling.max_tokens - sequence.index
    if context_length is not None:
        left = min(left, context_length - len(sequence.token_ids))
    if sequence.max_local_tokens is not None:
        left = min(left, sequence.max_local_tokens - sequence.num_local_tokens)
    return left


def check_sequence(
    sequence: Sequence, layout: KVLayout, *, vocab_size: int, context_length: int | None, token_budget: int
) -> None:
    """Raise InvalidSequenceError unless the sequence can be computed to its end in its blocks.

    At least its last known token must be uncomputed: its logits give the next one.
    """
    name, token_ids = sequence.request_id, sequence.token_ids
    if not 0 <= sequence.num_computed_tokens < len(token_ids):
        raise InvalidSequenceError(f"{name} has no token to compute")
    if sequence.index >= sequence.sampling.max_tokens:
        raise InvalidSequenceError(f"{name} has had all its {sequence.sampling.max_tokens} tokens")
    if sequence.wants_prompt_logprobs and (sequence.num_computed_tokens or sequence.index):
        raise InvalidSequenceError(f"{name} wants logprobs of a prompt that is computed already")
    if not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise InvalidSequenceError(f"{name} has a token outside the vocabulary")
    problem = find_problem(
        layout,
        sequence.tables,
        num_computed=sequence.num_computed_tokens,
        num_needed=num_tokens_to_store(sequence, context_length),
        chunk_tokens=token_budget,
    )
    if problem is not None:
        raise InvalidSequenceError(f"{name} {problem}")


def append_token(sequence: Sequence, choice: ChosenToken, context_length: int | None) -> SampledToken:
    """Add a token to a sequence and return what it means."""
    index, token_id = sequence.index, choice.token_id
    sequence.token_ids.append(token_id)
    sequence.num_local_tokens += 1
    finish_reason = _finish_reason(sequence, token_id, context_length)
    handed_over = sequence.max_local_tokens is not None and sequence.num_local_tokens >= sequence.max_local_tokens
    local_end = finish_reason is not None or handed_over
    has_prompt_logprobs = sequence.wants_prompt_logprobs and index == 0
    return SampledToken(
        number=sequence.number,
        index=index,
        token_id=token_id,
        finish_reason=finish_reason,
        local_end=local_end,
        logprob=choice.logprob,
        prompt_logprobs=tuple(sequence.prompt_logprobs) if has_prompt_logprobs else None,
        num_reused_tokens=sequence.num_reused_tokens,
    )


def stop_token_ids(sequence: Sequence) -> frozenset[int]:
    """Return the tokens that end it: the request's own, and the model's unless it says to ignore EOS."""
    sampling = sequence.sampling
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | sequence.stop_token_ids


def _finish_reason(sequence: Sequence, token_id: int, context_length: int | None) -> FinishReason | None:
    if token_id in stop_token_ids(sequence):
        return FinishReason.STOP
    if sequence.index >= sequence.sampling.max_tokens:
        return FinishReason.LENGTH
    if context_length is not None and len(sequence.token_ids) >= context_length:
        return FinishReason.LENGTH
    return None
