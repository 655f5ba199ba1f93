"""The engine on a card: as `model.py`'s, with the batch's numbers, the attention and the sampler there.

A step is written into pinned memory, goes up in one copy, is launched as a whole, and the host waits once: for its
tokens. Where nothing is sampled it waits for the end of the step all the same, since what a step has computed counts
as there when `step` returns. Readers that cannot wait so long follow the marks that the layer listeners are told.

A step in which any request asks for more than the sampler there knows (`_is_hosts`) has its logits fetched, and its
tokens chosen on the host.
"""

from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataplane.blocks.layout import KVLayout
from services.engine.cpu.attention import STEP_ARGUMENT, KVTensors
from services.engine.cuda import paged_ops
from services.engine.cuda.backends import ChunkBackend
from services.engine.cuda.device_attention import (
    Announcer,
    DeviceStepAttention,
    StepInputs,
    has_listeners,
    step_inputs,
)
from services.engine.cuda.device_sampler import NOT_FINITE, UNSETTLED, choose
from services.engine.cuda.graphs import GraphRunner
from services.engine.cuda.protocol import MarkSource, Recorder, Runtime
from services.engine.cuda.step_plan import (
    BufferTooSmallError,
    StepFields,
    StepLimits,
    StepPlan,
    StepPlanner,
    largest_step_bytes,
    pack,
)
from services.engine.interface import Choice, EngineFailedError, EngineLostError, Outcome, Sequence, StepItem
from services.engine.limits import MOST_RESERVED_BYTES
from services.engine.logprobs import row_numbers, score_prompts, scored_rows
from services.engine.sampler import LogitsNotFiniteError, sample
from services.engine.shaping import is_shaped


class StepBuffer:
    """A step's numbers on the host and on the device. Grows; whoever keeps views of it is told by `generation`."""

    def __init__(self, runtime: Runtime, num_bytes: int) -> None:
        self._runtime = runtime
        self.generation = 0
        self._make(num_bytes)

    def _make(self, num_bytes: int) -> None:
        self._host = self._runtime.host_buffer(num_bytes)
        self.device = torch.empty(num_bytes, dtype=torch.uint8, device=self._runtime.device)
        self.generation += 1

    def put(self, plan: StepPlan, *, num_rows: int, tile_tokens: int) -> StepFields:
        """Pack a step and start its copy. The step before must be done: the memory is the same."""
        try:
            fields = pack(plan, self._host.array, num_rows=num_rows, tile_tokens=tile_tokens)
        except BufferTooSmallError as error:
            self._make(1 << (error.num_bytes - 1).bit_length())
            fields = pack(plan, self._host.array, num_rows=num_rows, tile_tokens=tile_tokens)
        self.device[: fields.num_bytes].copy_(self._host.tensor[: fields.num_bytes], non_blocking=True)
        return fields


