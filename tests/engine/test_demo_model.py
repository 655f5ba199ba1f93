"""The demo checkpoint: its tokenizer, its files, and whether it answers."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.engine.demo_model import DEMO_MODEL_DIR
from tests import corpus
from tests.share import examples

MAX_FOLDER_BYTES = 8 * 1000 * 1000
TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    return model.eval()


def complete(model: Any, text: str) -> str:
    """The greedy completion of a text, end token included."""
    ids = torch.tensor([TOKENIZER.encode(text, add_special_tokens=False).ids])
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return cast(str, TOKENIZER.decode(output[0, ids.shape[1] :].tolist(), skip_special_tokens=False))


def count_right(model: Any, prompts: list[corpus.FactPrompt]) -> int:
    return sum(complete(model, prompt.prompt) == f" {prompt.answer}{corpus.END_OF_TEXT}" for prompt in prompts)


@settings(max_examples=examples(300), deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_is_lossless(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_every_corpus_word_and_every_digit_is_one_token() -> None:
    assert all(len(TOKENIZER.encode(word).ids) == 1 for word in corpus.vocabulary())
    assert len(TOKENIZER.encode("0123456789").ids) == 10


def test_prompts_have_the_length_asked_for() -> None:
    rng = Random(0)
    for target in (100, 500, 2000):
        for _ in range(20):
            prompt = corpus.make_fact_prompt(rng, 4, target)
            assert 0 <= len(TOKENIZER.encode(prompt.prompt).ids) - target <= 20


def test_prompt_states_the_answer_once() -> None:
    prompt = corpus.make_fact_prompt(Random(1), 8, 400)
    assert prompt.prompt.count(f"The code of {prompt.question_name} is {prompt.answer}.") == 1
    assert prompt.prompt == f"{prompt.document} Q: What is the code of {prompt.question_name}? A:"
    assert prompt == corpus.make_fact_prompt(Random(1), 8, 400)


def test_names_in_a_document_are_distinct_and_share_parts() -> None:
    facts = corpus.make_facts(Random(2), 40, shared_name_chance=0.8)
    assert len({fact.name for fact in facts}) == 40
    assert len({fact.name.split()[0] for fact in facts}) < 40
    assert len({fact.name.split()[1] for fact in facts}) < 40


def test_folder_is_at_most_8_mb() -> None:
    files = [path for path in DEMO_MODEL_DIR.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MAX_FOLDER_BYTES


def test_chat_template_renders(chat_tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
        {"role": "assistant", "content": "7412"},
        {"role": "user", "content": "And now?"},
    ]
    assert chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
        "<|im_start|>assistant\n7412<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_answers_short_prompts(model: Any) -> None:
    rng = Random(3)
    assert count_right(model, [corpus.make_fact_prompt(rng, 4, 100) for _ in range(10)]) >= 9


def test_answers_prompts_of_2000_tokens_and_more(model: Any) -> None:
    rng = Random(4)
    prompts = [corpus.make_fact_prompt(rng, rng.randint(8, 16), 2000 + 100 * index) for index in range(5)]
    assert all(len(TOKENIZER.encode(prompt.prompt).ids) >= 2000 for prompt in prompts)
    assert count_right(model, prompts) >= 4


def test_answers_chat_messages(model: Any, chat_tokenizer: Any) -> None:
    rng = Random(5)
    right = 0
    for _ in range(10):
        prompt = corpus.make_fact_prompt(rng, 4, 150)
        messages = [{"role": "user", "content": prompt.chat_message}]
        text = chat_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        right += complete(model, text) == prompt.answer + corpus.IM_END
    assert right >= 9
