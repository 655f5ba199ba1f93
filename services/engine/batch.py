"""Which sequences the next engine step computes, and what its tokens mean. Pure: decides, never acts.

A step holds one token of each decode sequence and fills the rest of its token budget with prefill chunks: tenants in
turn, of each what came first. While a prompt waits, a share of the budget and one of the places are kept for prefill,
so that many decodes cannot starve it; where the decodes do not all fit into the rest tenants take turns, and their
decodes too.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import zip_longest

from services.engine import limits
from services.engine.interface import Engine, GrammarError, Outcome, Sequence, StepItem
from services.engine.messages import FailedSequence, SampledToken, StepResult
from services.engine.rules import append_token, check_sequence
from services.engine.turns import TenantTurns


class Batch:
    """The sequences of one engine, by number. Not thread-safe: the engine's thread is its only user.

    `token_budget` bounds the tokens of a step, `max_sequences` its items. Sequences end at `context_length`.
    """

    def __init__(self, token_budget: int, *, max_sequences: int = 256, context_length: int | None = None) -> None:
        if token_budget < 2 or max_sequences < 2:
            raise ValueError("a step needs room for a decode and a prefill: budget and limit must be 2 or more")
        self.token_budget = token_budget
        self.max_sequences = max_sequences
        self.context_length = context_length
        self.prefill_reserve = max(1, token_budget // limits.PREFILL_SHARE)
        self._prefill: dict[int, Sequence] = {}
        self._decode: dict[int, Sequence] = {}
        self._turns = TenantTurns()
        """Of the tenants that have prompts, in tokens."""

    def __len__(self) -> int:
        return len(self._prefill) + len(self._decode)

    def check(self, sequence: Sequence, engine: Engine) -> None:
        """Raise InvalidSequenceError unless this engine can compute the sequence to its end here."""
        check_sequence(
            sequence,
            engine.layout,
            vocab_size=engine.vocab_size,
            context_length=self.context_length,
            token_budget=self.token_budget,
        )

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in line that `check` let pass."""
        number = sequence.number
        assert number not in self._prefill and number not in self._decode, f"{sequence.request_id} is here already"
        queue = self._decode if sequence.num_uncomputed_tokens == 1 else self._prefill
        queue[number] = sequence

    def remove(self, number: int) -> Sequence | None:
        """Take a sequence out; None when it is not (or no longer) here."""
        return self._prefill.pop(number, None) or self._decode.pop(number, None)

    def clear(self) -> None:
        """Take all sequences out."""
        self._prefill.clear()
        self._decode.clear()

    def plan(self) -> list[StepItem]:
        """Return the next step's items, empty when there is nothing to do: decodes first, then prefill chunks."""
        waiting = bool(self._prefill)
        num_decodes = min(
            self.token_budget - (self.prefill_reserve if waiting else 0),
            self.max_sequences - (1 if waiting else 0),
            len(self._decode),
        )
        items = [
            StepItem(sequence, sequence.num_computed_tokens, 1, True) for sequence in self._next_decodes(num_decodes)
        ]
        budget = self.token_budget - len(items)
        for sequence in self._prefill_in_turn():
            if budget == 0 or len(items) == self.max_sequences:
                break
            num_tokens = min(budget, sequence.num_uncomputed_tokens)
            self._turns.gave(sequence.tenant, num_tokens)
            start = sequence.num_computed_tokens
            items.append(StepItem(sequence, start, num_tokens, start + num_tokens == len(sequence.token_ids)))
            budget -= num_tokens
        return items

    def commit(self, items: Seq[StepItem], outcomes: Seq[Outcome], started_ns: int, ended_ns: int) -> StepResult:
        """Record that a planned step was computed, with these `outcomes`, one per sampling item, in order.

        Sequences that ended here have left the batch when this returns.
        """
        assert len(outcomes) == sum(item.samples for item in items), "one outcome per sampling item"
        left = iter(outcomes)
        sampled: list[SampledToken] = []
        failed: list[FailedSequence] = []
        num_decode_tokens = 0
        for item in items:
            sequence, number = item.sequence, item.sequence.number
            assert sequence.num_computed_tokens == item.start, f"{number} was computed behind the batch's back"
            sequence.num_computed_tokens += item.num_tokens
            # Count decodes before `_settle` moves the sequence: a prefill that ends here becomes a decode there.
            num_decode_tokens += number in self._decode
            # A chunk that ends before the last known token samples none. With one token left, a decode follows.
            if not item.samples:
                if sequence.num_uncomputed_tokens == 1:
                    self._settle(sequence, ended=False)
                continue
            # A grammar error fails its own sequence only: the other sequences of the step keep their outcomes.
            outcome = next(left)
            if isinstance(outcome, GrammarError):
                failed.append(FailedSequence(number, str(outcome), outcome.is_spent))
                self._settle(sequence, ended=True)
                continue
            # The token ends the sequence here, or makes a finished prefill a decode.
            token = append_token(sequence, outcome, self.context_length)
            sampled.append(token)
            self._settle(sequence, ended=token.local_end)
        num_tokens = sum(item.num_tokens for item in items)
        return StepResult(
            started_ns=started_ns,
            ended_ns=ended_ns,
            num_prefill_tokens=num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            computed=tuple((item.sequence.number, item.sequence.num_computed_tokens) for item in items),
            sampled=tuple(sampled),
            failed=tuple(failed),
        )

    def check_integrity(self) -> None:
        """Assert what must hold between steps."""
        assert not self._prefill.keys() & self._decode.keys(), "a sequence is in one line only"
        for number, sequence in (*self._prefill.items(), *self._decode.items()):
            assert number == sequence.number, "a sequence keeps its number"
            assert 0 < sequence.num_uncomputed_tokens <= len(sequence.token_ids), f"{number} has something to compute"
            assert sequence.num_local_tokens <= sequence.index, f"{number} counts its tokens"
        assert all(s.num_uncomputed_tokens == 1 for s in self._decode.values()), "a decode computes one token"
        assert all(s.num_uncomputed_tokens > 1 for s in self._prefill.values()), "a prefill computes several"

    def _prefill_in_turn(self) -> Iterator[Sequence]:
        """Iterate over the prompts; whose turn is next depends on what is given meanwhile."""
        lines = _by_tenant(self._prefill.values())
        while lines:
            tenant = self._turns.order(lines)[0]
            yield lines[tenant].pop(0)
            if not lines[tenant]:
                del lines[tenant]

    def _next_decodes(self, count: int) -> list[Sequence]:
        """Return `count` decodes; where that is not all of them, as many of each tenant, and they go to the end of the
        line."""
        if count == len(self._decode):
            return list(self._decode.values())
        rounds = zip_longest(*_by_tenant(self._decode.values()).values())
        numbers = [sequence.number for each in rounds for sequence in each if sequence is not None][:count]
        for number in numbers:
            self._decode[number] = self._decode.pop(number)
        return [self._decode[number] for number in numbers]

    def _settle(self, sequence: Sequence, *, ended: bool) -> None:
        """Move a sequence whose prefill or stay here is over to where it belongs: among the decodes, or out."""
        if ended or sequence.number in self._prefill:
            self.remove(sequence.number)
            if not ended:
                self._decode[sequence.number] = sequence


def _by_tenant(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    lines: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        lines.setdefault(sequence.tenant, []).append(sequence)
    return lines
