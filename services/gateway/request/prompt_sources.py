"""Where the KV of prompts came from. Pure."""

from collections.abc import Sequence

import msgspec

from schemas.ids import WorkerId
from schemas.request import TransferReport


class PromptSources(msgspec.Struct, frozen=True, kw_only=True):
    """Where prompts' KV came from on one worker each: cached + transferred + recomputed = the prompts' tokens."""

    cached_tokens: int
    transferred_tokens: int
    recomputed_tokens: int
    transferred_from: dict[WorkerId, int]
    """The transferred tokens by the worker or store that they were read from."""


def sources_of(reports: Sequence[TransferReport]) -> PromptSources:
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
