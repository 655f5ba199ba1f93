"""What a worker relies on, of vLLM and of what stands in for it where it is not installed."""

import pytest

from schemas.request import SamplingParams
from services.engine.vllm_engine.plan import Copies, TrackedSequence
from tests.engine.vllm_engine.conftest import World

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
HOT = SamplingParams(max_tokens=24, temperature=4.0, seed=4, ignore_eos=True)
"""Any change of the logits shows in some token. Many greedy answers of the demo model stay what they are, though a
block is another prompt's."""
SAMPLINGS = [pytest.param(GREEDY, id="greedy"), pytest.param(HOT, id="seeded")]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [1 + (7919 * at + 31 * salt) % 240 for at in range(length)]


class Heard:
    """A hand-over's listener: all layers tell the same, in order."""

    def __init__(self) -> None:
        self.announced: list[tuple[int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.announced.append((layer, num_tokens))


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer(world: World, sampling: SamplingParams) -> None:
    prompt = prompt_of(world.size * 7 + 3)
    expected = world.reference(prompt, sampling)
    world.forget()
    world.add("r", prompt, sampling, world.table(len(prompt) + 24, spread=2))
    assert world.run()["r"] == expected
    computed = sum(copies.end - copies.start for copies in world.copies)
    assert computed == len(prompt) + 23, "each token once, and not the last one"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_hand_over(world: World, sampling: SamplingParams) -> None:
    """All is announced layer by layer, and who has the blocks goes on with one token."""
    prompt = prompt_of(world.size * 7 + 3, 1)
    expected = world.reference(prompt, sampling)
    table, heard = world.table(len(prompt) + 24), Heard()
    world.forget()
    world.add("p", prompt, sampling, table, hands_over=True, listener=heard)
    assert world.run()["p"] == expected[:1]
    num_layers = world.link.layout.num_layers
    assert [layer for layer, _ in heard.announced] == [*range(num_layers)] * (len(heard.announced) // num_layers)
    told = [num_tokens for layer, num_tokens in heard.announced if layer == 0]
    assert told == sorted(told) and told[-1] == world.size * 8 and all(tokens % world.size == 0 for tokens in told)

    world.forget()
    tokens = [*prompt, expected[0]]
    world.add("d", tokens, sampling, table, num_prompt=len(prompt), num_present=len(prompt))
    assert world.run()["d"] == expected[1:]
    assert (world.copies[0].start, world.copies[0].end) == (len(prompt), len(tokens))


def test_a_part_that_landed(world: World) -> None:
    prompt = prompt_of(world.size * 4 + 3, 2)
    expected = world.reference(prompt, HOT)
    table = world.table(len(prompt) + 24)
    world.forget()
    world.add("p", prompt, HOT, table, hands_over=True, listener=Heard())
    world.run()
    for num_blocks in range(5):
        world.forget()
        own = [*table[:num_blocks], *world.table(len(prompt) + 24)[num_blocks:]]
        world.add("d", prompt, HOT, own, num_present=num_blocks * world.size)
        assert world.run()["d"] == expected
        assert world.copies[0].start == num_blocks * world.size


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_goes_on_from_every_token(world: World, sampling: SamplingParams) -> None:
    prompt = prompt_of(world.size * 2 + 5, 3)
    expected = world.reference(prompt, sampling)
    for index in range(1, 24):
        world.forget()
        tokens = [*prompt, *expected[:index]]
        world.add("r", tokens, sampling, world.table(len(prompt) + 24), num_prompt=len(prompt))
        assert world.run()["r"] == expected[index:], index


def test_an_answer_s_blocks_are_saved_as_they_fill(world: World) -> None:
    """The next turn of a conversation finds them, whoever computed them."""
    sampling = SamplingParams(max_tokens=3 * world.size, temperature=0.0, ignore_eos=True)
    prompt = prompt_of(world.size + 2, 4)
    table = world.table(len(prompt) + sampling.max_tokens)
    answer = world.reference(prompt, sampling)
    world.forget()
    world.add("r", prompt, sampling, table)
    world.run()
    turn = [*prompt, *answer, 5, 6, 7]
    expected = world.reference(turn, HOT)
    present = (len(turn) - 4) // world.size * world.size
    world.forget()
    own = [*table[: present // world.size], *world.table(len(turn) + 24)[present // world.size :]]
    world.add("next", turn, HOT, own, num_present=present)
    assert world.run()["next"] == expected
    assert world.copies[0].start == present


def test_what_the_engine_has_cached_itself_gets_into_the_arena(world: World) -> None:
    """Of an earlier request, and of one in the same step."""
    prompt = prompt_of(world.size * 2 + 3, 5)
    expected = world.reference(prompt, HOT)
    world.forget()
    tables = [world.table(len(prompt) + 24) for _ in range(3)]
    world.add("first", prompt, HOT, tables[0])
    world.run()
    for name, table in (("again", tables[1]), ("same step", tables[2])):
        world.add(name, prompt, HOT, table)
    assert set(map(tuple, world.run().values())) == {tuple(expected)}
    for table in tables:
        world.forget()
        world.add("d", prompt, HOT, table, num_present=2 * world.size)
        assert world.run()["d"] == expected and world.copies[0].start == 2 * world.size


def test_what_the_engine_has_cached_itself_is_its_tenant_s(world: World) -> None:
    """Of layers with windows it caches nothing."""
    prompt = prompt_of(world.size * 3, 9)
    world.forget()
    cached = 0 if world.link.layout.is_windowed else 2 * world.size
    for tenant, num_local in (("a", 0), ("b", 0), ("a", cached), ("", 0)):
        world.copies.clear()
        world.add("r", prompt, HOT, world.table(len(prompt) + 24), tenant=tenant)
        world.run()
        assert world.copies[0].start == num_local, tenant


def test_two_of_one_step_that_nobody_has_cached(world: World) -> None:
    prompt = prompt_of(world.size + 3, 6)
    expected = world.reference(prompt, HOT)
    world.forget()
    tables = [world.table(len(prompt) + 24) for _ in range(2)]
    for number, table in enumerate(tables):
        world.add(f"r{number}", prompt, HOT, table)
    assert set(map(tuple, world.run().values())) == {tuple(expected)}
    for table in tables:
        world.forget()
        world.add("d", prompt, HOT, table, num_present=world.size)
        assert world.run()["d"] == expected


def test_stop_tokens_end_it_and_are_part_of_it(world: World) -> None:
    prompt = prompt_of(world.size * 2, 7)
    expected = world.reference(prompt, GREEDY)
    stop = expected[5]
    first = expected.index(stop)
    world.forget()
    sampling = SamplingParams(max_tokens=24, temperature=0.0)
    world.add("r", prompt, sampling, world.table(len(prompt) + 24), stops=frozenset({stop}))
    assert world.run()["r"] == expected[: first + 1]
    assert world.results[-1].sampled[0].finish_reason == "stop"


def test_the_context_ends_it(world: World) -> None:
    context_length = world.steps._context_length
    prompt = prompt_of(context_length - 3, 10)
    world.forget()
    world.add("r", prompt, HOT, world.table(context_length))
    assert len(world.run()["r"]) == 3
    assert world.results[-1].sampled[0].finish_reason == "length"


def test_many_at_once(world: World) -> None:
    prompts = {f"r{number}": prompt_of(9 + 11 * number, number) for number in range(8)}
    samplings = {
        name: SamplingParams(max_tokens=5 + number, temperature=number % 2 * 0.9, seed=number, ignore_eos=True)
        for number, name in enumerate(prompts)
    }
    expected = {name: world.reference(prompt, samplings[name]) for name, prompt in prompts.items()}
    world.forget()
    for name, prompt in prompts.items():
        world.add(name, prompt, samplings[name], world.table(len(prompt) + 20))
    assert world.run() == expected
    assert not len(world.steps)


def test_who_is_taken_out_leaves_nothing(world: World) -> None:
    prompt = prompt_of(world.size * 12, 8)
    expected = world.reference(prompt, HOT)
    world.forget()
    gone = [world.add(f"gone-{number}", prompt_of(world.size * 12, 20 + number), HOT,
                      world.table(world.size * 12 + 24)) for number in range(3)]  # fmt: skip
    world.step()
    assert any(sequence.num_uncomputed_tokens for sequence in gone)
    for sequence in gone:
        assert world.steps.remove(sequence.number)
        assert not world.steps.remove(sequence.number)
    world.add("r", prompt, HOT, world.table(len(prompt) + 24))
    assert world.run() == {"r": expected}
    assert not world.link.tracked


def test_more_than_the_engine_has_room_for(world: World) -> None:
    """Some are put aside and begin again, from what of them is in the arena."""
    num_tokens, max_tokens = (world.num_engine_blocks // 8 - 2) * world.size, 5 * world.size
    prompts = {f"r{number}": prompt_of(num_tokens, 40 + number) for number in range(8)}
    samplings = {
        name: SamplingParams(max_tokens=max_tokens, temperature=number % 2 * 4.0, seed=number, ignore_eos=True)
        for number, name in enumerate(prompts)
    }
    expected = {name: world.reference(prompt, samplings[name]) for name, prompt in prompts.items()}
    world.forget()
    for name, prompt in prompts.items():
        world.add(name, prompt, samplings[name], world.table(num_tokens + max_tokens))
    assert world.run() == expected
    ends: dict[TrackedSequence, int] = {}
    again: list[Copies] = []
    for copies in world.copies:
        again += [copies] if copies.start < ends.get(copies.tracked, 0) else []
        ends[copies.tracked] = copies.end
    # A real engine gives back what windows see no more, and may have room for all.
    assert again or world.link.layout.is_windowed, "nobody was put aside: the engine has room for all"
    assert all(any(copies.loads) for copies in again), "not all was computed again"
