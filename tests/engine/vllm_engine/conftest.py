"""An engine behind `VllmSteps`, faked or vLLM itself, and an arena."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
import pytest

from dataplane.blocks.layout import BlockTable, BlockTables, KVLayout, num_blocks_for, segments_of, uniform_shape
from schemas.ids import RequestId
from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.fake import fake_answer, fake_prompt_logprobs
from services.engine.grammar import Grammars
from services.engine.interface import LayerListener, Sequence
from services.engine.messages import SampledToken, StepResult
from services.engine.tokenizer import read_tokenizer
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.plan import Copies
from services.engine.vllm_engine.steps import VllmSteps
from tests.engine.rig import NAMES, new_number
from tests.engine.vllm_engine.fake_vllm import FakeVllm
from tests.plane.harness import HostMemory

LAYOUT = KVLayout(weights="fake", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=4, block_size=8)
WINDOWED = msgspec.structs.replace(LAYOUT, windows=(20, 0, 20))
NUM_BLOCKS = 512
CONTEXT_LENGTH = 1024
BUDGET = 40


@dataclass
class World:
    """One engine and its arena. `reference`: the answer of an engine that nobody helps."""

    steps: VllmSteps
    link: EngineLink
    engine: FakeVllm
    memory: HostMemory | None
    reference: Callable[[list[int], SamplingParams], list[int]]
    logprobs: Callable[[list[int], int], list[TokenLogprob]]
    """Says of tokens from the second on how likely they are, and of the likeliest at each place, so many."""
    num_engine_blocks: int
    """Of the engine's own: little more than the longest context takes, so that some requests must begin again."""
    copies: list[Copies] = field(default_factory=list[Copies])
    """Of all steps so far."""
    results: list[StepResult] = field(default_factory=list[StepResult])
    grammars: Grammars | None = None
    num_kept_blocks: int = 0
    """The arena's first blocks, which a test has for itself."""
    _next_block: int = 0

    @property
    def size(self) -> int:
        return self.link.layout.block_size

    def table(self, num_tokens: int, *, spread: int = 1) -> list[int]:
        """Take blocks for so many tokens, every `spread`th, and begin anew where there are no more."""
        count = num_blocks_for(num_tokens, self.size)
        if not self.num_kept_blocks <= self._next_block <= NUM_BLOCKS - count * spread:
            self._next_block = self.num_kept_blocks
        first, self._next_block = self._next_block, self._next_block + count * spread
        return [first + number * spread for number in range(count)]

    def tables(self, table: list[int], num_present: int) -> BlockTables:
        """Return the tables of all cache groups: one with a window begins where `num_present` tokens need it to."""
        layout = self.link.layout
        first = [layout.first_needed_block(group, num_present) for group in range(len(layout.groups))]
        return tuple(BlockTable(segments_of(table[at:]), at) for at in first)

    def add(
        self,
        name: str,
        tokens: list[int],
        sampling: SamplingParams,
        table: list[int],
        *,
        num_prompt: int | None = None,
        num_present: int = 0,
        hands_over: bool = False,
        listener: LayerListener | None = None,
        stops: frozenset[int] = frozenset(),
        tenant: str = "",
        wants_prompt_logprobs: bool = False,
    ) -> Sequence:
        grammar = self.grammars.compile(sampling.grammar) if self.grammars and sampling.grammar else None
        sequence = Sequence(
            RequestId(name), new_number(name), list(tokens), len(tokens) if num_prompt is None else num_prompt,
            sampling, self.tables(table, num_present), num_computed_tokens=num_present,
            max_local_tokens=1 if hands_over else None, layer_listener=listener, stop_token_ids=stops,
            tenant=tenant, grammar=grammar, wants_prompt_logprobs=wants_prompt_logprobs,
        )  # fmt: skip
        self.steps.add(sequence)
        return sequence

    def step(self) -> list[SampledToken]:
        result = self.steps.run_step()
        self.copies += self.link.step
        if result is None:
            return []
        self.results.append(result)
        return list(result.sampled)

    def run(self) -> dict[str, list[int]]:
        """Step until nothing is left; return the tokens of each request."""
        answers: dict[str, list[int]] = {}
        while len(self.steps):
            for token in self.step():
                answers.setdefault(NAMES[token.number], []).append(token.token_id)
        return answers

    def forget(self) -> None:
        """Let the engine have nothing of its own; what the arena has stays."""
        self.engine.forget_blocks()
        self.copies.clear()


