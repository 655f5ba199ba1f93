"""An arena in a card's memory, behind the plane: `cuda` between cards that see each other's memory, `nccl` between any
two, `tcp` by way of host memory.

The engine runs ahead of its card: that it has come past a layer does not mean that the layer is computed. It records a
mark behind each (an event), and whoever lends the layer waits for the mark before it announces a frame.
"""

import contextlib
import threading
from collections.abc import Callable, Generator

from msgspec.structs import replace

from dataplane.blocks.layout import ArenaShape
from dataplane.cards import limits
from dataplane.cards.card import Card, CardError, CardMemory, unsuited, wait_until
from dataplane.cards.ends import CudaHolder, CudaReader, NcclHolder, NcclReader, StagedSource, StagedTarget
from dataplane.cards.pairs import NCCL, Pairs
from dataplane.carriers import loopback, tcp
from dataplane.carriers.carrier import AUTO, CarrierBrokenError, HolderEnd, ReaderEnd
from dataplane.carriers.host import AttachedArenas
from dataplane.carriers.shm import holder_runs
from dataplane.carriers.tcp import TcpHolder, TcpReader
from dataplane.memory.arena import SHM_DIR, Arena
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Names, Open, ProtocolError
from schemas.handoff import Endpoint
from schemas.ids import WorkerId

CUDA = "cuda"


