"""Regular expressions of a JSON Schema, which are JavaScript's (ECMA-262), as llguidance reads them, in Rust's syntax.

Whatever asks for a character is written as a class without those that no answer writes: llguidance would leave out a
character that a string has no short escape for, as if it had not been asked for, and takes a class that has all control
characters for one that has the quotation mark and the backslash too.
"""

import re

from services.engine.interface import GrammarError

_UNWRITTEN = r"\x00-\x07\x0b\x0e-\x1f\x7f"
"""As a class has it: control characters without a short escape."""
_WRITTEN = f"[^{_UNWRITTEN}]"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_SPACE = r"[\t\n\f\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"
"""What both ECMA-262 and Unicode take for white space."""
_PART = re.compile(r"\\(?:[pP]\{[^}]{0,64}\}|[xu]\{[^}]{0,8}\}|x..|u.{4}|.)|\[\^?|.", re.DOTALL)
_CONTROL = re.compile(rf"[{_UNWRITTEN}]|\\[avxu].*", re.DOTALL)
"""What may be such a character by itself."""
_IN_BRACKETS = {"[": r"\[", "&": r"\&", "~": r"\~"}
"""Characters that mean something in Rust's brackets only."""


def in_rust(pattern: str) -> str:
    """Return a schema's regular expression as llguidance is to have it. Raises GrammarError for what the two languages
    read differently."""
    parts = list[str]()
    is_whole = "(?s" in pattern  # no JavaScript, and Rust has it
    at = 0
    while found := _PART.match(pattern, at):
        at, part = found.end(), found[0]
        if part in ("[", "[^"):
            inside, at = _brackets(pattern, at)
            parts.append(f"[{part}{inside}]&&{_WRITTEN}]")
        elif part == ".":
            parts.append(_WRITTEN if is_whole else f"[{_DOT}&&{_WRITTEN}]")
        elif part == r"\s":
            parts.append(_SPACE)
        elif part[:2] in (r"\p", r"\P", r"\S", r"\W", r"\D") or _CONTROL.fullmatch(part):
            parts.append(f"[{part}&&{_WRITTEN}]")
        else:
            parts.append(part)
    return "".join(parts)


def _brackets(pattern: str, at: int) -> tuple[str, int]:
    """Return what stands in brackets that begin before `at`, and where it goes on behind them."""
    parts = list[str]()
    while found := _PART.match(pattern, at):
        at, part = found.end(), found[0]
        if part == "]" and parts:
            return "".join(parts), at
        if part == "]" or pattern.startswith(("[:", "--"), found.start()):
            raise GrammarError(f"{pattern[found.start() : at + 1]!r} in brackets is not supported")
        if part == "[^":  # each stands for itself
            part, at = "[", found.start() + 1
        parts.append(_SPACE if part == r"\s" else _IN_BRACKETS.get(part, part))
    raise GrammarError("a bracket is not closed")
