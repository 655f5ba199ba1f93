"""Who makes the parts of a holder that are not of the event loop: its memory, the plane's ends.

The simulator puts parts of its own in their place, which run the same code under virtual time.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers.carrier import KVArena
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader
from dataplane.ends.server import LeaseGate, PlaneServer, ServerOptions
from dataplane.times import PlaneTimes

MakeArena = Callable[[ArenaShape], HostArena]
"""Raises ArenaTooLargeError."""
MakeServer = Callable[[KVArena, ArenaShape, LeaseGate, TicketSecrets, ServerOptions], PlaneServer]
MakeReader = Callable[[KVArena, ArenaShape, TicketSecrets, PlaneTimes], PlaneReader]


@dataclass(frozen=True, slots=True)
class Platform:
    make_arena: MakeArena = HostArena.create
    make_server: MakeServer = PlaneServer
    make_reader: MakeReader = PlaneReader


THREADS = Platform()
"""A thread for each stream."""
