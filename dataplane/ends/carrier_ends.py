"""Which class is which end of which carrier, by where the arenas are."""

from typing import NamedTuple

from dataplane.cards import ipc, staged
from dataplane.cards.device_arena import DeviceArena, KVArena
from dataplane.cards.nccl.pair import Pair
from dataplane.cards.nccl.pair_core import HolderCore
from dataplane.cards.nccl.paired import PairedHolder
from dataplane.carriers import shm, tcp
from dataplane.carriers.carrier import HolderCarrier
from dataplane.ends.choice import CUDA, NCCL, CarrierBrokenError
from dataplane.memory.checksum import DigestKind
from dataplane.memory.extent import Extent
from dataplane.memory.frames import SequenceMemory
from dataplane.memory.rows import SequenceRuns


class Paired(NamedTuple):
    """The pair that a read is to go over, and what the read is called there."""

    pair: Pair[HolderCore]
    read_id: int


def holder_carrier(
    name: str,
    arena: KVArena,
    source: SequenceRuns,
    extent: Extent,
    digest_kind: DigestKind | None,
    paired: Paired | None = None,
) -> HolderCarrier:
    """Return the holder's end of a carrier. Raises DeviceError, and CarrierBrokenError when it cannot be had here."""
    if isinstance(arena, DeviceArena):
        if name == NCCL and paired is not None:
            return PairedHolder(*paired, arena, source, digests=digest_kind is not None)
        if name == tcp.NAME:
            return staged.StagedHolder(arena, source, extent, digest_kind)
        if name == shm.NAME:
            return staged.StagedSharedHolder(arena, source, extent, digest_kind)
        if name == CUDA:
            return ipc.CudaHolder(arena, source, digest_kind)
        raise CarrierBrokenError(name, "this holder's arena is on a card")
    memory = SequenceMemory(arena.array, source)
    if name == tcp.NAME:
        return tcp.TcpHolder(memory, extent, digest_kind)
    return shm.SharedHolder(memory, digest_kind)
