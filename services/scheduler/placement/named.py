"""Finds a policy by its name: one of ours, one that a package has registered (entry point `kvmesh.policies`), or
`package.module:name`."""

import signal
import threading
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from types import FrameType
from typing import Any, cast

from services.config import SchedulerConfig
from services.errors import UserError
from services.scheduler.limits import POLICY_LIMIT_S
from services.scheduler.placement.cost import Cost, CostLimits
from services.scheduler.placement.policy import POLICIES, Choice, Policy, Question

ENTRY_POINTS = "kvmesh.policies"
COST = "cost"


def names() -> list[str]:
    """Return the names that there are, but for those of modules."""
    return sorted({COST, *POLICIES, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def policy_named(settings: SchedulerConfig) -> Policy:
    """Return the policy that is configured. Raises UserError with the names there are, or with what is wrong with a
    module."""
    name = settings.policy
    if name == COST:
        return Cost(CostLimits(settings.pull_tokens_min, settings.unsplit_tokens_max))
    if name in POLICIES:
        return POLICIES[name]
    point = next((point for point in entry_points(group=ENTRY_POINTS) if point.name == name), None)
    where = point.value if point is not None else name
    module, colon, attribute = where.partition(":")
    if not colon:
        raise UserError(
            f"no placement policy is called {name!r}; there are: {', '.join(names())}; or package.module:name"
        )
    try:
        found: Any = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"the placement policy {name!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise UserError(f"the placement policy {name!r} is no function")
    return partial(_within, cast(Policy, found))


class _TooSlowError(BaseException):
    """Not an Exception: what a policy does with those must not keep it going."""


def _within(policy: Policy, question: Question) -> Choice | None:
    """Ask a policy that may be anybody's. Raises TimeoutError where it takes too long: a signal interrupts it, which
    only a process's first thread gets."""
    if threading.current_thread() is not threading.main_thread():
        return policy(question)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooSlowError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, POLICY_LIMIT_S, POLICY_LIMIT_S)
            return policy(question)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
    except _TooSlowError:
        raise TimeoutError(f"it took more than {POLICY_LIMIT_S * 1e3:.0f} ms") from None
