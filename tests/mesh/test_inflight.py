"""A burst of one prompt on real processes: what waits for another's blocks answers what one process says."""

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from schemas.request import SamplingParams
from services.config import GatewayConfig, MeshConfig, WorkerConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from tests.corpus import make_fact_prompt
from tests.mesh.processes import RunningMesh, in_parallel
from tests.mesh.reference import Case, Judge, SingleProcess
from tests.promises import nothing_wrong

NUM_CLIENTS = 12
NUM_CHOICES = 2
NUM_TOKENS = 6


def cases() -> list[Case]:
    """One long prompt, with and without words of one's own behind it; every second answer is sampled."""
    rng = random.Random(19)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    prompt = tokenizer.encode(make_fact_prompt(rng, 4, 1_500).prompt, add_special_tokens=False).ids
    return [
        Case(
            [*prompt, *prompt[40 * number : 40 * number + 20]] if number % 3 == 2 else prompt,
            SamplingParams(max_tokens=NUM_TOKENS, temperature=float(number % 2), seed=100 + number, ignore_eos=True),
        )
        for number in range(NUM_CLIENTS)
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_a_burst_of_one_prompt_is_answered_as_by_one_process(
    carrier: str, running_mesh: RunningMesh, tmp_path: Path, single: SingleProcess, judge: Judge
) -> None:
    asked = cases()
    options = Launch(
        num_prefill=2,
        num_decode=2,
        config=MeshConfig(gateway=GatewayConfig(port=0), worker=WorkerConfig(carrier=carrier)),
    )  # type: ignore[arg-type]
    with running_mesh(tmp_path, options) as mesh:

        def send(case: Case) -> dict[str, Any]:
            return mesh.complete(**case.fields, n=NUM_CHOICES, return_token_ids=True)

        answers = in_parallel([lambda case=case: send(case) for case in asked], NUM_CLIENTS)
        mesh.assert_no_blocks_held()
        assert all(w.num_dropped_messages == w.num_refused_reads == 0 for w in mesh.fleet.workers)
    for case, answer in zip(asked, answers, strict=True):
        for choice in answer["choices"]:
            seed = case.sampling.seed + choice["index"]
            sampling = SamplingParams(
                max_tokens=NUM_TOKENS, temperature=case.sampling.temperature, seed=seed, ignore_eos=True
            )
            each = Case(case.prompt, sampling)
            judge.compare(carrier, each, single.run(each), choice["token_ids"])
    nothing_wrong(judge.verdict.wrong)
    # Of each request one choice is told. Each prefill worker may compute the prompt once, where it would have to wait
    # for longer; the rest of each prompt is a block and what is its own.
    computed = [
        (answer["usage"]["kvmesh"]["prefill"] or answer["usage"]["kvmesh"])["recomputed_tokens"] for answer in answers
    ]
    assert sum(computed) <= 2 * len(asked[0].prompt) + NUM_CLIENTS * (16 + 20), computed
