"""Bursts of one prompt in the simulator: computed once, sent once to each decode worker, whoever falls meanwhile."""

import dataclasses
from collections.abc import Sequence

import pytest

from services.sim import world
from services.sim.mesh import BLOCK_SIZE, MeshShape
from services.sim.scenario import Fault, Scenario
from services.sim.verdict.expected import ClientRequest
from services.sim.world import SimOptions, SimReport, simulate
from services.telemetry import Key, SpanName, SpanRecord
from tests.promises import nothing_wrong

PROMPT = tuple(1 + (7 * at) % 53 for at in range(122))
NUM_CLIENTS = 8
SHAPE = MeshShape(num_blocks=256, step_s=0.05)
"""Four steps compute the prompt, and the burst comes within the first."""


def burst(
    shape: MeshShape = SHAPE,
    faults: tuple[Fault, ...] = (),
    *,
    prompts: Sequence[tuple[int, ...]] = (PROMPT,) * NUM_CLIENTS,
    max_tokens: int = 6,
    num_choices: int = 1,
    own: int = 0,
    seed: int = 3,
) -> tuple[SimReport, list[SpanRecord]]:
    """Let clients ask at once, for one prompt if nothing else is said, each with so many tokens of its own behind
    it."""
    spans: list[SpanRecord] = []

    def asks(*_: object) -> list[ClientRequest]:
        return [
            ClientRequest(
                at_s=0.1 + 0.002 * number, prompt=(*prompt, *[1 + number] * own), max_tokens=max_tokens,
                temperature=1.0, seed=number, num_choices=num_choices, stream=True,
            )
            for number, prompt in enumerate(prompts)
        ]  # fmt: skip

    def keep(records: list[SpanRecord], **_: bool) -> list[str]:
        spans.extend(records)
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "make_requests", asks)
        patch.setattr(world, "trace_problems", keep)
        options = SimOptions(num_requests=len(prompts), scenario=Scenario(faults=faults), shape=shape)
        report = simulate(seed, options)
    nothing_wrong(report.verdict.problems)
    return report, spans


def computed(spans: list[SpanRecord]) -> int:
    """Return how many prompt tokens the engines computed."""
    return sum(int(s.attributes[Key.NUM_PREFILL_TOKENS]) for s in spans if s.name == SpanName.ENGINE_STEP)


def read(spans: list[SpanRecord]) -> int:
    """Return how many bytes of KV were read."""
    return sum(int(s.attributes.get(Key.NUM_BYTES, 0)) for s in _reads(spans))


def _reads(spans: list[SpanRecord]) -> list[SpanRecord]:
    return [s for s in spans if s.name == SpanName.KV_TRANSFER and s.attributes.get(Key.END) == "target"]


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("own", [0, 5])
def test_a_burst_is_computed_once_and_sent_once_to_each_decode_worker(num_choices: int, own: int) -> None:
    report, spans = burst(num_choices=num_choices, own=own)
    num_answers = NUM_CLIENTS * num_choices
    assert report.verdict.num_finished == NUM_CLIENTS
    # A choice computes what lies behind the common blocks: less than one, and its own tokens.
    assert computed(spans) <= len(PROMPT) + num_answers * (BLOCK_SIZE + own)
    token_bytes = SHAPE.layout.block_bytes // BLOCK_SIZE
    holders = SHAPE.num_prefill - 1 + SHAPE.num_decode
    assert read(spans) <= token_bytes * (holders * len(PROMPT) + 2 * num_answers * (BLOCK_SIZE + own))
    if num_choices > 1:  # more than one prefill worker had a part in it
        assert any(s.service.startswith("prefill") for s in _reads(spans))
    waits = [s for s in spans if s.name == SpanName.DUPLICATE_WAIT]
    assert waits and all(s.attributes[Key.DUPLICATE] for s in waits)


def test_without_waiting_it_is_computed_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the tests above say nothing."""
    from services.holder.core.inflight import InFlightDuplicates

    monkeypatch.setattr(InFlightDuplicates, "find", lambda self, attempt: None)
    _, spans = burst()
    assert computed(spans) > 2 * len(PROMPT)


@pytest.mark.parametrize("target", ["prefill", "decode", "scheduler", "directory"])
@pytest.mark.parametrize("at_s", [0.12, 0.2, 0.3])
def test_a_burst_ends_well_whoever_dies(target: str, at_s: float) -> None:
    report, _ = burst(faults=(Fault(do="kill", target=target, at_s=at_s, for_s=1.0),))
    assert report.verdict.num_finished == NUM_CLIENTS


@pytest.mark.parametrize("at_s", [0.11, 0.15, 0.25])
def test_a_burst_goes_on_where_clients_hang_up(at_s: float) -> None:
    report, _ = burst(faults=(Fault(do="disconnect", at_s=at_s, for_s=0.05, share=0.5),))
    verdict = report.verdict
    assert verdict.num_finished + verdict.num_cancelled == NUM_CLIENTS


@pytest.mark.parametrize("carrier", ["tcp", "loopback"])
@pytest.mark.parametrize(
    "shape",
    [
        MeshShape(num_prefill=0, num_decode=0, num_aggregated=2),
        MeshShape(whole_blocks=True),
        MeshShape(windows=(0, 8)),
        MeshShape(policy="round_robin"),
        MeshShape(num_blocks=48),
    ],
)
def test_a_burst_on_any_mesh(shape: MeshShape, carrier: str) -> None:
    shape = dataclasses.replace(shape, step_s=0.05, carrier=carrier)
    report, _ = burst(shape)
    assert report.verdict.num_finished == NUM_CLIENTS
