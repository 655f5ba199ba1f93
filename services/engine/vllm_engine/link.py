"""What the two halves of the connector, the sampler and the worker's steps share in one process.

vLLM makes its connector and its logits processor itself and gives them its configuration only, so they find the link
by a name that stands in there.
"""

import secrets
from collections.abc import Callable, Generator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import KEY, VALUE, ArenaShape
from services.engine.interface import EngineLostError, Outcome, Sequence
from services.engine.vllm_engine.plan import Copies, GroupPair, TrackedSequence
from services.engine.vllm_engine.runs import Run

Pages = npt.NDArray[np.uint8]
"""One layer's blocks as bytes: [blocks, bytes of a block's keys and values]."""


class EngineLayer(NamedTuple):
    """A layer of vLLM's: its blocks, the cache group that says which of them a request has, and how many tokens a query
    sees, itself included (0: all)."""

    pages: Pages
    group: int
    window: int


_links: dict[str, "EngineLink"] = {}


class EngineLink:
    """The sequences that vLLM has, by its names for them, and the blocks on both sides.

    All of it runs on the thread that steps the engine. The arena has keys and values apart: the first half of a page
    goes where a block's keys lie, the second where its values do. Neither half means anything by itself.
    """

    def __init__(self, shape: ArenaShape, arena: memoryview) -> None:
        layout = shape.layout
        self.name = secrets.token_hex(8)
        self.layout = layout
        self.tracked: dict[str, TrackedSequence] = {}
        self.sequences: dict[str, Sequence] = {}
        """The same, by our names."""
        self.outcomes: dict[str, Outcome] = {}
        """By our names: what was chosen in the step that runs, or ran last."""
        self.step: list[Copies] = []
        """What the step that runs, or ran last, copies."""
        self.num_preempted = 0
        """Requests that vLLM has put aside before this step, to begin again."""
        self.on_logits: Callable[[npt.NDArray[np.float32]], None] | None = None
        """Sees the logits [sequences, vocab] that tokens are chosen from."""
        self.on_begin: Callable[[Seq[int]], None] = lambda _: None
        """Called with whom a step computes that is planned."""
        self._half = layout.block_size * layout.token_bytes
        self._planes: list[tuple[Pages, Pages]] = []
        self.use(shape, arena)
        # Empty until `attach`: vLLM creates its KV cache, and with it the layers and groups, only while it loads.
        self._pages: list[Pages] = []
        self.group_pairs: list[GroupPair] = []
        self._pair_of_layer: list[int] = []
        self._saved: list[int] = []
        """The layers whose hook this step has called, in order."""
        _links[self.name] = self

    def use(self, shape: ArenaShape, arena: memoryview) -> None:
        """Copy to and from this arena from now on, whose layout is the same."""
        array = np.frombuffer(arena, np.uint8)
        self._planes = [
            (self._plane(array, shape, layer, KEY), self._plane(array, shape, layer, VALUE))
            for layer in range(self.layout.num_layers)
        ]

    def close(self) -> None:
        """Let go of the arena and of vLLM's memory."""
        _links.pop(self.name, None)
        self._planes.clear()
        self._pages.clear()

    def attach(self, layers: Mapping[int, EngineLayer]) -> None:
        """Take vLLM's layers. Raises EngineLostError where they are not of the layout that was agreed."""
        layout = self.layout
        expected = [*range(layout.num_layers)]
        if sorted(layers) != expected:
            raise EngineLostError(f"vLLM has KV of layers {sorted(layers)}, not of each of {len(expected)}")
        for number, layer in layers.items():
            if layer.pages.shape[1] != 2 * self._half:
                raise EngineLostError(
                    f"a block of layer {number} has {layer.pages.shape[1]} bytes in vLLM and {2 * self._half} in the "
                    "arena"
                )
            window = layout.groups[layout.group_of_layer[number]].window
            if layer.window != window:
                raise EngineLostError(
                    f"layer {number} sees {layer.window or 'all'} tokens in vLLM, and {window or 'all'} by config.json"
                )
        self._pages = [layers[number].pages for number in expected]
        pair_of_layer = [GroupPair(layout.group_of_layer[number], layers[number].group) for number in expected]
        self.group_pairs = sorted(set(pair_of_layer))
        self._pair_of_layer = [self.group_pairs.index(pair) for pair in pair_of_layer]

    def sampled(self) -> set[str]:
        """Return our names of those that the step gives a token: of the others it computes a part of the prompt."""
        done = (copies for copies in self.step if copies.end == len(copies.tracked.sequence.token_ids))
        return {sequence_name(copies.tracked.sequence) for copies in done}

    def copy_in(self) -> None:
        """Copy in what this step's requests were promised, all layers."""
        for copies in self.step:
            for layer, pair in enumerate(self._pair_of_layer) if any(copies.loads) else ():
                keys, values = self._planes[layer]
                page = self._pages[layer]
                for arena, engine, count in copies.loads[pair]:
                    rows = page[engine : engine + count]
                    rows[:, : self._half] = keys[arena : arena + count]
                    rows[:, self._half :] = values[arena : arena + count]

    def save(self, layer: int) -> None:
        """Copy out what this step has computed of a layer, and announce it. The layer's KV must be written."""
        self._saved.append(layer)
        for copies in self.step:
            for run in copies.saves[self._pair_of_layer[layer]]:
                self._save_run(layer, run)
            listener = copies.tracked.sequence.layer_listener
            if listener is not None:
                listener.advance(layer, copies.announced)

    def begin_step(self, step: list[Copies], num_preempted: int) -> None:
        """A step is planned."""
        self.on_begin([copies.tracked.sequence.number for copies in step])
        self.step = step
        self.num_preempted = num_preempted
        self.outcomes.clear()
        self._saved.clear()

    def check_saved(self) -> None:
        """Raise EngineLostError unless each layer's hook was called once in this step, in order: what was announced
        would not be there, or not what was computed."""
        if self.step and self._saved != [*range(self.layout.num_layers)]:
            raise EngineLostError(f"vLLM saved layers {self._saved}, not each of {self.layout.num_layers} in order")

    def saved_is_intact(self) -> bool:
        """Return whether what the last step saved is still what vLLM has."""
        return all(
            np.array_equal(self._planes[layer][part][arena : arena + count], half)
            for copies in self.step
            for layer, page in enumerate(self._pages)
            for arena, engine, count in copies.saves[self._pair_of_layer[layer]]
            for part, half in enumerate(np.split(page[engine : engine + count], 2, axis=1))
        )

    @contextmanager
    def confused(self, block: int, other: int) -> Generator[None]:
        """Let a block of the arena have another one's bytes, for a while."""
        planes = [plane for planes in self._planes for plane in planes]
        right = [plane[block].copy() for plane in planes]
        for plane in planes:
            plane[block] = plane[other]
        try:
            yield
        finally:
            for plane, row in zip(planes, right, strict=True):
                plane[block] = row

    def _save_run(self, layer: int, run: Run) -> None:
        keys, values = self._planes[layer]
        arena, engine, count = run
        rows = self._pages[layer][engine : engine + count]
        keys[arena : arena + count] = rows[:, : self._half]
        values[arena : arena + count] = rows[:, self._half :]

    def _plane(self, array: Pages, shape: ArenaShape, layer: int, part: int) -> Pages:
        """Return one layer's keys (or values) of all blocks, [blocks, bytes]."""
        num_blocks = shape.num_blocks[shape.layout.group_of_layer[layer]]
        first = shape.offset(layer, part, 0)
        return array[first : first + num_blocks * self._half].reshape(num_blocks, self._half)


def sequence_name(sequence: Sequence) -> str:
    """Return our name of a sequence, by which vLLM gives its tokens."""
    return f"{sequence.request_id}.{sequence.number}"


def link_of(extra_config: Mapping[str, Any]) -> EngineLink:
    """Return the link that an engine's configuration names."""
    return _links[extra_config["link"]]
