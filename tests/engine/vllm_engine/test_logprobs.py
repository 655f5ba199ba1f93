"""Logprobs of a prompt's and an answer's tokens through `VllmSteps`: of vLLM they are transformers' own in float32,
of what stands in for it what it says of right KV; whatever is cached, cut into chunks, handed over or put aside."""

from collections.abc import Sequence as Seq

import pytest

from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.interface import Sequence
from tests.engine.vllm_engine.conftest import World
from tests.engine.vllm_engine.fake_vllm import FakeVllm
from tests.engine.vllm_engine.test_contract import Heard, prompt_of

TOLERANCE = 5e-4
"""Of vLLM. It was 1.8e-4 away at most from transformers in float32, which is 1.1e-4 away from itself in float64: the
demo model's logits lie between -18 and 30 here."""
NUM_TOP = 5
SAMPLINGS = [
    pytest.param({"temperature": 0.0}, id="greedy"),
    pytest.param({"temperature": 1.5, "seed": 4, "top_k": 20}, id="seeded"),
    pytest.param({"temperature": 1.0, "seed": 4, "frequency_penalty": 1.0, "min_p": 0.05}, id="penalized"),
]


def wanted(max_tokens: int = 24, **sampling: float) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, ignore_eos=True, **sampling  # type: ignore[arg-type]
    )  # fmt: skip


def largest_difference(found: Seq[TokenLogprob], expected: Seq[TokenLogprob]) -> float:
    """Return how far logprobs are from those of a reference. Which tokens are among the likeliest may differ between
    equal ones."""
    assert len(found) == len(expected)
    worst = 0.0
    for one, other in zip(found, expected, strict=True):
        assert len(one.top) == len(other.top) == NUM_TOP
        pairs = zip(one.top, other.top, strict=True)
        worst = max(worst, abs(one.logprob - other.logprob), *(abs(a - b) for (_, a), (_, b) in pairs))
    return worst


def of_answer(world: World, sequence: Sequence) -> list[TokenLogprob]:
    sampled = (token for result in world.results for token in result.sampled if token.number == sequence.number)
    return [token.logprob for token in sampled if token.logprob is not None]


def check(world: World, sequence: Sequence, had: int = 0) -> None:
    """See that a sequence's logprobs are right, of its prompt where they were wanted and of its answer's tokens from
    the one with index `had` on."""
    limit = 0.0 if isinstance(world.engine, FakeVllm) else TOLERANCE
    expected, num_prompt = world.logprobs(sequence.token_ids, NUM_TOP), sequence.num_prompt_tokens
    of_prompt = expected[: num_prompt - 1] if sequence.wants_prompt_logprobs else []
    worst = [
        largest_difference(sequence.prompt_logprobs, of_prompt),
        largest_difference(of_answer(world, sequence), expected[num_prompt - 1 + had :]),
    ]
    print(f"largest difference: prompt {worst[0]:.1e}, answer {worst[1]:.1e}")
    assert max(worst) <= limit


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whatever_is_cached(world: World, sampling: dict[str, float]) -> None:
    """A prompt of several chunks, of one token, of two; and again, when vLLM has it itself: its logprobs need all of
    it."""
    for length in (world.size * 7 + 3, 1, 2):
        prompt = prompt_of(length, 50)
        for _ in range(2):
            world.copies.clear()
            table = world.table(length + 24)
            sequence = world.add("r", prompt, wanted(**sampling), table, wants_prompt_logprobs=True)
            world.run()
            assert world.copies[0].start == sequence.num_reused_tokens == 0
            check(world, sequence)


def test_a_hand_over(world: World) -> None:
    """Token 0's and the prompt's come from whoever computes the prompt, the others from whoever goes on."""
    prompt, sampling = prompt_of(world.size * 7 + 3, 51), wanted(temperature=1.5, seed=4)
    table = world.table(len(prompt) + 24)
    first = world.add("p", prompt, sampling, table, hands_over=True, listener=Heard(), wants_prompt_logprobs=True)
    world.run()
    check(world, first)
    world.forget()
    second = world.add("d", first.token_ids, sampling, table, num_prompt=len(prompt), num_present=len(prompt))
    world.run()
    assert world.copies[0].start == len(prompt)
    check(world, second, had=1)


@pytest.mark.parametrize("index", [1, 7, 23])
def test_an_answer_that_goes_on(world: World, index: int) -> None:
    prompt, sampling = prompt_of(world.size * 2 + 5, 52), wanted(temperature=1.5, seed=9, repetition_penalty=1.3)
    answer = world.reference(prompt, sampling)
    world.forget()
    tokens = [*prompt, *answer[:index]]
    sequence = world.add("r", tokens, sampling, world.table(len(prompt) + 24), num_prompt=len(prompt))
    assert world.run()["r"] == answer[index:]
    check(world, sequence, had=index)


def test_who_wants_none_gets_none(world: World) -> None:
    """Beside one who wants all, with the same prompt and in the same steps."""
    prompt = prompt_of(world.size * 3, 53)
    silent_one = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    silent = world.add("silent", prompt, silent_one, world.table(len(prompt) + 24))
    asks = world.add("asks", prompt, wanted(temperature=0.0), world.table(len(prompt) + 24), wants_prompt_logprobs=True)
    answers = world.run()
    assert answers["silent"] == answers["asks"]
    assert not silent.prompt_logprobs and not of_answer(world, silent)
    check(world, asks)


def test_a_prompt_that_is_put_aside_half_way(world: World) -> None:
    """There is room for both prompts, and no more: the first one's answer takes what the second one's end needs. The
    second one begins again with its first token, though the arena has a part of it: else logprobs would be missing.
    """
    num_blocks = world.num_engine_blocks - 1  # vLLM keeps one for itself
    first_blocks = num_blocks // 2
    first = prompt_of(first_blocks * world.size - 3, 54)
    second = prompt_of((num_blocks - first_blocks) * world.size - 3, 55)
    sampling = SamplingParams(max_tokens=4 * world.size, temperature=0.0, ignore_eos=True)
    world.add("first", first, sampling, world.table(len(first) + sampling.max_tokens))
    sequence = world.add(
        "second", second, wanted(3, temperature=0.0), world.table(len(second) + 3), wants_prompt_logprobs=True
    )
    world.run()
    starts = [copies.start for copies in world.copies if copies.tracked.sequence is sequence]
    assert starts.count(0) > 1 or world.link.layout.is_windowed, "it was not put aside: the engine has room for all"
    check(world, sequence)


def test_prompts_that_are_put_aside_behind_their_ends(world: World) -> None:
    """They begin again with all that they have, and what was said of their prompts is not said twice."""
    num_tokens = (world.num_engine_blocks // 8 - 2) * world.size
    asked = wanted(5 * world.size, temperature=1.5, seed=1)
    sequences: list[Sequence] = []
    for number in range(8):
        table = world.table(num_tokens + asked.max_tokens)
        prompt = prompt_of(num_tokens - number, 60 + number)
        sequences.append(world.add(f"r{number}", prompt, asked, table, wants_prompt_logprobs=True))
    world.run()
    put_aside = sum(result.num_preempted for result in world.results)
    assert put_aside or world.link.layout.is_windowed, "nobody was put aside: the engine has room for all"
    for sequence in sequences:
        check(world, sequence)
