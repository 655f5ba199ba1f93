"""No test of the gate is judged by the clock: what others bring about is waited for (`tests/waiting.py`), and a limit
is there against hangs alone. In virtual time (`tests/virtual.py`, the simulator) a number of seconds is exact."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests import nightly

SHORTEST_LIMIT_S = 10
CLOCKS = ("monotonic", "monotonic_ns", "now_ms", "perf_counter", "perf_counter_ns", "time", "time_ns")
LIMITS = ("deadline_s", "timeout", "timeout_s")

EXCEPTIONS = {
    "tests/bus/test_nats.py": 5,
    "tests/compose/test_compose_files.py": 1,
    "tests/engine/vllm_engine/test_vllm_mesh.py": 2,
    "tests/gateway/test_failures.py": 1,
    "tests/gateway/test_unauthenticated.py": 1,
    "tests/gateway/test_survival.py": 2,
    "tests/mesh/processes.py": 1,
    "tests/plane/test_reuse.py": 2,
    "tests/scheduler/policies.py": 1,
    "tests/store/rig.py": 1,
    "tests/store/test_tiers.py": 2,
    "tests/wire/test_permissions.py": 1,
}
"""How often a file breaks the rule. It may only become less: who mends one takes it from here."""


def test_no_test_waits_for_the_clock() -> None:
    found = Counter(path for path, tree in judged() for _ in faults(tree))
    assert dict(found) == EXCEPTIONS


def test_what_breaks_the_rule_is_found() -> None:
    bad = (
        "await asyncio.sleep(0.1)", "time.sleep(1)", "async with asyncio.timeout(5): pass",
        "await asyncio.wait_for(work, 0.5)", "client.get(timeout=2)",
        'patch.setattr(limits, "HEAD_S", 0.1)', 'patch.setattr("a.b.GAP_MS", 1)', "assert time.monotonic() - began < 1",
    )  # fmt: skip
    good = (
        "await asyncio.sleep(0)",
        "async with asyncio.timeout(60): pass",
        "assert now_ms() < deadline_ms",
        'patch.setattr(limits, "MAX_KEEPS_PER_S", 0)',
    )
    for code in bad:
        assert len(list(faults(ast.parse(f"async def test():\n    {code}")))) == 1, code
    for code in good:
        assert not list(faults(ast.parse(f"async def test():\n    {code}"))), code


def judged() -> Iterator[tuple[str, ast.Module]]:
    """The files of the gate in which time is real."""
    for path in sorted(Path("tests").rglob("*.py")):
        name, source = path.as_posix(), path.read_text()
        is_nightly = any(name == file or name.startswith(f"{file}/") for file in nightly.FILES)
        is_virtual = "\npytestmark = pytest.mark.virtual_time\n" in source or name.startswith("tests/sim/")
        if not is_nightly and not is_virtual and name not in ("tests/waiting.py", "tests/style/test_clocks.py"):
            yield name, ast.parse(source)


def faults(tree: ast.Module) -> Iterator[ast.AST]:
    """Sleeps of some seconds, limits that a busy machine reaches, assertions about the time that has passed, times that
    are patched in place of being given (`services/times.py`)."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=function, args=arguments, keywords=keywords):
                name = _name(function)
                limits = [word.value for word in keywords if word.arg in LIMITS]
                limits += arguments[:1] if name == "timeout" else arguments[1:2] if name == "wait_for" else []
                sleeps = name == "sleep" and any(number_of(argument) for argument in arguments[:1])
                patches = name == "setattr" and any(_is_time_name(argument) for argument in arguments[:2])
                if sleeps or patches or any(0 < number_of(limit) < SHORTEST_LIMIT_S for limit in limits):
                    yield node
            case ast.Assert() if any(is_time_passed(part) for part in ast.walk(node)):
                yield node
            case _:
                pass


def _is_time_name(node: ast.expr) -> bool:
    name = node.value if isinstance(node, ast.Constant) else None
    return isinstance(name, str) and re.search(r"(?<!_PER)_M?S$", name) is not None


def number_of(node: ast.expr) -> float:
    """Return a number that is written there; 0 for everything else."""
    return float(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, int | float) else 0.0


def is_time_passed(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and any(isinstance(part, ast.Call) and _name(part.func) in CLOCKS for part in ast.walk(node))
    )


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
