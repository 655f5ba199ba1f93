"""Which tests hold shut what was once found to be open."""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[3]
FINDINGS: Mapping[str, tuple[str, ...]] = {
    "the bus was open": ("wire/test_permissions.py", "cli/test_bus.py", "bus/test_tls.py"),
    "a lease's tenant was whatever the requester wrote; hoarded leases": (
        "worker/test_credentials.py", "worker/test_leases.py", "worker/test_lend.py", "plane/test_tenants.py",
    ),
    "a lying holder was believed": ("worker/test_peers.py", "worker/test_copies.py", "plane/test_bad_references.py"),
    "a paused broker killed the fleet": ("mesh/faults/test_broker_pause.py", "scheduler/test_scheduler_liveness.py"),
    "bodies took the gateway's memory, and came before the key": (
        "gateway/test_unauthenticated.py", "cli/test_host.py",
    ),
    "files for everybody, special tokens, tickets of another life": (
        "cli/test_files.py", "gateway/test_special_tokens.py", "plane/test_ticket.py", "mesh/test_rotation.py",
    ),
    "https, other sites' pages, Host": ("gateway/test_tls.py", "gateway/test_http.py"),
    "absurd numbers": ("wire/test_extremes.py", "gateway/test_bad_input.py", "directory"),
    "grammars took the gateway's memory and time": ("gateway/test_grammars.py", "style/test_patterns.py"),
    "a ticket opened several streams": ("plane/test_bad_references.py",),
    "one tenant held up the others": (
        "worker/test_tenants_in_turn.py", "engine/test_batch.py", "gateway/test_unsent.py", "gateway/test_failures.py",
        "mesh/test_grammars.py",
    ),
    "a revoked identity stayed; anybody answered `$SRV`": ("wire/test_members.py", "wire/test_permissions.py"),
    "malformed frames": ("plane/test_unauthenticated.py",),
}  # fmt: skip
"""Files or folders below tests/."""


@dataclass
class Tested:
    num_passed: int = 0
    num_skipped: int = 0
    failed: list[str] = field(default_factory=list[str])


def tests_of(findings: Mapping[str, tuple[str, ...]]) -> dict[str, Tested]:
    """Run every test of these findings, each with all its cases; say how they ended."""
    paths = sorted({f"tests/{path}" for paths in findings.values() for path in paths})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", f"--junitxml={report}", *paths]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {name: _tested(cases, paths) for name, paths in findings.items()}


def _tested(cases: list[ElementTree.Element], paths: tuple[str, ...]) -> Tested:
    modules = tuple(f"tests.{path.removesuffix('.py').replace('/', '.')}" for path in paths)
    tested = Tested()
    for case in cases:
        module = case.get("classname", "")
        if not any(module == own or module.startswith(own + ".") for own in modules):
            continue
        if case.find("skipped") is not None:
            tested.num_skipped += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            tested.failed.append(f"{module}::{case.get('name')}")
        else:
            tested.num_passed += 1
    return tested
