"""What a prefill worker knows of one attempt. Pure."""

from dataclasses import dataclass
from typing import Literal

from schemas.observe import RunStage
from schemas.request import RunPrefill
from services.worker.core.attempts import Run
from services.worker.kv.leases import Grant

Phase = Literal["queued", "fetching", "computing", "withdrawing", "handing_over"]


@dataclass(slots=True, eq=False)
class PrefillRun(Run[RunPrefill]):
    """One attempt on this worker."""

    phase: Phase = "queued"
    lease: Grant | None = None
    computed_ms: int = 0
    reserved: bool = False
    """The decode worker has said that it has room."""
    offer_again: bool = False
    """The decode worker has said so again: it may not have heard the offer."""
    offered_again_ms: int = 0

    @property
    def is_split(self) -> bool:
        return self.request.handoff_id is not None

    @property
    def num_kv_tokens(self) -> int:
        return len(self.prompt) if self.is_split else self.num_tokens_at_end - 1

    @property
    def has_ended(self) -> bool:
        return self.phase == "withdrawing"

    @property
    def stage(self) -> RunStage:
        return "ending" if self.phase == "withdrawing" else self.phase

    @property
    def owes_tokens(self) -> bool:
        return self.phase in ("queued", "fetching", "computing")
