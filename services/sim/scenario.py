"""What goes wrong, and when: read from a file, or made from a seed. The simulator and the tests with real processes
carry out the same scenarios.

A scenario file is TOML:

    [[faults]]
    do = "kill"          # see FaultKind
    target = "decode"    # a role, a process's name, a server's (nats-1), or "bus", "plane", "client"
    on = "offered"       # at the `nth` message whose subject ends so; or `at_s` seconds after the first request
    nth = 2
    for_s = 1.0          # how long it lasts; a killed process or engine starts again after so long
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec

from services.errors import UserError
from services.sim.limits import LONG_S

FaultKind = Literal[
    "kill", "pause", "drain", "broker", "broker_pause", "partition", "plane_cut", "loss", "duplication",
    "reordering", "delay", "truncation", "corruption", "stall", "slowness", "refusal", "disconnect", "slow_client",
    "clock_step", "clock_drift", "kill_engine", "hang_engine", "bus_cut",
    "kill_server", "stop_server", "split", "unplug",
]  # fmt: skip
FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
SERVER_FAULTS: frozenset[FaultKind] = frozenset({"kill_server", "stop_server", "split", "unplug"})
"""Faults of one server of a broker of several: it ends, stands still, is cut off from the others, or with its whole
machine from all."""

PROCESS_FAULTS: frozenset[FaultKind] = frozenset(
    {
        "kill", "pause", "drain", "partition", "plane_cut", "clock_step", "clock_drift", "kill_engine", "hang_engine",
        "bus_cut",
    }
)  # fmt: skip
"""Faults of one process."""
PHASES = ("place", "run", "reserved", "offered", "streaming", "landed", "released", "lease", "stored")
"""Last tokens of the subjects at which a fault may happen."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fault. `share`: of the messages, streams or clients that it happens to while it lasts."""

    do: FaultKind
    target: str = ""
    at_s: float = 0.0
    on: str = ""
    nth: int = 1
    for_s: float = 1.0
    share: float = 1.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Faults, and whether some requests may end with an error (`may_fail`) or every one must be answered."""

    faults: tuple[Fault, ...] = ()
    name: str = ""
    may_fail: bool = False
    text: str = ""
    """What the scenario tests, for people."""


def load_scenario(path: Path) -> Scenario:
    """Read a scenario file. Raises UserError."""
    try:
        scenario = msgspec.toml.decode(path.read_text("utf-8"), type=Scenario)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no scenario: {error}") from error
    return msgspec.structs.replace(scenario, name=scenario.name or path.stem)


def fault_kinds(text: str) -> tuple[FaultKind, ...]:
    """Return the kinds that a command line names: `all`, `none`, or names with commas. Raises UserError."""
    if text == "all":
        return FAULT_KINDS
    names = [] if text in ("none", "") else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in FAULT_KINDS]:
        raise UserError(f"no fault is called {unknown[0]!r}; there are: all, none, {', '.join(FAULT_KINDS)}")
    return tuple(kind for kind in FAULT_KINDS if kind in names)


def random_scenario(rng: random.Random, kinds: Sequence[FaultKind], targets: Sequence[str], span_s: float) -> Scenario:
    """Return a few faults of these kinds within the first `span_s` seconds, but for those of one server."""
    kinds = [kind for kind in kinds if kind not in SERVER_FAULTS]
    if not kinds:
        return Scenario()
    chosen = rng.sample(list(kinds), min(len(kinds), rng.choice((1, 1, 2, 2, 3))))
    faults: list[Fault] = []
    for kind in chosen:
        for _ in range(rng.choice((1, 1, 2, 3)) if kind in PROCESS_FAULTS else 1):
            faults.append(_random_fault(rng, kind, targets, span_s))
    return Scenario(faults=tuple(faults), may_fail=True)


def server_faults(
    rng: random.Random, kinds: Sequence[FaultKind], servers: Sequence[str], span_s: float
) -> tuple[Fault, ...]:
    """Return a few faults of servers of these names, of those kinds that are faults of one."""
    kinds = [kind for kind in kinds if kind in SERVER_FAULTS]
    return tuple(_random_fault(rng, rng.choice(kinds), servers, span_s) for _ in range(rng.choice((1, 1, 2, 3))))


LONG_KINDS: frozenset[FaultKind] = frozenset({"kill", "drain", "partition", "plane_cut", "broker", "bus_cut"})
LONG_SHARE = 0.03


def _random_fault(rng: random.Random, kind: FaultKind, targets: Sequence[str], span_s: float) -> Fault:
    phase = rng.choice(PHASES) if rng.random() < 0.5 else ""
    long_s = {
        "pause": 5.0,
        "broker": 5.0,
        "broker_pause": 8.0,
        "partition": 4.0,
        "bus_cut": 5.0,
        "plane_cut": 4.0,
        "kill": 2.5,
        "kill_engine": 2.5,
        "hang_engine": 2.5,
        "drain": 2.0,
        "kill_server": 3.0,
        "stop_server": 5.0,
        "split": 5.0,
        "unplug": 5.0,
    }.get(kind, span_s)
    if kind in LONG_KINDS and rng.random() < LONG_SHARE:
        long_s = LONG_S
    share = {"loss": 0.3, "duplication": 0.5, "reordering": 0.5, "delay": 1.0}.get(kind, 0.8)
    return Fault(
        do=kind,
        target=rng.choice(list(targets)) if kind in PROCESS_FAULTS | SERVER_FAULTS else "",
        at_s=round(rng.uniform(0.0, span_s), 4),
        on=phase,
        nth=rng.randint(1, 8) if phase else 1,
        for_s=round(rng.uniform(0.05, long_s), 4),
        share=round(rng.uniform(0.02, share), 4),
    )
