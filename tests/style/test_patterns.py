"""Every regular expression of ours takes a time that grows as the text does: one call holds the interpreter's lock, and
the text may be a stranger's."""

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOTS = ("schemas", "dataplane", "services")
METHODS = frozenset(("match", "search", "fullmatch", "finditer", "sub", "split", "findall"))
LENGTH = 64 * 1024
CPU_S = 0.1
"""Of a thread: a pattern that is linear takes some milliseconds, and one that is not seconds."""
OTHERS = ' \n\t"\\/a0['


class Used(NamedTuple):
    """A pattern, and the method by which it is used; `flags` by their names."""

    place: str
    pattern: str
    flags: tuple[str, ...]
    method: str


def used_in(name: str, source: str) -> Iterator[Used]:
    """Yield the patterns of a file that are written out in it."""
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        if not (isinstance(call.func.value, ast.Name) and call.func.value.id == "re" and call.args):
            continue
        pattern = call.args[0]
        if not (isinstance(pattern, ast.Constant) and isinstance(pattern.value, str)):
            continue
        flags = tuple(each.attr for each in ast.walk(call) if isinstance(each, ast.Attribute) and each.attr.isupper())
        methods = [call.func.attr]
        if methods == ["compile"]:
            methods = sorted(set(re.findall(rf"\b{name_of(tree, call)}\.(\w+)\(", source)) & METHODS) or ["search"]
        yield from (Used(f"{name}:{call.lineno}", pattern.value, flags, method) for method in methods)


def name_of(tree: ast.Module, call: ast.Call) -> str:
    """Return what a compiled pattern is called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and node.value is call and isinstance(node.targets[0], ast.Name):
            return node.targets[0].id
    return "nothing"


def all_used() -> list[Used]:
    return [
        used
        for root in ROOTS
        for path in sorted(Path(root).rglob("*.py"))
        for used in used_in(str(path), path.read_text())
    ]


def slow_text(used: Used, length: int = LENGTH) -> str:
    """Return the beginning of a text that takes too long; "": there is none of those that are tried."""
    pattern = re.compile(used.pattern, sum(getattr(re, flag) for flag in used.flags))
    run = pattern.search if used.method not in ("match", "fullmatch") else getattr(pattern, used.method)
    words = re.findall(r"[\w%/`$@ ]{2,}", used.pattern)
    repeated = [*used.pattern, *OTHERS, *(one + other for one in words for other in ("", *words))]
    for first in ("", *words):
        for word in dict.fromkeys(repeated):
            text = first + word * (length // len(word))
            started = time.thread_time()
            run(text)
            if time.thread_time() - started > CPU_S:
                return text[:40]
    return ""


@pytest.mark.parametrize("used", all_used(), ids=lambda used: f"{used.place} {used.method}")
def test_a_pattern_is_linear(used: Used) -> None:
    assert not slow_text(used)


@pytest.mark.parametrize(
    ("pattern", "length"),
    [(r"^\s*(?:start\s*:)", 16_384), ("a[^b]*b", 32_768), (r"%json(?:\s|//[^\n]*\n)*(?=\{)", LENGTH)],
)
def test_the_rule_sees_one_that_is_not(pattern: str, length: int) -> None:
    assert slow_text(Used("", pattern, ("MULTILINE",), "search"), length)
