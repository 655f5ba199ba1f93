"""What clients write of answers, as a gateway has it understood: by a process with limits, each tenant in turn."""

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from schemas import subjects
from schemas.request import AskGrammar, digest_of_grammar
from services.config import MeshConfig
from services.gateway import limits
from services.gateway.api.constraints import Constraint, Written
from services.gateway.api.grammars import GrammarProcess, UnderstoodGrammars
from services.gateway.api.guard import NotNowError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.turn import Turn
from services.times import GatewayTimes
from tests.engine.grammar_rig import Checkpoint
from tests.gateway.conftest import Rig
from tests.waiting import until

TIMEOUT_S = 60.0
WORDS = [f"w{number}" for number in range(60)]


def lark(text: str) -> Constraint:
    return Constraint(Written("guided_grammar", "grammar", text))


def schema(value: object) -> Constraint:
    return Constraint(Written("response_format", "schema", json.dumps(value)))


GOOD = lark('start: "good"')
ALL_WORDS = lark("start: A\nA: " + " & ".join(f"/(?s:.*){word}(?s:.*)/" for word in WORDS))
"""The states of its automaton double with each word."""


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    demo = Checkpoint("demo", Path())
    yield GrammarProcess(demo.tokenizer, demo.vocab_size, demo.eos)


def children() -> set[int]:
    """Return the processes that understand grammars for this one."""
    return {int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and _is_child(each)}


def _is_child(folder: Path) -> bool:
    try:
        parent = int((folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1])
        return parent == os.getpid() and b"grammar_child" in (folder / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


# The process.


def test_what_is_understood_is_the_workers_grammar(process: GrammarProcess) -> None:
    assert process.read_grammar(GOOD, TIMEOUT_S) == 'start: "good"'
    assert process.read_grammar(lark('root ::= "a"'), TIMEOUT_S).endswith('start: "a"\n')


def test_what_is_refused_is_refused_by_name(process: GrammarProcess) -> None:
    with pytest.raises(InvalidRequestError, match=r"at /items/minLenght: .*is `minLength` meant") as raised:
        process.read_grammar(schema({"items": {"minLenght": 1}}), TIMEOUT_S)
    assert (raised.value.param, raised.value.code, raised.value.status) == ("response_format", "invalid_schema", 400)


@pytest.mark.parametrize(
    "hostile",
    [
        ALL_WORDS,
        schema({"type": "string", "allOf": [{"pattern": word} for word in WORDS]}),
        schema({"type": "integer", "minimum": -(2**63), "maximum": -(2**63), "multipleOf": 2}),
    ],
    ids=["lark", "schema", "at which the library ends its process"],
)
def test_what_would_take_all_memory_is_refused(process: GrammarProcess, hostile: Constraint) -> None:
    with pytest.raises(InvalidRequestError, match="to understand: simplify it"):
        process.read_grammar(hostile, TIMEOUT_S)
    assert process.read_grammar(GOOD, TIMEOUT_S)


def test_what_takes_too_long_is_refused(process: GrammarProcess) -> None:
    with pytest.raises(InvalidRequestError, match="to understand: simplify it"):
        process.read_grammar(ALL_WORDS, 0.01)


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 32_000,
        "%json//" * 4_000,
        "start: " + "(" * 16_000,
        "start: r0\n" + "\n".join(f"r{at}: r{at + 1}" for at in range(2_300)) + '\nr2300: "a"',
        "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(1_700)) + '\nr1700 ::= "a"',
    ],
)
def test_what_is_long_is_answered(process: GrammarProcess, text: str) -> None:
    assert len(text) <= limits.MAX_CLIENT_GRAMMAR_CHARACTERS
    try:
        assert process.read_grammar(lark(text), TIMEOUT_S)
    except InvalidRequestError as error:
        assert "cannot be held" in error.message


def test_a_process_that_was_killed_is_started_again() -> None:
    demo, others = Checkpoint("demo", Path()), children()
    process = GrammarProcess(demo.tokenizer, demo.vocab_size, demo.eos)
    assert process.read_grammar(GOOD, TIMEOUT_S)
    (first,) = children() - others
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(first, number)  # it may be one of a group that is told so
    assert process.read_grammar(GOOD, TIMEOUT_S) and children() - others == {first}
    os.kill(first, signal.SIGKILL)
    assert process.read_grammar(GOOD, TIMEOUT_S)
    (second,) = children() - others
    assert second != first
    del process
    gc.collect()
    assert not children() - others, "it ends with its owner"


def test_a_model_without_an_end() -> None:
    endless = GrammarProcess(Tokenizer(models.WordLevel()), 10, [])
    with pytest.raises(InvalidRequestError, match="no token that ends a text"):
        endless.read_grammar(GOOD, TIMEOUT_S)


# What was understood, and whose turn it is.


