"""`VllmSteps` where vLLM does what it seldom does, or what it must not. Without vLLM."""

import pytest

from schemas.request import SamplingParams
from services.engine.interface import EngineLostError, InvalidSequenceError, StepFailedError
from services.engine.vllm_engine.link import EngineLayer
from tests.engine.rig import NAMES
from tests.engine.vllm_engine.conftest import World, fake_world
from tests.engine.vllm_engine.fake_vllm import FakeVllm
from tests.engine.vllm_engine.test_contract import GREEDY, Heard, prompt_of


def test_one_that_begins_again_goes_on_from_the_arena() -> None:
    world = fake_world(num_engine_blocks=16)
    prompts = {f"r{number}": prompt_of(30 + number, number) for number in range(4)}
    sampling = SamplingParams(max_tokens=40, temperature=0.0)
    expected = {name: world.reference(prompt, sampling) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        world.add(name, prompt, sampling, world.table(len(prompt) + 40))
    assert world.run() == expected
    assert world.engine.num_preempted > 0
    assert sum(result.num_preempted for result in world.results) == world.engine.num_preempted
    assert any(any(copies.loads) for copies in world.copies), "not all was computed again"
    assert world.engine.num_free == 15, "all blocks are free again"


def test_sizes_that_do_not_agree_are_found_before_anything_is_copied() -> None:
    world = fake_world()
    with pytest.raises(EngineLostError, match="has 64 bytes in vLLM and 512 in the arena"):
        world.link.attach({layer: EngineLayer(page[:, :64], 0, 0) for layer, page in enumerate(world.engine._pages)})
    layers = {layer: EngineLayer(page, 0, 0) for layer, page in enumerate(world.engine._pages)}
    with pytest.raises(EngineLostError, match=r"layers \[0, 2\]"):
        world.link.attach({0: layers[0], 2: layers[2]})
    with pytest.raises(EngineLostError, match=r"layer 1 sees 16 tokens in vLLM, and all by config\.json"):
        world.link.attach(layers | {1: layers[1]._replace(window=16)})


@pytest.mark.parametrize("order", [(0, 1), (0, 2, 1), (0, 1, 1, 2), ()])
def test_layers_saved_otherwise_end_the_engine(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world()

    def save(self: FakeVllm, layer: int) -> None:
        if layer == 2:
            for each in order:
                self._link.save(each)

    monkeypatch.setattr(FakeVllm, "layer_is_written", save)
    sequence = world.add("r", prompt_of(20), GREEDY, world.table(60), listener=Heard(), hands_over=True)
    with pytest.raises(StepFailedError, match="vLLM saved layers") as raised:
        world.step()
    assert (raised.value.numbers, raised.value.is_lost, len(world.steps)) == ((sequence.number,), True, 0)


@pytest.mark.parametrize("finished", [True, False])
def test_an_end_that_the_rules_do_not_know_ends_the_engine(finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world()
    monkeypatch.setattr(
        FakeVllm,
        "engine_step",
        lambda self: self.says(f"r.{sequence.number}", 3, finished=finished),
    )
    sequence = world.add("r", prompt_of(20), SamplingParams(max_tokens=2 if finished else 1), world.table(40))
    with pytest.raises(StepFailedError, match="ended" if finished else "goes on with") as raised:
        world.step()
    assert raised.value.is_lost


def test_what_cannot_be_computed_is_refused() -> None:
    world = fake_world()
    sequence = world.add("r", prompt_of(20), GREEDY, world.table(60))
    with pytest.raises(AssertionError, match="is here already"):
        world.steps.add(sequence)
    with pytest.raises(InvalidSequenceError, match="lacks"):
        world.add("s", prompt_of(20), GREEDY, world.table(16))
    with pytest.raises(InvalidSequenceError, match="vocabulary"):
        world.add("s", [1, 300], GREEDY, world.table(60))


def test_what_vllm_does_not_take_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world()

    def refuse(*_: object) -> str:
        raise ValueError("too long")

    monkeypatch.setattr(FakeVllm, "add_request", refuse)
    with pytest.raises(InvalidSequenceError, match=r"vLLM does not take r\.\d+: too long"):
        world.add("r", prompt_of(20), GREEDY, world.table(60))
    assert not len(world.steps) and not world.link.tracked


def test_a_prompt_is_computed_in_steps_of_the_budget() -> None:
    world = fake_world()
    world.add("r", prompt_of(70), GREEDY, world.table(90))
    world.step()
    world.step()
    assert [(r.num_prefill_tokens, r.num_decode_tokens) for r in world.results] == [(40, 0), (30, 0)]
    world.step()
    assert (world.results[-1].num_prefill_tokens, world.results[-1].num_decode_tokens) == (0, 1)


def test_what_the_engine_had_itself_is_told_as_reused() -> None:
    world = fake_world()
    prompt = prompt_of(3 * world.size)
    first = world.add("first", prompt, GREEDY, world.table(len(prompt) + 24))
    world.run()
    again = world.add("again", prompt, GREEDY, world.table(len(prompt) + 24))
    world.run()
    behind = world.add("behind", prompt, GREEDY, world.table(len(prompt) + 24), num_present=world.size)
    world.run()
    reused = [sequence.num_reused_tokens for sequence in (first, again, behind)]
    assert reused == [0, 2 * world.size, world.size], "what is in the arena does not count"


def test_nothing_to_do_is_no_step() -> None:
    world: World = fake_world()
    assert world.steps.run_step() is None and world.engine.num_steps == 0


def test_a_tenant_s_prompt_waits_for_no_other_tenant_s_backlog() -> None:
    """vLLM serves first come first served: it has what it can compute, and what waits here is given to it in turn."""
    world = fake_world()
    world.add("a0", prompt_of(70), GREEDY, world.table(90), tenant="a", hands_over=True)
    for number in range(1, 6):
        world.add(f"a{number}", prompt_of(70, number), GREEDY, world.table(90), tenant="a", hands_over=True)
    gone = world.add("gone", prompt_of(30, 9), GREEDY, world.table(60), tenant="a")
    late = world.add("b", prompt_of(20, 7), GREEDY, world.table(40), tenant="b", hands_over=True)
    assert len(world.steps) == 8
    assert world.steps.remove(gone.number) and len(world.steps) == 7
    with pytest.raises(AssertionError, match="already"):
        world.steps.add(late)
    order = [NAMES[token.number] for _ in range(12) for token in world.step()]
    assert order == ["a0", "b", "a1", "a2", "a3", "a4", "a5"] and not len(world.steps)


def test_what_vllm_does_not_take_once_it_has_room_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world()
    world.add("r", prompt_of(60), GREEDY, world.table(90), hands_over=True)
    refused = world.add("s", prompt_of(20, 1), GREEDY, world.table(60))

    def refuse(*_: object) -> str:
        raise ValueError("too long")

    monkeypatch.setattr(FakeVllm, "add_request", refuse)
    answers = world.run()
    assert list(answers) == ["r"] and not world.link.tracked
    failed = [failure[:2] for result in world.results for failure in result.failed]
    assert failed == [(refused.number, f"vLLM does not take s.{refused.number}: too long")]
