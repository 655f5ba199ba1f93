"""What a worker, or a store, does with each event: rules, by the event's type. Pure.

Each core has a table of its own, `rules`, beside what it does. A worker's cores have theirs together here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from services.holder.core.actions import Action

EventT = TypeVar("EventT")
Rule = Callable[[EventT, int], list[Action]]
"""Takes an event and the time in milliseconds, changes its core's state, and returns what is to be done, in order."""
RuleTable = Mapping[type, Rule[Any]]


class Rules:
    """What several cores do with an event, one after another; nothing, where none of them has a rule for it.
    `afterwards`: what any event may have made possible."""

    def __init__(self, tables: Iterable[RuleTable], afterwards: Sequence[Callable[[int], list[Action]]] = ()) -> None:
        self._rules: dict[type, tuple[Rule[Any], ...]] = {}
        for table in tables:
            for event, rule in table.items():
                self._rules[event] = (*self._rules.get(event, ()), rule)
        self._afterwards = afterwards

    def decide(self, event: object, now_ms: int) -> list[Action]:
        """React to what has happened: return what is to be done, in order."""
        actions = [action for rule in self._rules.get(type(event), ()) for action in rule(event, now_ms)]
        for afterwards in self._afterwards:
            actions += afterwards(now_ms)
        return actions
