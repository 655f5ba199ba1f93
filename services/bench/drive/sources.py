"""Sums over requests how their prompts' KV was obtained: cached, read, computed. Pure."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from services.bench.drive.http_client import ReportedUsage


class SourceShares(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of prompt tokens: cached by the worker itself, read from others (in all and from each), computed."""

    prompt_tokens: int
    cached_tokens: int
    transferred_tokens: int
    transferred_from: dict[str, int]
    recomputed_tokens: int

    @property
    def reused_share(self) -> float:
        return 1 - self.recomputed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def words(self) -> str:
        """The shares in one line, in per cent."""
        total = max(1, self.prompt_tokens)
        readings = ", ".join(f"{worker} {count / total:.0%}" for worker, count in sorted(self.transferred_from.items()))
        read = f"{self.transferred_tokens / total:.0%} read" + (f" ({readings})" if readings else "")
        return f"{self.cached_tokens / total:.0%} cached, {read}, {self.recomputed_tokens / total:.0%} computed"


def shares_of(usages: Sequence[ReportedUsage]) -> SourceShares:
    """Return the sum over the requests' usages."""
    views = [usage.computing for usage in usages]
    readings = Counter[str]()
    for view in views:
        readings.update(view.transferred_from)
    return SourceShares(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(view.cached_tokens for view in views),
        transferred_tokens=sum(view.transferred_tokens for view in views),
        transferred_from=dict(sorted(readings.items())),
        recomputed_tokens=sum(view.recomputed_tokens for view in views),
    )
