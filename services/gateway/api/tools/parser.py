"""Calls in an answer's text, as models of several families write them.

A call is passed on as soon as it is certain that there is one: its name is that of a tool, and its arguments begin as a
JSON object does. From then on what the model writes up to the call's end is its arguments, character for character,
even where it breaks the JSON off: OpenAI's clients are warned of that. Whatever only looks like a call until then
is content, with its markers; so is what follows it, up to the next marker. White space between calls, before the first
and after the last is part of the format.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from services.gateway.api.pieces import CallArguments, CallBegin, Content, Piece, overlap
from services.gateway.api.tools.reader import SPACE, BadJsonError, Reader, Steps

MakeHex = Callable[[], str]
"""Makes a random text of at least 24 hexadecimal digits."""

NAME_CHARACTERS = r"[a-zA-Z0-9_.-]"
_NAME = re.compile(f"{NAME_CHARACTERS}*")
_ENVELOPE = ("name", "arguments", "parameters", "id", "type")
"""The fields that an object has that is a call."""


class NoCallError(Exception):
    """What looked like a call is not one."""


class ToolParser(ABC):
    """The splitter of one answer. `names` are those of the tools that may be called.

    `is_cut`: the answer ended within a call. With `only_one` the answer is over (`is_over`) once a call is complete:
    what still comes is not looked at.
    """

    markers: ClassVar[tuple[str, ...]]
    """What may be special tokens, and must be shown by a detokenizer; calls begin at the first."""
    call_ends: ClassVar[tuple[str, ...]]
    """What ends a call whose JSON is broken."""

    def __init__(self, names: Collection[str], make_hex: MakeHex, *, only_one: bool = False) -> None:
        self.num_calls = 0
        self.is_over = False
        self.is_cut = False
        self._names = names
        self._make_hex = make_hex
        self._only_one = only_one
        self._reader = Reader()
        self._pieces: list[Piece] = []
        self._streams_arguments = False
        """What is taken now are a call's arguments, and is passed on at once."""
        self._steps = self._run()

    def feed(self, text: str) -> list[Piece]:
        self._reader.text += text
        return self._go_on()

    def finish(self) -> list[Piece]:
        self._reader.ended = True
        return self._go_on()

    @abstractmethod
    def _calls(self) -> Steps[None]:
        """Read the calls behind a marker, with what closes them. Raises NoCallError and BadJsonError: what was taken
        since the last call is content."""

    def _new_id(self) -> str:
        return f"call_{self._make_hex()[:24]}"

    def _go_on(self) -> list[Piece]:
        next(self._steps, None)
        if self._streams_arguments:
            self._emit_arguments()
        pieces, self._pieces = self._pieces, []
        return pieces

    def _run(self) -> Steps[None]:
        while not self.is_over and (yield from self._marker()):
            yield from self._try_calls()

    def _try_calls(self) -> Steps[None]:
        """Read calls; where there are none, the marker is content."""
        marker_end = self._reader.at
        num_calls = self.num_calls
        try:
            yield from self._calls()
            if not self.is_over:
                yield from self._reader.space()
            self._drop(self._reader.at)
        except (NoCallError, BadJsonError):
            self.is_cut = self._reader.ended and bool(self._reader.text.strip())
            # What is behind the marker may have another one in it, and is read again.
            self._emit_content(marker_end if self.num_calls == num_calls else 0)

    def _marker(self) -> Steps[bool]:
        """Let content through up to a marker, which is taken with the space before it; False: there is none."""
        reader, marker = self._reader, self.markers[0]
        while (at := reader.text.find(marker)) < 0:
            if reader.ended:
                self._emit_content(len(reader.text))
                return False
            self._emit_content(_len_stripped(reader.text, len(reader.text) - overlap(reader.text, marker)))
            yield
        self._emit_content(_len_stripped(reader.text, at))
        reader.at = reader.text.find(marker) + len(marker)
        return True

    def _envelope(self) -> Steps[None]:
        """Read a call that is an object with a name and arguments. Raises as `_calls`, before the call is passed on."""
        reader, num_before = self._reader, self.num_calls
        name = arguments = ""
        # Fields come in any order: arguments behind the name are passed on as they come, others are kept to the end.
        try:
            yield from reader.expect("{")
            while True:
                yield from reader.space()
                field = yield from reader.string()
                yield from reader.space()
                yield from reader.expect(":")
                yield from reader.space()
                begin = reader.at
                # Skip further fields behind such arguments: the call has been passed on already.
                if self.num_calls > num_before:
                    yield from reader.value()
                elif field == "name":
                    name = self._known((yield from reader.string()))
                elif field in ("arguments", "parameters"):
                    if name and (yield from reader.begins_object()):
                        yield from self._arguments(name)
                    else:
                        yield from reader.value()
                        arguments = reader.text[begin : reader.at]
                elif field in _ENVELOPE:
                    yield from reader.value()
                else:
                    raise NoCallError
                yield from reader.space()
                if (yield from reader.char()) != ",":
                    break
                reader.at += 1
            yield from reader.expect("}")
        except BadJsonError:
            if self.num_calls == num_before:
                raise
            reader.at = 0  # what is behind the arguments closes the call, or is content
        if self.num_calls == num_before:
            self._emit_whole(self._known(name), arguments)

    def _arguments(self, name: str) -> Steps[None]:
        """Pass on a call, and its arguments as they come, up to the call's end where their JSON breaks off. Raises
        NoCallError where no object comes."""
        reader = self._reader
        if not (yield from reader.begins_object()):
            raise NoCallError
        self._begin_call(name)
        self._drop(reader.at)
        self._streams_arguments = True
        try:
            yield from reader.value()
        except BadJsonError:
            yield from self._broken()
        self._emit_arguments()
        self._streams_arguments = False

    def _broken(self) -> Steps[None]:
        """Take all that comes before a call's end."""
        reader = self._reader
        while True:
            rest = reader.text[reader.at :]
            found = [at for end in self.call_ends if (at := rest.find(end)) >= 0]
            self.is_cut = reader.ended and not found
            if found or reader.ended:
                reader.at += min(found, default=len(rest))
                return
            reader.at += len(rest) - max(overlap(rest, end) for end in self.call_ends)
            yield

    def _end(self, *words: str) -> Steps[bool]:
        """A call is complete: take what closes it, with the space before each word, as far as it is there. Return
        whether more calls may follow."""
        reader = self._reader
        for word in words:
            self._drop(reader.at)
            yield from reader.space()
            if not (yield from reader.word(word)) and reader.ended and word.startswith(reader.text[reader.at :]):
                reader.at = len(reader.text)
        self._drop(reader.at)
        self.is_over = self._only_one
        return not self.is_over

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise NoCallError
        return name

    def _emit_whole(self, name: str, arguments: str) -> None:
        """Pass on a call whose arguments came before its name, or did not come at all."""
        if not arguments.startswith("{") and arguments not in ("", "null"):
            raise NoCallError
        self._begin_call(name)
        self._pieces.append(CallArguments(self.num_calls - 1, arguments if arguments.startswith("{") else "{}"))

    def _begin_call(self, name: str) -> None:
        self._pieces.append(CallBegin(self.num_calls, self._new_id(), name))
        self.num_calls += 1

    def _emit_arguments(self) -> None:
        reader = self._reader
        if reader.at:
            self._pieces.append(CallArguments(self.num_calls - 1, reader.text[: reader.at]))
        self._drop(reader.at)

    def _emit_content(self, num_characters: int) -> None:
        """Let the first characters of what was not passed on through, and go on behind them."""
        if num_characters:
            self._pieces.append(Content(self._reader.text[:num_characters]))
        self._drop(num_characters)

    def _drop(self, num_characters: int) -> None:
        self._reader.text = self._reader.text[num_characters:]
        self._reader.at = 0


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5 and 3."""

    markers = ("<tool_call>", "</tool_call>")
    call_ends = ("</tool_call>",)

    def _calls(self) -> Steps[None]:
        yield from self._reader.space()
        yield from self._envelope()
        yield from self._end("</tool_call>")


class LlamaParser(ToolParser):
    """`{"name": …, "parameters": {…}}` as the whole answer, or behind `<|python_tag|>`; several with `;` between."""

    markers = ("<|python_tag|>",)
    call_ends = ("<|python_tag|>",)

    def _run(self) -> Steps[None]:
        yield from self._reader.space()
        if (yield from self._reader.char()) == "{":
            self._reader.at = 0
            yield from self._try_calls()
        else:
            self._reader.at = 0
        yield from super()._run()

    def _calls(self) -> Steps[None]:
        reader = self._reader
        while True:
            yield from reader.space()
            yield from self._envelope()
            if not (yield from self._end()):
                return
            yield from reader.space()
            if not (yield from reader.word(";")):
                return


class MistralParser(ToolParser):
    """`[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`, and since version 11 of its tokenizer
    `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    markers = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    call_ends = ("[TOOL_CALLS]",)

    def _new_id(self) -> str:
        return self._make_hex()[:9]  # its templates take no other length

    def _calls(self) -> Steps[None]:
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.word("[")):
            yield from self._named_call()
            return
        while True:
            yield from reader.space()
            yield from self._envelope()
            if not (yield from self._end()):
                return
            yield from reader.space()
            if not (yield from reader.word(",")):
                break
        yield from reader.expect("]")

    def _named_call(self) -> Steps[None]:
        reader = self._reader
        name = self._known((yield from reader.take_while(_NAME)))
        if (yield from reader.word("[CALL_ID]")):
            yield from reader.take_while(_NAME)
        yield from reader.word("[ARGS]")
        yield from reader.space()
        yield from self._arguments(name)
        yield from self._end()


class DeepSeekParser(ToolParser):
    """Calls between `<｜tool▁calls▁begin｜>` and its end: since version 3.1 a name, a separator and the arguments;
    before, the word "function" in the name's place, and behind the separator the name and a fence of JSON."""

    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    call_ends = ("\n```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")

    def _calls(self) -> Steps[None]:
        reader = self._reader
        _, call_begin, separator, call_end, calls_end = self.markers
        yield from reader.space()
        if not (yield from reader.word(call_begin)):
            raise NoCallError
        while True:
            name = yield from reader.take_while(_NAME)
            if not (yield from reader.word(separator)):
                raise NoCallError
            yield from reader.space()
            fence = ()
            if not (yield from reader.begins_object()):
                fence = ("```",)
                name = yield from reader.take_while(_NAME)
                yield from reader.space()
                yield from reader.word("```json")
                yield from reader.space()
            yield from self._arguments(self._known(name))
            if not (yield from self._end(*fence, call_end)):
                return
            yield from reader.space()
            if not (yield from reader.word(call_begin)):
                break
        yield from self._end(calls_end)


def _len_stripped(text: str, end: int) -> int:
    """Return the length of `text[:end]` without the space at its end."""
    return len(text[:end].rstrip(SPACE))
