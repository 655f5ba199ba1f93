"""Workers on fake cards: an engine that runs ahead of its card, and whose KV is there late."""

from collections.abc import Sequence as Seq
from dataclasses import replace

import msgspec

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.cards.arena import CardArena
from dataplane.cards.card import wait_until
from schemas.worker import WorkerRole
from services.engine.fake import FakeEngine, _rows
from services.engine.interface import Outcome, StepItem
from services.worker.parts import WorkerParts
from tests.mesh.one_process import GRAMMARS, LAYOUT, VOCAB, make_parts, steps_of, thread_of
from tests.plane.fake_card import FakeCard, FakeMemory

WAIT_S = 60.0


class LateEngine(FakeEngine):
    """Writes a layer by putting the writing behind its stream, and says at once that the layer is there, with a mark:
    whoever believes that and does not wait for the mark reads what lay there before."""

    def __init__(self, arena: CardArena) -> None:
        assert isinstance(arena.card, FakeCard) and isinstance(arena.memory, FakeMemory)
        super().__init__(arena.shape, memoryview(arena.memory.array), vocab_size=VOCAB)
        self._marks = arena
        self._stream = arena.card.stream()

    def compute(self, items: Seq[StepItem]) -> list[Outcome]:
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
        assert wait_until(self._stream.is_done, lambda: False, WAIT_S)
        return self._outcomes(items)

    def close(self) -> None:
        super().close()
        self._stream.close()


def make_card_parts(
    worker_id: str,
    role: WorkerRole,
    card: FakeCard,
    *,
    num_blocks: int = 256,
    layout: KVLayout = LAYOUT,
) -> WorkerParts:
    """Return the parts of a worker whose KV lies on this card."""
    in_memory = make_parts(worker_id, role, num_blocks=num_blocks, layout=layout)
    in_memory.arena.close()
    arena = CardArena(card, uniform_shape(layout, num_blocks))
    made = thread_of(steps_of(LateEngine(arena)), GRAMMARS.compile)
    info = msgspec.structs.replace(in_memory.info, device=f"cuda:0 {card.name}")
    return replace(in_memory, info=info, arena=arena, make_engine=made)
