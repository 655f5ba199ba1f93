"""The engine's side of a worker's shell: sequences go to its thread, and what it has computed comes back as events."""

import contextlib
from collections.abc import Callable
from functools import partial

from dataplane.blocks.cache import BlockCache
from schemas.request import AttemptFailure
from services.engine.interface import EngineCallbacks, EngineDeath, InvalidSequenceError, Sequence, StepResult
from services.engine.thread import EngineStoppedError
from services.holder.core.actions import Submit
from services.holder.core.attempt import Attempt
from services.holder.core.attempts import Attempts
from services.holder.core.content import AttemptKey
from services.holder.core.events import EngineBack, EngineDied, EngineEvent, SequenceFailed, SequenceRemoved
from services.holder.kv.blocks import LentBlocks
from services.worker.parts import WorkerParts


class EngineFeed:
    """One worker's. `post` calls something on the event loop, from any thread; `step` lets the core hear of it."""

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
        self._attempts = attempts.records
        self._post = post
        self._step = step
        self._ungiven: dict[AttemptKey, Sequence] = {}
        """Sequences whose grammar is still being understood."""
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
        sequence, attempt = action.sequence, action.attempt
        if action.lease is not None:
            sequence.layer_listener = self._blocks.start_computing(action.lease, sequence.num_computed_tokens)
        self.note_written(sequence, attempt, sequence.num_computed_tokens)
        if sequence.sampling.grammar:
            sequence.grammar = self.engine.start_grammar(sequence.sampling.grammar)
            if not sequence.grammar.done():  # the engine's thread waits for nobody
                self._ungiven[attempt.key] = sequence
                attempt.awaits_grammar = True
                sequence.grammar.add_done_callback(lambda _: self._post(self._on_understood, attempt.key))
                return
        self._give(sequence)

    def expect(self, grammar: str) -> None:
        """Begin to understand what an answer must be that is soon to be computed here."""
        if grammar:
            self.engine.start_grammar(grammar)

    def _give(self, sequence: Sequence) -> None:
        try:
            self.engine.submit(sequence)
        except (EngineStoppedError, InvalidSequenceError) as error:
            self._post(self._on_failure, [sequence], str(error))

    def withdraw(self, key: AttemptKey) -> None:
        """Take a sequence back; `SequenceRemoved` follows."""
        if (sequence := self._ungiven.pop(key, None)) is not None:
            self._post(self._on_removed, sequence)
            return
        with contextlib.suppress(EngineStoppedError):  # its end fails the sequence anyway
            self.engine.cancel(*key)

    def note_written(self, sequence: Sequence, attempt: Attempt, num_tokens: int, *, ended: bool = False) -> None:
        """Note that a sequence's first `num_tokens` tokens have their KV here. `ended`: no more will be written."""
        num_full_blocks = num_tokens // attempt.hasher.block_size
        if num_full_blocks == attempt.num_stored_blocks and not ended:
            return  # most decode steps fill no block
        assert attempt.kv is not None, "it has blocks"
        hashes = attempt.hasher.extend(sequence.token_ids, num_tokens)
        num_stored, num_landed = attempt.num_stored_blocks, attempt.kv.num_present_tokens
        self._blocks.memory.store(sequence.tables, hashes, num_stored, num_tokens, num_landed, ended=ended)
        attempt.num_stored_blocks = num_full_blocks

    def keep_ended(self, sequence: Sequence, attempt: Attempt) -> None:
        """The engine has let go of a sequence; its blocks are still its own."""
        self.note_written(sequence, attempt, sequence.num_computed_tokens, ended=True)

    def stop_engine(self) -> None:
        """End after the running step, and let go of the memory. Blocks."""
        if self.engine.stop_engine(self._stop_timeout_s):
            self.engine.close()

    def _on_understood(self, key: AttemptKey) -> None:
        if (sequence := self._ungiven.pop(key, None)) is not None:
            if (attempt := self._find(sequence)) is not None:
                attempt.awaits_grammar = False
            self._give(sequence)

    def _on_step(self, result: StepResult) -> None:
        nobodys: list[Sequence] = []
        for sequence, num_tokens in result.computed:
            if (attempt := self._find(sequence)) is None:
                nobodys.append(sequence)
            else:
                self.note_written(sequence, attempt, num_tokens)
        for sampled in result.sampled:
            if sampled.local_end and (attempt := self._find(sampled.sequence)) is not None:
                self.keep_ended(sampled.sequence, attempt)
        for sequence, *_ in result.failed:
            if (attempt := self._find(sequence)) is not None:
                self.keep_ended(sequence, attempt)
        self._step(result)
        for sequence, reason, is_spent in result.failed:
            key = (sequence.request_id, sequence.attempt)
            code = AttemptFailure.ENGINE_FAILED if is_spent else AttemptFailure.GRAMMAR
            self._step(SequenceFailed(key, reason, code))
        # Last, so that what is wrong with one costs the others nothing.
        assert not nobodys, _written_late(nobodys)

    def _on_removed(self, sequence: Sequence) -> None:
        attempt = self._find(sequence)
        assert attempt is not None, _written_late([sequence])
        self.keep_ended(sequence, attempt)
        self._step(SequenceRemoved(attempt.key))

    def _on_failure(self, sequences: list[Sequence], reason: str) -> None:
        for sequence in sequences:
            self._step(SequenceFailed((sequence.request_id, sequence.attempt), reason))

    def _on_died(self, death: EngineDeath) -> None:
        had = death.had | self._ungiven.keys()
        self._ungiven.clear()
        self._step(EngineDied(death.reason, frozenset(had), death.in_step))

    def _find(self, sequence: Sequence) -> Attempt | None:
        return self._attempts.get((sequence.request_id, sequence.attempt))


def _written_late(sequences: list[Sequence]) -> str:
    """Return what is wrong with these sequences, which the engine had until now, and no core knows."""
    requests = ", ".join(sequence.request_id for sequence in sequences)
    return f"{requests}: their blocks are given back, and the engine wrote them"
