"""What a gateway reports when it is sampled: the requests under way, and the workers' blocks."""

from typing import Protocol

from schemas.ids import WorkerId
from schemas.worker import BlockCounts
from services import metric_names as names
from services.metrics import Metrics


class Observed(Protocol):
    """Where the present state is found (`Requests`)."""

    num_resumes: int
    num_progress_asked: int

    @property
    def num_live(self) -> int: ...

    def ages_s(self) -> list[float]: ...

    def overdue_s(self) -> float: ...

    def block_counts(self) -> dict[WorkerId, BlockCounts]: ...


class GatewayMetrics:
    """One gateway's metrics. `model`: what clients call it. What happens to a request is counted in `registry` by its
    observer (`observe/answer_observer.py`)."""

    def __init__(self, registry: Metrics, model: str, observed: Observed) -> None:
        self.registry = registry
        self.model = model
        self._observed = observed
        registry.on_sample(self._sample)

    def _sample(self) -> None:
        observed, put = self._observed, self.registry.set_series
        ages_s = observed.ages_s()
        put(names.RESUMES, {(): observed.num_resumes})
        put(names.PROGRESS_ASKED, {(): observed.num_progress_asked})
        put(names.RUNNING, {(): observed.num_live})
        put(names.UNFINISHED, {(age,): count for age, count in names.by_age(ages_s).items()})
        put(names.OLDEST_REQUEST, {(): max(ages_s, default=0.0)})
        put(names.OVERDUE, {(): observed.overdue_s()})
        put(
            names.KV_BLOCKS, {key: n for w, counts in observed.block_counts().items() for key, n in by_state(w, counts)}
        )


def by_state(worker_id: str, counts: BlockCounts) -> list[tuple[tuple[str, str], int]]:
    """Return ((worker, state), blocks) of one worker."""
    return [((worker_id, state), getattr(counts, state)) for state in names.BLOCK_STATES]
