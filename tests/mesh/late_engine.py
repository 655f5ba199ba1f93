"""Workers on fake cards: an engine that runs ahead of its card, and whose KV is there late."""

from collections.abc import Sequence as Seq
from dataclasses import replace

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.cards.card_arena import CardArena
from dataplane.cards.fakes.fake_communicator import FakeFabric, FakeLibrary
from dataplane.cards.fakes.fake_device import FakeDevice, FakeMemory
from dataplane.cards.nccl.communicator import LibraryThreads
from dataplane.cards.nccl.pair import PairParts
from schemas.worker import WorkerRole
from services.engine.fake import FakeEngine, _rows
from services.engine.interface import Outcome, StepItem
from services.worker.parts import WorkerParts
from tests.mesh.one_process import LAYOUT, VOCAB, make_parts, steps_of

STAGING_BYTES = 32 << 20
WAIT_S = 60.0


class LateEngine(FakeEngine):
    """Writes a layer by putting the writing behind its stream, and says at once that the layer is there, with a mark:
    whoever believes that and does not wait for the mark reads what lay there before."""

    def __init__(self, arena: CardArena) -> None:
        assert isinstance(arena.device, FakeDevice) and isinstance(arena.memory, FakeMemory)
        super().__init__(arena.shape, memoryview(arena.memory.array), vocab_size=VOCAB)
        self._marks = arena
        self._stream = arena.device.new_stream()
        self._done = arena.device.new_event()

    def step(self, items: Seq[StepItem]) -> list[Outcome]:
        for item in items:
            self._check(item)
        for layer in range(self.layout.num_layers):
            for item in items:
                end = item.start + item.num_tokens
                rows = _rows(self.layout, item.sequence.token_ids[item.start : end], item.start)
                self._stream.run(lambda item=item, layer=layer, rows=rows: self._write(item, layer, rows))
                listener = item.sequence.layer_listener
                if listener is not None:
                    listener.advance(layer, end, self._marks.mark(self._stream.handle))
        self._done.record(self._stream)
        assert self._done.wait(WAIT_S)
        return self._outcomes(items)

    def close(self) -> None:
        super().close()
        self._stream.close()
        self._done.close()


def make_card_parts(
    worker_id: str,
    role: WorkerRole,
    device: FakeDevice,
    *,
    num_blocks: int = 256,
    layout: KVLayout = LAYOUT,
    fabric: FakeFabric | None = None,
) -> WorkerParts:
    """Return the parts of a worker whose KV lies on this card. `fabric`: of its communicators, if it can make any."""
    in_memory = make_parts(worker_id, role, num_blocks=num_blocks, layout=layout)
    in_memory.arena.close()
    arena = CardArena(device, uniform_shape(layout, num_blocks), STAGING_BYTES)
    if fabric is not None:
        arena.pair_parts = PairParts(device, FakeLibrary(fabric, device), LibraryThreads())
    return replace(in_memory, arena=arena, steps=steps_of(LateEngine(arena)), device=f"cuda:0 {device.name}")
