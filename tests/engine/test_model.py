"""The engine's tokens are transformers' own, whatever the batch, the chunks, the blocks and the arena."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dataplane.blocks.layout import KVLayout, Segment, uniform_shape
from dataplane.memory.arena import Arena
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.interface import EngineFailedError, Sequence, StepItem
from services.engine.torch_engine.attention import KVTensors
from tests.engine.rig import (
    NAMES,
    NUM_BLOCKS,
    Allocator,
    arena_bytes,
    copy_kv,
    generate,
    greedy,
    library_model,
    load_tiny,
    make_sequence,
    num_near_ties,
    prompt_of,
    run_batch,
)

Tiny = Callable[..., Path]

ARCHITECTURES = {
    "qwen3": {},
    "qwen3-mha": {"kv_heads": 4},
    "qwen2": {},
    "llama": {"kv_heads": 1},
    "mistral": {"sliding_window": 24},
    "gemma": {},
    "gemma3_text": {"sliding_window": 16, "num_layers": 3, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neox": {"kv_heads": 4},
    "phi3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "olmo2": {},
    "starcoder2": {"sliding_window": 20},
}
LENGTHS = (1, 2, 37, 90, 131)
NUM_ANSWER_TOKENS = 12


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("budget", "run"), [(1000, 1000), (23, 3)], ids=["whole", "chunked-fragmented"])
def test_tokens_equal_generate(tiny: Tiny, name: str, budget: int, run: int) -> None:
    fields = dict(ARCHITECTURES[name])
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][: fields["num_layers"]]
    folder = tiny(name.partition("-")[0], **fields)
    engine = load_tiny(folder)
    batch, allocator = Batch(budget), Allocator(run=run)
    sampling = greedy(NUM_ANSWER_TOKENS)
    prompts = {f"r{length}": prompt_of(length, seed=length) for length in LENGTHS}
    for request, prompt in prompts.items():
        blocks, num_groups = allocator.take(len(prompt) + NUM_ANSWER_TOKENS), len(engine.layout.groups)
        batch.add(make_sequence(request, prompt, blocks, sampling, num_groups=num_groups))
    answers = run_batch(engine, batch)
    ties = sum(
        num_near_ties(folder, prompt, answers[r], generate(folder, prompt, NUM_ANSWER_TOKENS), sampling)
        for r, prompt in prompts.items()
    )
    assert ties <= 1, "near-ties are rare"


@pytest.mark.parametrize("budget", [2, 7, 16, 50])
def test_chunked_logits_are_the_library_s(tiny: Tiny, budget: int) -> None:
    folder = tiny("mistral", sliding_window=24)
    engine, prompt = load_tiny(folder), prompt_of(75)
    sequence = make_sequence("r", prompt, Allocator(run=4).take(76), greedy(1))
    parts: list[torch.Tensor] = []
    for start in range(0, len(prompt), budget):
        num_tokens = min(budget, len(prompt) - start)
        parts.append(engine.logits([StepItem(sequence, start, num_tokens, True)], range(num_tokens)))
    theirs = library_model(folder)(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(parts), theirs.detach(), rtol=1e-4, atol=1e-4)


def test_a_long_sliding_window_chunk_uses_several_masks(tiny: Tiny) -> None:
    folder = tiny("mistral", sliding_window=24)
    prompt = prompt_of(600)
    engine, batch = load_tiny(folder), Batch(590)
    batch.add(make_sequence("r", prompt, Allocator(run=20).take(620), greedy(5)))
    ours = run_batch(engine, batch)["r"]
    num_near_ties(folder, prompt, ours, generate(folder, prompt, 5), greedy(5))


def test_sequences_that_join_later_do_not_disturb(tiny: Tiny) -> None:
    folder = tiny()
    engine, batch, allocator, sampling = load_tiny(folder), Batch(20), Allocator(run=2), greedy(15)
    answers: dict[str, list[int]] = {}
    prompts = {f"r{n}": prompt_of(11 + 13 * n, seed=n) for n in range(5)}
    for request, prompt in prompts.items():
        batch.add(make_sequence(request, prompt, allocator.take(len(prompt) + 15), sampling))
        for _ in range(3):
            items = batch.plan()
            for token in batch.commit(items, engine.compute(items), 0, 0).sampled:
                answers.setdefault(NAMES[token.number], []).append(token.token_id)
    run_batch(engine, batch, answers)
    for request, prompt in prompts.items():
        num_near_ties(folder, prompt, answers[request], generate(folder, prompt, 15), sampling)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_hand_over_continues_with_the_same_tokens(tiny: Tiny, temperature: float) -> None:
    """Prefill in one engine, copy the slots' bytes to other blocks of another, decode there."""
    folder = tiny()
    sampling = SamplingParams(max_tokens=16, temperature=temperature, top_p=0.95, top_k=40, seed=7)
    source, target = load_tiny(folder), load_tiny(folder, num_blocks=NUM_BLOCKS // 2)
    prompts = {f"r{n}": prompt_of(20 + 17 * n, seed=n) for n in range(3)}
    whole = Batch(31)
    for n, (request, prompt) in enumerate(prompts.items()):
        whole.add(make_sequence(request, prompt, Allocator(first=n * 12).take(len(prompt) + 16), sampling))
    expected = run_batch(source, whole)

    prefill, decode, held = Batch(31), Batch(31), dict[str, Sequence]()
    for n, (request, prompt) in enumerate(prompts.items()):
        segments = Allocator(run=2, first=n * 30).take(len(prompt) + 1)
        held[request] = make_sequence(request, prompt, segments, sampling, max_local_tokens=1)
        prefill.add(held[request])
    answers: dict[str, list[int]] = {}
    allocator = Allocator(run=5, first=1)
    while items := prefill.plan():
        for token in prefill.commit(items, source.compute(items), 0, 0).sampled:
            assert token.local_end
            assert token.finish_reason is None
            request = NAMES[token.number]
            prompt = prompts[request]
            segments = allocator.take(len(prompt) + 16)
            copy_kv(
                arena_bytes(source),
                arena_bytes(target),
                source.layout,
                (held[request].tables[0].segments, segments),
                len(prompt),
            )
            received = make_sequence(request, prompt, segments, sampling)
            received.token_ids.append(token.token_id)
            received.num_computed_tokens = len(prompt)
            decode.add(received)
            answers[request] = [token.token_id]
    run_batch(target, decode, answers)
    assert answers == expected


def test_layers_are_reported_in_order_before_the_step_ends(tiny: Tiny) -> None:
    class Listener:
        def __init__(self) -> None:
            self.heard: list[tuple[int, int]] = []
            self.written: list[bool] = []

        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            self.heard.append((layer, num_tokens))
            assert engine._arena is not None
            self.written.append(not bool(engine._arena.keys[layer][:num_tokens].isnan().any()))
            self.written.append(not bool(engine._arena.values[layer][:num_tokens].isnan().any()))

    engine, batch, listener = load_tiny(tiny()), Batch(16), Listener()
    batch.add(make_sequence("r", prompt_of(40), [Segment(0, 8)], greedy(2), listener=listener))
    run_batch(engine, batch)
    assert listener.heard == [(layer, n) for n in (16, 32, 40, 41) for layer in range(engine.layout.num_layers)]
    assert all(listener.written), "a layer is in the arena when it is reported"


def test_tokens_do_not_depend_on_where_blocks_lie(tiny: Tiny) -> None:
    folder, prompt = tiny(), prompt_of(70)
    answers: list[list[int]] = []
    for run in (1, 2, 1000):
        engine, batch = load_tiny(folder), Batch(1000)
        sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=3)
        batch.add(make_sequence("r", prompt, Allocator(run=run).take(90), sampling))
        answers.append(run_batch(engine, batch)["r"])
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs(tiny: Tiny, dtype: str) -> None:
    engine, batch = load_tiny(tiny(), dtype=dtype), Batch(16)
    batch.add(make_sequence("r", prompt_of(50), Allocator(run=2).take(60), greedy(8)))
    assert len(run_batch(engine, batch)["r"]) == 8


