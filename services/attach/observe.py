"""What is seen of attached servers: metrics, and what `kvmesh status HOLDER` shows of each. It decides nothing."""

from collections import Counter

from schemas.attach import BlockRefused, Compared, Counted, FromScheduler, FromWorker, Loaded, Saved
from schemas.observe import AttachedServer
from services import metric_names as names
from services.attach.core import AttachCore, Server, Sharing
from services.metrics import Metrics


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
        self._metrics.set_series(names.ATTACH_HELD_BLOCKS, {(): sum(server.num_held for server in servers)})


def _described(name: str, server: Server) -> AttachedServer:
    return AttachedServer(
        server=name,
        model=server.hello.model,
        url=server.hello.url,
        sharing=server.sharing,
        why=server.why,
        num_asked_tokens=server.num_asked_tokens,
        num_loaded_tokens=server.num_loaded_tokens,
        num_saved_blocks=server.num_saved_blocks,
        num_compared=server.num_compared,
        num_refused=server.num_refused,
        num_held=server.num_held,
        not_saved=tuple(f"{reason} {number}" for reason, number in sorted(server.not_saved.items())),
    )
