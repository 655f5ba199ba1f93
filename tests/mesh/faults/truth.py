"""What a client must be told: the same request on one process alone, or a proven near-tie."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
from tokenizers import Tokenizer

from schemas.request import SamplingParams
from tests.mesh.faults.client import Stream
from tests.mesh.reference import Case, Judge, SingleProcess

VOCAB = (5, 500)
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 8,
    "maxItems": 10,
    "items": {
        "type": "object",
        "properties": {
            "name": {"enum": ["Ada Brook", "Max Reed", "Ida Moor"]},
            "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]{4}$"},
            "known": {"type": "boolean"},
        },
        "required": ["name", "code", "known"],
        "additionalProperties": False,
    },
}
"""Of some 200 tokens. It ends by itself, as the demo model would not."""
GRAMMAR = f"start: %json {json.dumps({**SCHEMA, 'x-guidance': {'whitespace_flexible': False}})}"
DOCUMENT_TOKENS = (600, 600)
"""More than any document has."""
Alone = Callable[[Case, int], list[int]]
"""Returns the answer of one process to a case with a number."""


class Truth:
    """Cases with their answers, computed once: by our own engine, unless `alone` is given. `num_near_ties` counts
    answers that differ where they may. `documents`: each answer is one, with penalties and logprobs beside."""

    def __init__(
        self,
        model: Path,
        *,
        num_cases: int,
        prompt_tokens: tuple[int, int],
        answer_tokens: tuple[int, int],
        seed: int = 4,
        alone: Alone | None = None,
        documents: bool = False,
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
                    ignore_eos=not documents,
                    grammar=GRAMMAR if documents else "",
                    presence_penalty=0.5 if documents else 0.0,
                    logprobs=1 if documents else None,
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
        if stream.case.sampling.grammar:  # of these none may differ, near-tie or not
            at = next(number for number, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
            return f"token {at} is {got[at]}, not {expected[at]}"
        self._judge = self._judge or Judge(self._model)
        num_wrong = len(self._judge.verdict.wrong)
        self._judge.compare("fault", stream.case, expected, got)
        if len(self._judge.verdict.wrong) > num_wrong:
            return self._judge.verdict.wrong[-1]
        self.num_near_ties += 1
        return ""


class Documents:
    """Says whether answers are the documents that were asked for."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._is_valid = jsonschema_rs.validator_for(SCHEMA).is_valid

    def problem(self, tokens: list[int]) -> str:
        """Say what is wrong with a finished answer; empty: nothing."""
        text = self._tokenizer.decode(tokens)
        try:
            return "" if self._is_valid(json.loads(text)) else f"not what the schema says: {text}"
        except ValueError as error:
            return f"no JSON ({error}): {text}"
