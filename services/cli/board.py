"""The state of a mesh as `kvmesh top` shows it, kept from messages on the bus. Times are monotonic seconds."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas import observe
from schemas.handoff import KVLanded
from schemas.ids import WorkerId
from schemas.message import Message
from schemas.observe import AttachedServer
from schemas.worker import WorkerLeft, WorkerLoad
from services.cli.limits import FORGET_AFTER_S, MAX_TTFTS, OPEN_REQUEST_MAX_S, RATE_WINDOW_S, SILENT_AFTER_S

PHASES = ("placing", "prefill", "decode")


@dataclass
class Rate:
    """A rate per second over the last RATE_WINDOW_S, or since `since_s` where that is less."""

    since_s: float
    _events: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])

    def count(self, now_s: float, amount: float = 1.0) -> None:
        self._events.append((now_s, amount))

    def per_s(self, now_s: float) -> float:
        while self._events and self._events[0][0] < now_s - RATE_WINDOW_S:
            self._events.popleft()
        return sum(amount for _, amount in self._events) / max(1.0, min(RATE_WINDOW_S, now_s - self.since_s))


@dataclass
class Traffic:
    """The KV that one worker has read from another."""

    num_bytes: Rate
    transfers: Rate
    carrier: str = ""
    last_s: float = 0.0


@dataclass
class Board:
    """What is known of a mesh. `add_message` adds a message; the other methods return what to draw."""

    began_s: float
    policy: str = ""
    is_ready: bool = False
    loads: dict[WorkerId, tuple[float, WorkerLoad]] = field(default_factory=dict[WorkerId, tuple[float, WorkerLoad]])
    pairs: dict[tuple[WorkerId, WorkerId], Traffic] = field(default_factory=dict[tuple[WorkerId, WorkerId], Traffic])
    servers: dict[WorkerId, tuple[AttachedServer, ...]] = field(
        default_factory=dict[WorkerId, tuple[AttachedServer, ...]]
    )
    """By holder, those that are attached to it."""
    ends: Counter[str] = field(default_factory=Counter[str])
    """Ended requests by outcome: finished, cancelled, failed."""
    failures: Counter[str] = field(default_factory=Counter[str])
    num_resumed: int = 0
    num_moved: int = 0
    """Of those that were resumed: so many were migrated by workers that leave."""
    ttfts_ms: deque[int] = field(default_factory=lambda: deque[int](maxlen=MAX_TTFTS))
    _open: dict[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    """Running requests: the phase of each, and when it is dropped at the latest."""

    def __post_init__(self) -> None:
        self.finished = Rate(self.began_s)
        self.tokens = Rate(self.began_s)

    def add_message(self, message: Message, now_s: float, now_ms: int) -> None:
        """Add a message. `now_s`: monotonic; `now_ms`: the same, as deadlines have it."""
        match message:
            case WorkerLoad():
                self._on_load(message, now_s)
            case WorkerLeft():
                self._on_left(message)
            case KVLanded():
                self._on_landed(message, now_s)
            case observe.StoryMessage():
                self._on_event(message, now_s, now_ms)
            case _:
                pass

    def _on_load(self, load: WorkerLoad, now_s: float) -> None:
        known = self.loads.get(load.worker.worker_id)
        if known is not None:
            before = known[1] if known[1].worker.incarnation == load.worker.incarnation else None
            self.tokens.count(now_s, load.num_tokens - (before.num_tokens if before else 0))
        self.loads[load.worker.worker_id] = (now_s, load)

    def _on_left(self, left: WorkerLeft) -> None:
        known = self.loads.get(left.worker_id)
        if known is not None and known[1].worker.incarnation == left.incarnation:
            del self.loads[left.worker_id]

    def _on_landed(self, landed: KVLanded, now_s: float) -> None:
        key = (landed.source_worker, landed.target_worker)
        pair = self.pairs.get(key)
        if pair is None:
            pair = self.pairs[key] = Traffic(Rate(self.began_s), Rate(self.began_s))
        pair.num_bytes.count(now_s, landed.num_bytes)
        pair.transfers.count(now_s)
        pair.carrier, pair.last_s = landed.carrier, now_s

    def _on_event(self, event: observe.StoryMessage, now_s: float, now_ms: int) -> None:
        request_id = event.request_id
        phase = ""
        # Each kind of event begins a phase, or ends the request: then `phase` stays empty.
        match event:
            case observe.RequestAccepted():
                phase = "placing"
            case observe.RequestPlaced():
                phase = "prefill"
            case observe.FirstTokenReceived():
                phase = "decode"
                self.ttfts_ms.append(event.age_ms)
            case observe.RequestResumed():
                phase = "placing"
                self.num_resumed += 1
                self.num_moved += event.moved_by is not None
            case observe.RequestFinished():
                self.ends["finished"] += 1
                self.finished.count(now_s)
            case observe.RequestFailed(code=code):
                self.ends["failed"] += 1
                self.failures[code] += 1
            case observe.RequestCancelled():
                self.ends["cancelled"] += 1
            case _:
                return
        # Show a request until a second after its deadline at most: the message about its end may be lost.
        if phase:
            left_s = min(OPEN_REQUEST_MAX_S, max(0.0, (event.deadline_ms - now_ms) / 1000))
            self._open[request_id] = (phase, now_s + left_s + 1.0)
        else:
            self._open.pop(request_id, None)

    def phases(self, now_s: float) -> Counter[str]:
        """Return the number of running requests in each phase."""
        for request_id in [request_id for request_id, (_, until_s) in self._open.items() if until_s < now_s]:
            del self._open[request_id]
        return Counter(phase for phase, _ in self._open.values())

    def workers(self, now_s: float) -> Iterator[tuple[WorkerLoad, bool]]:
        """Yield the last load of each worker, by name, and whether the worker has been silent for SILENT_AFTER_S."""
        for worker_id in [w for w, (seen_s, _) in self.loads.items() if seen_s < now_s - FORGET_AFTER_S]:
            del self.loads[worker_id]
        for _, (seen_s, load) in sorted(self.loads.items()):
            yield load, seen_s < now_s - SILENT_AFTER_S
