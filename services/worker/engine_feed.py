"""What a worker's shell has of its engine: it submits attempts as sequences, and makes events of what was computed."""

import contextlib
from collections.abc import Callable
from functools import partial

from dataplane.blocks.cache import BlockCache
from schemas.request import AttemptFailure
from services.engine.client import EngineCallbacks, EngineDeath, EngineStoppedError
from services.engine.interface import LayerListener
from services.engine.messages import StepResult, SubmitSequence
from services.holder.core.actions import Submit
from services.holder.core.attempt import Attempt
from services.holder.core.attempts import Attempts
from services.holder.core.content import AttemptKey
from services.holder.core.events import EngineBack, EngineDied, EngineEvent, SequenceFailed, SequenceRemoved
from services.holder.kv.blocks import LentBlocks
from services.worker.parts import WorkerParts


class EngineFeed:
    """One worker's. `post` calls something on the event loop, from any thread; `step` is `Worker.step`."""

    def __init__(
        self,
        parts: WorkerParts,
        blocks: LentBlocks[BlockCache],
        attempts: Attempts,
        *,
        post: Callable[..., None],
        step: Callable[[EngineEvent], object],
    ) -> None:
        self._stop_timeout_s = parts.limits.times.worker.engine_stop_timeout_s
        self._blocks = blocks
        self._attempts = attempts
        self._post = post
        self._step = step
        self._ungiven: dict[AttemptKey, tuple[Submit, LayerListener | None]] = {}
        """Those whose grammar is still being understood, and who is notified of their layers."""
        self.engine = parts.make_engine(
            EngineCallbacks(
                on_step=partial(post, self._on_step),
                on_failure=partial(post, self._on_failure),
                on_removed=partial(post, self._on_removed),
                on_died=partial(post, self._on_died),
                on_back=partial(post, self._step, EngineBack()),
            )
        )

    def submit(self, action: Submit) -> None:
        """Give the engine a sequence; what of it is in place already is stored, and may be read under its lease."""
        attempt, sequence, listener = action.attempt, action.sequence, None
        if action.lease is not None:
            listener = self._blocks.start_computing(action.lease, sequence.num_computed_tokens)
        self.note_written(attempt, sequence.num_computed_tokens)
        if sequence.sampling.grammar:
            understood = self.engine.start_grammar(sequence.sampling.grammar)
            if not understood.done():  # the engine's thread waits for nobody
                self._ungiven[attempt.key] = (action, listener)
                attempt.awaits_grammar = True
                understood.add_done_callback(lambda _: self._post(self._on_understood, attempt.key))
                return
        self._give(sequence, listener)

    def expect(self, grammar: str) -> None:
        """Begin to understand what an answer must be that is soon to be computed here."""
        if grammar:
            self.engine.start_grammar(grammar)

    def _give(self, sequence: SubmitSequence, listener: LayerListener | None) -> None:
        try:
            self.engine.submit(sequence, listener)
        except EngineStoppedError as error:
            self._post(self._on_failure, (sequence.number,), str(error))

    def withdraw(self, key: AttemptKey) -> None:
        """Take a sequence back; `SequenceRemoved` follows."""
        number = self._attempts.records[key].number
        if self._ungiven.pop(key, None) is not None:
            self._post(self._on_removed, number)
            return
        with contextlib.suppress(EngineStoppedError):  # its end fails the sequence anyway
            self.engine.cancel(number)

    def note_written(self, attempt: Attempt, num_tokens: int, *, ended: bool = False) -> None:
        """Note that an attempt's first `num_tokens` tokens have their KV here. `ended`: no more will be written."""
        attempt.num_computed_tokens = num_tokens
        num_full_blocks = num_tokens // attempt.hasher.block_size
        if num_full_blocks == attempt.num_stored_blocks and not ended:
            return  # most decode steps fill no block
        assert attempt.kv is not None, "it has blocks"
        hashes = attempt.hasher.extend(attempt.token_ids, num_tokens)
        num_stored, num_landed = attempt.num_stored_blocks, attempt.kv.num_present_tokens
        self._blocks.memory.store(attempt.tables, hashes, num_stored, num_tokens, num_landed, ended=ended)
        attempt.num_stored_blocks = num_full_blocks

    def keep_ended(self, attempt: Attempt) -> None:
        """The engine has let go of an attempt; its blocks are still its own."""
        self.note_written(attempt, attempt.num_computed_tokens, ended=True)

    def stop_engine(self) -> None:
        """End after the running step, and let go of the memory. Blocks."""
        if self.engine.stop_engine(self._stop_timeout_s):
            self.engine.close()

    def _on_understood(self, key: AttemptKey) -> None:
        if (ungiven := self._ungiven.pop(key, None)) is not None:
            action, listener = ungiven
            action.attempt.awaits_grammar = False
            self._give(action.sequence, listener)

    def _on_step(self, result: StepResult) -> None:
        """Note what a step has written and sampled, and pass it to `step`. On the event loop."""
        attempts = self._attempts.of_engine
        nobodys = [number for number, _ in result.computed if number not in attempts]
        for number, num_tokens in result.computed:
            if (attempt := attempts.get(number)) is not None:
                self.note_written(attempt, num_tokens)
        for sampled in result.sampled:
            if (attempt := attempts.get(sampled.number)) is not None:
                attempt.token_ids.append(sampled.token_id)
                if sampled.local_end:
                    self.keep_ended(attempt)
        failed = [(attempts[one.number], one) for one in result.failed if one.number in attempts]
        for attempt, _ in failed:
            self.keep_ended(attempt)
        self._step(result)
        for attempt, (_, reason, is_spent) in failed:
            code = AttemptFailure.ENGINE_FAILED if is_spent else AttemptFailure.GRAMMAR
            self._step(SequenceFailed(attempt.key, reason, code))
        # Last, so that what is wrong with one costs the others nothing.
        assert not nobodys, _written_late(nobodys)

    def _on_removed(self, number: int) -> None:
        attempt = self._attempts.of_engine.get(number)
        assert attempt is not None, _written_late([number])
        self.keep_ended(attempt)
        self._step(SequenceRemoved(attempt.key))

    def _on_failure(self, numbers: tuple[int, ...], reason: str) -> None:
        for number in numbers:
            if (attempt := self._attempts.of_engine.get(number)) is not None:
                self._step(SequenceFailed(attempt.key, reason))

    def _on_died(self, death: EngineDeath) -> None:
        had = self._keys(death.had) | self._ungiven.keys()
        self._ungiven.clear()
        self._step(EngineDied(death.reason, frozenset(had), self._keys(death.in_step)))

    def _keys(self, numbers: frozenset[int]) -> frozenset[AttemptKey]:
        attempts = self._attempts.of_engine
        return frozenset(attempts[number].key for number in numbers if number in attempts)


def _written_late(numbers: list[int]) -> str:
    """Return what is wrong with these sequences, which the engine had until now, and no core knows."""
    named = ", ".join(map(str, numbers))
    return f"sequences {named} of the engine: their blocks are given back, and the engine wrote them"
