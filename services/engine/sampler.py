"""From logits to tokens. A token's random number depends on (seed, its index in the answer) only, so that a second
attempt, on whatever worker and in whatever batch, draws the very tokens of the first.

The order is vLLM's, which is Hugging Face's and OpenAI's: `shaping.py`, then temperature, min_p, top_k, top_p.
What is kept is then drawn from by inverting the cumulative distribution over token ids in id order, which no sort's
treatment of ties can change. Logprobs are those of the logits as they came.
"""

import hashlib
import math
from collections.abc import Sequence as Seq
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from schemas.request import SamplingParams
from services.engine.interface import ChosenToken, GrammarError, Outcome, Sequence
from services.engine.logprobs import token_logprobs
from services.engine.shaping import is_shaped, shaped

NEAR_TIE = 1e-4
"""Below this, two computations of the same logits in float32 may rightly choose differently."""
GREEDY_BELOW = 1e-6
"""A temperature this small leaves the best token only, and would leave the range of float32."""
FIRST_CANDIDATES = 1024
"""Most top_p sets are far smaller than a vocabulary: try so many before sorting all of it."""


class LogitsNotFiniteError(ArithmeticError):
    """The model computed logits that are no numbers: its input, its KV or its weights are broken."""


class _Candidates(NamedTuple):
    """The tokens that may be drawn, in id order, and their cumulative probability (float64, ends at `total`)."""

    token_ids: Tensor
    cumulative: Tensor
    total: float


def uniform(seed: int, index: int) -> float:
    """Return the random number in [0, 1) of the answer's token `index`: 53 bits of blake2b over seed and index.

    A keyed hash is a counter-based generator like Philox, takes a seed of any size, and is the same in every
    process, on every machine and under every version of every library.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8, person=b"kvmesh-sampler").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: Tensor, sequences: Seq[Sequence]) -> list[Outcome]:
    """Return what comes next in each sequence by its row of `logits` ([n, vocab]). An outcome is an error where the
    request's own parameters leave no token.

    Temperature 0 (or nearly) is greedy. Raises LogitsNotFiniteError when a row holds NaN or has no finite maximum.
    """
    if not sequences:
        return []
    best, best_ids = logits.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise LogitsNotFiniteError(
            f"logits of {int((~torch.isfinite(best)).sum())} of {len(sequences)} sequences are not finite"
        )
    token_ids = cast(list[int], best_ids.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [
        _outcome(logits[row].float(), sequence) if asks_more(sequence) else ChosenToken(token_ids[row])
        for row, sequence in enumerate(sequences)
    ]


def asks_more(sequence: Sequence) -> bool:
    """Return whether its next token is more than the best one of its logits."""
    sampling = sequence.sampling
    return sampling.temperature > GREEDY_BELOW or sampling.logprobs is not None or is_shaped(sequence)


def near_tie(logits: Tensor, sequence: Sequence) -> bool:
    """Return whether another correct computation of these logits ([vocab]) could choose another token for the sequence.

    Greedy: the two best of what shaping leaves are closer than 1e-4 of the logits' spread (maximum - minimum). Sampled:
    the random number lies within 1e-4 of a border of the chosen token's interval, or the kept set is itself a near-tie:
    the logits at the border of min_p or top_k are closer than 1e-4 of the spread, or top_p is within 1e-4 of a partial
    sum there. Raises GrammarError as shaping does.
    """
    sampling, spread = sequence.sampling, _spread(logits)
    row = _shaped(logits.float(), sequence)
    if sampling.temperature <= GREEDY_BELOW:
        best = torch.topk(row, 2).values
        return float(best[0] - best[1]) < NEAR_TIE * spread or bool(best[0] == best[1])
    choice = _choice(row, sampling)
    number = uniform(sampling.seed, sequence.index)
    at = _position(choice, number)
    upper = float(choice.cumulative[at]) / choice.total
    lower = float(choice.cumulative[at - 1]) / choice.total if at else 0.0
    # The outermost borders, 0 and 1, are no borders: there is no token beyond them.
    if (at and number - lower < NEAR_TIE) or (at + 1 < len(choice.token_ids) and upper - number < NEAR_TIE):
        return True
    return _set_near_tie(row, sampling, spread)


def _outcome(logits: Tensor, sequence: Sequence) -> Outcome:
    """Return what comes next by one row ([vocab], float32)."""
    sampling = sequence.sampling
    try:
        row = _shaped(logits, sequence)
    except GrammarError as error:
        return error
    if sampling.temperature > GREEDY_BELOW:
        token_id = _draw(_choice(row, sampling), uniform(sampling.seed, sequence.index))
    else:
        token_id = int(row.argmax())
    if sampling.logprobs is None:
        return ChosenToken(token_id)
    return ChosenToken(token_id, *token_logprobs(logits[None], [token_id], sampling.logprobs))


def _shaped(row: Tensor, sequence: Sequence) -> Tensor:
    return torch.as_tensor(shaped(row.numpy(), sequence)) if is_shaped(sequence) else row


def _spread(logits: Tensor) -> float:
    finite = logits[torch.isfinite(logits)]
    return float(finite.max() - finite.min())


def _weights(row: Tensor, best: Tensor, temperature: float) -> Tensor:
    """Return unnormalized probabilities. `best` is the row's maximum."""
    # It goes first: a tiny temperature then drives the others to -inf, not the best to +inf.
    return torch.exp((row - best) / temperature)


