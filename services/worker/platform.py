"""Who makes the parts of a worker that are not of the event loop: its memory, the plane's ends, the engine's thread.

The simulator puts parts of its own in their place, which run the same code under virtual time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers.carrier import KVArena
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader
from dataplane.ends.server import LeaseGate, PlaneServer, ServerOptions
from dataplane.times import PlaneTimes
from services.engine.interface import Sequence, StepCallback, Steps
from services.engine.thread import EngineThread

MakeArena = Callable[[ArenaShape], HostArena]
"""Raises ArenaTooLargeError."""
MakeServer = Callable[[KVArena, ArenaShape, LeaseGate, TicketSecrets, ServerOptions], PlaneServer]
MakeReader = Callable[[KVArena, ArenaShape, TicketSecrets, PlaneTimes], PlaneReader]


class MakeEngine(Protocol):
    """As `EngineThread`."""

    def __call__(
        self,
        steps: Steps,
        on_step: StepCallback,
        on_failure: Callable[[list[Sequence], str], None],
        on_removed: Callable[[Sequence], None],
    ) -> EngineThread: ...


@dataclass(frozen=True, slots=True)
class Platform:
    make_arena: MakeArena = HostArena.create
    make_server: MakeServer = PlaneServer
    make_reader: MakeReader = PlaneReader
    make_engine: MakeEngine = EngineThread


THREADS = Platform()
"""A thread for the engine, one for each stream."""
