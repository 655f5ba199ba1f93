"""The sampler asked by parameters and index alone, where what an answer has so far does not matter."""

from collections.abc import Sequence as Seq

from torch import Tensor

from schemas.request import SamplingParams
from services.engine import sampler
from services.engine.interface import ChosenToken, Sequence
from tests.engine.rig import sequence_at


def at_index(sampling: SamplingParams, index: int) -> Sequence:
    return sequence_at(sampling, answer=[0] * index)


def sample(logits: Tensor, wanted: Seq[tuple[SamplingParams, int]]) -> list[int]:
    outcomes = sampler.sample(logits, [at_index(*one) for one in wanted])
    assert all(isinstance(outcome, ChosenToken) for outcome in outcomes)
    return [outcome.token_id for outcome in outcomes if isinstance(outcome, ChosenToken)]


def near_tie(logits: Tensor, sampling: SamplingParams, index: int) -> bool:
    return sampler.near_tie(logits, at_index(sampling, index))
