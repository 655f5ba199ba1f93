"""What splitters return, added up."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from services.gateway.api.choice import TextReader
from services.gateway.api.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from services.gateway.api.reasoning import ReasoningSplitter
from services.gateway.api.tools.parser import ToolParser


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Sum:
    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list[Call])

    def add(self, pieces: Iterable[Piece]) -> None:
        """Add pieces as a client would, which has to be told of a call before it hears its arguments."""
        for piece in pieces:
            match piece:
                case Content(text):
                    assert text, "no empty piece"
                    self.content += text
                case Reasoning(text):
                    assert text, "no empty piece"
                    self.reasoning += text
                case CallBegin(number, call_id, name):
                    assert number == len(self.calls)
                    self.calls.append(Call(call_id, name))
                case CallArguments(number, text):
                    assert text and number == len(self.calls) - 1
                    self.calls[number].arguments += text

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for call in self.calls]


def counting() -> Callable[[], str]:
    """Return a maker of ids that are not random."""
    numbers = iter(range(1_000))
    return lambda: f"{next(numbers):032x}"


def split(splitter: TextReader | ReasoningSplitter | ToolParser, deltas: Iterable[str]) -> Sum:
    whole = Sum()
    for delta in deltas:
        whole.add(splitter.feed(delta))
    whole.add(splitter.finish())
    return whole


def divided(text: str, sizes: Sequence[int]) -> list[str]:
    """Return the text in pieces of these sizes, and the rest."""
    pieces: list[str] = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]