class DeviceEngine:
    """Computes steps on a card and keeps KV in an arena there, which others read and write between layers.

    `step` may run on any one thread at a time. `recorder` None: without graphs. `backend`: what computes chunks in
    place of our kernel. `limits`: what is made ready for; a step beyond them is computed, only slower.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        arena: KVTensors,
        *,
        vocab_size: int,
        runtime: Runtime,
        marks: MarkSource,
        recorder: Recorder | None = None,
        backend: ChunkBackend | None = None,
        limits: StepLimits,
    ) -> None:
        self.layout: KVLayout = arena.layout
        self.vocab_size = vocab_size
        self.model = model
        self._arena: KVTensors | None = arena
        self._runtime = runtime
        self._marks = marks
        self._backend = backend
        self._planner = StepPlanner(arena.layout)
        self._tile_tokens = paged_ops.chunks_launch(arena.layout.head_dim, arena.dtype.itemsize).queries
        self._buffer = StepBuffer(runtime, min(MOST_RESERVED_BYTES, largest_step_bytes(arena.layout, limits)))
        self._generation = self._buffer.generation
        self._fields: StepFields | None = None
        self.graphs: GraphRunner | None = None
        if recorder is not None:
            self.graphs = GraphRunner(recorder, self._compute_padded, limits.num_sequences)

    @torch.inference_mode()
    def step(self, items: Seq[StepItem]) -> list[Outcome]:
        """Compute the items, write their KV, call the layer listeners, and return one outcome per sampling item.

        Raises EngineFailedError when the model did not call its attention once a layer, LogitsNotFiniteError when its
        logits are no numbers, ValueError when a sequence has outgrown its block tables, EngineLostError when the card
        fails.
        """
        with self._runtime.active():
            try:
                return self._step(items)
            except BaseException:
                self._end_launched()
                raise

    def _end_launched(self) -> None:
        """Wait for what a step that failed has launched: it goes on writing, and its blocks are given to others.

        Raises EngineLostError.
        """
        try:
            self._runtime.wait()
        except RuntimeError as error:
            raise EngineLostError(f"the card fails: {str(error).partition(chr(10))[0]}") from error

    def _step(self, items: Seq[StepItem]) -> list[Outcome]:
        if any(map(_is_hosts, items)):
            return self._step_for_host(items)
        plan = self._planner.plan(items)
        logits, inputs = self._compute(items, plan)
        ids = self._runtime.fetch(choose(logits, plan.draws, inputs.draws))
        if UNSETTLED in ids:
            ids = self._runtime.fetch(choose(logits, plan.draws, inputs.draws, all_candidates=True))
        if bad := ids.count(NOT_FINITE):
            raise LogitsNotFiniteError(f"logits of {bad} of {len(ids)} sequences are not finite")
        return [Choice(token_id) for token_id in ids]

    def _step_for_host(self, items: Seq[StepItem]) -> list[Outcome]:
        """Compute a step whose tokens are chosen on the host, and the logarithms that are wanted of its prompts."""
        plan, scored = self._planner.plan(items), scored_rows(items)
        rows = [*plan.sample_rows, *row_numbers(scored)]
        # A graph's rows are in the order of the batch.
        logits, _ = self._compute(items, plan._replace(sample_rows=rows), may_use_graph=not scored)
        num_sampled = len(plan.sample_rows)
        score_prompts(scored, logits[num_sampled:])
        outcomes = sample(logits[:num_sampled].cpu(), [item.sequence for item in items if item.samples])
        self._runtime.wait()
        return outcomes

    @torch.inference_mode()
    def logits(self, items: Seq[StepItem], rows: Seq[int], *, graph: bool = False) -> Tensor:
        """Compute the items and return the logits `[len(rows), vocab]`, float32, of these rows of the flat batch."""
        with self._runtime.active():
            try:
                plan = self._planner.plan(items)._replace(sample_rows=list(rows))
                logits = self._compute(items, plan, may_use_graph=graph)[0].clone()
            finally:
                self._end_launched()
        return logits

    def close(self) -> None:
        """Let go of the arena, so that its memory can be closed. Idempotent; not while a step runs."""
        self._arena = None
        if self.graphs is not None:
            self.graphs.disable()

    @torch.inference_mode()
    def record_graphs(self) -> bool:
        """Record the graphs of all sizes, the largest first: the others then fit into its memory. False: it failed."""
        if self.graphs is None:
            return False
        with self._runtime.active():
            recorded = all(self._record(size) for size in reversed(self.graphs.sizes))
            self._runtime.wait()
        return recorded

    def _record(self, size: int) -> bool:
        assert self.graphs is not None
        self._put(self._planner.plan([]), size)
        return self.graphs.record(size)

    def _compute(
        self, items: Seq[StepItem], plan: StepPlan, *, may_use_graph: bool = True
    ) -> tuple[Tensor, StepInputs]:
        """Return the sampled rows' logits `[samples, vocab]`, float32, and the step's numbers."""
        if self._arena is None:
            raise EngineFailedError("the engine is closed")
        listens = has_listeners(items)
        if may_use_graph and not listens and plan.is_decode and (found := self._replay(plan)) is not None:
            return found
        fields = self._put(plan, plan.num_rows)
        inputs = step_inputs(self._buffer.device, fields)
        announcer = Announcer(items, self._marks, self._runtime.stream_handle) if listens else None
        chunk_attention = None
        if self._backend is not None and not plan.is_decode:
            chunk_attention = self._backend.plan(self._arena, plan)
        attention = DeviceStepAttention(self._arena, inputs, chunk_attention=chunk_attention, on_written=announcer)
        return self._forward(attention, inputs.sample_rows).float(), inputs

    def _replay(self, plan: StepPlan) -> tuple[Tensor, StepInputs] | None:
        """Compute a decode by its graph; None: there is none for it."""
        if self.graphs is None or (size := self.graphs.size_for(plan.num_rows)) is None:
            return None
        fields = self._put(plan, size)
        if (logits := self.graphs.run(size)) is None:
            self._runtime.wait()  # what failed may still read what is written next
            return None
        inputs = step_inputs(self._buffer.device, fields)
        if len(plan.sample_rows) == plan.num_rows:
            return logits[: plan.num_rows].float(), inputs
        return logits.index_select(0, inputs.sample_rows).float(), inputs

    def _compute_padded(self, size: int) -> Tensor:
        """Compute the decode of `size` rows, padding included, that lies in the buffer; return `[size, vocab]`."""
        assert self._arena is not None and self._fields is not None
        inputs = step_inputs(self._buffer.device, self._fields)
        assert inputs.num_rows == size, "what lies in the buffer is of another size"
        return self._forward(DeviceStepAttention(self._arena, inputs), None)

    def _forward(self, attention: DeviceStepAttention, rows: Tensor | None) -> Tensor:
        """Return the logits `[rows, vocab]`. `rows` None: of all."""
        arguments: dict[str, Any] = {STEP_ARGUMENT: attention}
        output = self.model(
            input_ids=attention.inputs.token_ids[None],
            position_ids=attention.inputs.positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            **arguments,
        )
        if attention.layers_seen != list(range(self.layout.num_layers)):
            raise EngineFailedError(
                f"attention ran for layers {attention.layers_seen}, not each of {self.layout.num_layers}"
            )
        return cast(Tensor, output.logits)[0]

    def _put(self, plan: StepPlan, num_rows: int) -> StepFields:
        self._fields = self._buffer.put(plan, num_rows=num_rows, tile_tokens=self._tile_tokens)
        if self._generation != self._buffer.generation:
            self._generation = self._buffer.generation
            if self.graphs is not None:
                self.graphs.clear()
        return self._fields


def _is_hosts(item: StepItem) -> bool:
    """Say whether an item asks for what only the host knows to do."""
    sequence: Sequence = item.sequence
    sampling = sequence.sampling
    if sequence.wants_prompt_logprobs and item.start < sequence.num_prompt_tokens - 1:
        return True
    return item.samples and (sampling.logprobs is not None or sampling.min_p > 0 or is_shaped(sequence))
