"""What an answer took: its tokens and attempts, and where the KV of its prompts came from. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from schemas.ids import WorkerId
from schemas.request import Reuse, TransferReport
from services.gateway.request.core import RequestCore


class PromptSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where prompts' KV came from on one worker each: cached + transferred + recomputed = the prompts' tokens."""

    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    transferred_from: dict[WorkerId, int]
    """The transferred tokens by the worker or store that they were read from."""


class AnswerUsage(NamedTuple):
    """An HTTP request as it has ended, over all its choices.

    Sources are those of each prompt's first choice, in the first attempt that gave tokens: `sources` of the worker that
    decoded (of the prefill worker, where an answer ended before the other had sent any), `prefill` of the prefill
    worker of a split request. Workers and `attempt` are those of the last attempt of the last choice. `reuse`: what was
    made of KV that others had of the first prompt.
    """

    num_prompt_tokens: int
    num_completion_tokens: int
    num_choices: int
    num_retries: int
    resumed_tokens: int
    """What the client had before the last attempt that went on with it."""
    sources: PromptSources
    prefill: PromptSources | None
    carrier: str
    prefill_worker: WorkerId | None
    decode_worker: WorkerId | None
    attempt: int
    reuse: Reuse | None


def answer_usage(
    cores: Sequence[RequestCore], choices_per_prompt: int, num_prompt_tokens: int, num_completion_tokens: int
) -> AnswerUsage:
    """Return what the choices `cores`, in the order of their prompts, have taken."""
    firsts, last = cores[::choices_per_prompt], cores[-1]
    reports = [report for core in firsts if (report := core.report or core.prefill_report) is not None]
    prefills = [core.prefill_report for core in firsts if core.prefill_report is not None]
    return AnswerUsage(
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_completion_tokens,
        num_choices=len(cores),
        num_retries=sum(core.attempt - 1 for core in cores),
        resumed_tokens=sum(core.num_answered for core in cores),
        sources=_sum_of(reports),
        prefill=_sum_of(prefills) if prefills else None,
        carrier=next((report.carrier for report in reports if report.carrier), ""),
        prefill_worker=last.prefill_worker,
        decode_worker=last.decode_worker,
        attempt=last.attempt,
        reuse=cores[0].reuse,
    )


def _sum_of(reports: Sequence[TransferReport]) -> PromptSources:
    """Return the sum of several prompts' reports."""
    transferred_from: dict[WorkerId, int] = {}
    for report in reports:
        for source in report.transferred_from:
            transferred_from[source.worker_id] = transferred_from.get(source.worker_id, 0) + source.num_tokens
    return PromptSources(
        cached_tokens=sum(max(0, report.cached_tokens) for report in reports),
        transferred_tokens=sum(max(0, report.transferred_tokens) for report in reports),
        recomputed_tokens=sum(max(0, report.recomputed_tokens) for report in reports),
        transferred_from=transferred_from,
    )
