"""The sampler: what is kept, what is drawn, and that only seed and index decide."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from schemas.request import SamplingParams
from services.engine.sampler import NEAR_TIE, LogitsNotFiniteError, uniform
from tests.engine.draws import near_tie, sample
from tests.share import examples


def params(**fields: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def draw(row: list[float] | torch.Tensor, sampling: SamplingParams, count: int) -> list[int]:
    logits = torch.as_tensor(row, dtype=torch.float32).repeat(count, 1)
    return sample(logits, [(sampling, index) for index in range(count)])


def test_greedy_is_the_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, [(params(temperature=0.0), 0), (params(temperature=0.0), 9)]) == [1, 0]


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, 5), []) == []


def test_the_random_number_is_pinned() -> None:
    """Another value here would give every migrated request other tokens: old and new workers must agree."""
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(-(2**80), 3)] == PINNED


PINNED = [0.26078659486205036, 0.381137871646391, 0.48057009870185075, 0.2049293351107837]


def test_only_seed_and_index_decide() -> None:
    torch.manual_seed(0)
    rows = torch.randn(6, 300)
    wanted = [(params(seed=n % 2, temperature=1.3), n // 2) for n in range(6)]
    together = sample(rows, wanted)
    alone = [sample(rows[n : n + 1], [wanted[n]])[0] for n in reversed(range(6))]
    assert together == alone[::-1]
    assert len({uniform(seed, index) for seed in range(50) for index in range(50)}) == 2500


def test_random_numbers_are_uniform_and_uncorrelated() -> None:
    numbers = np.array([[uniform(seed, index) for index in range(200)] for seed in range(200)])
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    assert chi_square(counts, np.full(50, 800.0)) < 90  # 49 degrees of freedom: p < 0.0004 above
    assert abs(np.corrcoef(numbers[:, :-1].ravel(), numbers[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]) < 0.02


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.8},
        {"top_k": 6, "top_p": 0.7, "temperature": 1.7},
    ],
)
def test_the_distribution_is_the_library_s(fields: dict[str, float]) -> None:
    row = torch.tensor([[1.0, 0.2, -0.5, 2.0, 1.1, 0.0, -2.0, 0.7, 1.4, 0.9]])
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(fields.get("temperature", 1.0))(ids, row) if "temperature" in fields else row
    if "top_k" in fields:
        scores = TopKLogitsWarper(int(fields["top_k"]))(ids, scores)
    if "top_p" in fields:
        scores = TopPLogitsWarper(fields["top_p"])(ids, scores)
    expected = scores.softmax(-1)[0].double().numpy()
    count = 4000
    counts = np.bincount(draw(row[0], params(seed=11, **fields), count), minlength=10)
    assert not counts[expected == 0].any()
    kept = expected > 0
    assert chi_square(counts[kept], expected[kept] * count) < 30  # at most 9 degrees of freedom: p < 0.0005 above


@pytest.mark.parametrize(
    ("row", "fields", "possible"),
    [
        ([0.0, 1.0, 2.0, 3.0], {"top_k": 1}, {3}),
        ([0.0, 1.0, 2.0, 3.0], {"top_p": 0.0}, {3}),
        ([0.0, 1.0, 2.0, 3.0], {"top_p": 1e-9}, {3}),
        ([0.0, 1.0, 2.0, 3.0], {"temperature": 1e-6}, {3}),
        ([0.0, 0.0, 0.0, 0.0], {"top_k": 2}, {0, 1, 2, 3}),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.5}, {0, 1}),
        ([0.0, 0.0, 0.0, 0.0], {"top_p": 0.51}, {0, 1, 2}),
        ([0.0, -math.inf, 0.0, -math.inf], {}, {0, 2}),
        ([5.0, 5.0, 5.0, 1.0], {"top_k": 100}, {0, 1, 2, 3}),
        ([9.0, 0.0, 9.0, 0.0], {"top_p": 0.999}, {0, 2}),
    ],
)
def test_what_can_be_drawn(row: list[float], fields: dict[str, float], possible: set[int]) -> None:
    assert set(draw(row, params(seed=5, **fields), 400)) == possible


def test_large_vocabulary_with_a_flat_nucleus() -> None:
    """The nucleus outgrows the first candidates."""
    tokens = draw(torch.zeros(20_000), params(seed=1, top_p=0.5), 50)
    assert max(tokens) < 10_000
    assert len(set(tokens)) > 40


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [1.0, math.nan], [-math.inf, -math.inf], [math.inf, 0.0]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(LogitsNotFiniteError):
        sample(torch.tensor([bad]), [(params(temperature=temperature), 0)])


@settings(max_examples=examples(200), deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    temperature=st.floats(1e-3, 5),
    top_k=st.integers(0, 50),
    top_p=st.floats(0, 1),
    seed=st.integers(-(2**40), 2**70),
    index=st.integers(0, 5000),
)
def test_a_draw_is_a_token_that_may_be_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, seed: int, index: int
) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    row = torch.tensor(logits)
    (token,) = sample(row[None], [(sampling, index)])
    assert 0 <= token < len(logits)
    assert sample(row[None], [(sampling, index)]) == [token]
    better = int((row > row[token]).sum())
    assert top_k == 0 or better < top_k
    weights = torch.exp((row - row.max()) / temperature).double()
    mass_before = float(weights[row > row[token]].sum() / weights.sum())
    assert mass_before < top_p + 1e-6 or better == 0


def test_near_ties() -> None:
    greedy = params(temperature=0.0)
    assert near_tie(torch.tensor([0.0, 10.0, 10.0 - 0.5e-3]), greedy, 0)
    assert not near_tie(torch.tensor([0.0, 10.0, 10.0 - 2e-3]), greedy, 0)
    assert near_tie(torch.zeros(4), greedy, 0)


def test_a_draw_near_a_border_is_a_near_tie() -> None:
    sampling = params(seed=3)
    number = uniform(3, 0)

    def two_tokens(first: float) -> torch.Tensor:
        return torch.tensor([math.log(first), math.log(1 - first)])

    assert near_tie(two_tokens(number + NEAR_TIE / 2), sampling, 0)
    assert near_tie(two_tokens(number - NEAR_TIE / 2), sampling, 0)
    assert not near_tie(two_tokens(number + NEAR_TIE * 3), sampling, 0)
    assert not near_tie(two_tokens(number - NEAR_TIE * 3), sampling, 0)


def test_a_kept_set_near_its_border_is_a_near_tie() -> None:
    row = torch.tensor([4.0, 2.0, 2.0 - 1e-4, 0.0])
    assert near_tie(row, params(seed=1, top_k=2), 0)
    assert not near_tie(row, params(seed=1, top_k=1), 0)
    even = torch.zeros(4)
    assert near_tie(even, params(seed=1, top_p=0.5), 0)
    assert not near_tie(even, params(seed=1, top_p=0.6), 0)


@pytest.mark.parametrize("temperature", [1e-46, 1e-30, 1e-7])
def test_a_temperature_next_to_nothing_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, 50)
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9, seed=3)
    assert sample(logits, [(params, 0)]) == [int(logits.argmax())]
