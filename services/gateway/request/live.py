"""The record of one choice under way. Its core decides; what is written, published and measured of it is noted here."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.ids import WorkerId
from schemas.observe import RequestPhase
from services.gateway.request.core import RequestCore
from services.gateway.request.job import Job, PackedPrompt
from services.gateway.request.mailbox import Mailbox


class Dispatch(NamedTuple):
    """An attempt that was sent to a worker that has not answered yet."""

    role: str
    sent_ns: int


@dataclass(slots=True)
class RequestTimes:
    """What the spans of a choice are made of. Times are ns by the monotonic clock."""

    submitted_ns: int = field(default_factory=lambda: time.monotonic_ns())
    attempt: int = 0
    asked_ns: int = 0
    """When the attempt under way was to be placed."""
    asked_again_ns: int = 0
    """When a scheduler was last asked for it."""
    place_trace: str = ""
    """What names the span of that question until it is recorded. The scheduler's and the directory's lie under it."""
    placed_ns: int = 0
    """When it was placed."""
    written_s: float = 0.0
    """When tokens were last written to the client, in seconds."""
    moved: tuple[WorkerId, int] | None = None
    """Who has migrated the answer that has not gone on yet, and when."""
    sent: dict[tuple[int, WorkerId], Dispatch] = field(default_factory=dict[tuple[int, WorkerId], Dispatch])
    """By attempt and worker."""


@dataclass(slots=True)
class Published:
    """What has been published of a request."""

    phase: RequestPhase
    phase_ms: int
    attempt: int = 1
    detail: str = ""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """`choice` marks its outputs in the mailbox."""

    job: Job
    choice: int
    mailbox: Mailbox
    core: RequestCore
    prompt: PackedPrompt
    """What the attempt under way computes: the job's prompt, or that and what has been answered."""
    signature: bytes
    """This gateway's signature of whose request it is."""
    started_ms: int
    published: Published
    times: RequestTimes = field(default_factory=RequestTimes)
    timer: asyncio.TimerHandle | None = None
    """It fires at the deadline."""
