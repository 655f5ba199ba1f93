"""Never wrong: what crosses the mesh equals what one process says, token for token."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from schemas.request import SamplingParams
from services.config import GatewayConfig, MeshConfig, WorkerConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from tests.corpus import make_fact_prompt
from tests.mesh.processes import Mesh, RunningMesh, TokenRecorder, in_parallel
from tests.mesh.reference import Case, Judge, SingleProcess
from tests.promises import nothing_wrong

NUM_REQUESTS = 200
WIDTH = 16


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Mixed lengths, from one token to thousands; every second one sampled, every third with penalties or masks."""
    rng = random.Random(7)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    made: list[Case] = []
    for number in range(NUM_REQUESTS):
        length = rng.choice([1, 5, 15, 16, 17, 60, 150, 400, 513, 900, 1500, 2300])
        text = make_fact_prompt(rng, rng.randrange(2, 6), length).prompt
        prompt = tokenizer.encode(text, add_special_tokens=False).ids[-max(1, length) :]
        if number % 2:
            sampling = SamplingParams(
                max_tokens=rng.randrange(1, 25),
                temperature=rng.choice([0.5, 1.0, 1.5]),
                top_p=rng.choice([1.0, 0.9]),
                top_k=rng.choice([0, 40]),
                seed=rng.randrange(2**31),
                ignore_eos=True,
            )
        else:
            sampling = SamplingParams(max_tokens=rng.randrange(1, 25), temperature=0, ignore_eos=number % 4 == 0)
        if number % 3 == 0:
            sampling = msgspec.structs.replace(sampling, **shaping(rng, sampling.max_tokens))
        made.append(Case(prompt, sampling))
    return made


def shaping(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Return some of what a request may ask of its tokens."""
    every: dict[str, Any] = {
        "presence_penalty": rng.choice([0.5, 1.5]),
        "frequency_penalty": rng.choice([-0.5, 1.0]),
        "repetition_penalty": rng.choice([0.75, 1.25]),
        "min_p": rng.choice([0.05, 0.25]),
        "min_tokens": rng.randrange(1, max_tokens + 1),
        "logit_bias": tuple((rng.randrange(1, 1336), rng.choice([-100.0, 3.0])) for _ in range(8)),
        "allowed_token_ids": tuple(rng.sample(range(1, 1336), 400)),
        "logprobs": 2,
    }
    return {name: every[name] for name in rng.sample(list(every), 3)}


@pytest.fixture(scope="module")
def expected(single: SingleProcess, cases: list[Case]) -> Callable[[int], list[int]]:
    """The tokens of the case with this number, computed once."""
    return cache(lambda number: single.run(cases[number], number))


def send(mesh: Mesh, case: Case) -> str:
    answer = mesh.complete(**case.fields)
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(case.prompt)
    if case.sampling.max_tokens > 1 and usage["completion_tokens"] > 1:
        sources = ("transferred_tokens", "cached_tokens", "recomputed_tokens")
        assert sum(usage["kvmesh"][name] for name in sources) == len(case.prompt)
        assert usage["kvmesh"]["prefill_worker"] != usage["kvmesh"]["decode_worker"]
    return usage["kvmesh"]["request_id"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("carrier", "num_requests"), [("shm", 40), ("tcp", 40), ("shm", 200), ("tcp", 200)])
def test_requests_16_at_a_time_through_2p2d(
    carrier: str,
    num_requests: int,
    running_mesh: RunningMesh,
    tmp_path: Path,
    cases: list[Case],
    expected: Callable[[int], list[int]],
    judge: Judge,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVMESH_TIME_SCALE", "20")  # a busy machine is no fault
    cases = cases[:num_requests]
    options = Launch(
        num_prefill=2,
        num_decode=2,
        config=MeshConfig(gateway=GatewayConfig(port=0), worker=WorkerConfig(carrier=carrier)),
    )  # type: ignore[arg-type]
    with running_mesh(tmp_path, options) as mesh, TokenRecorder(mesh) as recorder:
        jobs = [lambda case=case: send(mesh, case) for case in cases]
        request_ids = in_parallel(jobs, WIDTH)
        for number, (case, request_id) in enumerate(zip(cases, request_ids, strict=True)):
            judge.compare(f"{carrier} and one process", case, expected(number), recorder.tokens(request_id))
        mesh.assert_no_blocks_held()
        assert all(w.num_dropped_messages == w.num_refused_reads == 0 for w in mesh.fleet.workers)
    print(f"\n{carrier}: {dict(judge.verdict.counts)}")
    nothing_wrong(judge.verdict.wrong)


@pytest.mark.timeout(600)
def test_greedy_equals_generate(cases: list[Case], expected: Callable[[int], list[int]], judge: Judge) -> None:
    compared = 0
    for number, case in enumerate(cases):
        plain = SamplingParams(max_tokens=case.sampling.max_tokens, temperature=0)
        if case.sampling == plain:
            judge.compare("one process and generate()", case, judge.generate(case), expected(number))
            compared += 1
    print(f"\n{dict(judge.verdict.counts)}")
    assert compared >= 30
    nothing_wrong(judge.verdict.wrong)
