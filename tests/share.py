"""Which cases of the large matrices, and how many examples, `make test` runs; `make test-all` runs every case, and
`make test-examples` every example.

Cases beyond a matrix's share are marked `matrix` as they are collected. The share is the same at every run, and chosen
so that every carrier of a host and every fault is met somewhere in `make test` (tests/style/test_share.py). Rules:

- `Covering`: no value of any parameter is left out; each is met at least once, in as few cases as that takes.
- `Values`: all cases with these values of one parameter.
- `Ids`: these cases. They are named where some cost much more, or mean more, than others.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings

CARRIERS = ("loopback", "shm", "tcp")
"""Within one process, real and simulated; of those from and to cards every case is in the rest."""
BUGS = (
    "expired_lease_keeps_its_blocks", "lease_without_references", "keeps_what_any_layer_has",
    "announces_before_writing", "hash_without_its_past", "whole_prompt_from_cache", "tokens_without_index",
    "failure_ends_as_success", "transfer_is_not_linked", "read_tokens_count_twice", "fenced_worker_never_comes_back",
    "a_flush_that_lies",
)  # fmt: skip
"""Some of each chapter, caught by the first seeds. `make sim` hunts all of them."""

HOSTILE = (
    "a schema of 128 KiB", "references that double", "itself in both of two", "nested deeply", "a list of a million",
    "two million states", "counts in counts", "parentheses",
)  # fmt: skip
"""A grammar of each way to be too large."""


class Rule(Protocol):
    """Chooses the cases of one test that belong to the share."""

    def chosen(self, cases: Sequence[pytest.Function]) -> list[pytest.Function]: ...

    def unmet(self, cases: Sequence[pytest.Function]) -> list[str]:
        """Return what the rule names and no case has: the table has fallen behind the tests."""
        ...


@dataclass(frozen=True)
class Ids:
    """`names`: patterns of the ids between a test's brackets."""

    names: tuple[str, ...]

    def chosen(self, cases: Sequence[pytest.Function]) -> list[pytest.Function]:
        return [case for case in cases if any(fnmatchcase(case.callspec.id, name) for name in self.names)]

    def unmet(self, cases: Sequence[pytest.Function]) -> list[str]:
        return [name for name in self.names if not any(fnmatchcase(case.callspec.id, name) for case in cases)]


@dataclass(frozen=True)
class Values:
    """Tests without the parameter are left whole."""

    parameter: str
    values: tuple[object, ...]

    def chosen(self, cases: Sequence[pytest.Function]) -> list[pytest.Function]:
        return [case for case in cases if case.callspec.params.get(self.parameter, self.values[0]) in self.values]

    def unmet(self, cases: Sequence[pytest.Function]) -> list[str]:
        return []  # a file's tests need not have all of them


@dataclass(frozen=True)
class Covering:
    def chosen(self, cases: Sequence[pytest.Function]) -> list[pytest.Function]:
        """Greedily: next is whoever brings most that is new, the first of equals."""
        values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
        missing, taken = set[tuple[str, int]]().union(*values.values()), list[pytest.Function]()
        while missing:
            best = max(cases, key=lambda case: len(values[case] & missing))
            missing -= values[best]
            taken.append(best)
        return taken

    def unmet(self, cases: Sequence[pytest.Function]) -> list[str]:
        return []


OFTEN = Values("carrier", (*CARRIERS, *(f"sim-{carrier}" for carrier in CARRIERS)))

SHARES: Mapping[str, Rule] = {
    "tests/bus/test_nats.py::test_who_closes_while_it_connects_anew_stays_closed": Covering(),
    "tests/cli/test_up.py::test_up_serves_and_leaves_nothing_behind": Ids(("2",)),  # Ctrl-C
    "tests/engine/test_folders.py": Ids(("alone: *",)),
    "tests/engine/test_grammar.py::test_hostile": Ids(HOSTILE),
    "tests/engine/test_model.py::test_tokens_equal_generate": Covering(),
    "tests/mesh/test_reuse.py::test_every_combination_gives_the_tokens_of_a_single_process": Covering(),
    "tests/plane/test_bad_references.py": OFTEN,
    "tests/plane/test_compression.py::test_arrives_close_to_what_it_was": Covering(),
    "tests/plane/test_compression.py::test_network_that_damages": Covering(),
    "tests/plane/test_contract.py": OFTEN,
    "tests/plane/test_faults.py": OFTEN,
    "tests/plane/test_shapes.py": OFTEN,
    "tests/plane/test_whole_blocks.py": OFTEN,
    "tests/scheduler/test_cost_simulation.py::test_without_reuse_it_is_no_worse_than_least_loaded": Ids(
        ("1P1D-1.5", "4P3D of unequal speed-0.8", "3 aggregated, unequal-0.3")
    ),
    "tests/sim/test_bugs.py::test_caught": Ids(BUGS),
    "tests/sim/test_found.py::test_found": Ids(("*-0",)),
    "tests/sim/test_simulation.py::test_each_fault_by_itself": Ids(("1-*",)),
    "tests/sim/test_simulation.py::test_faults_together": Ids(tuple(str(seed) for seed in range(1_000, 1_004))),
    "tests/sim/test_simulation.py::test_whole_blocks": Ids(("0", "1", "2")),
    "tests/sim/test_simulation.py::test_without_faults_every_request_is_answered": Ids(("0", "1")),
}
"""By file, or by file and test."""


def examples(number: int, at_least: int = 10) -> int:
    """Return how many of a property's examples are drawn: in `make test`, which draws the same each time, a tenth."""
    return number if settings.get_current_profile_name() == "night" else max(at_least, number // 10)


def mark_rest(items: Iterable[pytest.Item], root: Path, *, is_whole: bool) -> None:
    """Mark what is beyond its matrix's share. `is_whole`: files were collected whole.

    Raises pytest.UsageError where a rule names a case that there is not."""
    tests: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("gpu"):
            tests.setdefault((item.path.relative_to(root).as_posix(), item.originalname), []).append(item)
    for (file, name), cases in tests.items():
        rule = SHARES.get(f"{file}::{name}") or SHARES.get(file)
        if rule is None or not is_whole:
            continue
        if unmet := rule.unmet(cases):
            raise pytest.UsageError(f"tests/share.py: {file}::{name} has no case {', '.join(unmet)}")
        chosen = rule.chosen(cases)
        for case in cases:
            if case not in chosen:
                case.add_marker("matrix")
