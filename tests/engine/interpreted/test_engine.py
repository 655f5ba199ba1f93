"""The engine of a card, its kernels interpreted: tokens are transformers' own, whatever the batch and the blocks."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from dataplane.blocks.cache import BlockCache, ring_blocks
from dataplane.blocks.layout import ArenaShape, Segment
from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.cuda.device_engine import DeviceEngine
from services.engine.interface import Engine, EngineFailedError, EngineLostError, Sequence, StepItem
from services.engine.sampler import LogitsNotFiniteError
from tests.engine.device_rig import CountedMarks, EagerRecorder, HostRuntime, load_device_engine
from tests.engine.rig import (
    BLOCK_SIZE,
    VOCAB,
    Allocator,
    arena_bytes,
    copy_kv,
    generate,
    greedy,
    load_tiny,
    make_sequence,
    num_near_ties,
    prompt_of,
    run_batch,
)

Tiny = Callable[..., Path]

FULL, SLIDING = "full_attention", "sliding_attention"
SMALL = {"heads": 2, "kv_heads": 1}
"""Few programs: the interpreter takes its time for each."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"heads": 4, "kv_heads": 2},
    "llama": {},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {"sliding_window": 16, "num_layers": 3, "layer_types": [SLIDING, FULL, SLIDING]},
}
NUM_ANSWER_TOKENS = 5
BUDGET = 29


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("recorder", [None, EagerRecorder()], ids=["eager", "graphs"])
def test_tokens_equal_generate(tiny: Tiny, name: str, recorder: EagerRecorder | None) -> None:
    """Windowed groups hold nothing but rings. Three decodes run in a graph of four."""
    folder = tiny(name, **(SMALL | ARCHITECTURES[name]))
    layout = layout_of(read_checkpoint(str(folder)), block_size=BLOCK_SIZE)
    blocks = tuple(4 * ring_blocks(g.window, BUDGET, BLOCK_SIZE) if g.window else 40 for g in layout.groups)
    shape = ArenaShape(layout=layout, num_blocks=blocks)
    engine = load_device_engine(folder, shape=shape, recorder=recorder)
    cache, batch = BlockCache(shape, chunk_tokens=BUDGET), Batch(BUDGET)
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in (1, 23, 60)}
    for request, prompt in prompts.items():
        allocation = cache.admit([], len(prompt) + NUM_ANSWER_TOKENS, 0)
        assert allocation is not None
        sequence = make_sequence(request, prompt, (), greedy(NUM_ANSWER_TOKENS))
        sequence.tables = allocation.tables
        batch.add(sequence)
    answers = run_batch(engine, batch)
    ties = sum(
        num_near_ties(folder, p, answers[r], generate(folder, p, NUM_ANSWER_TOKENS), greedy(NUM_ANSWER_TOKENS))
        for r, p in prompts.items()
    )
    assert ties == 0
    assert engine.graphs is None or not engine.graphs.is_disabled


def run_one(engine: DeviceEngine, prompt: list[int], sampling: SamplingParams, allocator: Allocator) -> list[int]:
    batch = Batch(40)
    batch.add(make_sequence("r", prompt, allocator.take(len(prompt) + sampling.max_tokens), sampling))
    return run_batch(engine, batch)["r"]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.9}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}], ids=["plain", "kept"]
)
def test_sampled_tokens_are_those_of_the_engine_on_the_cpu(tiny: Tiny, fields: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=8, seed=7, **fields)
    prompt = prompt_of(50)
    batch = Batch(40)
    batch.add(make_sequence("r", prompt, Allocator().take(60), sampling))
    expected = run_batch(load_tiny(tiny(**SMALL)), batch)["r"]
    assert (
        run_one(load_device_engine(tiny(**SMALL), recorder=EagerRecorder()), prompt, sampling, Allocator(run=2))
        == expected
    )


class EveryThird:
    """A grammar: which third of the tokens may follow depends on how many there are."""

    def allowed(self, answer: Seq[int]) -> npt.NDArray[np.bool_]:
        return np.arange(VOCAB) % 3 == len(answer) % 3


SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.0},
    "drawn": {"temperature": 0.9, "seed": 7},
    "penalties": {"temperature": 0.0, "frequency_penalty": 1.0, "repetition_penalty": 1.4, "logit_bias": ((9, 2.0),)},
    "drawn, min_p": {"temperature": 1.3, "seed": 7, "min_p": 0.3, "presence_penalty": 1.0},
    "grammar": {"temperature": 0.0, "grammar": "every third"},
    "logarithms": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 3},
}


def run_shapes(engine: Engine) -> tuple[dict[str, list[int]], dict[str, list[TokenLogprob]]]:
    """Return the tokens of one batch in which each request asks for something else, and the logarithms of a prompt and
    its answer."""
    batch, allocator, answers = Batch(29), Allocator(run=2), dict[str, list[int]]()
    logprobs: dict[str, list[TokenLogprob]] = {"prompt": [], "answer": []}
    for number, (name, fields) in enumerate(SHAPES.items()):
        sampling = SamplingParams(max_tokens=6, ignore_eos=True, **fields)
        sequence = make_sequence(name, prompt_of(9 + number, seed=number), allocator.take(24), sampling)
        if sampling.grammar:
            sequence.grammar = Future()
            sequence.grammar.set_result(EveryThird())
        sequence.wants_prompt_logprobs = sampling.prompt_logprobs is not None
        batch.add(sequence)
    while items := batch.plan():
        for token in batch.commit(items, engine.step(items), 0, 0).sampled:
            answers.setdefault(token.sequence.request_id, []).append(token.token_id)
            assert (token.logprob is None) == (token.sequence.sampling.logprobs is None)
            if token.logprob is not None:
                logprobs["answer"].append(token.logprob)
                logprobs["prompt"] = token.sequence.prompt_logprobs
    return answers, logprobs


