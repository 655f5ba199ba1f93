"""The self-check finds what would give wrong tokens later: each of these is a mistake that a new version of vLLM, or
the connector, could make."""

import subprocess
import sys
from collections.abc import Callable

import msgspec
import pytest

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.interface import EngineLostError, StepFailedError
from services.engine.vllm_engine.link import EngineLink
from services.engine.vllm_engine.plan import Copies, Run, TrackedSequence
from services.engine.vllm_engine.self_check import check_steps
from tests.engine.vllm_engine.conftest import LAYOUT, World, fake_world
from tests.engine.vllm_engine.fake_vllm import FakeVllm

Bug = Callable[[pytest.MonkeyPatch, World], None]
Save = Callable[[EngineLink, int], None]
"""What is done when a layer's hook is called."""


def test_nothing_is_found_where_nothing_is_wrong(world: World) -> None:
    check_steps(world.steps, world.engine, world.link)
    assert not len(world.steps) and not world.link.tracked


@pytest.mark.parametrize(("token_budget", "block_size"), [(16, 8), (64, 32), (64, 256), (512, 256)])
def test_no_setting_is_blamed_on_the_engine(token_budget: int, block_size: int) -> None:
    """Blocks beyond a step's budget, and steps of less than a block."""
    world = fake_world(token_budget=token_budget, layout=msgspec.structs.replace(LAYOUT, block_size=block_size))
    check_steps(world.steps, world.engine, world.link)


@pytest.mark.vllm
@pytest.mark.parametrize(("token_budget", "block_size"), [(64, 32), (512, 256)])
def test_vllm_starts_with_any_setting(token_budget: int, block_size: int) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    loads = f"load_world({str(DEMO_MODEL_DIR)!r}, {token_budget}, {block_size})"
    code = f"from tests.engine.vllm_engine.conftest import load_world; {loads}.steps.close()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def at_each_layer(patch: pytest.MonkeyPatch, world: World, save: Save) -> None:
    if isinstance(world.engine, FakeVllm):
        patch.setattr(FakeVllm, "layer_is_written", lambda self, layer: save(self._link, layer))
        return
    from services.engine.vllm_engine.connector import MeshConnector, layer_of

    patch.setattr(MeshConnector, "save_kv_layer", lambda self, name, *_, **__: save(self._link, layer_of(name)))


def hook_skipped(patch: pytest.MonkeyPatch, world: World) -> None:
    at_each_layer(patch, world, lambda link, layer: link.save(layer) if layer else None)


def saved_before_written(patch: pytest.MonkeyPatch, world: World) -> None:
    begin = EngineLink.begin_step

    def and_save(self: EngineLink, step: list[Copies]) -> None:
        begin(self, step)
        for layer in range(self.layout.num_layers):
            self.save(layer)

    patch.setattr(EngineLink, "begin_step", and_save)
    at_each_layer(patch, world, lambda *_: None)


def layers_out_of_order(patch: pytest.MonkeyPatch, world: World) -> None:
    at_each_layer(patch, world, lambda link, layer: link.save({0: 1, 1: 0}.get(layer, layer)))


def block_off_by_one(patch: pytest.MonkeyPatch, _: World) -> None:
    save = EngineLink._save_run

    def another(self: EngineLink, layer: int, run: Run) -> None:
        save(self, layer, run._replace(engine_block=run.engine_block - 1))

    patch.setattr(EngineLink, "_save_run", another)


def tail_not_saved(patch: pytest.MonkeyPatch, _: World) -> None:
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


def stale_present(patch: pytest.MonkeyPatch, _: World) -> None:
    """What is present is not what vLLM is told: one block more."""
    matched = TrackedSequence.num_matched
    patch.setattr(
        TrackedSequence,
        "num_matched",
        lambda self, num_tokens, num_local: min(
            matched(self, num_tokens, num_local) + self.layout.block_size, num_tokens - 1 - num_local
        ),
    )


def unpadded_lease(patch: pytest.MonkeyPatch, _: World) -> None:
    planned = TrackedSequence.plan

    def unpadded(self: TrackedSequence, start: int, num_tokens: int, block_ids: list[list[int]]) -> Copies:
        copies = planned(self, start, num_tokens, block_ids)
        return copies._replace(announced=min(copies.announced, copies.end))

    patch.setattr(TrackedSequence, "plan", unpadded)


def loads_nothing(patch: pytest.MonkeyPatch, _: World) -> None:
    patch.setattr(EngineLink, "copy_in", lambda self: None)


def loads_another_block(patch: pytest.MonkeyPatch, _: World) -> None:
    load = EngineLink.copy_in

    def another(self: EngineLink) -> None:
        runs = [tuple(run._replace(arena_block=run.arena_block + 1) for run in copies.loads) for copies in self.step]
        self.step = [copies._replace(loads=loads) for copies, loads in zip(self.step, runs, strict=True)]
        load(self)

    patch.setattr(EngineLink, "copy_in", another)


BUGS: list[Bug] = [
    hook_skipped, saved_before_written, layers_out_of_order, block_off_by_one, tail_not_saved, stale_present,
    unpadded_lease, loads_nothing, loads_another_block,
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_found(bug: Bug, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = world.engine.add_request, list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(world.engine, "add_request", lambda *request: added.append(add(*request)) or added[-1])
        bug(patch, world)
        with pytest.raises((EngineLostError, StepFailedError)):
            check_steps(world.steps, world.engine, world.link)
    world.steps.clear()
    for name in added:  # an engine that failed is not used again, but by the next test
        world.engine.abort(name)
    check_steps(world.steps, world.engine, world.link)
