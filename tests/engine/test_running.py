"""What a worker's engine does for it, with either engine, on a thread of the worker and in a process of its own."""

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for
from dataplane.carriers.host import HostArena
from schemas.block import pack_tokens
from schemas.ids import RequestId, WorkerId
from schemas.request import SamplingParams
from services.config import EngineConfig, EngineName, MeshConfig, ModelConfig, WorkerConfig
from services.engine.checkpoint import read_checkpoint
from services.engine.client import EngineCallbacks
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.interface import LayerListener
from services.engine.messages import SampledToken, StepResult, SubmitSequence
from services.engine.process import EngineProcess
from services.launch.engine_choice import with_engine
from services.worker.parts import load_parts

TIMEOUT = 60.0
PROMPT = [1 + 7919 * at % 240 for at in range(150)]
"""Longer than a step's budget, and than some blocks."""
NUM_ANSWER = 20
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NUM_ANSWER, temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=NUM_ANSWER, temperature=1.0, seed=4, ignore_eos=True),
    "logprobs": SamplingParams(max_tokens=NUM_ANSWER, temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=1),
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


class Heard:
    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        self.told.append((layer, num_tokens))


class Worker:
    """An arena and the engine that computes in it."""

    def __init__(self, engine: EngineName, *, in_process: bool) -> None:
        config = MeshConfig(
            model=ModelConfig(path=str(DEMO_MODEL_DIR)),
            worker=WorkerConfig(num_threads=1, kv_bytes=32 << 20, token_budget=64, device="cpu"),
            engine=EngineConfig(name=engine, process=in_process),
            ticket_secrets=("s" * 32,),
            tenant_seed="s" * 32,
        )
        checkpoint = read_checkpoint(str(DEMO_MODEL_DIR), engine)
        config = with_engine(config, checkpoint)
        self.parts = load_parts(config, "decode", WorkerId("decode-0"))
        assert isinstance(self.parts.arena, HostArena)
        self.arena = self.parts.arena.array
        self.names: list[str] = []
        self.tokens: dict[str, list[SampledToken]] = {}
        self.ends: queue.Queue[tuple[str, str]] = queue.Queue()
        self.engine = self.parts.make_engine(
            EngineCallbacks(
                self._on_step,
                lambda failed, reason: [self.ends.put((self.names[each], reason)) for each in failed],  # type: ignore[arg-type]
                lambda removed: self.ends.put((self.names[removed], "removed")),
            )
        )
        assert isinstance(self.engine, EngineProcess) == in_process
        self.engine.start_engine()

    def close(self) -> None:
        assert self.engine.stop_engine(TIMEOUT)
        self.engine.close()
        self.parts.arena.close()

    def submit(
        self,
        name: str,
        sampling: SamplingParams,
        first_block: int,
        *,
        tokens: list[int] | None = None,
        num_computed: int = 0,
        listener: LayerListener | None = None,
    ) -> int:
        """Return its number."""
        num_blocks = num_blocks_for(len(PROMPT) + sampling.max_tokens, self.parts.limits.block_size)
        self.names.append(name)
        sequence = SubmitSequence(
            number=len(self.names) - 1,
            request_id=RequestId(name),
            tokens=pack_tokens(tokens or PROMPT),
            num_prompt_tokens=len(PROMPT),
            sampling=sampling,
            tables=(BlockTable((Segment(first_block, num_blocks),)),),
            num_computed_tokens=num_computed,
            max_local_tokens=1 if listener else None,
            stop_token_ids=tuple(self.parts.limits.eos_token_ids),
            wants_prompt_logprobs=sampling.prompt_logprobs is not None,
        )
        self.engine.submit(sequence, listener)
        return sequence.number

    def run(self, name: str, sampling: SamplingParams, first_block: int, **more: Any) -> list[int]:
        """Return the answer's tokens, once it has ended well."""
        self.submit(name, sampling, first_block, **more)
        assert self.ends.get(timeout=TIMEOUT) == (name, "")
        return [token.token_id for token in self.tokens[name]]

    def _on_step(self, result: StepResult) -> None:
        for token in result.sampled:
            name = self.names[token.number]
            self.tokens.setdefault(name, []).append(token)
            if token.local_end:
                self.ends.put((name, ""))


