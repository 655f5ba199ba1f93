"""How JSON is nested: how deep, without recursion, and whether an object has a name twice."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield what a JSON value is made of, level by level: first itself, then what is right in it, and so on."""
    level: list[Any] = [value]
    while level:
        yield level
        level = [child for parent in level for child in _children(parent)]


def doubled_name(payload: bytes) -> str | None:
    """Return a name that an object in a JSON object, or it itself, has twice; None: there is none.

    Decoders take the last of such values, others the first: who reads the same body would see another one. Only values
    with objects in them are read in Python's own way, ten times as slow as msgspec's. Raises msgspec.DecodeError and
    ValueError for what is no JSON object.
    """
    compact = msgspec.json.format(payload, indent=-1)
    members = _MEMBERS.decode(compact)
    values = [bytes(raw) for raw in members.values()]
    # All of them with their names, quotes, colons and commas: what is longer has a name twice, or escapes in a name.
    if 1 + sum(len(name.encode()) + 4 for name in members) + sum(map(len, values)) < len(compact):
        values = [compact]
    found: list[str] = []
    for value in values:
        if value[:1] in (b"{", b"[") and b"{" in value:
            json.loads(value, object_pairs_hook=lambda pairs: found.extend(_doubled(pairs)))
    return found[0] if found else None


_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _doubled(pairs: list[tuple[str, Any]]) -> list[str]:
    names = Counter([name for name, _ in pairs])
    return [] if len(names) == len(pairs) else [name for name, _ in names.most_common(1)]


def _children(value: Any) -> list[Any]:
    """Return what is inside of an object or array; nothing of other values."""
    if isinstance(value, Mapping):
        return list(cast(Mapping[str, Any], value).values())
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else []
