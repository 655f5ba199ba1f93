"""What an answer's text is made of, in the order in which a client hears of it, and who takes it apart.

A splitter gets text as it comes and returns what is certain. However the text is divided, the pieces add up to the
same. Text that may be the beginning of a marker is held back until it is one or is none.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text of the answer proper."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool begins. `number` counts an answer's calls, from 0: OpenAI's `index`."""

    number: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next characters of a call's arguments, as the model wrote them."""

    number: int
    text: str


Piece = Content | Reasoning | CallBegin | CallArguments


class Splitter(Protocol):
    """Takes an answer's text apart. `is_over`: no more text is needed."""

    @property
    def is_over(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]:
        """Return what is now certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return the rest: the answer has ended."""
        ...


class Both:
    """First reasoning is split off, then calls in what is left."""

    def __init__(self, first: Splitter, second: Splitter) -> None:
        self._first = first
        self._second = second

    @property
    def is_over(self) -> bool:
        return self._second.is_over

    def feed(self, text: str) -> list[Piece]:
        return self._pass_on(self._first.feed(text))

    def finish(self) -> list[Piece]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, pieces: Sequence[Piece]) -> list[Piece]:
        passed: list[Piece] = []
        for piece in pieces:
            passed += self._second.feed(piece.text) if isinstance(piece, Content) else [piece]
        return passed


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
