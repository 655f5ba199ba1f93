"""From logits to tokens where the logits are, for all rows at once, without a word from the host in between.

The same order, the same numbers and the same treatment of ties as `sampler.py`, whose tokens these are: what differs
is the last bit of an exponential on another device, and only a near-tie turns on that.
"""

import torch
from torch import Tensor

from services.engine.cuda.step_plan import Draws
from services.engine.sampler import FIRST_CANDIDATES

NOT_FINITE = -1
"""In place of a token: the row has no finite maximum, or a NaN."""
UNSETTLED = -2
"""In place of a token: top_p keeps more than the first candidates. `choose` again with all of them."""
ROWS_AT_A_TIME = 32
"""Rows that are drawn together: their sums in float64 take 1.2 MB each for a vocabulary of 152,000."""


def choose(logits: Tensor, draws: Draws, inputs: Tensor, *, all_candidates: bool = False) -> Tensor:
    """Return int64 `[n]`, a token id, NOT_FINITE or UNSETTLED per row of `logits` (`[n, vocab]`, float32).

    `inputs` float64 `[5, draws]` are the numbers of `draws` on the device. Rows that are not drawn are greedy.
    """
    best, token_ids = logits.max(dim=-1)
    for start in range(0, len(draws.samples), ROWS_AT_A_TIME):
        part = slice(start, start + ROWS_AT_A_TIME)
        rows = inputs[0, part].long()
        top_ks = [top_k for top_k in draws.top_ks[part] if 0 < top_k < logits.shape[1]]
        drawn = _draw(
            logits.index_select(0, rows),
            best.index_select(0, rows)[:, None],
            inputs[1:, part, None],
            most=max(top_ks, default=0),
            has_nucleus=any(top_p < 1 for top_p in draws.top_ps[part]),
            num_candidates=logits.shape[1] if all_candidates else min(FIRST_CANDIDATES, logits.shape[1]),
        )
        token_ids.index_copy_(0, rows, drawn)
    return token_ids.masked_fill(~torch.isfinite(best), NOT_FINITE)


def _draw(logits: Tensor, best: Tensor, inputs: Tensor, *, most: int, has_nucleus: bool, num_candidates: int) -> Tensor:
    """Return a token id or UNSETTLED per row of `logits` `[m, vocab]`; `best` `[m, 1]` is their maximum.

    `inputs` `[4, m, 1]`: temperature, top_k, top_p, number. `most`: the largest top_k that leaves something out, or 0.
    """
    temperature, top_k, top_p, number = inputs[0].float(), inputs[1].long(), inputs[2], inputs[3]
    vocab = logits.shape[1]
    if most:
        limits = (top_k > 0) & (top_k < vocab)
        border = logits.topk(most).values.gather(1, top_k.clamp(1, most) - 1)
        logits = logits.masked_fill(limits & (logits < border), float("-inf"))
    weights = torch.exp((logits - best) / temperature)
    unsettled = None
    if has_nucleus:
        total = weights.sum(dim=1, keepdim=True, dtype=torch.float64)
        ordered = logits.topk(num_candidates).values
        partial = torch.cumsum(torch.exp((ordered - best) / temperature), dim=1, dtype=torch.float64) / total
        count = (torch.searchsorted(partial, top_p) + 1).clamp(max=num_candidates)
        threshold = ordered.gather(1, count - 1)
        chosen, ties = logits > threshold, logits == threshold
        num_ties = count - chosen.sum(dim=1, keepdim=True)
        chosen = chosen | (ties & (ties.cumsum(dim=1) <= num_ties)) | (top_p >= 1)
        weights = weights.masked_fill(~chosen, 0.0)
        if num_candidates < vocab:
            unsettled = (partial[:, -1:] < top_p) & (top_p < 1)
    cumulative = torch.cumsum(weights, dim=1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    at = torch.searchsorted(cumulative, number * total, right=True)
    # number * total rounded up to the total: the last token with any probability.
    at = torch.where(at < vocab, at, torch.searchsorted(cumulative, total))
    at = at.clamp(max=vocab - 1)
    if unsettled is not None:
        at = at.masked_fill(unsettled, UNSETTLED)
    return at[:, 0]
