"""An arena on a card behind the plane: `cuda` between cards that see each other's memory, `nccl` between any two, `shm`
and `tcp` by way of host memory."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from dataplane import limits as plane_limits
from dataplane.blocks.layout import ArenaShape
from dataplane.cards import limits
from dataplane.cards.device import Device, DeviceError
from dataplane.cards.device_arena import DeviceArena, DeviceHandles
from dataplane.cards.ipc import CudaHolder, CudaReader, OpenedArenas, SourceArena
from dataplane.cards.nccl.pair import BUFFER_BYTES, PairEnd, PairParts
from dataplane.cards.nccl.pair_core import HolderCore, PairBrokenError, ReaderCore
from dataplane.cards.nccl.paired import PairedHolder, PairedReader
from dataplane.cards.nccl.pairs import HolderPairs, ReaderPairs
from dataplane.cards.staged import SharedStagedReader, StagedHolder, StagedReader, StagedSharedHolder
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import CarrierBrokenError, HolderCarrier, ReaderCarrier
from dataplane.carriers.kv_arena import AUTO, Approach, PairRefusedError, ReadAsked
from dataplane.carriers.shm import AttachedArenas, holder_frames, holder_runs
from dataplane.memory.checksum import DigestKind, FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Open, PairRead, ProtocolError
from schemas.handoff import Endpoint
from schemas.ids import WorkerId

CUDA, NCCL = "cuda", "nccl"


class CardArena(DeviceArena):
    """An arena on a card that is served and read into. Raises as `DeviceArena`."""

    def __init__(self, device: Device, shape: ArenaShape, staging_bytes: int) -> None:
        super().__init__(device, shape, staging_bytes)
        self.pair_parts: PairParts | None = None
        """With what this card makes communicators; None: it makes none. Set before the arena is served or read into."""

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder offers: `nccl` only where communicators can be made."""
        if wanted != AUTO:
            return (wanted,)
        has_nccl = self.pair_parts is not None and self.pair_parts.refusal() is None
        return (CUDA, NCCL, shm.NAME, tcp.NAME) if has_nccl else (CUDA, shm.NAME, tcp.NAME)

    def as_holder(self, carriers: tuple[str, ...]) -> "CardHolderSide":
        return CardHolderSide(self, self.pair_parts if NCCL in carriers else None)

    def as_reader(self, shape: ArenaShape) -> "CardReaderSide":
        return CardReaderSide(self, shape)


