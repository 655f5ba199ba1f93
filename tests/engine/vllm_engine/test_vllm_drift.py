"""No drift between engines: our own and vLLM compute the same tokens of the same checkpoint in float32, whatever a
request asks of them."""

import random
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from schemas.request import SamplingParams
from services.engine.demo_model import DEMO_MODEL_DIR
from tests.corpus import make_fact_prompt
from tests.engine.vllm_engine.conftest import World
from tests.mesh.reference import Case, Judge, SingleProcess
from tests.mesh.test_shaped_choices import SHAPES, case_of
from tests.promises import nothing_wrong

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
NUM_CASES = 40
NUM_SHAPED = 12


def cases() -> list[Case]:
    """Half of them text that the model knows how to go on with, the others noise."""
    rng, tokenizer = random.Random(8), Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    made: list[Case] = []
    for number in range(NUM_CASES):
        length = rng.choice([1, 15, 31, 32, 33, 150, 400, 900])
        prompt = [rng.randrange(5, 500) for _ in range(length)]
        if number % 2:
            text = make_fact_prompt(rng, rng.randrange(2, 6), length).prompt
            prompt = tokenizer.encode(text, add_special_tokens=False).ids[-length:]
        made.append(Case(prompt, SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)))
    return made


def shaped_cases() -> list[Case]:
    """Penalties, bias, min_p, masks and grammars, greedy and drawn."""
    return [case_of(number, [*SHAPES.values()][number % len(SHAPES)]) for number in range(NUM_SHAPED)]


@pytest.mark.parametrize("made", [cases, shaped_cases])
def test_answers_are_equal_but_for_proven_near_ties(real_world: World, made: Callable[[], list[Case]]) -> None:
    own, judge, asked = SingleProcess(DEMO_MODEL_DIR), Judge(DEMO_MODEL_DIR), made()
    for number, case in enumerate(asked):
        judge.compare("vLLM", case, own.run(case, number), real_world.reference(case.prompt, case.sampling))
    print(f"\n{dict(judge.verdict.counts)}")
    nothing_wrong(judge.verdict.wrong)
    assert judge.verdict.counts["vLLM: equal"] >= len(asked) * 3 // 4, "a near-tie is rare"
