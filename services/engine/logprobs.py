"""Logprobs: log-softmax in float32 of the model's own logits, whatever tokens are chosen
by."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from schemas.logprobs import TokenLogprob
from services.engine.interface import Sequence, StepItem
from services.engine.limits import LOGPROB_ROWS


class ScoredRows(NamedTuple):
    """Rows [first_row, first_row + num_rows) of a step's flat batch give the logprobs of the prompt's tokens from
    `first_token` on."""

    sequence: Sequence
    first_row: int
    num_rows: int
    first_token: int


def scored_rows(items: Seq[StepItem]) -> list[ScoredRows]:
    """Return what of a step scores its prompts, where that is wanted. The logits at a position score the token
    behind it; behind the prompt's last token comes the answer, which is not the prompt's."""
    found: list[ScoredRows] = []
    first_row = 0
    for item in items:
        if item.sequence.wants_prompt_logprobs:
            num_rows = min(item.num_tokens, item.sequence.num_prompt_tokens - 1 - item.start)
            if num_rows > 0:
                found.append(ScoredRows(item.sequence, first_row, num_rows, item.start + 1))
        first_row += item.num_tokens
    return found


def row_numbers(scored: Iterable[ScoredRows]) -> list[int]:
    """Return their numbers in the flat batch, in order."""
    return [row for rows in scored for row in range(rows.first_row, rows.first_row + rows.num_rows)]


def score_prompts(scored: Seq[ScoredRows], logits: Tensor) -> None:
    """Append to each sequence's `prompt_logprobs`. `logits` `[rows, vocab]`: of `row_numbers`, of any device and dtype.

    A few rows at a time, so that what is computed of them stays small beside them.
    """
    done = 0
    for rows in scored:
        sequence, num_top = rows.sequence, rows.sequence.sampling.prompt_logprobs or 0
        for start in range(0, rows.num_rows, LOGPROB_ROWS):
            end = min(start + LOGPROB_ROWS, rows.num_rows)
            targets = sequence.token_ids[rows.first_token + start : rows.first_token + end]
            piece = logits[done + start : done + end].cpu().float()
            sequence.prompt_logprobs += token_logprobs(piece, targets, num_top)
        done += rows.num_rows


def token_logprobs(logits: Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprob]:
    """Return the logprob of one token per row of `logits` (`[n, vocab]`, float32), and of the `num_top` likeliest:
    likeliest first, of equal ones the smaller id."""
    values = torch.log_softmax(logits, dim=-1)
    own = _listed(values.gather(1, torch.tensor(token_ids)[:, None])[:, 0])
    tops = _likeliest(values, min(num_top, values.shape[1])) if num_top > 0 else [()] * len(own)
    return [TokenLogprob(logprob, top) for logprob, top in zip(own, tops, strict=True)]


def _likeliest(values: Tensor, count: int) -> list[tuple[tuple[int, float], ...]]:
    """Return the ids and values of the largest `count` of each row of `values`."""
    borders = values.topk(count).values[:, -1]
    tops: list[tuple[tuple[int, float], ...]] = []
    for row, border in zip(values, borders, strict=True):
        candidates = torch.nonzero(row >= border)[:, 0]  # in id order, and so are equal ones after a stable sort
        best = candidates[torch.argsort(row[candidates], descending=True, stable=True)[:count]]
        tops.append(tuple(zip(_listed(best), _listed(row[best]), strict=True)))
    return tops


def _listed(tensor: Tensor) -> list[Any]:
    return cast(list[Any], tensor.tolist())  # pyright: ignore[reportUnknownMemberType]
