"""What a request asks of its tokens beyond temperature, top_k, top_p and min_p, applied to one row of logits. No torch.

Order and meaning are vLLM's, which follows OpenAI and Hugging Face: what may not come is masked, then `logit_bias` is
added, then come the repetition, the frequency and the presence penalty. Presence and frequency count the answer,
repetition the prompt as well.

Of the masks the grammar's and `allowed_token_ids` never give way. Behind them, in this order, each as a whole,
`min_tokens` (no token that ends the answer) and `bad_words` do, where they would leave nothing.

All of it depends on the sequence's tokens, on where its answer begins, and on its parameters: an attempt that goes on
with an answer's beginning gives the tokens that the first one would have given.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from services.engine.counts import TokenCounts
from services.engine.interface import GrammarError, Sequence
from services.engine.limits import GRAMMAR_TIMEOUT_S
from services.engine.rules import stop_token_ids

Row = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def is_masked(sequence: Sequence) -> bool:
    """Return whether not every token may be its next one."""
    sampling = sequence.sampling
    return bool(
        sequence.grammar is not None
        or sampling.grammar
        or sampling.allowed_token_ids
        or sampling.bad_words
        or (sampling.min_tokens > 0 and sequence.index < sampling.min_tokens)
    )


def is_shaped(sequence: Sequence) -> bool:
    """Return whether `shaped` changes anything of its next row."""
    sampling = sequence.sampling
    return (
        is_masked(sequence)
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty != 0
        or sampling.presence_penalty != 0
        or bool(sampling.logit_bias)
    )


def shaped(logits: Row, sequence: Sequence) -> Row:
    """Return the logits `[vocab]` that the sequence's next token is chosen from, as a copy. Raises GrammarError where
    no token is left."""
    row = logits.copy()
    row[~permitted(sequence, row > -np.inf)] = -np.inf
    for token_id, bias in sequence.sampling.logit_bias:
        row[token_id] += np.float32(bias)
    _penalize(row, sequence)
    if not np.isfinite(row.max()):
        raise GrammarError("the request's parameters leave no token that may come next")
    return row


def permitted(sequence: Sequence, possible: Mask) -> Mask:
    """Return which of the `possible` tokens `[vocab]` may be the sequence's next one. Raises GrammarError where none
    may, or where the grammar does."""
    mask = possible & _base(sequence, len(possible))
    if not mask.any():
        raise GrammarError("the request's grammar or its allowed tokens leave no token that may come next")
    for token_ids in (_early_stops(sequence), _bad_ends(sequence)):
        without = mask.copy()
        without[[token_id for token_id in token_ids if 0 <= token_id < len(mask)]] = False
        mask = without if without.any() else mask
    return mask


def _base(sequence: Sequence, vocab_size: int) -> Mask:
    """Return the mask that never gives way."""
    sampling = sequence.sampling
    mask = np.ones(vocab_size, np.bool_)
    if sequence.grammar is not None:
        mask &= _grammar_mask(sequence, vocab_size)
    elif sampling.grammar:
        raise GrammarError("this worker's engine was not given the request's grammar")
    if sampling.allowed_token_ids:
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[list(sampling.allowed_token_ids)] = True
        mask &= allowed
    return mask


def _grammar_mask(sequence: Sequence, vocab_size: int) -> Mask:
    assert sequence.grammar is not None
    try:
        grammar = sequence.grammar.result(GRAMMAR_TIMEOUT_S)
    except TimeoutError as error:
        raise GrammarError(f"the grammar was not understood within {GRAMMAR_TIMEOUT_S} s") from error
    mask = grammar.allowed(sequence.token_ids[sequence.num_prompt_tokens :])
    assert mask.shape == (vocab_size,), "a grammar knows the model's vocabulary"
    return mask


def _early_stops(sequence: Sequence) -> Seq[int]:
    """Return the tokens that would end the answer before `min_tokens`."""
    if sequence.index >= sequence.sampling.min_tokens:
        return ()
    return tuple(stop_token_ids(sequence))


def _bad_ends(sequence: Sequence) -> Seq[int]:
    """Return the tokens that would complete a bad word. It must begin in the answer, not in the prompt."""
    ends: list[int] = []
    for *beginning, end in sequence.sampling.bad_words:
        count = len(beginning)
        last = sequence.token_ids[len(sequence.token_ids) - count :]
        if count <= sequence.index and last == beginning:
            ends.append(end)
    return ends


def _penalize(row: Row, sequence: Sequence) -> None:
    """Lower the logits of tokens that the sequence has, in place."""
    sampling = sequence.sampling
    repetition = sampling.repetition_penalty
    if repetition == 1 and sampling.frequency_penalty == 0 and sampling.presence_penalty == 0:
        return
    if sequence.counts is None:
        sequence.counts = TokenCounts(len(row))
    sequence.counts.catch_up(sequence.token_ids, sequence.num_prompt_tokens)
    if repetition != 1:
        seen = row[sequence.counts.seen]
        with np.errstate(all="ignore"):  # what is no number then is found by `shaped`
            row[sequence.counts.seen] = np.where(seen > 0, seen / np.float32(repetition), seen * np.float32(repetition))
    in_answer = sequence.counts.in_answer
    token_ids = np.fromiter(in_answer.keys(), np.int64, len(in_answer))
    times = np.fromiter(in_answer.values(), np.float32, len(in_answer))
    row[token_ids] -= np.float32(sampling.frequency_penalty) * times
    row[token_ids] -= np.float32(sampling.presence_penalty)