class CardHolderSide:
    """Makes the holder's ends, and offers pairs."""

    digest_kind: DigestKind = "sum64"

    def __init__(self, arena: CardArena, pair_parts: PairParts | None) -> None:
        self._arena = arena
        self._pairs = None if pair_parts is None else HolderPairs(pair_parts)

    def describe(self, endpoint: Endpoint, reader: WorkerId | None = None) -> Endpoint:
        """Say which card it is, and which pair this reader may open."""
        pair = None if self._pairs is None or reader is None else self._pairs.offer(reader)
        return replace(endpoint, card=self._arena.card, pair=pair)

    def carrier(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderCarrier:
        """Return the holder's end of the carrier. Raises CarrierBrokenError."""
        try:
            return self._carrier(wanted, reader, source, extent, frame_hash)
        except (DeviceError, PairRefusedError, PairBrokenError, ProtocolError) as error:
            raise CarrierBrokenError(wanted.carrier, str(error)) from error

    def open_pair(self, reader: WorkerId, generation: int) -> PairEnd[HolderCore]:
        """Return the pair of this offer. Raises PairRefusedError, CarrierBrokenError."""
        return self._known_pairs().open(reader, generation)

    def close(self) -> None:
        """End all pairs."""
        if self._pairs is not None:
            self._pairs.close()

    def _carrier(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderCarrier:
        arena = self._arena
        if wanted.carrier == NCCL and wanted.pair is not None:
            if extent.least_bytes > BUFFER_BYTES:
                raise CarrierBrokenError(NCCL, f"a frame has {extent.least_bytes} bytes or more")
            pair = self._known_pairs().find(reader, wanted.pair.generation)
            return PairedHolder(pair, wanted.pair.read_id, arena, source, digests=frame_hash.kind is not None)
        if wanted.carrier == tcp.NAME:
            return StagedHolder(arena, source, extent, frame_hash)
        if wanted.carrier == shm.NAME:
            return StagedSharedHolder(arena, source, extent, frame_hash)
        if wanted.carrier == CUDA:
            return CudaHolder(arena, source, frame_hash)
        raise CarrierBrokenError(wanted.carrier, "this holder's arena is on a card")

    def _known_pairs(self) -> HolderPairs:
        if self._pairs is None:
            raise CarrierBrokenError(NCCL, "this holder has no pairs")
        return self._pairs


@dataclass(slots=True, frozen=True)
class CardPlace:
    """Where a card is. `can_attach`: whether the endpoint's shared memory is on this host. `card`: its uuid. `can_map`:
    whether it reads the memory of the card of this uuid. `has_nccl`: whether communicators can be made here."""

    can_attach: Callable[[Endpoint], bool]
    card: str
    can_map: Callable[[str], bool]
    has_nccl: bool
    carriers: tuple[str, ...] = (CUDA, NCCL, shm.NAME, tcp.NAME)

    def reason(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Say why a carrier leads to this card, if it does."""
        rule = _RULES.get(carrier)
        return None if rule is None else rule(endpoint, self)


def _cuda(endpoint: Endpoint, place: CardPlace) -> str | None:
    if not endpoint.card or not place.can_map(endpoint.card):
        return None
    cards = "one card" if endpoint.card == place.card else "cards that see each other's memory"
    if loopback.find(endpoint.arena_nonce) is not None:
        return f"one process, {cards}"
    return f"one host, {cards}" if place.can_attach(endpoint) else None


def _nccl(endpoint: Endpoint, place: CardPlace) -> str | None:
    if not endpoint.card or endpoint.card == place.card:
        return None
    if endpoint.pair is None or not place.has_nccl:
        return None
    return "two cards"


def _shm(endpoint: Endpoint, place: CardPlace) -> str | None:
    return f"one host{_staging(endpoint)}" if place.can_attach(endpoint) else None


def _tcp(endpoint: Endpoint, place: CardPlace) -> str | None:
    return f"a network{_staging(endpoint)}" if endpoint.port > 0 else None


def _staging(endpoint: Endpoint) -> str:
    """Say what passes through host memory."""
    ends = "the holder's and the reader's" if endpoint.card else "the reader's"
    return f", {ends} card staged through host memory"


_RULES: dict[str, Callable[[Endpoint, CardPlace], str | None]] = {
    CUDA: _cuda,
    NCCL: _nccl,
    shm.NAME: _shm,
    tcp.NAME: _tcp,
}
"""Each returns why its carrier leads there, or None."""


class CardReaderSide:
    """Makes the reader's ends, and keeps what is open of holders: their memory, and pairs with them."""

    digest_kind: DigestKind = "sum64"

    def __init__(self, arena: CardArena, shape: ArenaShape) -> None:
        self.arena = arena
        self.shape = shape
        self.attached = AttachedArenas()
        self.opened = OpenedArenas(arena)
        self.pairs = None if arena.pair_parts is None else ReaderPairs(arena.pair_parts)
        has_nccl = self.pairs is not None and self.pairs.refusal() is None
        self.place = CardPlace(self.attached.can_attach, arena.card, arena.device.can_map, has_nccl)

    def approach(self, carrier: str, asked: ReadAsked) -> Approach:
        """Prepare a read; over `nccl` the pair is made now if need be. Raises CarrierBrokenError, TransferFailedError,
        WireClosedError, WireTimeoutError."""
        return self._paired(asked) if carrier == NCCL else CardApproach(self, carrier, asked)

    def release_ended(self) -> None:
        """Let go of the memory of holders that have ended, and of pairs that are not used. A driver takes its time."""
        self.attached.release_unlinked()
        self.opened.release_unlinked()
        if self.pairs is not None:
            self.pairs.release_idle()

    def close(self) -> None:
        """Unmap the holders' memory, end the pairs."""
        self.attached.close()
        self.opened.close()
        if self.pairs is not None:
            self.pairs.close()

    def _paired(self, asked: ReadAsked) -> "PairedApproach":
        if self.pairs is None:
            raise CarrierBrokenError(NCCL, "this reader makes no communicators")
        try:
            pair = self.pairs.join(asked.endpoint, asked.ticket, asked.dial, asked.deadline, asked.is_cancelled)
            read_id = pair.decide(lambda core: core.next_read())
        except (PairRefusedError, PairBrokenError) as error:
            raise CarrierBrokenError(NCCL, str(error)) from error
        return PairedApproach(pair, read_id, self.arena, asked.target)


class PairedApproach:
    """A read over a pair with the holder."""

    frame_bytes = plane_limits.MAX_FRAME_BYTES

    def __init__(self, pair: PairEnd[ReaderCore], read_id: int, arena: CardArena, target: SequenceRuns) -> None:
        self.pair = PairRead(generation=pair.generation, read_id=read_id)
        self._pair = pair
        self._arena = arena
        self._target = target

    def end(self, accepted: Accepted, extent: Extent, frame_hash: FrameHash) -> ReaderCarrier:
        """Return the reader's end. Raises DeviceError."""
        digests = frame_hash.kind is not None
        return PairedReader(self._pair, self.pair.read_id, self._arena, self._target, digests=digests)

    def close(self) -> None:
        """The pair is done with this read."""
        self._pair.leave(self.pair.read_id)


class CardApproach:
    """A read over a carrier that needs no pair."""

    pair = None

    def __init__(self, side: CardReaderSide, carrier: str, asked: ReadAsked) -> None:
        self.frame_bytes = plane_limits.MAX_FRAME_BYTES
        if carrier != CUDA:
            self.frame_bytes = min(limits.STAGED_FRAME_BYTES, side.arena.ring.frame_bytes)
        self._side = side
        self._carrier = carrier
        self._asked = asked

    def end(self, accepted: Accepted, extent: Extent, frame_hash: FrameHash) -> ReaderCarrier:
        """Return the reader's end. Raises DeviceError, ArenaMissingError, ProtocolError, CarrierBrokenError."""
        side, asked = self._side, self._asked
        if self._carrier == CUDA:
            return self._cuda_reader(accepted, extent, frame_hash)
        if self._carrier == tcp.NAME:
            return StagedReader(side.arena, asked.target, extent, frame_hash)
        source = holder_frames(side.attached.attach(asked.endpoint), accepted, side.shape, extent)
        return SharedStagedReader(source, side.arena, asked.target, extent, frame_hash)

    def close(self) -> None:
        """Nothing is held."""

    def _cuda_reader(self, accepted: Accepted, extent: Extent, frame_hash: FrameHash) -> ReaderCarrier:
        try:
            holder, give_back = self._open(accepted)
            try:
                source = holder_runs(accepted, self._side.shape, extent, holder.memory.num_bytes)
                return CudaReader(holder, source, self._side.arena, self._asked.target, frame_hash, give_back)
            except BaseException:
                give_back()
                raise
        except DeviceError as error:
            raise CarrierBrokenError(CUDA, str(error)) from error

    def _open(self, accepted: Accepted) -> tuple[SourceArena, Callable[[], None]]:
        """Return the holder's arena and what to call when it is not used any more. Raises DeviceError,
        ProtocolError."""
        endpoint = self._asked.endpoint
        server = loopback.find(endpoint.arena_nonce)
        if server is not None and isinstance(server.arena, DeviceArena):
            return server.arena, server.arena.use()
        if accepted.names is None:
            raise ProtocolError("the holder does not name its memory")
        handles = DeviceHandles.read(accepted.names)
        return self._side.opened.take((endpoint.arena, endpoint.arena_nonce), handles)
