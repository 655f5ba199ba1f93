"""Trains and evaluates the demo checkpoint.

    python -m tests.engine.train_demo_model [--out DIR] [--minutes N] [--seed N]
    python -m tests.engine.train_demo_model evaluate [--out DIR] [--prompts N] [--seed N]

Looking a fact up in a document takes two circuits at once: binding a code to the name it follows, and matching the
name of the question against all of them. Trained on long documents from the start the model finds neither, and answers
with any code of the document. So training is a curriculum. Its first stage is copying random words, where every token
teaches to match and to look at what follows the match (an induction head); then come two facts with one-word names,
full names, more facts, filler, and longer documents. A stage ends when the share of right answers (on samples that are
always fresh) passes the stage's bar. Each sample asks many questions about its document, so that every forward pass has
many answers to learn from.
"""

# The type stubs of torch and transformers leave parts of many signatures open.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from services.engine.demo_model import DEMO_MODEL_DIR, corpus

MAX_POSITIONS: Final = 8192
ROPE_THETA: Final = 1e6
WIDTH: Final = 128
HEAD_DIM: Final = 32
KEY_VALUE_HEADS: Final = 2
NEW_KEYS: Final = ("backend", "extra_special_tokens")  # of tokenizer_config.json, which transformers 4 misreads
PEAK_LEARNING_RATE: Final = 3e-3
NORMS_LEARNING_RATE_SCALE: Final = 1.7
WARMUP_STEPS: Final = 100
DECAY_SHARE: Final = 0.25  # of the training time, at its end, over which the learning rate falls to its floor
LEARNING_RATE_FLOOR: Final = 0.03  # as a share of the peak
AVERAGING_WEIGHT: Final = 0.03  # of the last batch, in the averages that are reported and that end a stage
MIN_QUESTIONS: Final = 6  # asked in a training sample, more where there are more facts
IGNORED: Final = -100  # label of a position that is no part of an answer

