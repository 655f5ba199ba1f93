"""Which class is which end of which carrier, by where the arenas are."""

from dataplane import ipc, shm, staged, tcp
from dataplane.carrier import HolderCarrier
from dataplane.connect import CUDA, CarrierBrokenError
from dataplane.device_arena import DeviceArena, KVArena
from dataplane.extent import Extent
from dataplane.frames import SequenceMemory
from dataplane.runs import SequenceRuns
from dataplane.stream import DigestKind


def holder_carrier(
    name: str, arena: KVArena, source: SequenceRuns, extent: Extent, digest_kind: DigestKind | None
) -> HolderCarrier:
    """Return the holder's end of a carrier. Raises DeviceError, and CarrierBrokenError when it cannot be had here."""
    if isinstance(arena, DeviceArena):
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
