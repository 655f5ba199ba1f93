"""What must be true of every answer, whatever faults there were, and the sum of it over a simulation."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataplane.blocks.layout import KVLayout
from schemas.request import FinishReason
from services.sim.brackets import is_document
from services.sim.client import ChoiceSeen, Exchange
from services.sim.verdict.expected import ClientRequest, is_prefix

NEVER_CODES = frozenset({"replay_mismatch", "internal", "invalid", "engine_failed", "grammar"})
"""Errors that no fault excuses: each shows a mistake in the mesh."""


@dataclass
class Verdict:
    """The result of a simulation. It passed where `problems` is empty. `failed` counts error codes."""

    num_requests: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_wrong: int = 0
    num_unfinished: int = 0
    num_leaked_blocks: int = 0
    num_documents: int = 0
    """Whole answers that had a grammar."""
    num_moved: int = 0
    """Times that an answer went on with what another worker had migrated."""
    failed: Counter[str] = field(default_factory=Counter[str])
    faults: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])

    def merge(self, other: "Verdict") -> None:
        """Add another simulation's result."""
        self.num_requests += other.num_requests
        self.num_finished += other.num_finished
        self.num_cancelled += other.num_cancelled
        self.num_wrong += other.num_wrong
        self.num_unfinished += other.num_unfinished
        self.num_leaked_blocks += other.num_leaked_blocks
        self.num_documents += other.num_documents
        self.num_moved += other.num_moved
        self.failed += other.failed
        self.faults += other.faults
        self.problems += other.problems


@dataclass(frozen=True, slots=True)
class ModelTruth:
    """What the reference answers are computed with."""

    layout: KVLayout
    vocab_size: int
    eos: int


def check_faultless(exchanges: Sequence[Exchange], verdict: Verdict) -> None:
    """Check the requests of a simulation without faults: each is answered, by its first attempt, unless a full worker
    gave its answer away."""
    num_again = 0
    for number, exchange in enumerate(exchanges):
        mesh = exchange.usage.get("kvmesh") if exchange.usage else None
        num_again += mesh["num_retries"] if mesh else 0
        if not exchange.done:
            verdict.problems.append(f"request {number} was not answered, nothing went wrong: {exchange.message}")
    if num_again > verdict.num_moved:
        verdict.problems.append(f"{num_again} attempts were begun again, {verdict.num_moved} moved, nothing went wrong")


def check_exchange(
    number: int, request: ClientRequest, exchange: Exchange, truth: ModelTruth, verdict: Verdict, *, may_time_out: bool
) -> None:
    """Check one request: the right tokens, or a prefix of them and one clear error.

    `may_time_out`: a fault lasted so long that the deadline may pass.
    """
    verdict.num_requests += 1
    name = f"request {number}"
    if not exchange.ended.is_set():
        verdict.num_unfinished += 1
        verdict.problems.append(f"{name} never ended")
        return
    if exchange.num_after_end:
        verdict.problems.append(f"{name}: {exchange.num_after_end} pieces came after its end")
    # Compare each choice with the reference; a choice without any piece counts as empty.
    is_whole = exchange.done
    for index in range(request.num_choices):
        tokens, reason = truth_of(request, index, truth)
        seen = exchange.choices.get(index, ChoiceSeen())
        problem = _problem_of(seen, tokens, reason, is_whole=is_whole)
        # With a grammar, an answer that stopped by itself must also be one whole document.
        if request.max_depth and seen.finish_reason == FinishReason.STOP:
            verdict.num_documents += 1
            if not is_document(seen.token_ids, request.max_depth, truth.eos):
                problem = "no valid document"
        if problem:
            verdict.num_wrong += 1
            verdict.problems.append(f"{name} choice {index}: {problem}: {seen.token_ids}, right is {tokens}")
    # Count how the request ended. A whole answer comes first: its client may have hung up after the end.
    if is_whole:
        verdict.num_finished += 1
        if exchange.status != 200:
            verdict.problems.append(f"{name}: a whole answer with status {exchange.status}")
        check_usage(name, request, exchange, verdict)
    elif exchange.hung_up:
        verdict.num_cancelled += 1
    elif exchange.is_reset:
        verdict.failed["connection_reset"] += 1
    elif exchange.error:
        verdict.failed[exchange.error] += 1
        # Faults excuse only some errors, and a refusal with 429 or 503 must say when to try again.
        if exchange.error in NEVER_CODES or (exchange.error == "deadline" and not may_time_out):
            verdict.problems.append(f"{name} failed with {exchange.error}: {exchange.message}")
        if exchange.status in (429, 503) and "retry-after" not in exchange.headers:
            verdict.problems.append(f"{name}: {exchange.status} without Retry-After")
    else:
        verdict.problems.append(f"{name} ended with neither an answer nor an error")


def check_usage(name: str, request: ClientRequest, exchange: Exchange, verdict: Verdict) -> None:
    """Check that the usage accounts for every prompt token once."""
    mesh = exchange.usage.get("kvmesh") if exchange.usage else None
    if not mesh:
        return
    for where in (mesh, mesh["prefill"]):
        if where is None:
            continue
        total = where["cached_tokens"] + where["transferred_tokens"] + where["recomputed_tokens"]
        if total != len(request.prompt):
            verdict.problems.append(
                f"{name}: usage accounts for {total} prompt tokens, there are {len(request.prompt)}"
            )


def truth_of(request: ClientRequest, index: int, truth: ModelTruth) -> tuple[list[int], str]:
    return request.reference(truth.layout, index, truth.vocab_size, truth.eos)


def _problem_of(seen: ChoiceSeen, tokens: list[int], reason: str, *, is_whole: bool) -> str:
    if not is_prefix(seen.token_ids, tokens):
        return "wrong tokens"
    if seen.finish_reason and (seen.token_ids != tokens or seen.finish_reason != reason):
        return f"finished with {seen.finish_reason!r} after {len(seen.token_ids)} tokens"
    if is_whole and not seen.finish_reason:
        return "a whole answer without a finish reason"
    return ""
