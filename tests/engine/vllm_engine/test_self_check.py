"""The self-check finds what would give wrong tokens later: each of these is a mistake that a new version of vLLM, or
the connector, could make."""

from collections.abc import Callable

import pytest

from services.engine.interface import EngineLostError, StepFailedError
from services.engine.vllm_engine import plan
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.plan import Copies, Run, TrackedSequence
from services.engine.vllm_engine.self_check import check_steps
from tests.engine.vllm_engine.conftest import fake_world
from tests.engine.vllm_engine.fake_vllm import FakeVllm

Patch = Callable[[pytest.MonkeyPatch], None]


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    world = fake_world()
    check_steps(world.steps, world.engine, world.link)
    assert not len(world.steps) and not world.link.tracked


def hook_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeVllm, "layer_is_written", lambda self, layer: self._link.save(layer) if layer else None)


def saved_before_written(patch: pytest.MonkeyPatch) -> None:
    write = FakeVllm._write
    late: list[tuple[FakeVllm, object, int]] = []

    def later(self: FakeVllm, item: object, layer: int) -> None:
        late.append((self, item, layer))

    def after(self: FakeVllm, layer: int) -> None:
        self._link.save(layer)
        while late:
            write(*late.pop())  # type: ignore[arg-type]

    patch.setattr(FakeVllm, "_write", later)
    patch.setattr(FakeVllm, "layer_is_written", after)


def layers_out_of_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeVllm, "layer_is_written", lambda self, layer: self._link.save({0: 1, 1: 0}.get(layer, layer)))


def block_off_by_one(patch: pytest.MonkeyPatch) -> None:
    save = EngineLink._save_run

    def another(self: EngineLink, layer: int, run: Run) -> None:
        save(self, layer, run._replace(engine_block=run.engine_block - 1))

    patch.setattr(EngineLink, "_save_run", another)


def tail_not_saved(patch: pytest.MonkeyPatch) -> None:
    planned = TrackedSequence.plan

    def without_tail(self: TrackedSequence, start: int, num_tokens: int, block_ids: list[list[int]]) -> Copies:
        copies = planned(self, start, num_tokens, block_ids)
        return copies._replace(
            saves=tuple(
                tuple(run._replace(num_blocks=run.num_blocks - 1) for run in runs if run.num_blocks > 1)
                for runs in copies.saves
            )
        )

    patch.setattr(TrackedSequence, "plan", without_tail)


def stale_present(patch: pytest.MonkeyPatch) -> None:
    """What is present is not what vLLM is told: one block more."""
    matched = TrackedSequence.num_matched
    patch.setattr(
        TrackedSequence,
        "num_matched",
        lambda self, num_tokens, num_local: min(
            matched(self, num_tokens, num_local) + self.layout.block_size, num_tokens - 1 - num_local
        ),
    )


def unpadded_lease(patch: pytest.MonkeyPatch) -> None:
    planned = TrackedSequence.plan

    def unpadded(self: TrackedSequence, start: int, num_tokens: int, block_ids: list[list[int]]) -> Copies:
        copies = planned(self, start, num_tokens, block_ids)
        return copies._replace(announced=min(copies.announced, copies.end))

    patch.setattr(TrackedSequence, "plan", unpadded)


def loads_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(EngineLink, "load", lambda self: None)


def loads_another_block(patch: pytest.MonkeyPatch) -> None:
    joined = plan.runs_of

    def swapped(pairs: list[tuple[int, int]]) -> list[Run]:
        runs = joined(pairs)
        return [Run(run.arena_block, run.engine_block, 1) for run in runs for _ in range(run.num_blocks)]

    patch.setattr(plan, "runs_of", swapped)


BUGS: list[Patch] = [
    hook_skipped, saved_before_written, layers_out_of_order, block_off_by_one, tail_not_saved, stale_present,
    unpadded_lease, loads_nothing, loads_another_block,
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_found(bug: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    world = fake_world()
    bug(monkeypatch)
    with pytest.raises((EngineLostError, StepFailedError)):
        check_steps(world.steps, world.engine, world.link)
