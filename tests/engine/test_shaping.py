"""What a request asks of its tokens beyond temperature, top_k and top_p, against an obvious reference or Hugging
Face's own processors; and that an answer that goes on elsewhere has the tokens that it would have had.
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from schemas.request import SamplingParams
from services.engine.counts import TokenCounts
from services.engine.interface import ChosenToken, GrammarError, Sequence
from services.engine.sampler import sample
from services.engine.shaping import shaped
from tests.engine.rig import sequence_at
from tests.share import examples

VOCAB = 24
EOS = 0
Row = npt.NDArray[np.float32]


def sequence(prompt: Seq[int], answer: Seq[int] = (), **sampling: Any) -> Sequence:
    return sequence_at(SamplingParams(max_tokens=100, **sampling), prompt, answer, stops=(EOS,))


def logits_of(seed: int) -> Row:
    return np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)


ROW = logits_of(1)
PROMPT, ANSWER = (3, 4, 4, 5), (5, 6, 6, 7)


def test_presence_counts_whether_and_frequency_how_often() -> None:
    row = shaped(ROW, sequence(PROMPT, ANSWER, presence_penalty=0.5, frequency_penalty=0.25))
    expected = ROW.copy()
    for token_id in range(VOCAB):
        times = ANSWER.count(token_id)
        expected[token_id] -= 0.25 * times + (0.5 if times else 0)
    np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_repetition_is_hugging_faces_over_prompt_and_answer() -> None:
    for penalty in (0.5, 1.3, 2.0):
        row = shaped(ROW, sequence(PROMPT, ANSWER, repetition_penalty=penalty))
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*PROMPT, *ANSWER]]), torch.tensor(ROW[None]))
        np.testing.assert_allclose(row, theirs[0].numpy(), rtol=1e-6)


def test_bias_is_added() -> None:
    row = shaped(ROW, sequence(PROMPT, logit_bias=((3, -100.0), (9, 2.5))))
    expected = ROW.copy()
    expected[3] -= 100
    expected[9] += 2.5
    np.testing.assert_allclose(row, expected, rtol=1e-6)


def test_only_allowed_tokens_are_left() -> None:
    row = shaped(ROW, sequence(PROMPT, allowed_token_ids=(2, 9)))
    assert set(np.flatnonzero(np.isfinite(row))) == {2, 9}


@pytest.mark.parametrize(("num_answered", "banned"), [(0, True), (2, True), (3, False), (4, False)])
def test_nothing_that_ends_an_answer_comes_before_its_least_length(num_answered: int, banned: bool) -> None:
    row = shaped(ROW, sequence(PROMPT, ANSWER[:num_answered], min_tokens=3, stop_token_ids=(8,)))
    assert [not np.isfinite(row[token_id]) for token_id in (EOS, 8, 9)] == [banned, banned, False]


@pytest.mark.parametrize("answer", [(), (6,), (6, 7), (7, 6), (1, 6, 7)])
def test_bad_words_are_hugging_faces_in_the_answer(answer: tuple[int, ...]) -> None:
    words = ((9,), (6, 7, 8), (7, 1))
    row = shaped(ROW, sequence(PROMPT, answer, bad_words=words))
    theirs = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=torch.tensor([EOS]))
    ids = torch.tensor([answer], dtype=torch.long).reshape(1, len(answer))
    assert [*np.isfinite(row)] == [*torch.isfinite(theirs(ids, torch.tensor(ROW[None])))[0].tolist()]


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
def test_min_p_is_hugging_faces(min_p: float) -> None:
    drawn: set[int] = set()
    for seed in range(400):
        (outcome,) = sample(torch.tensor(ROW[None]), [sequence(PROMPT, min_p=min_p, seed=seed, temperature=2.0)])
        assert isinstance(outcome, ChosenToken)
        drawn.add(outcome.token_id)
    theirs = MinPLogitsWarper(min_p)(torch.empty(1, 0), torch.tensor(ROW[None]) / 2) if min_p else torch.zeros(1, VOCAB)
    possible = set(torch.nonzero(torch.isfinite(theirs[0]))[:, 0].tolist())
    assert drawn <= possible and (min_p < 0.3 or drawn == possible)


def test_a_least_length_gives_way_where_nothing_else_may_come() -> None:
    row = shaped(ROW, sequence(PROMPT, min_tokens=5, allowed_token_ids=(EOS,)))
    assert set(np.flatnonzero(np.isfinite(row))) == {EOS}


def test_bad_words_give_way_where_nothing_else_may_come() -> None:
    row = shaped(ROW, sequence(PROMPT, bad_words=((2,), (9,)), allowed_token_ids=(2, 9)))
    assert set(np.flatnonzero(np.isfinite(row))) == {2, 9}


def test_what_leaves_no_token_is_an_error_of_that_sequence_alone() -> None:
    empty = ROW.copy()
    empty[2] = -np.inf
    wanted = [sequence(PROMPT, allowed_token_ids=(2,)), sequence(PROMPT, temperature=0)]
    outcomes = sample(torch.tensor(np.stack([empty, ROW])), wanted)
    assert isinstance(outcomes[0], GrammarError) and outcomes[1] == ChosenToken(int(ROW.argmax()))


# An answer that goes on elsewhere.

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.5]),
        "seed": st.integers(0, 5),
        "presence_penalty": st.sampled_from([0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, -1.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "min_tokens": st.integers(0, 8),
        "bad_words": st.sampled_from([(), ((5,), (6, 7)), ((8, 9, 10),)]),
        "logit_bias": st.sampled_from([(), ((5, 4.0), (6, 4.0), (7, 4.0))]),
        "allowed_token_ids": st.sampled_from([(), tuple(range(12))]),
    }
)


def next_token(tokens: Sequence, seed: int) -> int:
    """The token that follows: the logits are a function of all tokens so far."""
    (outcome,) = sample(torch.tensor(logits_of(hash((seed, *tokens.token_ids)) % 2**32)[None]), [tokens])
    assert isinstance(outcome, ChosenToken)
    return outcome.token_id


def answer_of(tokens: Sequence, length: int, seed: int) -> list[int]:
    while tokens.index < length:
        tokens.token_ids.append(next_token(tokens, seed))
    return tokens.token_ids[tokens.num_prompt_tokens :]


@settings(max_examples=examples(150), deadline=None)
@given(PARAMS, st.integers(0, 3), st.integers(1, 11))
def test_an_answer_that_goes_on_elsewhere_is_the_same(sampling: dict[str, Any], seed: int, cut: int) -> None:
    whole = answer_of(sequence(PROMPT, **sampling), 12, seed)
    assert answer_of(sequence(PROMPT, whole[:cut], **sampling), 12, seed) == whole


def test_counts_are_caught_up_and_never_wrong() -> None:
    tokens = sequence(PROMPT, ANSWER, frequency_penalty=1.0)
    before = shaped(ROW, tokens)
    tokens.token_ids.append(9)
    after = shaped(ROW, tokens)
    assert tokens.counts is not None and isinstance(tokens.counts, TokenCounts)
    np.testing.assert_array_equal(after, shaped(ROW, sequence(PROMPT, (*ANSWER, 9), frequency_penalty=1.0)))
    assert before[9] != after[9]