class CardArena:
    """A card's memory of this shape, owned by this process (`KVArena`). Raises CardError, and ValueError when the
    layout cannot live on a card.

    Its `name` is that of an empty file in /dev/shm, in which its nonce is: who can map that is on the same host.
    """

    carriers = (CUDA, NCCL, tcp.NAME)
    host_array = None

    def __init__(self, card: Card, shape: ArenaShape) -> None:
        if (reason := unsuited(shape.layout)) is not None:
            raise ValueError(reason)
        self.card = card
        self.shape = shape
        self.pairs = Pairs(card)
        self._lock = threading.Lock()
        self._marks: dict[int, Callable[[], bool]] = {}
        self._num_marks = 0
        self._opened: dict[tuple[str, str], _Opened] = {}
        self._attached = AttachedArenas()
        self.memory = card.allocate(shape.arena_bytes)
        self._file = Arena.create_bytes(0)
        self.name, self.nonce = self._file.name, self._file.nonce

    @property
    def num_bytes(self) -> int:
        """Of KV."""
        return self.memory.num_bytes

    @property
    def exported(self) -> object:
        """The KV as torch takes it over without a copy (DLPack); not to be used once the arena is closed."""
        return self.memory.exported

    # As a holder.

    def mark(self, stream_handle: int) -> int:
        """Return a mark behind all that the engine's stream was given so far. Raises CardError."""
        is_reached = self.card.mark(stream_handle)
        with self._lock:
            self._num_marks += 1
            self._marks[self._num_marks] = is_reached
            self._marks.pop(self._num_marks - limits.MAX_MARKS, None)
            return self._num_marks

    def wait_written(self, mark: int, has_ended: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a mark; return whether it is reached. A stream is in order: a later mark covers an earlier one.
        Raises CardError."""
        with self._lock:
            is_reached = self._marks.get(max(mark, self._num_marks - limits.MAX_MARKS + 1))
        return is_reached is None or wait_until(is_reached, has_ended, timeout_s)

    def offered(self, wanted: str) -> tuple[str, ...]:
        """Return what a holder offers: `nccl` only where communicators can be made."""
        if wanted != AUTO:
            return (wanted,)
        return (CUDA, tcp.NAME) if self.pairs.refusal() else self.carriers

    def describe(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with this card's uuid."""
        return replace(endpoint, card=self.card.uuid)

    def holder_end(
        self, wanted: Open, reader: WorkerId, source: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> HolderEnd:
        """Return the holder's end of the carrier. Raises CarrierBrokenError."""
        card, arena = self.card, (self.memory, source)
        try:
            match wanted.carrier:
                case tcp.NAME:
                    return TcpHolder(StagedSource(card, arena, frame_hash, writes=False), extent, frame_hash)
                case "cuda":
                    names: Names = {"memory": card.export(self.memory).hex(), "num_bytes": self.num_bytes}
                    return CudaHolder(card, *arena, frame_hash, names)
                case "nccl":
                    if extent.least_bytes > limits.NCCL_FRAME_BYTES:
                        raise CarrierBrokenError(NCCL, f"a frame has {extent.least_bytes} bytes or more")
                    is_joined = (wanted.names or {}).get("is_joined") is True
                    pair = self.pairs.of_holder(reader, _bytes_of(wanted.names, "id"), is_joined=is_joined)
                    return NcclHolder(card, arena, self.pairs, pair, frame_hash)
                case other:
                    raise CarrierBrokenError(other, "this holder's arena is on a card")
        except (CardError, ProtocolError) as error:
            raise CarrierBrokenError(wanted.carrier, str(error)) from error

    # As a reader.

    def leads_from(self, carrier: str, endpoint: Endpoint) -> str | None:
        """Return why a carrier leads here, if it does."""
        match carrier:
            case "cuda" if endpoint.card and self.card.can_map(endpoint.card):
                cards = "one card" if endpoint.card == self.card.uuid else "cards that see each other's memory"
                if loopback.find(endpoint.arena_nonce) is not None:
                    return f"one process, {cards}"
                return f"one host, {cards}" if self._attached.can_attach(endpoint) else None
            case "nccl" if endpoint.card not in ("", self.card.uuid) and not self.pairs.is_busy(endpoint.arena_nonce):
                return None if self.pairs.refusal() else "two cards"
            case tcp.NAME if endpoint.port > 0:
                ends = "the holder's and the reader's" if endpoint.card else "the reader's"
                return f"a network, {ends} card staged through host memory"
            case _:
                return None

    @contextlib.contextmanager
    def opening(self, carrier: str, endpoint: Endpoint, deadline: float) -> Generator[Names | None]:
        """Keep the pair with this holder for one read. Raises CarrierBrokenError, WireTimeoutError."""
        if carrier != NCCL:
            yield None
            return
        with self.pairs.of_reader(endpoint.arena_nonce, deadline) as pair:
            yield {"id": pair.unique_id.hex(), "is_joined": pair.is_joined}

    def reader_end(
        self,
        endpoint: Endpoint,
        accepted: Accepted,
        shape: ArenaShape,
        target: SequenceRuns,
        extent: Extent,
        frame_hash: FrameHash,
    ) -> ReaderEnd:
        """Return the reader's end. Raises ProtocolError, CarrierBrokenError."""
        card, arena = self.card, (self.memory, target)
        try:
            # tcp stages frames in host memory, and nccl receives them over the pair that `opening` keeps for this read.
            if accepted.carrier == tcp.NAME:
                return TcpReader(StagedTarget(card, arena, frame_hash, writes=True), extent, frame_hash)
            if accepted.carrier == NCCL:
                pair = self.pairs.in_use(endpoint.arena_nonce)
                pair.communicator()  # where it cannot be made another carrier is tried
                return NcclReader(card, arena, self.pairs, pair, frame_hash)
            # cuda copies from the holder's memory, which is mapped here: it counts as used until `give_back` is called.
            memory, give_back = self._holder_memory(endpoint, accepted)
            try:
                source = holder_runs(accepted, shape, extent, memory.num_bytes)
                return CudaReader(card, (memory, source), arena, frame_hash, give_back)
            except BaseException:
                give_back()
                raise
        except CardError as error:
            raise CarrierBrokenError(accepted.carrier, str(error)) from error

    def release_ended(self) -> None:
        """Unmap the memory of holders that have ended: their files have no names any more."""
        self._attached.release_unlinked()
        self._let_go(lambda key: not (SHM_DIR / key[0]).exists())

    def close(self) -> None:
        """Free everything; nobody reads from it or into it any more. The card stays. Idempotent."""
        self.pairs.close()
        self._attached.close()
        self._let_go(lambda _: True)
        self._marks.clear()
        self.memory.close()
        self._file.close()

    def _holder_memory(self, endpoint: Endpoint, accepted: Accepted) -> tuple[CardMemory, Callable[[], None]]:
        """Return a holder's memory, opened once each, and what to call once when it is not used any more. Raises
        CardError, ProtocolError."""
        server = loopback.find(endpoint.arena_nonce)
        if server is not None and isinstance(server.arena, CardArena):
            return server.arena.memory, lambda: None
        name, num_bytes = _bytes_of(accepted.names, "memory"), (accepted.names or {}).get("num_bytes")
        if not isinstance(num_bytes, int) or num_bytes < 0:
            raise ProtocolError("the holder does not say how large its memory is")
        key = (endpoint.arena, endpoint.arena_nonce)
        with self._lock:
            opened = self._opened.pop(key, None) or _Opened(self.card.map_memory(name, num_bytes))
            opened.num_users += 1
            self._opened[key] = opened  # the one used last is at the end
        if len(self._opened) > limits.MAX_OPENED:
            oldest = next(iter(self._opened))
            self._let_go(lambda key: key == oldest)
        return opened.memory, lambda: self._give_back(opened)

    def _let_go(self, is_meant: Callable[[tuple[str, str]], bool]) -> None:
        """Unmap what is meant, once nobody uses it."""
        with self._lock:
            for key in [key for key in self._opened if is_meant(key)]:
                opened = self._opened.pop(key)
                opened.is_let_go = True
                opened.close_unused()

    def _give_back(self, opened: "_Opened") -> None:
        with self._lock:
            opened.num_users -= 1
            opened.close_unused()


class _Opened:
    """Another process's memory, which is mapped here."""

    def __init__(self, memory: CardMemory) -> None:
        self.memory = memory
        self.num_users = 0
        self.is_let_go = False

    def close_unused(self) -> None:
        if self.is_let_go and not self.num_users:
            self.memory.close()


def _bytes_of(names: Names | None, field: str) -> bytes:
    """Return what the other end calls something. Raises ProtocolError."""
    text = (names or {}).get(field)
    try:
        return bytes.fromhex(text if isinstance(text, str) else "-")
    except ValueError as error:
        raise ProtocolError(f"the other end does not name its {field}") from error
