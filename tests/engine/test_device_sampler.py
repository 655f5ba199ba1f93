"""The batched sampler draws the very tokens of `sampler.sample`, row by row, whatever else is in the batch."""

import math
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.request import SamplingParams
from services.engine.cuda import device_sampler
from services.engine.cuda.device_sampler import NOT_FINITE, UNSETTLED, choose
from services.engine.cuda.step_plan import Draws
from services.engine.sampler import GREEDY_BELOW, uniform
from tests.engine.draws import sample
from tests.share import examples

Rows = Seq[tuple[SamplingParams, int]]


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def draws_of(wanted: Rows) -> Draws:
    drawn = [(at, s, index) for at, (s, index) in enumerate(wanted) if s.temperature > GREEDY_BELOW]
    return Draws(
        [at for at, _, _ in drawn],
        [s.temperature for _, s, _ in drawn],
        [s.top_k for _, s, _ in drawn],
        [s.top_p for _, s, _ in drawn],
        [uniform(s.seed, index) for _, s, index in drawn],
    )


def chosen(logits: torch.Tensor, wanted: Rows, *, all_candidates: bool = False) -> list[int]:
    draws = draws_of(wanted)
    inputs = torch.tensor([list(map(float, values)) for values in draws], dtype=torch.float64, device=logits.device)
    return choose(logits, draws, inputs.view(len(draws), -1), all_candidates=all_candidates).tolist()


few_values = st.sampled_from([0.0, 1.0, -1.0, 2.5, -30.0, -math.inf])
logit = st.one_of(st.floats(-30, 30, width=32), few_values)
one_row = st.tuples(
    st.builds(
        params,
        temperature=st.one_of(st.floats(1e-6, 5), st.sampled_from([0.0, 1e-5, 1.0])),
        top_k=st.one_of(st.integers(0, 60), st.just(0), st.just(1)),
        top_p=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1e-12, 0.25, 0.5, 1.0])),
        seed=st.integers(-(2**40), 2**70),
    ),
    st.integers(0, 5000),
)


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), vocab=st.integers(1, 50), wanted=st.lists(one_row, min_size=1, max_size=8))
def test_tokens_are_those_of_the_sampler(data: st.DataObject, vocab: int, wanted: Rows) -> None:
    rows = data.draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=len(wanted), max_size=8))
    logits = torch.tensor(rows[: len(wanted)])
    finite = torch.isfinite(logits.max(dim=-1).values)
    ours = chosen(logits, wanted)
    for row, token in enumerate(ours):
        if finite[row]:
            assert [token] == sample(logits[row : row + 1], [wanted[row]])
        else:
            assert token == NOT_FINITE


def test_large_batches_and_vocabularies(monkeypatch: pytest.MonkeyPatch) -> None:
    """More draws than are drawn at a time, among greedy rows; sets larger and smaller than the first candidates."""
    monkeypatch.setattr(device_sampler, "ROWS_AT_A_TIME", 7)
    torch.manual_seed(0)
    logits = torch.randn(40, 30_000) * 2
    choices = [{}, {"top_p": 0.3}, {"top_k": 50, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 5000, "top_p": 0.2}]
    wanted = [(params(temperature=1.0, seed=n) if not c else params(**({"temperature": 0.7} | c), seed=n), n)
              for n in range(40) for c in [choices[n % len(choices)]]]  # fmt: skip
    ours = chosen(logits, wanted)
    settled = [row for row, token in enumerate(ours) if token != UNSETTLED]
    expected = sample(logits, wanted)
    assert [ours[row] for row in settled] == [expected[row] for row in settled]
    assert len(settled) >= 24


def test_a_nucleus_beyond_the_first_candidates_is_told_and_drawn_from_all() -> None:
    logits = torch.cat([torch.zeros(1, 20_000), torch.randn(2, 20_000)])
    wanted = [(params(seed=1, top_p=0.5), 3), (params(seed=2, top_p=0.99, temperature=2.0), 4), (params(seed=3), 5)]
    ours = chosen(logits, wanted)
    assert ours[:2] == [UNSETTLED, UNSETTLED]
    assert chosen(logits, wanted, all_candidates=True) == sample(logits, wanted)
    assert ours[2] == sample(logits, wanted)[2]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_told(bad: list[float], temperature: float) -> None:
    wanted = [(params(temperature=temperature, top_p=0.9, top_k=1), 0), (params(temperature=0.0), 0)]
    assert chosen(torch.tensor([bad, [0.0, 1.0]]), wanted) == [NOT_FINITE, 1]


def test_a_number_on_a_border_is_the_token_s_behind_it() -> None:
    """And never a token's that has no probability."""
    draws = Draws([0, 1], [1.0, 1.0], [0, 0], [1.0, 1.0], [0.5, 0.0])
    inputs = torch.tensor([list(map(float, values)) for values in draws], dtype=torch.float64)
    assert choose(torch.tensor([[0.0, 0.0], [-math.inf, 0.0]]), draws, inputs).tolist() == [1, 1]


def test_no_rows_no_tokens() -> None:
    assert chosen(torch.empty(0, 5), []) == []
