"""What a holder of KV runs on."""

from dataclasses import dataclass

from dataplane.blocks.layout import ArenaShape
from dataplane.carriers.carrier import KVArena
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo
from services.holder.platform import THREADS, Platform
from services.trust.credentials import HolderCredentials


@dataclass(frozen=True, kw_only=True)
class HolderParts:
    """A holder's memory, and what it reports of itself. `info`: as far as that is known before it serves."""

    info: WorkerInfo
    arena: KVArena
    shape: ArenaShape
    credentials: HolderCredentials
    platform: Platform = THREADS

    @property
    def worker_id(self) -> WorkerId:
        return self.info.worker_id