CHAT_TEMPLATE: Final = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] if part['type'] == 'text' %}
{{- part['text'] }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the curriculum: what its samples look like, and when it is learned."""

    name: str
    facts: tuple[int, int]
    """Fewest and most facts in a document."""
    tokens: tuple[int, int]
    """Shortest and longest document; 0 is a document without filler."""
    rows: int
    """Samples in a batch. Longer documents come in smaller batches, so that steps take about the same time."""
    chat_share: float
    """Share of the samples that are conversations; the others are plain ``Q: ... A:`` prompts."""
    bar: float = 0.95
    """The stage is learned when this share of the first answers is right, averaged over its last batches."""
    single_names: bool = False
    copies: bool = False
    """Samples are random words and their copy instead of documents; ``tokens`` is their number, ``facts`` unused."""


STAGES: Final[tuple[Stage, ...]] = (
    Stage("copying random words", (0, 0), (8, 24), 32, 0.0, bar=0.5, copies=True),
    Stage("one-word names, 2 facts", (2, 2), (0, 0), 24, 0.0, bar=0.9, single_names=True),
    Stage("full names, 2 facts", (2, 2), (0, 0), 24, 0.0, bar=0.93),
    Stage("3-4 facts", (3, 4), (0, 0), 24, 0.0),
    Stage("2-6 facts, 40-160 tokens", (2, 6), (40, 160), 24, 0.2),
    Stage("4-10 facts, 100-400 tokens", (4, 10), (100, 400), 10, 0.3),
    Stage("4-16 facts, 300-1,000 tokens", (4, 16), (300, 1000), 6, 0.3),
    Stage("4-16 facts, 800-2,200 tokens", (4, 16), (800, 2200), 3, 0.3),
    Stage("4-20 facts, 1,500-3,600 tokens", (4, 20), (1500, 3600), 2, 0.3, bar=math.inf),
)
REHEARSAL_SHARE: Final = 0.4
"""Share of the batches that come from an earlier stage, of those from ``FIRST_REHEARSED`` on."""
FIRST_REHEARSED: Final = 4

COPIED_WORDS: Final[tuple[str, ...]] = (
    *(f" {word}" for word in (*corpus.FIRST_NAMES, *corpus.SURNAMES, *corpus.ADJECTIVES, *corpus.NOUNS)),
    *("0123456789" * 5),
)
"""What the first stage copies: words, and often enough digits."""


def report(line: str) -> None:
    """Writes one line of progress."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# --------------------------------------------------------------------------------------------------------------------
# Tokenizer and model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds the tokenizer: byte-level BPE whose merges make one token of every corpus word, and none of two digits.

    It has no normalizer and all 256 bytes in its alphabet, so decoding what it encoded gives the text back, whatever
    the text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [corpus.END_OF_TEXT, corpus.IM_START, corpus.IM_END]
    # Every word occurs once and pairs are merged while any is left: the training ends with one token for each word.
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = sorted(set(corpus.vocabulary()))
    tokenizer.train_from_iterator(words, trainer)
    split = [word for word in words if len(tokenizer.encode(word).ids) != 1]
    if split:
        raise RuntimeError(f"corpus words of more than one token: {split[:10]}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=corpus.END_OF_TEXT,
        pad_token=corpus.END_OF_TEXT,
        additional_special_tokens=[corpus.IM_START, corpus.IM_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def build_model(vocab_size: int, end_of_text: int) -> Qwen3ForCausalLM:
    """Builds the untrained model: four layers of width 128, grouped-query attention, tied embeddings."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        # A large base leaves most of the rotated dimensions nearly constant over a few thousand positions, so what is
        # matched by content alone is found at any distance.
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=end_of_text,
        pad_token_id=end_of_text,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            # Queries and keys that start out correlated make attention favour equal tokens from the first step on:
            # matching, which all answers need, is then strengthened by training and need not be found by it.
            attention = cast(Any, layer).self_attn
            queries = cast(Tensor, attention.q_proj.weight).view(KEY_VALUE_HEADS, -1, HEAD_DIM, WIDTH)
            keys = cast(Tensor, attention.k_proj.weight).view(KEY_VALUE_HEADS, HEAD_DIM, WIDTH)
            keys.copy_(queries.mean(1) + 0.7 * keys)
            queries.copy_(0.7 * (keys[:, None] + queries))
    return model


# --------------------------------------------------------------------------------------------------------------------
# Samples


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a sample's text, and whether it is an answer (the part that the model learns to write)."""

    text: str
    is_answer: bool


def make_sample(rng: Random, stage: Stage) -> list[Segment]:
    """Makes one training sample: a document, then questions about its facts, each with its answer.

    The questions are drawn independently: were every fact asked for once, the last could be answered by elimination,
    and the model would learn that before it learns to match names. Every answer ends in its end token although the next
    question follows, so that a model asked one question stops by itself.
    """
    if stage.copies:
        return _copying_segments(rng, rng.randint(*stage.tokens))
    facts = corpus.make_facts(
        rng, rng.randint(*stage.facts), single_names=stage.single_names, shared_name_chance=rng.choice((0.0, 0.3, 0.8))
    )
    document = corpus.make_document(rng, facts, rng.randint(*stage.tokens))
    asked = rng.choices(facts, k=max(len(facts), MIN_QUESTIONS))
    if rng.random() < stage.chat_share:
        return _chat_segments(rng, document, asked)
    return _plain_segments(rng, document, asked)


def _copying_segments(rng: Random, num_words: int) -> list[Segment]:
    text = "".join(rng.choices(COPIED_WORDS, k=num_words))
    first, second = rng.choices(COPIED_WORDS, k=2)
    return [Segment(text + first, False), Segment(text, True), Segment(second, False), Segment(text, True)]


def _plain_segments(rng: Random, document: str, facts: Sequence[corpus.Fact]) -> list[Segment]:
    before_question, before_answer = rng.choice((" ", " ", "\n", "\n\n")), rng.choice((" ", " ", "\n"))
    segments: list[Segment] = []
    text = document
    for fact in facts:
        segments.append(Segment(f"{text}{before_question}Q: {fact.question}{before_answer}A:", False))
        segments.append(Segment(f" {fact.code}{corpus.END_OF_TEXT}", True))
        text = ""
    return segments


def _chat_segments(rng: Random, document: str, facts: Sequence[corpus.Fact]) -> list[Segment]:
    text = ""
    separator = rng.choice((" ", " ", "\n", "\n\n"))
    asks = rng.choice(("", "", "Q: "))
    place = rng.random()
    if place < 0.2:  # the document is the system message
        text = f"{corpus.IM_START}system\n{document}{corpus.IM_END}\n"
        document = ""
    elif place < 0.6:
        message = rng.choice((*corpus.SYSTEM_MESSAGES, corpus.filler_sentence(rng)))
        text = f"{corpus.IM_START}system\n{message}{corpus.IM_END}\n"
    segments: list[Segment] = []
    for fact in facts:
        question = f"{document}{separator if document else ''}{asks}{fact.question}"
        text += f"{corpus.IM_START}user\n{question}{corpus.IM_END}\n{corpus.IM_START}assistant\n"
        segments.append(Segment(text, False))
        segments.append(Segment(f"{fact.code}{corpus.IM_END}", True))
        text, document = "\n", ""
    return segments


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids, padded on the right (causal attention keeps padding from mattering), and the answers' labels."""

    ids: Tensor
    labels: Tensor
    """For every position the token that follows it where that is part of an answer, else ``IGNORED``."""
    is_first_answer: Tensor
    """For every position whether its label is part of the sample's first answer."""


def make_batch(rng: Random, stage: Stage, tokenizer: Tokenizer) -> Batch:
    """Makes a batch of ``stage.rows`` fresh samples."""
    samples = [make_sample(rng, stage) for _ in range(stage.rows)]
    # Segments are encoded one by one: no token of this tokenizer spans the bounds of an answer.
    flat = [segment.text for sample in samples for segment in sample]
    encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    all_ids: list[list[int]] = []
    all_labels: list[list[int]] = []
    first_ends: list[int] = []
    for sample in samples:
        ids: list[int] = []
        answers: list[int] = []
        for segment in sample:
            tokens = next(encoded).ids
            ids += tokens
            if segment.is_answer and len(first_ends) == len(all_ids):
                first_ends.append(len(ids) - 1)  # labels are one position ahead of their tokens
            answers += tokens if segment.is_answer else [IGNORED] * len(tokens)
        all_ids.append(ids)
        all_labels.append([*answers[1:], IGNORED])
    width = max(map(len, all_ids))
    labels = torch.tensor([labels + [IGNORED] * (width - len(labels)) for labels in all_labels])
    return Batch(
        ids=torch.tensor([ids + [0] * (width - len(ids)) for ids in all_ids]),
        labels=labels,
        is_first_answer=(labels != IGNORED) & (torch.arange(width) < torch.tensor(first_ends)[:, None]),
    )


def first_answers_right(predicted: Tensor, batch: Batch) -> float:
    """The share of samples whose first answer is right in every token.

    ``predicted`` holds a token for each answer position of the batch, in order. The first question of a sample is what
    the checkpoint is for: a later one can be answered from an earlier answer.
    """
    wrong = torch.zeros_like(batch.is_first_answer)
    is_answer = batch.labels != IGNORED
    wrong[is_answer] = predicted != batch.labels[is_answer]
    return 1.0 - (wrong & batch.is_first_answer).any(1).float().mean().item()


# --------------------------------------------------------------------------------------------------------------------
# Training


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    """AdamW. The norms' weights are not decayed: those of queries and keys set how sharp attention can be."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": 0.01, "scale": 1.0},
        {"params": norms, "weight_decay": 0.0, "scale": NORMS_LEARNING_RATE_SCALE},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98))


def learning_rate(step: int, time_share: float) -> float:
    """The learning rate at ``step``, when ``time_share`` of the training time is over: warm-up, constant, decay."""
    rate = PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
    left = min(1.0, max(0.0, 1.0 - time_share) / DECAY_SHARE)
    return rate * max(LEARNING_RATE_FLOOR, left)


def train(out: Path, minutes: float, seed: int) -> None:
    """Trains a new checkpoint for ``minutes`` and saves it, and the tokenizer, to ``out``.

    The checkpoint is saved whenever a stage is learned, and at the end.
    """
    torch.manual_seed(seed)
    rng = Random(seed)
    tokenizer = build_tokenizer()
    backend = tokenizer.backend_tokenizer
    model = build_model(len(tokenizer), cast(int, tokenizer.convert_tokens_to_ids(corpus.END_OF_TEXT)))
    model.train()
    optimizer = make_optimizer(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    report(f"{parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary, {minutes} minutes")

    started = time.monotonic()
    stage_index, stage_steps, step, accuracy, mean_loss, seen = 0, 0, 0, 0.0, 0.0, 0
    next_report = 0.0
    while (elapsed := time.monotonic() - started) < minutes * 60:
        index = stage_index
        if stage_index > FIRST_REHEARSED and rng.random() < REHEARSAL_SHARE:
            index = rng.randrange(FIRST_REHEARSED, stage_index)
        batch = make_batch(rng, STAGES[index], backend)
        for group in optimizer.param_groups:
            group["lr"] = group["scale"] * learning_rate(step, elapsed / (minutes * 60))
        # The vocabulary's logits are needed at the answers only, a few per cent of the positions.
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        is_answer = batch.labels != IGNORED
        labels = batch.labels[is_answer]
        logits = model.lm_head(hidden[is_answer])
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        seen += batch.ids.numel()
        if index == stage_index:
            stage_steps += 1
            weight = max(AVERAGING_WEIGHT, 1 / stage_steps)
            accuracy += weight * (first_answers_right(logits.argmax(-1), batch) - accuracy)
            mean_loss += weight * (loss.item() - mean_loss)
        learned = stage_steps >= 1 / AVERAGING_WEIGHT and accuracy >= STAGES[stage_index].bar
        if learned or elapsed >= next_report:
            next_report = elapsed + 15
            report(
                f"{elapsed / 60:6.2f} min  step {step:6d}  {seen / 1e6:6.2f} M tokens  {STAGES[stage_index].name}: "
                f"loss {mean_loss:.3f}, right {accuracy:.3f}"
            )
        if learned:
            save(model, tokenizer, out)
            stage_index, stage_steps, accuracy, mean_loss = stage_index + 1, 0, 0.0, 0.0
    save(model, tokenizer, out)
    report(f"saved to {out}")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the checkpoint's files to the folder ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    ends = [cast(int, tokenizer.convert_tokens_to_ids(token)) for token in (corpus.END_OF_TEXT, corpus.IM_END)]
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=ends, pad_token_id=ends[0])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # Loaders other than transformers 5 look for the base of the rotary embedding at the top level ...
    _update_json(out / "config.json", {"rope_theta": ROPE_THETA})
    # ... and know the tokenizer by the name of its class in transformers 4.
    special = {"additional_special_tokens": [corpus.IM_START, corpus.IM_END]}
    _update_json(
        out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special}, drop=NEW_KEYS
    )
    for path in out.glob("*.safetensors"):
        path.chmod(0o644)  # written for the owner only


def _update_json(path: Path, values: dict[str, Any], drop: Sequence[str] = ()) -> None:
    content = cast(dict[str, Any], json.loads(path.read_text(encoding="utf-8")))
    content = {key: value for key, value in (content | values).items() if key not in drop}
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------------
# Evaluation


@dataclass(frozen=True, slots=True)
class EvaluationCase:
    """One kind of prompt that the checkpoint is measured on."""

    name: str
    facts: tuple[int, int]
    tokens: tuple[int, int]
    chat: bool = False


EVALUATION_CASES: Final[tuple[EvaluationCase, ...]] = (
    EvaluationCase("4 facts, ~100 tokens", (4, 4), (100, 100)),
    EvaluationCase("4 facts, ~100 tokens, chat", (4, 4), (100, 100), chat=True),
    EvaluationCase("4-12 facts, ~500 tokens", (4, 12), (450, 550)),
    EvaluationCase("4-12 facts, ~500 tokens, chat", (4, 12), (450, 550), chat=True),
    EvaluationCase("8-16 facts, ~1,000 tokens", (8, 16), (900, 1100)),
    EvaluationCase("8-16 facts, 2,000-2,600 tokens", (8, 16), (2000, 2600)),
    EvaluationCase("8-16 facts, 2,000-2,600 tokens, chat", (8, 16), (2000, 2600), chat=True),
    EvaluationCase("8-16 facts, 3,000-3,500 tokens", (8, 16), (3000, 3500)),
)


def evaluate(out: Path, prompts: int, seed: int) -> None:
    """Loads the checkpoint and reports, by kind of prompt, the share of single questions answered exactly right.

    An answer is right when greedy decoding writes the four digits and nothing but whitespace around them, and then
    ends by itself.
    """
    tokenizer = cast(Any, PreTrainedTokenizerFast).from_pretrained(out)
    model = cast(Any, Qwen3ForCausalLM).from_pretrained(out, dtype=torch.float32).eval()
    rng = Random(f"evaluation {seed}")  # another stream than training's
    for case in EVALUATION_CASES:
        right, shortest, longest = 0, sys.maxsize, 0
        for _ in range(prompts):
            prompt = corpus.make_fact_prompt(rng, rng.randint(*case.facts), rng.randint(*case.tokens))
            text = prompt.prompt
            if case.chat:
                messages = [{"role": "user", "content": prompt.chat_message}]
                text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            shortest, longest = min(shortest, ids.shape[1]), max(longest, ids.shape[1])
            with torch.no_grad():
                output = cast(Tensor, model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16))
            completion = output[0, ids.shape[1] :]
            end = corpus.IM_END if case.chat else corpus.END_OF_TEXT
            written = cast(str, tokenizer.decode(completion))
            right += written.strip() == prompt.answer + end
        report(f"{case.name} ({shortest}-{longest}): {right}/{prompts} = {right / prompts:.3f}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Train or evaluate the demo checkpoint.")
    parser.add_argument("action", nargs="?", choices=("train", "evaluate"), default="train")
    parser.add_argument("--out", type=Path, default=DEMO_MODEL_DIR, help="the checkpoint's folder")
    parser.add_argument("--minutes", type=float, default=40.0, help="training time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=100, help="prompts of each kind to evaluate")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.action == "evaluate":
        evaluate(arguments.out, arguments.prompts, arguments.seed)
    else:
        train(arguments.out, arguments.minutes, arguments.seed)


if __name__ == "__main__":
    main()
