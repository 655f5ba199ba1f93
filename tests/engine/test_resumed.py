"""An answer of the demo model that is handed over behind token 0, or goes on elsewhere in its middle, with all that its
request asks of its tokens: those of an answer that nobody cut. Each mistake that is planted in our code shows in them.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from schemas.request import SamplingParams
from services.engine import grammar as grammar_module
from services.engine import shaping
from services.engine.batch import Batch
from services.engine.checkpoint import read_checkpoint
from services.engine.counts import TokenCounts
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.grammar import Grammars
from services.engine.interface import Sequence
from services.engine.rules import stop_token_ids
from services.engine.tokenizer import read_tokenizer
from tests.engine.rig import Allocator, load_tiny, make_sequence, run_batch

PROMPT = [5 + (7919 * at) % 490 for at in range(40)]
NUM_TOKENS = 40
CUTS = (1, 9, 25)
"""Behind so many tokens the answer goes on elsewhere; behind the first one it does where it is handed over."""
PERSON = (
    'start: %json {"type": "array", "minItems": 3, "items": {"type": "object", "properties": {"name": {"enum": '
    '["Ada", "Max"]}, "age": {"type": "integer", "maximum": 99}}, "required": ["name", "age"]}}'
)
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3}
SHAPES: dict[str, dict[str, Any]] = {
    "penalties": PENALTIES | {"temperature": 0.0},
    "penalties, drawn": PENALTIES | {"temperature": 1.2, "seed": 4, "min_p": 0.02},
    "grammar": {"temperature": 0.0, "grammar": PERSON},
    "grammar and penalties, drawn": PENALTIES | {"temperature": 1.2, "seed": 4, "grammar": PERSON},
    "least length": {"temperature": 1.0, "seed": 4, "min_tokens": 30, "ignore_eos": False},
    "bad words": {"temperature": 0.0},
}


class Answers:
    """The demo model's. Whoever computes the rest of an answer knows its beginning's tokens, and nothing more."""

    def __init__(self) -> None:
        checkpoint = read_checkpoint(str(DEMO_MODEL_DIR))
        self._engine = load_tiny(DEMO_MODEL_DIR)
        self._eos = checkpoint.eos_token_ids
        self._grammars = Grammars(read_tokenizer(DEMO_MODEL_DIR).tokenizer, checkpoint.vocab_size, self._eos)
        self._whole: dict[str, list[int]] = {}

    def sampling(self, name: str) -> SamplingParams:
        fields: dict[str, Any] = {"ignore_eos": not SHAPES[name].get("grammar")} | SHAPES[name]
        if name == "least length":
            fields["logit_bias"] = tuple((token_id, 100.0) for token_id in self._eos)
        if name == "bad words":  # what it would say without
            fields["bad_words"] = tuple(pairwise(self._of(SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))))
        return SamplingParams(max_tokens=NUM_TOKENS, **fields)

    def whole(self, name: str) -> list[int]:
        if name not in self._whole:
            self._whole[name] = self._of(self.sampling(name))
        return self._whole[name]

    def in_parts(self, name: str) -> Iterable[list[int]]:
        """Go on with the whole answer's beginning of each length, and have token 0 from somebody else."""
        whole, sampling = self.whole(name), self.sampling(name)
        first = self._of(sampling, max_local_tokens=1)
        yield self._of(sampling, first)
        for cut in CUTS:
            yield self._of(sampling, whole[:cut])

    def _of(self, sampling: SamplingParams, begun: Seq[int] = (), max_local_tokens: int | None = None) -> list[int]:
        sequence = make_sequence(
            "r", [*PROMPT, *begun], Allocator(run=2).take(len(PROMPT) + NUM_TOKENS), sampling,
            max_local_tokens=max_local_tokens,
        )  # fmt: skip
        sequence.num_prompt_tokens = len(PROMPT)
        sequence.stop_token_ids = self._eos
        sequence.grammar = self._grammars.compile(sampling.grammar) if sampling.grammar else None
        batch = Batch(16)
        batch.add(sequence)
        return [*begun, *run_batch(self._engine, batch).get("r", [])]


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.mark.parametrize("name", SHAPES)
def test_an_answer_that_goes_on_elsewhere_is_the_same(answers: Answers, name: str) -> None:
    whole = answers.whole(name)
    assert len(whole) > max(CUTS)
    assert [*answers.in_parts(name)] == [whole] * (1 + len(CUTS))


# Mistakes.


def answer_so_far_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    """An attempt takes all that it was given for prompt."""
    right, begins_at = TokenCounts.catch_up, dict[int, int]()

    def catch_up(self: TokenCounts, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        right(self, token_ids, begins_at.setdefault(id(self), len(token_ids)))

    patch.setattr(TokenCounts, "catch_up", catch_up)


def prompt_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    right = TokenCounts.catch_up

    def catch_up(self: TokenCounts, token_ids: Seq[int], num_prompt_tokens: int) -> None:
        right(self, token_ids[num_prompt_tokens:], 0)

    patch.setattr(TokenCounts, "catch_up", catch_up)


def grammar_is_not_rebuilt(patch: pytest.MonkeyPatch) -> None:
    """It sees the tokens of its own attempt alone."""
    right, begins_at = grammar_module._Answer.allowed, dict[int, int]()

    def allowed(self: Any, answer: Seq[int]) -> Any:
        return right(self, answer[begins_at.setdefault(id(self), len(answer)) :])

    patch.setattr(grammar_module._Answer, "allowed", allowed)


def no_mask_on_token_0(patch: pytest.MonkeyPatch) -> None:
    right = shaping._grammar_mask

    def mask(sequence: Sequence, vocab_size: int) -> Any:
        return right(sequence, vocab_size) if sequence.index else np.ones(vocab_size, np.bool_)

    patch.setattr(shaping, "_grammar_mask", mask)


def least_length_begins_anew(patch: pytest.MonkeyPatch) -> None:
    def early_stops(sequence: Sequence) -> Seq[int]:
        return tuple(stop_token_ids(sequence)) if sequence.num_local_tokens < sequence.sampling.min_tokens else ()

    patch.setattr(shaping, "_early_stops", early_stops)


def bad_words_begin_anew(patch: pytest.MonkeyPatch) -> None:
    right = shaping._bad_ends
    patch.setattr(shaping, "_bad_ends", lambda sequence: right(sequence) if sequence.num_local_tokens else [])


BUGS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]] = {
    answer_so_far_is_not_counted: ("penalties", "penalties, drawn"),
    prompt_is_not_counted: ("penalties, drawn",),
    grammar_is_not_rebuilt: ("grammar", "grammar and penalties, drawn"),
    no_mask_on_token_0: ("grammar", "grammar and penalties, drawn"),
    least_length_begins_anew: ("least length",),
    bad_words_begin_anew: ("bad words",),
}
"""Each with the answers that it must change."""


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_mistake_shows(
    answers: Answers, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: answers.whole(name) for name in BUGS[bug]}
    bug(monkeypatch)
    for name, whole in expected.items():
        assert any(found != whole for found in answers.in_parts(name)), name
