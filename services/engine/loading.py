"""Makes an engine on the host, in whichever process it is to run."""

import importlib
from pathlib import Path
from typing import NamedTuple

from dataplane.blocks.layout import ArenaShape
from dataplane.machine import usable_cores
from services.config import EngineConfig, WorkerConfig
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.checkpoint import Checkpoint
from services.engine.devices import CPU
from services.engine.grammar import Grammars
from services.engine.interface import CompileGrammar, Engine, Steps
from services.engine.tokenizer import read_tokenizer

LIBRARY_METRICS = "vllm:"
"""How the names of the metrics begin that vLLM counts itself."""


class AnswerRules(NamedTuple):
    """What the checkpoint's tokenizer says of answers: the tokens that end one, and how a grammar is understood."""

    eos_token_ids: frozenset[int]
    start_grammar: CompileGrammar


class LoadedEngine(NamedTuple):
    """`device`: what is reported of where it runs: "cpu", or vLLM's version."""

    steps: Steps
    rules: AnswerRules
    device: str


def read_answer_rules(checkpoint: Checkpoint) -> AnswerRules:
    """Raises CheckpointError."""
    tokenizer = read_tokenizer(Path(checkpoint.path))
    ends = tokenizer.ends(checkpoint)
    return AnswerRules(ends, Grammars(tokenizer.tokenizer, checkpoint.vocab_size, ends).compile)


def load_host_engine(
    checkpoint: Checkpoint, shape: ArenaShape, arena: memoryview, settings: WorkerConfig, engine: EngineConfig
) -> LoadedEngine:
    """Return an engine that computes in an arena of this shape. Raises UserError."""
    rules, num_threads = read_answer_rules(checkpoint), settings.num_threads or usable_cores()
    if engine.name == "vllm":
        from services.engine.vllm_engine.loading import load_vllm  # noqa: PLC0415  (seconds of imports)

        loaded = load_vllm(
            checkpoint,
            arena,
            shape,
            token_budget=settings.token_budget,
            num_threads=num_threads,
            kv_format=engine.kv_format,
            kv_bytes=engine.kv_bytes,
            args=engine.args,
        )
        return LoadedEngine(loaded.steps, rules, loaded.device)
    from services.engine.torch_engine.model import load_engine  # noqa: PLC0415  (seconds of imports)

    ours = load_engine(checkpoint, arena_buffer=arena, shape=shape, num_threads=num_threads)
    return LoadedEngine(planned_steps(ours, checkpoint, settings), rules, CPU)


def import_engine(name: str) -> None:
    """Import what an engine is made of, which takes seconds. Raises ImportError."""
    if name == "vllm":
        from services.engine.vllm_engine.loading import import_vllm  # noqa: PLC0415

        import_vllm()
    else:
        importlib.import_module("services.engine.torch_engine.model")


def planned_steps(engine: Engine, checkpoint: Checkpoint, settings: WorkerConfig) -> BatchSteps:
    """Return the steps of an engine of ours."""
    return BatchSteps(engine, Batch(settings.token_budget, context_length=checkpoint.context_length))