class FakeReader:
    """Understands a grammar when it is let; `bad` never."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Semaphore(0)

    def load_tokens(self) -> None:
        pass

    def read_grammar(self, constraint: Constraint, timeout_s: float) -> str:
        assert constraint.document is not None
        text = constraint.document.text
        self.asked.append(text)
        assert self.go.acquire(timeout=60)
        if text == "bad":
            raise InvalidRequestError("it is bad", "guided_grammar")
        return f"{text} is understood"


def times() -> GatewayTimes:
    return MeshConfig().times.gateway


async def test_what_is_known_is_not_understood_again() -> None:
    reader = FakeReader()
    grammars = UnderstoodGrammars(reader, times())
    reader.go.release(3)
    asked = [grammars.grammar_of(lark("one"), owner) for owner in ("a", "a", "a")]
    assert await asyncio.gather(*asked) == ["one is understood"] * 3 and reader.asked == ["one"]
    with pytest.raises(InvalidRequestError, match="it is bad"):
        await grammars.grammar_of(lark("bad"), "a")
    with pytest.raises(InvalidRequestError, match="it is bad"):
        await grammars.grammar_of(lark("bad"), "a")
    assert reader.asked == ["one", "bad", "bad"]


async def test_so_many_are_kept() -> None:
    reader = FakeReader()
    grammars = UnderstoodGrammars(reader, times())
    texts = [str(number) for number in range(limits.MAX_KEPT_GRAMMARS + 1)]
    reader.go.release(len(texts) + 1)
    for text in [*texts, texts[-1], texts[0]]:
        await grammars.grammar_of(lark(text), "a")
    assert reader.asked == [*texts, texts[0]]


async def begun(turn: Turn, owner: str, name: str, order: list[str], wait: Callable[[], object]) -> asyncio.Task[None]:
    """Return a task that waits for its turn, and then does what waits."""

    def work() -> None:
        order.append(name)
        wait()

    task = asyncio.create_task(turn.work(owner, work))
    await asyncio.sleep(0)
    return task


async def test_each_owner_has_a_line() -> None:
    """Who comes with forty does not keep those with one waiting for forty."""
    turn, order, go = Turn("", 60.0), list[str](), threading.Semaphore(0)

    def wait() -> None:
        assert go.acquire(timeout=60)

    tasks = [await begun(turn, "a", f"a{number}", order, wait) for number in range(40)]
    tasks += [await begun(turn, owner, f"{owner}{number}", order, wait) for number in range(2) for owner in ("b", "c")]
    go.release(len(tasks))
    await asyncio.gather(*tasks)
    assert order[:7] == ["a0", "b0", "c0", "a1", "b1", "c1", "a2"] and len(order) == 44


async def test_one_of_each_owner_at_a_time() -> None:
    turn, order, go = Turn("", 60.0, at_once=2), list[str](), threading.Semaphore(0)

    def wait() -> None:
        assert go.acquire(timeout=60)

    tasks = [await begun(turn, owner, name, order, wait) for owner, name in (("a", "a0"), ("a", "a1"), ("b", "b0"))]
    await until(lambda: len(order) == 2)
    assert sorted(order) == ["a0", "b0"]
    go.release(3)
    await asyncio.gather(*tasks)
    assert order[2] == "a1"


async def test_who_waits_too_long_is_told_to_come_again() -> None:
    turn, go = Turn("others are first", 0.01), threading.Event()
    first = await begun(turn, "a", "a", [], lambda: go.wait(60))
    with pytest.raises(NotNowError, match="others are first") as refused:
        await turn.work("b", lambda: None)
    assert refused.value.fail.status == 503 and refused.value.fail.retry_after_ms > 0
    go.set()
    await first
    assert await turn.work("b", lambda: "done") == "done"


async def test_who_goes_away_takes_nobody_s_turn() -> None:
    turn, order, go = Turn("", 60.0), list[str](), threading.Event()
    first = await begun(turn, "a", "a", order, lambda: go.wait(60))
    gone, stays = [await begun(turn, owner, owner, order, lambda: None) for owner in ("b", "c")]
    gone.cancel()
    go.set()
    await asyncio.gather(first, stays)
    assert order == ["a", "c"] and gone.cancelled()


async def test_a_long_grammar_stays_with_the_gateway_which_tells_it(rig: Rig) -> None:
    choices = ["x" * 3_000, "y" * 3_000]
    body = {"model": rig.model.name, "prompt": "Q", "n": 3, "max_tokens": 2, "guided_choice": choices}
    rig.mesh.gate.clear()
    asked = asyncio.create_task(rig.http.post("/v1/completions", json=body))
    await rig.mesh.until(lambda: len(rig.mesh.runs) == 3)
    for run in rig.mesh.runs:
        question = AskGrammar(request_id=run.request_id, attempt=1, deadline_ms=run.deadline_ms)
        told = await rig.mesh.bus.ask(subjects.GRAMMAR, (run.gateway_id,), question, 5)
        assert not run.sampling.grammar and choices[1] in told.grammar
        assert digest_of_grammar(told.grammar) == run.sampling.grammar_digest
    rig.mesh.gate.set()
    assert (await asked).status_code == 200
    run = rig.mesh.runs[0]
    question = AskGrammar(request_id=run.request_id, attempt=1, deadline_ms=run.deadline_ms)
    assert not (await rig.mesh.bus.ask(subjects.GRAMMAR, (run.gateway_id,), question, 5)).grammar, "it is over"


async def test_what_fits_into_no_message_is_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(rig.mesh.bus.connection), "max_bytes", 10_000)
    body = {"model": rig.model.name, "prompt": "Q", "max_tokens": 2, "guided_choice": ["x" * 4_000, "y" * 4_000]}
    refused = await rig.http.post("/v1/completions", json=body)
    assert refused.status_code == 413 and refused.json()["error"]["param"] == "guided_choice"
