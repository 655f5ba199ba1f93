"""Checks the events of each request as the broker saw them: one beginning, one end, and nothing after the end."""

from collections import defaultdict
from collections.abc import Iterator

ENDS = frozenset({"finished", "failed", "cancelled"})
EVENTS = ENDS | {"accepted", "placed", "first_token", "resumed"}


class RequestEventTap:
    """Collects request events. `note_event` is a tap of `SimBroker`."""

    def __init__(self) -> None:
        self._events: defaultdict[str, list[str]] = defaultdict(list)
        self._cut: set[str] = set()
        """Requests of which the broker has lost an event, or passed one on late."""

    def note_event(self, subject: str, _source: str) -> None:
        tokens = subject.split(".")
        if tokens[2] == "request" and tokens[-1] in EVENTS:
            self._events[tokens[3]].append(tokens[-1])

    def miss(self, subject: str) -> None:
        """The broker has died with this message unread, or passes it on late. Observes a `SimBroker`'s losses."""
        tokens = subject.split(".")
        if tokens[2:3] == ["request"]:
            self._cut.add(tokens[3])

    def problems(self, *, may_be_cut: bool) -> Iterator[str]:
        """Yield what is wrong once all requests have ended. `may_be_cut`: gateways have died, and their requests'
        events may lack an end."""
        for request_id, names in self._events.items():
            if names.count("accepted") > 1 or sum(name in ENDS for name in names) > 1:
                yield f"the events of {request_id} begin or end twice: {names}"
            elif request_id in self._cut:
                continue
            elif names[0] != "accepted":
                yield f"the events of {request_id} do not begin: {names}"
            elif any(name in ENDS for name in names[:-1]):
                yield f"the events of {request_id} go on after their end: {names}"
            elif names[-1] not in ENDS and not may_be_cut:
                yield f"the events of {request_id} have no end: {names}"
