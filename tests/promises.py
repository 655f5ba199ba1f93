"""Failures that are no matter of chance: something that kvmesh promises did not hold.

A wrong, lost or doubled token, a leaked block or lease, a request that never ends, another tenant's KV: who finds one
raises `PromiseBrokenError`, and the test is not tried again (tests/again.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class PromiseBrokenError(AssertionError):
    """kvmesh has done what it promises never to do."""


def same_tokens(got: object, expected: object) -> None:
    """Raises PromiseBrokenError where an answer is not the one that one process alone gives."""
    if got != expected:
        raise PromiseBrokenError(f"the answer is {got}, not {expected}")


def nothing_wrong(found: Sequence[str]) -> None:
    """Raises PromiseBrokenError with the first of what was found to be wrong."""
    if found:
        raise PromiseBrokenError("\n".join(found[:20]))


@contextmanager
def must_end(what: str) -> Iterator[None]:
    """Turn a TimeoutError into the promise that is broken: `what` never came."""
    try:
        yield
    except TimeoutError as error:
        raise PromiseBrokenError(f"it never came: {what}") from error


def is_broken_promise(error: BaseException | None) -> bool:
    """Say whether this error, one of its group, or what it came of, is a promise that was broken."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_broken_promise, error.exceptions))
    return error is not None and (isinstance(error, PromiseBrokenError) or is_broken_promise(error.__cause__))
