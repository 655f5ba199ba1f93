"""How deep JSON is nested, without recursion."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast


def levels(value: Any) -> Iterator[list[Any]]:
    """Yield what a JSON value is made of, level by level: first itself, then what is right in it, and so on."""
    level: list[Any] = [value]
    while level:
        yield level
        level = [child for parent in level for child in _children(parent)]


def _children(value: Any) -> list[Any]:
    """Return what is inside of an object or array; nothing of other values."""
    if isinstance(value, Mapping):
        return list(cast(Mapping[str, Any], value).values())
    return list(cast(Sequence[Any], value)) if isinstance(value, list | tuple) else []
