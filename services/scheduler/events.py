"""The words of `core.py`: what can happen to the fleet, and what the service is asked to do about it.

What workers report of themselves are events as they stand: `WorkerJoined`, `WorkerLoad`, `WorkerDraining`,
`WorkerLeft`.
"""

from dataclasses import dataclass

from schemas.ids import WorkerId
from schemas.worker import WorkerBeat, WorkerDraining, WorkerJoined, WorkerLeft, WorkerLoad
from services.presence import BusConnected

# What the service is asked to do.


@dataclass(frozen=True, slots=True)
class SendPing:
    """Ping this worker. What comes of it must be reported, with the ping: answered, unserved or unanswered."""

    worker_id: WorkerId
    incarnation: str
    sent_ms: int


@dataclass(frozen=True, slots=True)
class PublishLeft:
    """Publish on a worker's behalf that it has left."""

    left: WorkerLeft


@dataclass(frozen=True, slots=True)
class ProveBus:
    """Send a message through the broker to ourselves: somebody's silence is about to matter. What comes of it must be
    reported."""


# What can happen to the fleet.


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """The broker reports that a connection has ended, which called itself by this name. A reason to ask, and no proof:
    anybody may take a name, and whoever has lost its connection may come back."""

    name: str


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """`worker_id` and `incarnation`: who has answered."""

    ping: SendPing
    worker_id: WorkerId
    incarnation: str


@dataclass(frozen=True, slots=True)
class PingUnserved:
    """The broker answers that nobody serves this worker's pings."""

    ping: SendPing


@dataclass(frozen=True, slots=True)
class PingUnanswered:
    """The ping's time is over, or it could not be sent."""

    ping: SendPing


@dataclass(frozen=True, slots=True)
class BusProved:
    """What came of `ProveBus`."""

    works: bool


FleetEvent = WorkerJoined | WorkerLoad | WorkerBeat | WorkerDraining | WorkerLeft
Event = FleetEvent | ConnectionEnded | PingAnswered | PingUnserved | PingUnanswered | BusProved | BusConnected
Action = SendPing | PublishLeft | ProveBus