def fake_world(*, num_engine_blocks: int = 132, token_budget: int = BUDGET, layout: KVLayout = LAYOUT) -> World:
    shape = uniform_shape(layout, NUM_BLOCKS)
    link = EngineLink(shape, memoryview(bytearray(shape.arena_bytes)))
    engine = FakeVllm(link, num_blocks=num_engine_blocks, token_budget=token_budget)
    steps = VllmSteps(
        engine, link, vocab_size=engine.vocab_size, context_length=CONTEXT_LENGTH, token_budget=token_budget
    )
    logprobs = partial(fake_prompt_logprobs, layout)
    return World(steps, link, engine, None, partial(fake_answer, layout), logprobs, num_engine_blocks)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-model", default=str(DEMO_MODEL_DIR), help="the checkpoint that vLLM itself is tried with")


@pytest.fixture(scope="session")
def real_world(pytestconfig: pytest.Config) -> Iterator[World]:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    world = load_world(pytestconfig.getoption("--vllm-model"))
    yield world
    world.steps.close()
    assert world.memory is not None
    world.memory.close()


def load_world(model: str, token_budget: int = 4 * BUDGET, block_size: int = 32) -> World:
    """Load a checkpoint into this process's one vLLM."""
    import torch

    from services.engine.checkpoint import layout_of, read_checkpoint
    from services.engine.logprobs import token_logprobs
    from services.engine.vllm_engine.formats import format_here
    from services.engine.vllm_engine.loading import load_vllm
    from tests.engine.rig import library_model

    checkpoint = read_checkpoint(model, "vllm")
    kv_format = format_here(checkpoint.dtype, block_size, checkpoint.head_dim, {})
    layout = layout_of(checkpoint, dtype=checkpoint.dtype, block_size=block_size, kv_format=kv_format)
    shape = uniform_shape(layout, NUM_BLOCKS)
    memory = HostMemory(shape)
    num_engine_blocks = num_blocks_for(checkpoint.context_length, block_size) + 4
    steps = load_vllm(
        checkpoint, memory.arena.buffer, shape, token_budget=token_budget, num_threads=1, kv_format=kv_format,
        kv_bytes=num_engine_blocks * shape.layout.block_bytes, args={},
    ).steps  # fmt: skip

    def logprobs(token_ids: list[int], num_top: int) -> list[TokenLogprob]:
        with torch.inference_mode():
            logits = library_model(Path(checkpoint.path))(torch.tensor([token_ids]), use_cache=False).logits[0]
        return token_logprobs(logits[:-1].float(), token_ids[1:], num_top)

    world = World(steps, steps._link, steps._engine, memory, lambda *_: [], logprobs, num_engine_blocks)  # type: ignore[arg-type]
    tokenizer = read_tokenizer(Path(checkpoint.path)).tokenizer
    world.grammars = Grammars(tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids)

    def alone(prompt: list[int], sampling: SamplingParams) -> list[int]:
        world.forget()
        stops = frozenset[int]() if sampling.ignore_eos else checkpoint.eos_token_ids
        world.add("alone", prompt, sampling, world.table(len(prompt) + sampling.max_tokens), stops=stops)
        return world.run()["alone"]

    world.reference = alone
    return world


@pytest.fixture(params=["fake", "fake-windows", pytest.param("vllm", marks=pytest.mark.vllm)])
def world(request: pytest.FixtureRequest) -> World:
    if request.param != "vllm":
        return fake_world() if request.param == "fake" else fake_world(layout=WINDOWED, num_engine_blocks=160)
    real: World = request.getfixturevalue("real_world")
    real.steps.clear()
    real.forget()
    real.results.clear()
    assert real.memory is not None
    real.memory.fill(0)  # what an earlier test has left may be just what this one should have written
    return real
