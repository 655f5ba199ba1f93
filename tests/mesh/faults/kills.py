"""Kills, over and over, under load: whatever dies, every answer is whole."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.mesh.faults.actor import is_there
from tests.mesh.faults.client import Stream
from tests.mesh.faults.harness import FaultMesh
from tests.mesh.faults.truth import Documents

NUM_STREAMS = 8
"""Open at a time."""
TOKENS_BEFORE = 2
"""What some answer must have had before a worker is killed: a kill of an idle mesh proves little."""
ALIVE_WITHIN_S = 60.0
LOGPROB_TOLERANCE = 1e-3
"""Between two answers of other batches."""
MAX_TIMES = 3
"""So many times the kills that were asked for, where they do not cut documents enough."""


@dataclass
class KillReport:
    """`num_cut`: kills of a worker that was in the middle of an answer."""

    num_kills: int = 0
    num_cut: int = 0
    num_streams: int = 0
    num_tokens: int = 0
    num_near_ties: int = 0
    num_resumed: int = 0
    wrong: list[str] = field(default_factory=list[str])
    failed: list[str] = field(default_factory=list[str])
    num_documents: int = 0
    num_cut_documents: int = 0
    """Those that another worker went on with in the middle."""
    invalid: list[str] = field(default_factory=list[str])
    logprob_difference: float = 0.0
    """The largest one of a document's logprobs to those of the first answer to the same request."""

    @property
    def complaints(self) -> list[str]:
        return [*self.wrong, *self.failed, *self.invalid]


class Killing:
    """Keeps streams open, kills workers in the middle of them, and compares every token. `aimed`: of the
    decode workers those are killed that have requests, where any has. `num_cut_documents`: goes on until so many
    documents were cut."""

    def __init__(
        self,
        mesh: FaultMesh,
        num_kills: int,
        on_kill: Callable[[], None],
        *,
        aimed: bool = False,
        num_cut_documents: int = 0,
    ) -> None:
        self.report = KillReport()
        self._mesh = mesh
        self._num_kills = num_kills
        self._on_kill = on_kill
        self._aimed = aimed
        self._num_cut_documents = num_cut_documents
        self._logprobs: dict[int, list[float]] = {}
        """By case, of the first answer that was whole."""
        self._open: set[Stream] = set()
        self._enough = False
        self._documents = Documents(DEMO_MODEL_DIR)

    async def run(self) -> KillReport:
        ties = self._mesh.truth.num_near_ties
        async with asyncio.TaskGroup() as tasks:
            for _ in range(NUM_STREAMS):
                tasks.create_task(self._ask())
            killers = [tasks.create_task(self._kill(role)) for role in ("decode", "prefill")]
            await asyncio.wait(killers)
            self._enough = True
        self.report.num_near_ties = self._mesh.truth.num_near_ties - ties
        return self.report

    async def _ask(self) -> None:
        while not self._enough:
            stream = self._mesh.new_stream()
            self._open.add(stream)
            await asyncio.wait([self._mesh.start(stream)])
            self._open.discard(stream)
            self._judge(stream)

    def _judge(self, stream: Stream) -> None:
        report, who = self.report, f"request {stream.number} ({stream.request_id})"
        report.num_streams += 1
        report.num_tokens += len(stream.tokens)
        report.num_resumed += stream.num_resumed_tokens > 0
        if problem := self._mesh.truth.problem(stream, self._mesh.truth.answers[stream.number]):
            report.wrong.append(f"{who}: {problem}")
        if stream.case.sampling.grammar and stream.ending == "finished":
            report.num_documents += 1
            report.num_cut_documents += stream.num_resumed_tokens > 0
            if problem := self._documents.problem(stream.tokens):
                report.invalid.append(f"{who}: {problem}")
            self._judge_logprobs(stream, who)
        if stream.ending != "finished" or stream.problem:
            report.failed.append(f"{who} {stream.ending}: {stream.error or stream.problem}")

    def _judge_logprobs(self, stream: Stream, who: str) -> None:
        first = self._logprobs.setdefault(stream.number, stream.logprobs)
        if not len(first) == len(stream.logprobs) == len(stream.tokens):
            self.report.wrong.append(f"{who}: {len(stream.logprobs)} logprobs of {len(stream.tokens)} tokens")
            return
        difference = max(abs(one - other) for one, other in zip(stream.logprobs, first, strict=True))
        self.report.logprob_difference = max(self.report.logprob_difference, difference)
        if difference > LOGPROB_TOLERANCE:
            self.report.wrong.append(f"{who}: a logprob differs by {difference:.1e}")

    async def _kill(self, role: str) -> None:
        """Kill one of a role as soon as all of it are there again, three decode workers to one prefill worker.

        An answer that was open at a kill gets on before the role is hit again: a request is given up after five
        attempts in a row that brought its client nothing, as it may be what kills the workers."""
        mesh, share = self._mesh, 0.75 if role == "decode" else 0.25
        members = [child for child in mesh.supervisor.children if child.role == role]
        open_then: dict[Stream, int] = {}
        enough = round(self._num_kills * share)
        for number in range(enough * MAX_TIMES):
            if number >= enough and self.report.num_cut_documents >= self._num_cut_documents:
                break
            await self._until_all_serve([child.name for child in members], open_then)
            await asyncio.sleep(mesh.rng.uniform(0.0, 0.1))  # any moment of what goes on
            busy = {name for name, load in mesh.worker_loads().items() if load.num_running > 0}
            choice = [child for child in members if child.name in busy] if self._aimed and role == "decode" else []
            victim = mesh.rng.choice(choice or members)
            self.report.num_cut += victim.name in busy
            open_then = {stream: len(stream.tokens) for stream in self._open}
            victim.kill()
            self.report.num_kills += 1
            self._on_kill()
            await victim.process.wait()

    async def _until_all_serve(self, names: list[str], open_then: dict[Stream, int]) -> None:
        mesh = self._mesh

        def serve() -> bool:
            loads = mesh.worker_loads()
            ready = all(name in loads and loads[name].state == "ready" for name in names)
            there = all(is_there(child) for child in mesh.supervisor.children if child.name in names)
            got_on = all(stream.ending or len(stream.tokens) > num for stream, num in open_then.items())
            return ready and there and got_on and any(len(s.tokens) >= TOKENS_BEFORE for s in self._open)

        if not await mesh.listener.until(serve, ALIVE_WITHIN_S):
            raise TimeoutError(f"{', '.join(names)} are not all there after {ALIVE_WITHIN_S:.0f} s")
