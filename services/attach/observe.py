"""What is seen of attached servers: metrics, spans, what `kvmesh status HOLDER` shows of each. It decides nothing."""

import time
from collections import Counter

from schemas.attach import Ask, BlockRefused, Compared, Counted, FromScheduler, FromWorker, Loaded, Saved
from schemas.observe import AttachedServer
from services import metric_names as names
from services.attach.core import AttachCore, Bring, GiveBlocks, Server, Sharing
from services.attach.limits import MAX_TRACED
from services.metrics import Metrics
from services.telemetry import OpenSpan, Telemetry
from services.telemetry.names import Key, SpanName


class AttachMetrics:
    """One holder's."""

    def __init__(self, metrics: Metrics, core: AttachCore) -> None:
        self._metrics = metrics
        self._core = core
        metrics.on_sample(self._sample)

    def received(self, message: FromScheduler | FromWorker) -> None:
        """Count what a half has sent."""
        inc = self._metrics.inc
        match message:
            case Counted(asked_tokens=asked, loaded_tokens=loaded, not_saved=not_saved):
                inc(names.ATTACH_TOKENS, "asked", by=asked)
                inc(names.ATTACH_TOKENS, "loaded", by=loaded)
                for reason, number in not_saved.items():
                    inc(names.ATTACH_NOT_SHARED, reason, by=number)
            case Saved(slots=slots):
                inc(names.ATTACH_BLOCKS, "saved", by=len(slots))
            case Compared():
                inc(names.ATTACH_BLOCKS, "compared")
            case BlockRefused():
                inc(names.ATTACH_BLOCKS, "damaged")
            case Loaded(seconds=seconds):
                self._metrics.observe(names.ATTACH_LOAD_SECONDS, seconds)
            case _:
                pass

    def brought(self, num_blocks: int) -> None:
        """Count what was brought for a question."""
        self._metrics.inc(names.ATTACH_BLOCKS, "brought", by=num_blocks)

    def turned_off(self) -> None:
        """Count a server that was found wrong."""
        self._metrics.inc(names.ATTACH_MISMATCHES)

    def servers(self) -> tuple[AttachedServer, ...]:
        """Return what there is to say of each server."""
        return tuple(_described(name, server) for name, server in self._core.servers.items())

    def _sample(self) -> None:
        servers = self._core.servers.values()
        sharing = Counter(server.sharing for server in servers)
        self._metrics.set_series(names.ATTACH_SERVERS, {(each.value,): sharing[each] for each in Sharing})
        num_held = sum(server.num_pinned + len(server.purse) for server in servers) + self._core.num_given_up
        self._metrics.set_series(names.ATTACH_HELD_BLOCKS, {(): num_held})


class AskSpans:
    """What servers ask for, below the trace of the request that it is for. A server that passes no trace on has one
    begun by its question."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._open: dict[tuple[str, int], OpenSpan] = {}
        """The questions that are to be answered."""
        self._parents: dict[tuple[str, int], str] = {}
        """By server and number of the question, the traceparent of its further spans: of the last `MAX_TRACED`, as
        nothing reports that the last one has been."""

    def asked(self, server: str, ask: Ask) -> None:
        span = self._telemetry.begin_span(SpanName.ATTACH_ASK, ask.traceparent, {Key.SERVER: server})
        self._open[server, ask.number] = span
        self._parents[server, ask.number] = ask.traceparent or span.traceparent
        if len(self._parents) > MAX_TRACED:
            oldest = next(iter(self._parents))
            del self._parents[oldest]
            self._open.pop(oldest, None)

    def answered(self, answer: GiveBlocks) -> None:
        """End the question's span with its first answer."""
        if (span := self._open.pop((answer.server, answer.number), None)) is not None:
            span.end({Key.NUM_BLOCKS: len(answer.blocks)})

    def fetch_begun(self, bring: Bring) -> OpenSpan:
        parent = self._parents.get((bring.server, bring.number), "")
        return self._telemetry.begin_span(SpanName.ATTACH_FETCH, parent, {Key.SERVER: bring.server})

    def fetch_ended(self, span: OpenSpan, num_blocks: int, failure: str) -> None:
        span.end({Key.NUM_BLOCKS: num_blocks}, failure)

    def loaded(self, server: str, load: Loaded) -> None:
        """A load has just ended."""
        end_ns = time.monotonic_ns()
        times_ns = (end_ns - round(1e9 * load.seconds), end_ns)
        attributes = {Key.SERVER: server, Key.NUM_BLOCKS: load.num_loaded}
        error = "" if load.num_loaded else "a block was damaged, or the arena is gone"
        parent = self._parents.get((server, load.number), "")
        self._telemetry.record(SpanName.ATTACH_LOAD, parent, times_ns, attributes, error=error)


def _described(name: str, server: Server) -> AttachedServer:
    return AttachedServer(
        server=name,
        model=server.hello.model,
        url=server.hello.url,
        sharing=server.sharing,
        why=server.why,
        num_asked_tokens=server.num_asked_tokens,
        num_loaded_tokens=server.num_loaded_tokens,
        num_brought_blocks=server.num_brought_blocks,
        num_saved_blocks=server.num_saved_blocks,
        num_compared=server.num_compared,
        num_refused=server.num_refused,
        num_pinned=server.num_pinned,
        num_empty=len(server.purse),
        canary=server.canary,
        not_saved=tuple(f"{reason} {number}" for reason, number in sorted(server.not_saved.items())),
    )
