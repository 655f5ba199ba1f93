"""Checks that nobody is declared dead who lives, where nothing has happened that could make anybody look so."""

from services.sim.scenario import FaultKind

LOOKS_DEAD: frozenset[FaultKind] = frozenset({"kill", "pause", "drain", "partition", "loss", "bus_cut", "unplug"})
"""Faults after which a worker may rightly be taken for dead: it is, or it was not received while others were."""


class DepartureTap:
    """Collects who was reported to have left by somebody else. `note_event` is a tap of `SimBroker`."""

    def __init__(self) -> None:
        self.departed: list[str] = []

    def note_event(self, subject: str, source: str) -> None:
        tokens = subject.split(".")
        if tokens[2] == "worker" and tokens[-1] == "left" and tokens[3] != source:
            self.departed.append(tokens[3])

    def problems(self, kinds: set[FaultKind], num_servers_away: int) -> list[str]:
        """Return who was declared dead although no fault of the run, by their kinds, can make a worker look so. Nor can
        the loss of one of the broker's servers; `num_servers_away`: how many were, at once, at most."""
        return (
            []
            if kinds & LOOKS_DEAD or num_servers_away > 1
            else [f"{worker} lives and was declared dead" for worker in self.departed]
        )
