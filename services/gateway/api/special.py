"""Tokens that begin and end what a conversation is made of: the special ones, and what else a template writes that is
one token, `<tool_response>` or DeepSeek's `<｜User｜>`. Who can write one can write a turn of somebody else: what a
client's strings spell stays text, be it in a content, a tool's schema or a call.

Where they spell none the prompt is encoded whole, as by transformers. Else their spellings are replaced by words
that nobody can guess before the template is rendered; in what it returns all such tokens are the template's own. The
text is cut there, and each piece is encoded by a tokenizer that does not know them.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from tokenizers import AddedToken

Trie = dict[str, Any]


class GuardedTokens:
    """Tokens that only a template may write, by id."""

    def __init__(self, tokens: Mapping[int, AddedToken]) -> None:
        self._ids = {token.content: token_id for token_id, token in tokens.items()}
        self.ids = frozenset(self._ids.values())
        self._takes_space_before = {token.content for token in tokens.values() if token.lstrip}
        self._takes_space_behind = {token.content for token in tokens.values() if token.rstrip}
        self._spelled = re.compile(_pattern(self._ids)) if self._ids else None
        self._beginnings = {text[:length] for text in self._ids for length in range(1, len(text))}
        self._longest = max(map(len, self._ids), default=0)

    def mask(self, text: str, masks: "Masks") -> str:
        """Return the text with words of `masks` in place of what is spelled like one of the tokens, and of an end that
        could become one with what the template writes behind it."""
        if self._spelled is None:
            return text
        text = self._spelled.sub(lambda found: masks.word_for(found[0]), text)
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if (end := text[-length:]) in self._beginnings:
                return text[:-length] + masks.word_for(end)
        return text

    def mask_all(self, value: Any, masks: "Masks") -> Any:
        """Return a JSON value with all its strings masked, the names of its fields too."""
        if isinstance(value, str):
            return self.mask(value, masks)
        if isinstance(value, Mapping):
            fields = cast(Mapping[str, Any], value).items()
            return {self.mask(name, masks): self.mask_all(child, masks) for name, child in fields}
        if isinstance(value, list):
            return [self.mask_all(child, masks) for child in cast(list[Any], value)]
        return value

    def spelled_in(self, text: str) -> list[int]:
        """Return the ids of those that are spelled in a text, one after the other."""
        return [] if self._spelled is None else [self._ids[spelled] for spelled in self._spelled.findall(text)]

    def split(self, text: str) -> Iterator[str | int]:
        """Return the ids of those that are spelled in a text, and the pieces between them."""
        at, strips = 0, False
        for found in self._spelled.finditer(text) if self._spelled is not None else ():
            piece = text[at : found.start()]
            piece = piece.lstrip() if strips else piece
            yield piece.rstrip() if found[0] in self._takes_space_before else piece
            yield self._ids[found[0]]
            at, strips = found.end(), found[0] in self._takes_space_behind
        yield text[at:].lstrip() if strips else text[at:]


class Masks:
    """The words that stand for spellings in one conversation. They are letters and digits: no template and no filter
    changes them."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._numbers: dict[str, int] = {}

    def word_for(self, spelling: str) -> str:
        """Return the word for a spelling."""
        number = self._numbers.setdefault(spelling, len(self._numbers))
        return f"x{self._nonce}x{number}x"

    def unmask(self, text: str) -> str:
        """Return the text with the spellings again."""
        spellings = list(self._numbers)
        return re.sub(rf"x{self._nonce}x(\d+)x", lambda found: spellings[int(found[1])], text)


def _pattern(words: Iterable[str]) -> str:
    """Return a pattern of the longest of these words. It goes by their common beginnings, so that the time it takes
    does not grow with their number."""
    trie: Trie = {}
    for word in words:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: Trie) -> str:
    branches = [re.escape(char) + _pattern_of(child) for char, child in node.items() if char]
    if not branches:
        return ""
    inner = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return f"{inner}?" if "" in node else inner
