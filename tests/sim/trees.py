"""A request's spans as a text that can be compared: names, services' roles, parents, links, outcomes, attribute keys.

`python -m tests.sim.trees` writes the golden trees: one of each outcome, as the simulator makes them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.sim import world
from services.sim.mesh import MeshShape
from services.sim.scenario import Fault, Scenario
from services.sim.verdict.expected import ClientRequest
from services.sim.verdict.traces import HTTP_ROOT
from services.sim.world import SimOptions, simulate
from services.telemetry import Key, SpanName, SpanRecord
from tests.promises import nothing_wrong

GOLDEN = Path(__file__).with_name("golden")
STORY = (
    SpanName.TOKENIZE, SpanName.PLACE, SpanName.SCHEDULE, SpanName.LOCATE, SpanName.DISPATCH, SpanName.DUPLICATE_WAIT,
    SpanName.PREFILL, SpanName.PREFILL_QUEUE, SpanName.PREFILL_COMPUTE, SpanName.FIRST_TOKEN, SpanName.KV_TRANSFER,
    SpanName.KV_LEASE_WAIT, SpanName.KV_FIRST_BYTE, SpanName.KV_STREAM, SpanName.KV_VERIFY, SpanName.DECODE,
    SpanName.DECODE_QUEUE, SpanName.DECODE_FIRST_STEP, SpanName.DECODE_STREAM, SpanName.KV_RELEASE,
    SpanName.ENGINE_STEP,
)  # fmt: skip
SHOWN = (Key.ROLE, Key.END, Key.ATTEMPT, Key.OUTCOME, Key.REUSE)
FAMILIES = (f"{Key.TTFT_PART}.", f"{Key.PLACE_TERM}.")


@dataclass(frozen=True)
class Case:
    """One request and what befalls it. `seed`: one in which it befalls the worker that has the request."""

    name: str
    seed: int
    shape: MeshShape
    faults: tuple[Fault, ...] = ()
    max_tokens: int = 6


ONE_OF_EACH = MeshShape(num_prefill=1, num_decode=1, carrier="tcp", num_blocks=128)
CASES = (
    Case("finished", 1, ONE_OF_EACH),
    Case("failed", 1, ONE_OF_EACH, (Fault(do="kill", target="decode", on="offered", for_s=60.0),)),
    Case(
        "cancelled",
        1,
        MeshShape(num_prefill=1, num_decode=1, carrier="tcp", num_blocks=128, step_s=0.02),
        (Fault(do="disconnect", for_s=5.0),),
        max_tokens=200,
    ),
    Case(
        "migrated",
        1,
        MeshShape(num_prefill=1, num_decode=2, carrier="tcp", num_blocks=128),
        (Fault(do="kill", target="decode", on="landed", for_s=60.0),),
        max_tokens=60,
    ),
    Case("partially_recomputed", 15, ONE_OF_EACH, (Fault(do="truncation", for_s=5.0),)),
)


def spans_of(case: Case) -> list[SpanRecord]:
    """Simulate the case, which must break no promise; return the spans of its one request and of its engine steps."""
    spans: list[SpanRecord] = []
    check = world.trace_problems

    def keep(records: list[SpanRecord], **terms: Any) -> list[str]:
        spans.extend(records)
        return check(records, **terms)

    ask = ClientRequest(
        at_s=0.1, prompt=tuple(range(1, 41)), max_tokens=case.max_tokens, temperature=1.0, seed=7, num_choices=1,
        stream=True,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "make_requests", lambda *_: [ask])
        patch.setattr(world, "trace_problems", keep)
        scenario = Scenario(faults=case.faults, may_fail=True)
        report = simulate(case.seed, SimOptions(num_requests=1, scenario=scenario, shape=case.shape))
    nothing_wrong(report.verdict.problems)
    assert sum(report.verdict.faults.values()) == len(case.faults), "the fault never struck"
    return spans


def draw(spans: Sequence[SpanRecord], trace_id: str = "") -> str:
    """Return the tree of the one HTTP request among the spans, or of this trace."""
    (root,) = (s for s in spans if s.name.startswith(HTTP_ROOT) and trace_id in ("", s.trace_id))
    lines = _lines(root, spans, {(s.trace_id, s.span_id): s for s in spans})
    return "\n".join(lines) + "\n"


def _lines(span: SpanRecord, spans: Sequence[SpanRecord], known: dict[tuple[str, str], SpanRecord]) -> list[str]:
    children = [s for s in spans if (s.trace_id, s.parent_id) == (span.trace_id, span.span_id)]
    blocks = sorted((_order(child), [f"  {line}" for line in _lines(child, spans, known)]) for child in children)
    lines, first = [_line(span, known)], 0
    for at, (_, block) in enumerate(blocks):
        if at and blocks[at - 1][1] == block:
            if not lines[first].endswith(" +"):
                lines[first] += " +"  # more of the same
        else:
            first = len(lines)
            lines += block
    return lines


def _order(span: SpanRecord) -> tuple[int, int]:
    return STORY.index(span.name), int(span.attributes.get(Key.ATTEMPT, 0))


def _line(span: SpanRecord, known: dict[tuple[str, str], SpanRecord]) -> str:
    shown = [f"{key.removeprefix('kvmesh.')}={span.attributes[key]}" for key in SHOWN if key in span.attributes]
    error = [f"error={span.error}"] if span.error and span.error != span.attributes.get(Key.OUTCOME) else []
    keys = sorted({_family(key) for key in span.attributes if key not in SHOWN})
    links = sorted({_linked(link, known) for link in span.links})
    return " ".join(
        [span.name, f"({_role(span)})", *shown, *error, *links, f"[{' '.join(keys)}]" if keys else ""]
    ).rstrip()


def _family(key: str) -> str:
    family = next((family + "*" for family in FAMILIES if key.startswith(family)), key)
    return family.removeprefix("kvmesh.")


def _linked(link: str, known: dict[tuple[str, str], SpanRecord]) -> str:
    _, trace_id, span_id, _ = link.split("-")
    span = known.get((trace_id, span_id))
    return f"-> {span.name} ({_role(span)})" if span else "-> what was lost"


def _role(span: SpanRecord) -> str:
    return span.service.partition("-")[0]


def main() -> None:
    for case in CASES:
        (GOLDEN / f"{case.name}.txt").write_text(draw(spans_of(case)))
        sys.stdout.write(f"{case.name}\n")


if __name__ == "__main__":
    main()
