"""Rules that no linter has: one owner for the environment, tasks in groups, no assert that stands for a check."""

import ast
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.subjects import SUBJECTS

ROOTS = ("schemas", "dataplane", "services")

TASKS_OUTSIDE_A_GROUP = {
    "dataplane/lasting.py": "tries again, and ends its process where it must not",
    "services/bus/nats.py": "closing the connection is waited for with a limit, and ends whoever closed it",
    "services/launch/restart.py": "hears a process, and whoever waits for that one's end awaits it",
    "services/launch/serve.py": "watch the parent and the bus while a service runs: cancelled when it ends",
    "services/launch/supervisor.py": "processes that start are waited for, whichever is ready or ends first",
    "services/runtime.py": "two are waited for, whichever ends first",
    "services/sim/faults.py": "the simulator's own faults, awaited when they are healed",
    "services/sim/platform/loop.py": "the simulator's loop is what a task is made on",
    "services/sim/world.py": "the simulated clients, waited for together with a limit",
}
"""Every other task belongs to an asyncio.TaskGroup, which ends it and hears of its error."""
THREADS = {
    "services/attach/connector/client.py": "a server's: what fails in it is logged, and tried again; joined at its end",
    "services/attach/connector/worker_half.py": "a server's: a load that fails is computed; joined at its end",
    "services/attach/door.py": "a canary's, which ends with a word of its own; nobody waits for it at an end",
    "dataplane/lasting.py": "tries again, and ends its process where it must not",
    "dataplane/cards/pairs.py": "two of a card's communicator: one is waited for, one is given up with it",
    "dataplane/ends/reader.py": "one for each read, which joins it",
    "dataplane/ends/server.py": "one for each stream: joined as the server is closed, and says what it failed by",
    "services/ending.py": "ends the process where its main thread does not",
    "services/engine/child.py": "ends the engine's process where nobody is there any more",
    "services/engine/thread.py": "the engine's: its end is looked for with each tick, and ends the worker",
    "services/gateway/api/grammar_child.py": "has a stack of its own, and is joined",
    "services/telemetry/spans.py": "joined, for a limited time",
}
"""Who starts a thread, and who notices when it ends. One that goes on with its process is made by `lasting_thread`."""
WRITES_FOR_ALL = {
    "services/bench/drive/make_checkpoint.py": "weights of nobody's, for a measurement",
    "services/gateway/api/grammar_child.py": "tells the kernel whom to end first where memory is short",
}
"""Everything else that a service writes is its owner's alone: `services/files.py` makes it."""
CATCH_ASSERTIONS = {
    "dataplane/lasting.py": "it ends the process by it, instead of trying again",
    "services/holder/observe/journal.py": "it says what led to it, and raises it again",
    "services/sim/world.py": "the simulator reports every assertion of the code under test as a problem",
}


def sources() -> Iterator[tuple[str, str]]:
    for root in ROOTS:
        for path in sorted(Path(root).rglob("*.py")):
            yield path.as_posix(), path.read_text()


@pytest.fixture(scope="module")
def nodes() -> dict[str, list[ast.AST]]:
    """Return each file's syntax, node by node."""
    gc.disable()  # what a finalizer parses meanwhile confuses the parser of Python 3.11 (python/cpython#106905)
    try:
        return {name: list(ast.walk(ast.parse(source))) for name, source in sources()}
    finally:
        gc.enable()


def files_with(nodes: dict[str, list[ast.AST]], breaks_rule: Callable[[ast.AST], bool]) -> set[str]:
    return {name for name, of_file in nodes.items() if any(map(breaks_rule, of_file))}


def lines_with(pattern: str) -> set[str]:
    return {name for name, source in sources() if re.search(pattern, source)}


