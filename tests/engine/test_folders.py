"""A folder is read as transformers reads it, however it was saved: prompts, ends, weights, their identity, tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.config import MeshConfig, ModelConfig
from services.engine.batch import Batch
from services.engine.checkpoint import read_checkpoint
from services.engine.tokenizer import read_tokenizer
from services.engine.torch_engine.model import load_model as load_weights
from services.engine.weights import INDEX_FILE
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import ChatBody, CompletionBody
from services.gateway.api.prepare import prepare
from services.gateway.api.template import ChatMessage, ChatOptions, ChatTemplateError, ToolCall
from services.gateway.api.text import TextCodec, codec_of
from services.gateway.service import load_model
from tests.engine.folders import BEYOND, Choices, alone, make_folder, merge, pairs
from tests.engine.rig import (
    Allocator,
    generate,
    greedy,
    load_tiny,
    make_sequence,
    num_near_ties,
    prompt_of,
    run_batch,
)  # fmt: skip

TEXTS = ("Hi there", "é｜ 東", "<|im_start|>user\nHi<|im_end|>", f"a{BEYOND}b", "")
TOOL = {"type": "function", "function": {"name": "get", "description": "d", "parameters": {"type": "object"}}}
ARGUMENTS = '{"b": "é", "a": [1, 2]}'
NUM_TOKENS = 8
CASES = {
    **{f"alone: {', '.join(choices.values())}": choices for choices in alone()},
    **{f"pairs: {', '.join(choices.values())}": choices for choices in pairs()},
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights with the demo model's vocabulary."""
    return make_random_checkpoint(tmp_path_factory.mktemp("base") / "model", vocab=1336, tie_word_embeddings=True)


@pytest.fixture
def folder(base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return make_folder(tmp_path / "model", base, cast("Choices", request.param))


folders = pytest.mark.parametrize("folder", CASES.values(), ids=CASES, indirect=True)


def library_weights(folder: Path) -> Mapping[str, torch.Tensor] | None:
    """Return what transformers loads; None: it does not."""
    try:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).state_dict()
    except (KeyError, OSError):
        return None


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def chats() -> list[tuple[list[dict[str, Any]], list[Any] | None]]:
    """Return conversations as transformers takes them, with their tools."""
    hi = [{"role": "user", "content": "Hi é"}]
    call = {"type": "function", "function": {"name": "get", "arguments": {"b": "é", "a": [1, 2]}}}
    called = [*hi, {"role": "assistant", "content": "x", "tool_calls": [call]}, {"role": "user", "content": "Go on"}]
    return [(hi, None), (called, None), (called, [TOOL])]


def ours(codec: TextCodec, turns: list[dict[str, Any]], tools: list[Any] | None) -> list[int]:
    calls = (ToolCall(name="get", arguments=ARGUMENTS),)
    messages = [
        ChatMessage(role=turn["role"], content=turn["content"], tool_calls=calls if "tool_calls" in turn else ())
        for turn in turns
    ]
    knows_tools = codec.tools_template != codec.template
    return codec.encode_chat(messages, ChatOptions(tools=tuple(tools or ()) if knows_tools else ()))


@folders
def test_prompts_and_ends(folder: Path) -> None:
    found, library = read_tokenizer(folder), cast(Any, AutoTokenizer).from_pretrained(folder, local_files_only=True)
    codec = codec_of(found)
    for text in TEXTS:
        for special in (True, False):
            assert codec.encode(text, add_special_tokens=special) == library(text, add_special_tokens=special).input_ids
    for turns, tools in chats():
        if not codec.template:
            with pytest.raises(ValueError, match="chat_template is not set"):
                library.apply_chat_template(turns)
            with pytest.raises(ChatTemplateError, match="no chat template"):
                ours(codec, turns, tools)
            continue
        expected = library.apply_chat_template(turns, tools=tools, add_generation_prompt=True, return_dict=False)
        assert ours(codec, turns, tools) == expected

    ends = library_ends(folder)
    assert found.ends(read_checkpoint(str(folder))) == (ends | {library.eos_token_id}) - {None}


def library_ends(folder: Path) -> set[int]:
    try:
        ends: Any = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    except OSError:  # there is no file of it
        ends = AutoConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return set(ends if isinstance(ends, list) else [] if ends is None else [ends])


@folders
def test_weights_and_tokens(folder: Path) -> None:
    checkpoint = read_checkpoint(str(folder))
    model, expected = load_weights(checkpoint, "float32").state_dict(), library_weights(folder)
    engine = load_tiny(folder)
    if expected is None:  # the library takes no index without metadata, and vLLM does
        merge(folder / INDEX_FILE, metadata={})
        expected = library_weights(folder)
    assert expected is not None and same(model, expected)
    prompt = prompt_of(70)
    batch = Batch(32)
    batch.add(make_sequence("r", prompt, Allocator().take(len(prompt) + NUM_TOKENS), greedy(NUM_TOKENS)))
    answer = run_batch(engine, batch)["r"]
    num_near_ties(folder, prompt, answer, generate(folder, prompt, NUM_TOKENS), greedy(NUM_TOKENS))

    # Whatever file is changed: other weights have another identity, and files that nobody loads have no part in it.
    for path in sorted(folder.rglob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[-2] ^= 0x10
        path.write_bytes(content)
        is_other = read_checkpoint(str(folder)).weights != checkpoint.weights
        assert is_other == (path.relative_to(folder).as_posix() in checkpoint.weight_files)
        assert is_other or same(model, library_weights(folder) or {})
        content[-2] ^= 0x10
        path.write_bytes(content)


def test_a_token_beyond_the_model_s_vocabulary_is_named(base: Path, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", base, {"tokens": "one beyond the model's"})
    model = load_model(MeshConfig(model=ModelConfig(path=str(folder))))
    turn = {"role": "user", "content": BEYOND}
    for body in (
        msgspec.convert({"model": "model", "prompt": f"Hi {BEYOND}"}, CompletionBody),
        msgspec.convert({"model": "model", "messages": [turn]}, ChatBody),
    ):
        with pytest.raises(InvalidRequestError, match=rf"holds '{BEYOND}', token 1336 .* the model knows 0 … 1335"):
            prepare(model, body)
    allowed = msgspec.convert({"model": "model", "prompt": "Hi", "bad_words": [BEYOND, "a"]}, CompletionBody)
    assert all(max(word) < model.vocab_size for word in prepare(model, allowed).options.sampling.bad_words)
