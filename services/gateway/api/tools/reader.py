"""Reads text that is still coming: each step takes what is there, and waits (`yield`) where it needs more.

What is read does not depend on how the text comes. JSON is followed character by character, so that a call's arguments
can be passed on while they are written.
"""

import re
from collections.abc import Generator
from typing import TypeVar

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]

SPACE = " \t\r\n"
_SPACES = re.compile(rf"[{SPACE}]*")
_PLAIN = re.compile(r'[^"\\]*')
_NUMBER_CHARACTERS = re.compile(r"[-+.eE0-9]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LETTERS = re.compile(r"[a-z]*")
_HEX = re.compile(r"[0-9a-fA-F]")


class BadJsonError(ValueError):
    """The next character cannot be part of the JSON that is being read."""


class Reader:
    """`text[at:]` is what has come and was not read. Whoever uses it may cut `text` at `at` between two steps, as long
    as no step is under way that goes back (`word`, `begins_object`)."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False

    def char(self) -> Steps[str]:
        """Return the next character without taking it; empty at the end."""
        while self.at == len(self.text) and not self.ended:
            yield
        return self.text[self.at : self.at + 1]

    def word(self, word: str) -> Steps[bool]:
        """Take this word; False, and nothing is taken, where another text comes."""
        begin = self.at
        for expected in word:
            if (yield from self.char()) != expected:
                self.at = begin
                return False
            self.at += 1
        return True

    def take_while(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take all characters that a pattern of single characters matches."""
        taken = ""
        while (yield from self.char()) and (found := pattern.match(self.text, self.at)) and found[0]:
            taken += found[0]
            self.at = found.end()
        return taken

    def space(self) -> Steps[str]:
        """Take white space."""
        return self.take_while(_SPACES)

    def begins_object(self) -> Steps[bool]:
        """Return whether a JSON object comes, by its first two characters; nothing is taken."""
        begin = self.at
        found = yield from self.word("{")
        if found:
            yield from self.space()
            found = (yield from self.char()) in ("}", '"')
        self.at = begin
        return found

    def value(self) -> Steps[None]:
        """Take a JSON value. Raises BadJsonError, with all taken that could be part of one.

        Other than in JSON a string may have line breaks in it: models write them, and many who read JSON do not mind.
        """
        closing: list[str] = []
        while True:
            yield from self.space()
            char = yield from self.char()
            if char in ("{", "["):
                self.at += 1
                closing.append("}" if char == "{" else "]")
                yield from self.space()
                if (yield from self.char()) != closing[-1]:
                    yield from self._name(closing)
                    continue
                self.at += 1
                closing.pop()
            elif char == '"':
                yield from self.string()
            else:
                yield from self._scalar()
            if not (yield from self._goes_on(closing)):
                return

    def string(self) -> Steps[str]:
        """Take a JSON string and return what is between its quotes. Raises BadJsonError."""
        yield from self.expect('"')
        taken = ""
        while True:
            taken += yield from self.take_while(_PLAIN)
            if (yield from self.char()) == '"':
                self.at += 1
                return taken
            yield from self.expect("\\")
            escaped = yield from self.char()
            if not escaped or escaped not in '"\\/bfnrtu':
                raise BadJsonError
            self.at += 1
            taken += f"\\{escaped}"
            if escaped == "u":
                taken += yield from self._four_digits()

    def expect(self, char: str) -> Steps[None]:
        """Take this character. Raises BadJsonError."""
        if (yield from self.char()) != char:
            raise BadJsonError
        self.at += 1

    def _four_digits(self) -> Steps[str]:
        taken = ""
        for _ in range(4):
            char = yield from self.char()
            if not _HEX.fullmatch(char):
                raise BadJsonError
            self.at += 1
            taken += char
        return taken

    def _name(self, closing: list[str]) -> Steps[None]:
        """Take the name and the colon before an object's value; nothing in an array."""
        if closing[-1] == "}":
            yield from self.space()
            yield from self.string()
            yield from self.space()
            yield from self.expect(":")

    def _goes_on(self, closing: list[str]) -> Steps[bool]:
        """After a value: take what ends the objects and arrays around it; False: all have ended."""
        while closing:
            yield from self.space()
            if (yield from self.char()) == ",":
                self.at += 1
                yield from self._name(closing)
                return True
            yield from self.expect(closing.pop())
        return False

    def _scalar(self) -> Steps[None]:
        if (yield from self.take_while(_LETTERS)) in ("true", "false", "null"):
            return
        if not _NUMBER.fullmatch((yield from self.take_while(_NUMBER_CHARACTERS))):
            raise BadJsonError