def test_a_closed_engine_lets_go_of_its_arena(tiny: Tiny) -> None:
    engine = load_tiny(tiny())
    engine.close()
    with pytest.raises(EngineFailedError):
        engine.compute([StepItem(make_sequence("r", [1, 2], [Segment(0, 1)], greedy(1)), 0, 2, True)])


def test_a_sequence_that_outgrew_its_segments_is_refused(tiny: Tiny) -> None:
    engine = load_tiny(tiny())
    with pytest.raises(ValueError, match="past the 8 slots"):
        engine.compute([StepItem(make_sequence("r", prompt_of(9), [Segment(0, 1)], greedy(1)), 0, 9, True)])


def test_tensors_keep_the_memory_that_they_show() -> None:
    """A step that is still under way when its worker is torn down must not meet memory that was unmapped."""
    shape = uniform_shape(
        KVLayout(weights="w", dtype="bfloat16", num_layers=2, num_kv_heads=1, head_dim=4, block_size=8), 4
    )
    arena = Arena.create(shape)
    tensors = [KVTensors(shape, arena.buffer)]
    arena.close()
    assert arena.name in Path("/proc/self/maps").read_text()
    tensors[0].keys[1].fill_(3.0)
    tensors.clear()
    assert arena.name not in Path("/proc/self/maps").read_text()
