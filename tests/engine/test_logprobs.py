"""Logprobs equal transformers' own, however a prompt is cut into chunks and wherever an
answer goes on."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from schemas.logprobs import TokenLogprob
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.interface import Engine, Sequence
from tests.engine.rig import Allocator, library_model, load_tiny, make_sequence, prompt_of

Tiny = Callable[..., Path]
TOLERANCE = 1e-4
NUM_TOP = 5


def theirs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' log-softmax `[tokens, vocab]`: row p tells of the token behind position p."""
    with torch.inference_mode():
        return library_model(folder)(torch.tensor([token_ids]), use_cache=False).logits[0].float().log_softmax(-1)


def run(engine: Engine, sequence: Sequence, budget: int) -> list[TokenLogprob]:
    """Compute a sequence to its end; return what was said of its answer's tokens."""
    batch, found = Batch(budget), list[TokenLogprob]()
    batch.add(sequence)
    while items := batch.plan():
        for token in batch.commit(items, engine.compute(items), 0, 0).sampled:
            assert token.logprob is not None
            found.append(token.logprob)
    return found


def wanted(**sampling: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, logprobs=NUM_TOP, prompt_logprobs=NUM_TOP, ignore_eos=True, **sampling)  # type: ignore[arg-type]


def largest_difference(found: list[TokenLogprob], rows: torch.Tensor, token_ids: list[int]) -> float:
    """Return how far the logprobs are from the library's, by token; the likeliest must be the library's own."""
    assert len(found) == len(token_ids) == len(rows)
    worst = 0.0
    for one, row, token_id in zip(found, rows, token_ids, strict=True):
        worst = max(worst, abs(one.logprob - float(row[token_id])))
        best = row.topk(NUM_TOP).values
        assert len(one.top) == NUM_TOP
        assert [logprob for _, logprob in one.top] == sorted((logprob for _, logprob in one.top), reverse=True)
        for (other, logprob), library in zip(one.top, best, strict=True):
            worst = max(worst, abs(logprob - float(row[other])), abs(logprob - float(library)))
    return worst


@pytest.mark.parametrize("budget", [2, 7, 16, 100])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8, "seed": 3, "top_k": 5}, {"frequency_penalty": 1.0, "min_p": 0.1}],
    ids=str,
)
def test_all_are_the_librarys(tiny: Tiny, budget: int, sampling: dict[str, float]) -> None:
    check(tiny(), load_tiny(tiny()), prompt_of(45), budget, wanted(**sampling))


def test_with_a_sliding_window(tiny: Tiny) -> None:
    folder = tiny("mistral", sliding_window=24)
    check(folder, load_tiny(folder), prompt_of(75), 16, wanted())


def test_of_the_demo_model() -> None:
    check(DEMO_MODEL_DIR, load_tiny(DEMO_MODEL_DIR), prompt_of(60), 16, wanted())


def check(folder: Path, engine: Engine, prompt: list[int], budget: int, sampling: SamplingParams) -> None:
    of_prompt, of_answer = differences(folder, engine, prompt, budget, sampling)
    print(f"largest difference: prompt {of_prompt:.1e}, answer {of_answer:.1e}")
    assert max(of_prompt, of_answer) < TOLERANCE


def differences(
    folder: Path, engine: Engine, prompt: list[int], budget: int, sampling: SamplingParams
) -> tuple[float, float]:
    """Return the largest ones of a prompt's and of its answer's logprobs."""
    sequence = make_sequence("r", prompt, Allocator(run=3).take(len(prompt) + 8), sampling)
    sequence.wants_prompt_logprobs = True
    answer = run(engine, sequence, budget)
    rows = theirs(folder, sequence.token_ids)
    of_prompt = largest_difference(sequence.prompt_logprobs, rows[: len(prompt) - 1], prompt[1:])
    of_answer = largest_difference(answer, rows[len(prompt) - 1 : -1], sequence.token_ids[len(prompt) :])
    return of_prompt, of_answer


def test_of_an_answer_that_goes_on(tiny: Tiny) -> None:
    """Another engine gets the prompt and the answer's beginning, and says the same of the rest."""
    folder, prompt, sampling = tiny(), prompt_of(30), wanted(temperature=0.7, seed=5, repetition_penalty=1.2)
    whole = make_sequence("r", prompt, Allocator().take(40), sampling)
    expected = run(load_tiny(folder), whole, 16)
    resumed = make_sequence("r", whole.token_ids[:33], Allocator(run=2).take(40), sampling)
    resumed.num_prompt_tokens = len(prompt)
    found = run(load_tiny(folder), resumed, 16)
    assert resumed.token_ids == whole.token_ids and not resumed.prompt_logprobs
    rows = theirs(folder, whole.token_ids)
    assert largest_difference(found, rows[32:-1], whole.token_ids[33:]) < TOLERANCE
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected[3:]], abs=TOLERANCE)


def test_who_wants_none_gets_none(tiny: Tiny) -> None:
    engine, batch = load_tiny(tiny()), Batch(64)
    asks = make_sequence("asks", prompt_of(20), Allocator().take(30), wanted())
    asks.wants_prompt_logprobs = True
    plain = msgspec.structs.replace(wanted(), logprobs=None, prompt_logprobs=None)
    silent = make_sequence("silent", prompt_of(21), Allocator(first=8).take(30), plain)
    batch.add(asks)
    batch.add(silent)
    while items := batch.plan():
        for token in batch.commit(items, engine.compute(items), 0, 0).sampled:
            assert (token.logprob is None) == (token.number == silent.number)
    assert not silent.prompt_logprobs and len(asks.prompt_logprobs) == 19
