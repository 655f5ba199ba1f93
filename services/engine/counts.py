"""What penalties count of a sequence's tokens."""

from collections import Counter
from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Which tokens of the vocabulary the prompt or the answer has, `seen` `[vocab]`, and how often the answer has each.

    Made of the tokens alone, so that an attempt that goes on elsewhere counts the same. Catches up with tokens that
    were appended since.
    """

    def __init__(self, vocab_size: int) -> None:
        self.seen = np.zeros(vocab_size, np.bool_)
        self.in_answer = Counter[int]()
        self._num_counted = 0

    def catch_up(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count the tokens that are new; the answer begins at `num_prompt_tokens`."""
        first, self._num_counted = self._num_counted, len(token_ids)
        self.seen[token_ids[first:]] = True
        self.in_answer.update(token_ids[max(first, num_prompt_tokens) :])
