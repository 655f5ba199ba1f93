"""What the mesh relies on in vLLM, tried before the worker serves: a new version that keeps its blocks elsewhere, calls
its hooks otherwise or schedules otherwise fails here with one line, and not later with another prompt's text."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import BlockTable, Segment
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.interface import EngineLostError, Sequence
from services.engine.vllm_engine.formats import TOLERANCE
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.plan import Copies
from services.engine.vllm_engine.steps import VllmSteps

NUM_BLOCKS = 8
"""Of each cache group of the memory that it computes in."""

Logits = npt.NDArray[np.float32]


class Forgets(Protocol):
    def forget_blocks(self) -> None:
        """Let the engine forget what it has cached itself."""
        ...


class _Listener:
    """A hand-over's listener."""

    def __init__(self) -> None:
        self.announced: list[tuple[int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.announced.append((layer, num_tokens))


def check_steps(steps: VllmSteps, engine: Forgets, link: EngineLink) -> None:
    """Compute a prompt of three and a half blocks as a prefill worker does, in two parts; go on as a decode worker
    does, from its blocks alone; and see that these are what it read. Raises EngineLostError.

    Writes into the first NUM_BLOCKS blocks of what the link uses.
    """
    # The last block is half full: a hand-over must announce it as a whole one.
    check = _Check(steps, engine, link)
    size = link.layout.block_size
    prompt = [1 + (7919 * at) % 250 for at in range(3 * size + size // 2)]
    blocks = list(range(4))

    # Prefill: the second part loads the block of the first, and each step announces all layers, in order.
    first = check.compute_token(prompt[: size + 1], blocks, 0)
    listener = _Listener()
    whole = check.compute_token(prompt, blocks, size, listener)
    check.expect((first.copies.start, whole.copies.start), (0, size), "it computed what it should have loaded")
    layers = [*range(link.layout.num_layers)]
    announced = [layer for layer, _ in listener.announced], set(listener.announced[-len(layers) :])
    wanted = layers * whole.num_steps, {(layer, 4 * size) for layer in layers}
    check.expect(announced, wanted, "its layers were announced otherwise")
    check.expect(link.saved_is_intact(), True, "blocks changed after they were saved")

    # Decode from the loaded blocks, and once more from nothing in other blocks: the logits must agree.
    tokens = [*prompt, whole.token]
    after = check.compute_token(tokens, blocks, len(prompt))
    check.expect((after.copies.start, after.copies.end), (len(prompt), len(tokens)), "it did not go on behind a prompt")
    other = check.compute_token(tokens, [6, 4, 5, 7], 0)
    check.close(after.logits, other.logits, "what it computes from loaded blocks is not what it computes by itself")
    # Decode with a wrong block: if the logits stayed the same, they would not depend on the arena.
    with link.confused(blocks[2], blocks[0]):
        confused = check.compute_token(tokens, blocks, len(prompt))
    check.expect(np.array_equal(confused.logits, after.logits), False, "it does not read the blocks that it loads")
    # vLLM may have cached the wrong block itself by now: no request may be served from it.
    engine.forget_blocks()


class _Ran:
    def __init__(self, token: int, logits: Logits, copies: Copies, num_steps: int) -> None:
        self.token = token
        self.logits = logits
        self.copies = copies
        """Of the first step: a small budget makes several of a long prompt."""
        self.num_steps = num_steps


class _Check:
    def __init__(self, steps: VllmSteps, engine: Forgets, link: EngineLink) -> None:
        self._steps = steps
        self._engine = engine
        self._link = link
        self._count = 0

    def compute_token(
        self, tokens: list[int], blocks: list[int], num_present: int, listener: _Listener | None = None
    ) -> _Ran:
        """Compute one token behind `tokens`, of which `num_present` have their KV in these blocks."""
        self._engine.forget_blocks()
        self._count += 1
        tables = (BlockTable(tuple(Segment(block, 1) for block in blocks)),) * len(self._link.layout.groups)
        sequence = Sequence(
            RequestId("self-check"), self._count, list(tokens), len(tokens),
            SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            tables, num_computed_tokens=num_present, max_local_tokens=1, layer_listener=listener,
        )  # fmt: skip
        seen: list[Any] = []
        self._link.on_logits = seen.append
        self._steps.add(sequence)
        copies: list[Copies] = []
        while sequence.num_local_tokens == 0:
            self._steps.run_step()
            copies += self._link.step
        self._link.on_logits = None
        return _Ran(sequence.token_ids[-1], seen[-1][0], copies[0], len(copies))

    def expect(self, found: object, wanted: object, text: str) -> None:
        if found != wanted:
            raise EngineLostError(f"vLLM failed its check: {text} ({found}, not {wanted})")

    def close(self, found: Logits, wanted: Logits, text: str) -> None:
        spread = float(wanted.max() - wanted.min())
        difference = float(np.abs(found - wanted).max())
        if not difference <= TOLERANCE[self._link.layout.dtype] * spread:
            raise EngineLostError(f"vLLM failed its check: {text} (logits differ by {difference} of {spread})")
