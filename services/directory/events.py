"""What can happen to the directory, and what its core asks the shell to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass

from schemas.directory import BlocksEvicted, BlocksStored, Inventory, Tier
from schemas.ids import WorkerId

# What the shell is asked to do.


@dataclass(frozen=True, slots=True)
class ReadPage:
    """Ask this worker for its inventory from `offset` on, and bring the answer: PageRead or PageMissing.

    `reading` names which reading of this worker the page belongs to; a page of one that was given up is not mixed in.
    """

    worker_id: WorkerId
    incarnation: str
    offset: int = 0
    reading: int = 0


@dataclass(frozen=True, slots=True)
class Sweep:
    """Call `DirectoryCore.sweep` until it returns that there is no more to do."""


Action = ReadPage | Sweep


# What can happen.


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker has reported that it lives."""

    worker_id: WorkerId
    incarnation: str
    room: Mapping[Tier, int] | None = None
    """For how many blocks it has room on each tier that it has. None: not reported."""


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """This incarnation of a worker has left, or was declared lost."""

    worker_id: WorkerId
    incarnation: str


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """A worker has stored or evicted blocks. The hashes of `message` are whole."""

    message: BlocksStored | BlocksEvicted


@dataclass(frozen=True, slots=True)
class PageRead:
    """The worker has answered. The hashes of `page` are whole. `is_part`: the rest of the page follows."""

    asked: ReadPage
    page: Inventory
    is_part: bool = False


@dataclass(frozen=True, slots=True)
class PageMissing:
    """The worker has not answered, or not with an inventory."""

    asked: ReadPage


@dataclass(frozen=True, slots=True)
class EventsMissed:
    """Events may have been lost on their way here, without a later one that would show the gap."""


Event = WorkerSeen | WorkerGone | BlocksChanged | PageRead | PageMissing | EventsMissed