Workers = tuple[Worker, Worker]
"""On a thread, and in a process."""


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    if request.param == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed here: make vllm-test")
    made = Worker(request.param, in_process=False), Worker(request.param, in_process=True)
    yield made
    for worker in made:
        worker.close()


def both(workers: Workers, run: Callable[[Worker], Any]) -> list[Any]:
    return [run(worker) for worker in workers]


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_an_answer_is_the_same_in_both(kind: str, workers: Workers) -> None:
    def run(worker: Worker) -> object:
        answer = worker.run(f"answer-{kind}", SAMPLINGS[kind], 0)
        assert len(answer) == SAMPLINGS[kind].max_tokens
        tokens = worker.tokens[f"answer-{kind}"]
        told = [*(tokens[0].prompt_logprobs or ()), *(token.logprob for token in tokens if token.logprob is not None)]
        return answer, [[token for token, _ in each.top] for each in told], [each.logprob for each in told]

    (answer, tops, logprobs), (answer_apart, tops_apart, logarithms_apart) = both(workers, run)
    assert (answer, tops) == (answer_apart, tops_apart)
    assert logprobs == pytest.approx(logarithms_apart, abs=1e-4), "sums of another order may differ in the last bits"


def test_a_prompt_is_told_layer_by_layer_and_goes_on_elsewhere(workers: Workers) -> None:
    """What one computes the other continues, either way round."""
    for source, target in (workers, workers[::-1]):
        layout, size = source.parts.shape.layout, source.parts.limits.block_size
        number = len(source.names)
        expected = source.run(f"alone-{number}", SAMPLINGS["seeded"], 0)
        heard = Heard()
        (first,) = source.run(f"prompt-{number}", SAMPLINGS["seeded"], 100, listener=heard)
        assert first == expected[0]
        for layer in range(layout.num_layers):
            told = [num_tokens for each, num_tokens in heard.told if each == layer]
            assert told == sorted(told) and told[-1] >= len(PROMPT) // size * size
        target.arena[:] = source.arena
        present = len(PROMPT) if not layout.whole_blocks else len(PROMPT) // size * size
        tokens = [*PROMPT, first]
        following = target.run(f"rest-{number}", SAMPLINGS["seeded"], 100, tokens=tokens, num_computed=present)
        assert [first, *following] == expected


def test_who_is_withdrawn_leaves_and_the_others_go_on(workers: Workers) -> None:
    def run(worker: Worker) -> object:
        long = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        number = worker.submit("withdrawn", long, 0)
        worker.submit("other", SAMPLINGS["greedy"], 60)
        worker.engine.cancel(number)
        ends = {worker.ends.get(timeout=TIMEOUT) for _ in range(2)}
        assert ends == {("withdrawn", "removed"), ("other", "")}
        return [token.token_id for token in worker.tokens["other"]]

    threaded, apart = both(workers, run)
    assert threaded == apart


def test_a_document_is_held_to_its_grammar(workers: Workers) -> None:
    def run(worker: Worker) -> object:
        grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
        sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=3, grammar=grammar)
        worker.engine.start_grammar(grammar).result(TIMEOUT)
        return worker.run("document", sampling, 0)

    threaded, apart = both(workers, run)
    assert threaded == apart
    assert threaded


def test_a_process_computes_with_as_many_threads_as_its_worker_may(workers: Workers) -> None:
    """vLLM's own OpenMP threads go by what was set before the process began."""
    engine = workers[1].engine
    assert isinstance(engine, EngineProcess)
    environment = Path(f"/proc/{engine._child.process.pid}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in environment
