"""What one process says: the engine alone, and transformers' own `generate`, with proofs of near-ties."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for, uniform_shape
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.checkpoint import Checkpoint, layout_of, read_checkpoint
from services.engine.grammar import Grammars
from services.engine.interface import Sequence
from services.engine.sampler import near_tie
from services.engine.tokenizer import read_tokenizer
from services.engine.torch_engine.model import TransformersEngine, load_engine

BLOCK_SIZE = 16
SAME_NAME = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "min_tokens", "logprobs",
)  # fmt: skip
"""What a request's body calls as we do."""


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    sampling: SamplingParams

    @property
    def fields(self) -> dict[str, Any]:
        """As a body of `/v1/completions` has it."""
        asked = msgspec.structs.asdict(self.sampling)
        fields = {name: asked[name] for name in SAME_NAME}
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in self.sampling.logit_bias}
        fields["allowed_token_ids"] = list(self.sampling.allowed_token_ids) or None
        if self.sampling.grammar:
            fields["structured_outputs"] = {"grammar": self.sampling.grammar}
        return {"prompt": self.prompt} | fields


class SingleProcess:
    """The engine in this process, one request after another."""

    def __init__(self, model: Path) -> None:
        self.checkpoint: Checkpoint = read_checkpoint(str(model))
        layout = layout_of(self.checkpoint, dtype="float32", block_size=BLOCK_SIZE)
        self._num_blocks = num_blocks_for(self.checkpoint.context_length, BLOCK_SIZE)
        self._buffer = memoryview(bytearray(self._num_blocks * layout.block_bytes))
        self._engine: TransformersEngine = load_engine(
            self.checkpoint,
            arena_buffer=self._buffer,
            shape=uniform_shape(layout, self._num_blocks),
            num_threads=1,
        )
        checkpoint = self.checkpoint
        self._grammars = Grammars(
            read_tokenizer(Path(checkpoint.path)).tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids
        )

    def run(self, case: Case, number: int = 0) -> list[int]:
        batch = Batch(512, context_length=self.checkpoint.context_length)
        batch.add(
            Sequence(
                request_id=RequestId(f"single-{number}"),
                number=number,
                token_ids=list(case.prompt),
                num_prompt_tokens=len(case.prompt),
                sampling=case.sampling,
                tables=(BlockTable((Segment(0, self._num_blocks),)),) * len(self._engine.layout.groups),
                stop_token_ids=frozenset() if case.sampling.ignore_eos else self.checkpoint.eos_token_ids,
                grammar=self._grammars.compile(case.sampling.grammar) if case.sampling.grammar else None,
            )
        )
        answer: list[int] = []
        while items := batch.plan():
            answer += [t.token_id for t in batch.commit(items, self._engine.compute(items), 0, 0).sampled]
        return answer


@dataclass
class Verdict:
    """Counts of what was compared. `wrong` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter[str])
    wrong: list[str] = field(default_factory=list[str])


class Judge:
    """Compares answers; a difference passes only where teacher-forced logits of the library prove a near-tie."""

    def __init__(self, model: Path) -> None:
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        checkpoint = read_checkpoint(str(model))
        self._eos = checkpoint.eos_token_ids
        self._grammars = Grammars(read_tokenizer(model).tokenizer, checkpoint.vocab_size, checkpoint.eos_token_ids)
        self.verdict = Verdict()

    def generate(self, case: Case) -> list[int]:
        """Return the library's own greedy answer."""
        prompt = torch.tensor([case.prompt])
        with torch.inference_mode():
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=case.sampling.max_tokens,
                do_sample=False,
                top_k=None,
                top_p=None,
                temperature=None,
            )
        return output[0, len(case.prompt) :].tolist()

    def compare(self, what: str, case: Case, expected: list[int], got: list[int]) -> None:
        """Count the answer as equal, as a proven near-tie, or as wrong."""
        if expected == got:
            self.verdict.counts[f"{what}: equal"] += 1
            return
        at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), None)
        if at is None:
            self.verdict.wrong.append(f"{what}: lengths {len(expected)} and {len(got)}: {expected} {got}")
            return
        with torch.inference_mode():
            logits = self._model(torch.tensor([case.prompt + expected[:at]])).logits[0, -1].float()
        tokens = [*case.prompt, *expected[:at]]
        sequence = Sequence(
            RequestId("judged"), 0, tokens, len(case.prompt), case.sampling, (), stop_token_ids=self._eos,
            grammar=self._grammars.compile(case.sampling.grammar) if case.sampling.grammar else None,
        )  # fmt: skip
        if near_tie(logits, sequence):
            self.verdict.counts[f"{what}: near-tie"] += 1
        else:
            self.verdict.wrong.append(f"{what}: token {at} of a {len(case.prompt)}-token prompt: {expected} {got}")
