"""What a client must be told: the same request on one process alone, or a proven near-tie."""

import random
from collections.abc import Callable
from pathlib import Path

from schemas.request import SamplingParams
from tests.mesh.faults.client import Stream
from tests.mesh.reference import Case, Judge, SingleProcess

VOCAB = (5, 500)
Alone = Callable[[Case, int], list[int]]
"""Returns the answer of one process to a case with a number."""


class Truth:
    """Cases with their answers, computed once: by our own engine, unless `alone` is given. `num_near_ties` counts
    answers that differ where they may."""

    def __init__(
        self,
        model: Path,
        *,
        num_cases: int,
        prompt_tokens: tuple[int, int],
        answer_tokens: tuple[int, int],
        seed: int = 4,
        alone: Alone | None = None,
    ) -> None:
        rng = random.Random(seed)
        self._model = model
        self._judge: Judge | None = None
        self.num_near_ties = 0
        self.cases = [
            Case(
                [rng.randrange(*VOCAB) for _ in range(rng.randint(*prompt_tokens))],
                SamplingParams(
                    max_tokens=rng.randint(*answer_tokens),
                    temperature=float(number % 2),
                    seed=rng.randrange(2**31),
                    ignore_eos=True,
                ),
            )
            for number in range(num_cases)
        ]
        alone = alone or SingleProcess(model).run
        self.answers = [alone(case, number) for number, case in enumerate(self.cases)]

    def problem(self, stream: Stream, answer: list[int]) -> str:
        """Say what is wrong with what a client has had; empty: nothing."""
        got = stream.tokens
        expected = answer if stream.ending == "finished" else answer[: len(got)]
        if got == expected:
            return ""
        if len(got) != len(expected):
            return f"{len(got)} tokens of {len(expected)}"
        self._judge = self._judge or Judge(self._model)
        num_wrong = len(self._judge.verdict.wrong)
        self._judge.compare("fault", stream.case, expected, got)
        if len(self._judge.verdict.wrong) > num_wrong:
            return self._judge.verdict.wrong[-1]
        self.num_near_ties += 1
        return ""