def is_name(node: ast.expr, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def starts_thread(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread", "threading.Timer")


def makes_bare_task(node: ast.AST) -> bool:
    """Say whether this is `asyncio.create_task(...)`, `ensure_future(...)` or `loop.create_task(...)`. A group's own
    `create_task` is the only other one."""
    if not isinstance(node, ast.Call):
        return False
    match node.func:
        case ast.Attribute(attr="ensure_future") | ast.Name(id="ensure_future" | "create_task"):
            return True
        case ast.Attribute(attr="create_task", value=owner):
            return not names_a_group(owner)
        case _:
            return False


def names_a_group(owner: ast.expr) -> bool:
    """`tasks`, `self._tasks`, `group` …: what a TaskGroup is called here."""
    name = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
    return name.strip("_").endswith(("tasks", "group"))


def test_the_environment_is_read_in_one_place() -> None:
    assert lines_with(r"os\.environ|getenv\(") == {"services/config.py"}


def test_no_pickle_no_eval() -> None:
    assert lines_with(r"\bpickle\b|(?<![.\w])eval\(|(?<![.\w])exec\(|shell=True") == set()


def test_who_starts_a_thread_says_who_notices_its_end(nodes: dict[str, list[ast.AST]]) -> None:
    of_services = {name: each for name, each in nodes.items() if "/sim/" not in name and "/bench/" not in name}
    assert files_with(of_services, starts_thread) == THREADS.keys()


def test_tasks_belong_to_a_group(nodes: dict[str, list[ast.AST]]) -> None:
    found = files_with(nodes, makes_bare_task)
    assert found == TASKS_OUTSIDE_A_GROUP.keys()


def test_the_rule_sees_a_task_outside_a_group() -> None:
    def is_bare(code: str) -> bool:
        return any(makes_bare_task(node) for node in ast.walk(ast.parse(code)))

    for code in ("asyncio.create_task(f())", "create_task(f())", "asyncio.ensure_future(f())"):
        assert is_bare(code), code
    assert is_bare("self._loop.create_task(f())") and is_bare("asyncio.get_running_loop().create_task(f())")
    assert not is_bare("tasks.create_task(f())") and not is_bare("self._tasks.create_task(f())")


def test_nothing_is_made_of_an_assertion_that_failed(nodes: dict[str, list[ast.AST]]) -> None:
    """An assert is about us: it is neither caught nor raised as validation of what others said."""

    def catches(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler) or node.type is None:
            return False
        return any(is_name(each, "AssertionError") for each in ast.walk(node.type) if isinstance(each, ast.expr))

    found = files_with(nodes, catches)
    assert found == CATCH_ASSERTIONS.keys()


def test_replies_are_typed(nodes: dict[str, list[ast.AST]]) -> None:
    """A question's reply has the type that its subject declares: nobody narrows it by an assert."""
    replies = {reply.__name__ for subject in SUBJECTS for reply in subject.reply}

    def narrows(node: ast.AST) -> bool:
        if not isinstance(node, ast.Assert) or not isinstance(node.test, ast.Call):
            return False
        return is_name(node.test.func, "isinstance") and is_name(node.test.args[1], *replies)

    found = files_with(nodes, narrows)
    assert found == set()


def test_no_client_of_ours_asks_a_proxy_for_the_mesh(nodes: dict[str, list[ast.AST]]) -> None:
    """What the environment says of proxies is for what is outside."""

    def may_use_one(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        is_client = is_name(node.func.value, "httpx") and node.func.attr in ("AsyncClient", "Client", "get", "post")
        return is_client and not any(keyword.arg == "trust_env" for keyword in node.keywords)

    assert files_with(nodes, may_use_one) == set()


def test_text_is_utf_8_whatever_the_locale(nodes: dict[str, list[ast.AST]]) -> None:
    num_arguments = {"read_text": 0, "write_text": 1}

    def asks_the_locale(node: ast.AST) -> bool:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        return len(node.args) + len(node.keywords) == num_arguments.get(node.func.attr)

    assert files_with(nodes, asks_the_locale) == set()


def writes_by_itself(node: ast.AST) -> bool:
    """Say whether this makes a folder, or a file that anybody may read."""
    if not isinstance(node, ast.Call):
        return False
    match node.func:
        case ast.Attribute(attr="write_text" | "write_bytes" | "mkdir" | "makedirs"):
            return True
        case ast.Attribute(attr="open") | ast.Name(id="open"):
            modes = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            return any(isinstance(mode, str) and re.fullmatch(r"[wax]b?\+?|r\+b?", mode) for mode in modes)
        case _:
            return False


def test_what_is_written_is_its_owners_alone(nodes: dict[str, list[ast.AST]]) -> None:
    found = files_with(nodes, writes_by_itself)
    assert found == WRITES_FOR_ALL.keys() | {"services/files.py"}


def test_the_rule_sees_a_file_that_anybody_may_read() -> None:
    def writes(code: str) -> bool:
        return any(writes_by_itself(node) for node in ast.walk(ast.parse(code)))

    for code in ("p.open('w')", "open(p, 'ab')", "p.write_text(t)", "p.write_bytes(b)", "p.mkdir()"):
        assert writes(code), code
    assert not writes("p.open()") and not writes("p.open('rb')") and not writes("gate.open(ticket)")
