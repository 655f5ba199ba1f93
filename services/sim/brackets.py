"""A grammar for the simulated model's tokens, which are no text: brackets that match. Pure.

An answer opens, opens further, writes something or closes until all is closed, and ends. What remembers nothing between
tokens cannot be wrong after a resume: what the simulator looks for is an engine that has not been given all of them.
"""

import re
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from services.engine.interface import Grammar, GrammarError
from services.gateway.api.constraints import Constraint, understand

_TEXT = re.compile(r"brackets ([1-9])")
_KINDS = 6
_OPENS, _CLOSES = 1, 5
"""What a token's id, divided by `_KINDS`, leaves. The others stand within brackets."""


class Brackets:
    """Implements `Grammar`: at most `max_depth` brackets are open at once."""

    def __init__(self, max_depth: int, vocab_size: int, eos: int) -> None:
        self._max_depth = max_depth
        kinds = np.arange(vocab_size) % _KINDS
        self._opens, self._closes = kinds == _OPENS, kinds == _CLOSES
        self._ends = np.arange(vocab_size) == eos

    def allowed(self, answer: Seq[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow: `[vocab]`. Raises GrammarError, as `Grammar.allowed` says."""
        depth, mask = 0, self._opens
        for number, token in enumerate(answer):
            if not mask[token]:
                raise GrammarError(f"token {number}, {token}, may not be there")
            depth += int(self._opens[token]) - int(self._closes[token])
            mask = self._behind(depth)
        return mask

    def _behind(self, depth: int) -> npt.NDArray[np.bool_]:
        if depth == 0:
            return self._ends
        return ~self._ends if depth < self._max_depth else ~self._ends & ~self._opens


class BracketGrammars:
    """Those of one simulated model."""

    def __init__(self, vocab_size: int, eos: int) -> None:
        self._vocab_size = vocab_size
        self._eos = eos

    def compile(self, text: str) -> "Future[Grammar]":
        """Understand `brackets N` at once."""
        started: Future[Grammar] = Future()
        if (found := _TEXT.fullmatch(text)) is not None:
            started.set_result(Brackets(int(found[1]), self._vocab_size, self._eos))
        else:
            started.set_exception(GrammarError(f"{text!r} is not `brackets` and their depth"))
        return started

    def load_tokens(self) -> None:
        """Implements `GrammarReader`: there is nothing to load."""

    def read_grammar(self, constraint: Constraint, timeout_s: float) -> str:
        """Implements `GrammarReader`, at once."""

        def check(text: str) -> Callable[[str], bool]:
            self.compile(text).result()
            return lambda _: False  # tokens here are no text

        return understand(constraint, check)


def is_document(answer: Seq[int], max_depth: int, eos: int) -> bool:
    """Return whether a whole answer is brackets that match, around everything, and then ends."""
    text = "".join({_OPENS: "(", _CLOSES: ")"}.get(token % _KINDS, ".") for token in answer[:-1])
    for _ in range(max_depth):
        text = re.sub(r"\(\.*\)", ".", text)
    return text == "." and len(answer) >= 3 and answer[-1] == eos
