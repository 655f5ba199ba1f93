"""What an answer's text is made of, in the order in which a client receives it.

Whoever takes it apart (`TextReader` in `choice.py`, and what it is made of) gets text as it comes and returns what is
certain. However the text is divided, the pieces add up to the same. Text that may be the beginning of a marker is held
back until it is one or cannot be one.
"""

from typing import NamedTuple


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


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
