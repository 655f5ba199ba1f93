"""What is seen of each event and of what was decided on it, once that was carried out: spans, metrics, and the record
of the last steps. It decides nothing."""

from collections.abc import Sequence

from services.holder.core.actions import CloseLease
from services.holder.core.events import StreamEnded, TimePassed
from services.holder.observe.journal import Journal
from services.holder.observe.metrics import HolderMetrics
from services.holder.observe.transfers import HolderSpans
from services.telemetry import Telemetry


class HolderObserver:
    """One worker's or store's."""

    def __init__(self, telemetry: Telemetry, worker_id: str, measured: HolderMetrics) -> None:
        self.journal = Journal()
        self._lease_spans = HolderSpans(telemetry, worker_id)
        self._measured = measured

    def saw(self, cause: str, event: object, actions: Sequence[object]) -> None:
        """See one step. `cause`: the subject of the message, or the part of this process that the event is of."""
        if actions or not isinstance(event, TimePassed):
            self.journal.note(cause, event, actions)
        for action in actions:
            if isinstance(action, CloseLease):
                self._measured.lease_ended(action.lease)
                self._lease_spans.lease_ended(action.lease)
        if isinstance(event, StreamEnded):
            self._lease_spans.stream_ended(event.lease, event.stats, event.error)
