"""What a decode worker knows of one attempt. Pure."""

from dataclasses import dataclass

from schemas.handoff import HandoffState, KVOffered
from schemas.ids import WorkerId
from schemas.observe import RunStage
from schemas.request import ReserveBlocks, TransferReport
from services.worker.core.attempts import Run


@dataclass(slots=True, eq=False)
class DecodeRun(Run[ReserveBlocks]):
    """One attempt on this worker. `reading`, `fetching_from`: a read may still write its blocks; `computing`: the
    engine may."""

    state: HandoffState = HandoffState.NEW
    reserved_ms: int | None = None
    """When its source was last told that there is room, as far as the clock has been heard since."""
    offer: KVOffered | None = None
    reading: bool = False
    computing: bool = False
    ended: bool = False
    source_left: bool = False
    lost_reason: str = ""
    """Why its source will not offer, learnt while it was waiting for blocks."""
    report: TransferReport | None = None

    @property
    def has_ended(self) -> bool:
        return self.ended

    @property
    def owes_tokens(self) -> bool:
        return not self.ended

    @property
    def stage(self) -> RunStage:
        if self.ended:
            return "ending"
        if self.computing:
            return "computing"
        if self.fetching_from is not None:
            return "fetching"
        if self.reading:
            return "receiving"
        return "queued" if self.state is HandoffState.NEW else "reserved"

    @property
    def reading_from(self) -> WorkerId | None:
        return self.request.prefill_worker if self.reading else self.fetching_from