def _choice(row: Tensor, sampling: SamplingParams) -> _Candidates:
    """Return what `row` ([vocab], float32) leaves to draw from."""
    best = row.max()
    row = _min_p(row, best, sampling)
    kept = _top_k(row, sampling.top_k)
    if sampling.top_p < 1:
        nucleus = _nucleus(row if kept is None else row[kept], sampling)
        kept = nucleus if kept is None else kept[nucleus]
    weights = _weights(row if kept is None else row[kept], best, sampling.temperature)
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    token_ids = torch.arange(len(row)) if kept is None else kept
    return _Candidates(token_ids, cumulative, float(cumulative[-1]))


def _min_p(row: Tensor, best: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the row without what is too unlikely beside its `best`."""
    if sampling.min_p <= 0:
        return row
    return row.masked_fill(_weights(row, best, sampling.temperature) < sampling.min_p, -torch.inf)


def _top_k(row: Tensor, top_k: int) -> Tensor | None:
    """Return the ids, ascending, of the `top_k` best; None: all. Ties at the border are kept, as in transformers."""
    if not 0 < top_k < len(row):
        return None
    return torch.nonzero(row >= torch.topk(row, top_k).values[-1])[:, 0]


def _nucleus(row: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the positions, ascending, of the smallest set whose mass reaches top_p; among equals the first ones."""
    ordered, _, count = _partial_sums(row, sampling)
    threshold = ordered[count - 1]
    chosen = row > threshold
    num_ties = count - int(chosen.sum())
    chosen[torch.nonzero(row == threshold)[:num_ties, 0]] = True
    return torch.nonzero(chosen)[:, 0]


def _partial_sums(row: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor, int]:
    """Return the best logits in descending order, their partial probabilities, and how many of them reach top_p."""
    best = row.max()
    total = _weights(row, best, sampling.temperature).sum(dtype=torch.float64)
    ordered = torch.topk(row, min(FIRST_CANDIDATES, len(row))).values
    partial = torch.cumsum(_weights(ordered, best, sampling.temperature), dim=0, dtype=torch.float64) / total
    if float(partial[-1]) < sampling.top_p and len(ordered) < len(row):
        ordered = torch.as_tensor(np.sort(row.numpy())[::-1].copy())  # three times as fast as torch's sort
        partial = torch.cumsum(_weights(ordered, best, sampling.temperature), dim=0, dtype=torch.float64) / total
    count = int(torch.searchsorted(partial, sampling.top_p)) + 1
    return ordered, partial, min(count, len(ordered))


def _position(choice: _Candidates, number: float) -> int:
    """Return where `number` of [0, 1) falls: the first position whose cumulative probability exceeds it."""
    at = int(torch.searchsorted(choice.cumulative, number * choice.total, right=True))
    if at < len(choice.token_ids):
        return at
    # number * total rounded up to the total: the last token with any probability.
    return int(torch.searchsorted(choice.cumulative, choice.total))


def _draw(choice: _Candidates, number: float) -> int:
    return int(choice.token_ids[_position(choice, number)])


def _set_near_tie(row: Tensor, sampling: SamplingParams, spread: float) -> bool:
    """Return whether the border of the kept set could move. `spread`: of the logits as they came."""
    best = row.max()
    if sampling.min_p > 0:
        border = best + sampling.temperature * math.log(sampling.min_p)
        if bool(((row < best) & ((row - border).abs() < NEAR_TIE * spread)).any()):
            return True
        row = _min_p(row, best, sampling)
    if 0 < sampling.top_k < len(row):
        border = torch.topk(row, sampling.top_k + 1).values
        if float(border[-2] - border[-1]) < NEAR_TIE * spread:
            return True
    if sampling.top_p >= 1:
        return False
    kept = _top_k(row, sampling.top_k)
    _, partial, count = _partial_sums(row if kept is None else row[kept], sampling)
    return bool((partial[max(0, count - 2) : count] - sampling.top_p).abs().min() < NEAR_TIE)