@pytest.mark.parametrize("recorder", [None, EagerRecorder()], ids=["eager", "graphs"])
def test_what_the_host_chooses_is_what_the_engine_on_the_cpu_does(tiny: Tiny, recorder: EagerRecorder | None) -> None:
    """Penalties, bias, min_p, a grammar and logarithms, beside requests that ask for none of it."""
    expected, theirs = run_shapes(load_tiny(tiny(**SMALL)))
    found, ours = run_shapes(load_device_engine(tiny(**SMALL), recorder=recorder))
    assert found == expected and expected["grammar"][0] % 3 == 0
    for what, count in (("prompt", 13), ("answer", 6)):
        assert len(ours[what]) == len(theirs[what]) == count
        for one, other in zip(ours[what], theirs[what], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
    if recorder is not None:
        assert sum(recording.num_replays for recording in recorder.recordings), "a decode takes a graph all the same"


def test_kv_of_the_cpu_goes_on_here(tiny: Tiny) -> None:
    """A mixed fleet: prefill on the CPU, decode on a card."""
    source, target = load_tiny(tiny(**SMALL)), load_device_engine(tiny(**SMALL))
    prompt, sampling = prompt_of(50), greedy(6)
    batch, segments = Batch(100), Allocator(run=3).take(60)
    batch.add(make_sequence("r", prompt, segments, sampling))
    expected = run_batch(source, batch)["r"]
    other = Allocator(run=2, first=30).take(60)
    copy_kv(arena_bytes(source), arena_bytes(target), source.layout, (segments, other), len(prompt))  # type: ignore[arg-type]
    received = make_sequence("r", prompt, other, sampling)
    received.token_ids.append(expected[0])
    received.num_computed_tokens = len(prompt)
    batch.add(received)
    assert run_batch(target, batch)["r"] == expected[1:]


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[int, int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.heard.append((layer, num_tokens, mark))


def test_listeners_hear_of_each_layer_once_with_a_mark(tiny: Tiny) -> None:
    """Two listeners of one step share its marks; a decode that somebody listens to takes no graph."""
    recorder = EagerRecorder()
    engine = load_device_engine(tiny(**SMALL), recorder=recorder)
    one, other, allocator = Listener(), Listener(), Allocator()
    batch = Batch(40)
    batch.add(make_sequence("a", prompt_of(20), allocator.take(30), greedy(2), listener=one))
    batch.add(make_sequence("b", prompt_of(10), allocator.take(30), greedy(2), listener=other))
    batch.add(make_sequence("c", prompt_of(5), allocator.take(30), greedy(4)))
    before = sum(recording.num_replays for recording in recorder.recordings)
    run_batch(engine, batch)
    assert one.heard == [(0, 20, 1), (1, 20, 2), (0, 21, 3), (1, 21, 4)]
    assert other.heard == [(0, 10, 1), (1, 10, 2), (0, 11, 3), (1, 11, 4)]
    replays = sum(recording.num_replays for recording in recorder.recordings) - before
    assert replays == 2, "what is left of c once nobody listens any more"


def test_a_layer_is_written_when_it_is_told_of(tiny: Tiny) -> None:
    class Reader(Listener):
        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            super().advance(layer, num_tokens, mark)
            arena = engine._arena
            assert arena is not None
            assert not arena.keys[layer][:num_tokens].isnan().any()
            assert not arena.values[layer][:num_tokens].isnan().any()

    engine, batch, reader = load_device_engine(tiny(**SMALL)), Batch(16), Reader()
    batch.add(make_sequence("r", prompt_of(40), [Segment(0, 8)], greedy(2), listener=reader))
    run_batch(engine, batch)
    assert [heard[:2] for heard in reader.heard] == [(layer, n) for n in (16, 32, 40, 41) for layer in range(2)]


def test_a_step_waits_once(tiny: Tiny) -> None:
    engine = load_device_engine(tiny(**SMALL))
    runtime = engine._runtime
    assert isinstance(runtime, HostRuntime)
    batch, steps = Batch(16), 0
    batch.add(make_sequence("r", prompt_of(40), [Segment(0, 8)], SamplingParams(max_tokens=3, top_p=0.9, seed=1)))
    before = runtime.num_fetches
    while items := batch.plan():
        batch.commit(items, engine.step(items), 0, 0)
        steps += 1
    assert steps == 5
    assert runtime.num_fetches - before == steps, "steps that sample nothing too: what they computed counts as there"


def test_a_step_that_fails_ends_on_the_card_before_it_raises(tiny: Tiny) -> None:
    """Its blocks are somebody else's then."""

    class Failing(Listener):
        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            raise RuntimeError("no such lease")

    engine = load_device_engine(tiny(**SMALL))
    runtime = engine._runtime
    assert isinstance(runtime, HostRuntime)
    sequence = make_sequence("r", prompt_of(8), [Segment(0, 2)], greedy(1), listener=Failing())
    items = [StepItem(sequence, 0, 8, True)]
    before = runtime.num_waits
    with pytest.raises(RuntimeError, match="no such lease"):
        engine.step(items)
    assert runtime.num_waits == before + 1
    runtime.failure = RuntimeError("CUDA error: unspecified launch failure\nCUDA kernel errors might be reported later")
    with pytest.raises(EngineLostError, match=r"the card fails: CUDA error: unspecified launch failure$"):
        engine.step(items)


def test_bfloat16(tiny: Tiny) -> None:
    assert (
        len(run_one(load_device_engine(tiny(**SMALL), dtype="bfloat16"), prompt_of(50), greedy(4), Allocator(run=2)))
        == 4
    )


def step_of(tokens: int, blocks: int) -> list[StepItem]:
    sequence: Sequence = make_sequence("r", prompt_of(tokens), [Segment(0, blocks)], greedy(1))
    return [StepItem(sequence, 0, tokens, True)]


def test_what_cannot_be_computed_is_refused(tiny: Tiny) -> None:
    engine = load_device_engine(tiny(**SMALL))
    with pytest.raises(ValueError, match="past the 8 slots"):
        engine.step(step_of(9, 1))
    engine.model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(LogitsNotFiniteError, match="1 of 1"):
        engine.step(step_of(8, 1))
    engine.close()
    with pytest.raises(EngineFailedError, match="closed"):
        engine.step(step_of(8, 1))


def test_a_step_too_large_for_the_buffer_grows_it_and_graphs_are_made_anew(tiny: Tiny) -> None:
    recorder = EagerRecorder()
    engine = load_device_engine(tiny(**SMALL), recorder=recorder)
    prompt = prompt_of(60)
    expected = run_one(engine, prompt, greedy(5), Allocator())
    recorded, old = len(recorder.recordings), engine._buffer
    old._make(64)
    assert run_one(engine, prompt, greedy(5), Allocator(first=20)) == expected
    assert old.device.nbytes >= 1024
    assert len(recorder.recordings) == recorded + 1, "the one that is used"
    assert isinstance(engine._marks, CountedMarks)
