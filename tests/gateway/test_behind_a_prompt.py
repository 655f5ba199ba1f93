"""An answer's text is what it adds to its prompt's: with tokenizers whose words begin with the space before them, on
every route, streamed and not."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from services.engine.grammar import Grammars
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.sentencepiece import TOKENIZERS, folder_with

C, H, R = "/v1/completions", "/v1/chat/completions", "/v1/responses"
ROUTES = (C, H, R)


@pytest.fixture(scope="session", params=TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_with(TOKENIZERS[request.param](), tmp_path_factory.mktemp("sentencepiece") / "model")


def ids(rig: Rig, *words: str) -> list[int]:
    """Return the tokens of this spelling."""
    vocabulary = rig.model.codec._tokenizer.get_vocab()  # pyright: ignore[reportPrivateUsage]
    return [vocabulary[word] for word in words]


def saying(rig: Rig, *words: str) -> None:
    answer = [*ids(rig, *words), min(rig.model.eos_token_ids)]
    rig.mesh.answers = lambda prompt: answer


def text_of(answer: dict[str, Any], path: str) -> str:
    if path == R:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    choice = answer["choices"][0]
    return choice["text"] if path == C else choice["message"]["content"]


async def ask(rig: Rig, path: str = C, **fields: object) -> dict[str, Any]:
    prompt = {C: {"prompt": "the dog"}, H: {"messages": [{"role": "user", "content": "the dog"}]}, R: {"input": "the"}}
    answer = await rig.http.post(path, json={"model": rig.model.name, **prompt[path], **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def streamed(rig: Rig, path: str = C, **fields: object) -> list[dict[str, Any]]:
    prompt = {C: {"prompt": "the dog"}, H: {"messages": [{"role": "user", "content": "the dog"}]}, R: {"input": "the"}}
    answer = await rig.http.post(path, json={"model": rig.model.name, **prompt[path], "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def streamed_text(events: Sequence[dict[str, Any]], path: str = C) -> str:
    def parts() -> Iterator[str]:
        for event in events:
            if event.get("type") == "response.output_text.delta":
                yield event["delta"]
            for choice in event.get("choices", ()):
                yield choice["text"] if path == C else choice["delta"].get("content", "")

    return "".join(parts())


@pytest.mark.parametrize("path", ROUTES)
async def test_the_space_between_prompt_and_answer_is_kept(open_rig: OpenRig, folder: Path, path: str) -> None:
    async with open_rig(model_path=folder) as rig:
        saying(rig, "▁the", "▁the")
        assert text_of(await ask(rig, path), path) == " the the"
        assert streamed_text(await streamed(rig, path), path) == " the the"


async def test_an_echo_is_one_text(open_rig: OpenRig, folder: Path) -> None:
    async with open_rig(model_path=folder) as rig:
        codec = rig.model.codec
        answer = ids(rig, "▁the", "▁cat")
        saying(rig, "▁the", "▁cat")
        for prompt in ("the dog", codec.encode("the dog"), codec.encode(" the"), ids(rig, "▁"), [2], [2, 2]):
            token_ids = codec.encode(prompt) if isinstance(prompt, str) else prompt
            both = codec.decode([*token_ids, *answer])
            assert text_of(await ask(rig, prompt=prompt, echo=True, logprobs=0), C) == both
            assert streamed_text(await streamed(rig, prompt=prompt, echo=True)) == both
            assert text_of(await ask(rig, prompt=prompt), C) == both.removeprefix(codec.decode(token_ids))


async def test_a_text_s_beginning_has_no_space(open_rig: OpenRig, folder: Path) -> None:
    """A prompt of special tokens alone is no text."""
    async with open_rig(model_path=folder) as rig:
        saying(rig, "▁the", "▁the")
        assert text_of(await ask(rig, prompt="<s>"), C) == "the the"
        shown = await ask(rig, prompt=[2], skip_special_tokens=False)
        assert text_of(shown, C) == " the the", "there the prompt is text"


@pytest.mark.parametrize("path", ROUTES)
async def test_stop_strings_are_found_in_the_text(open_rig: OpenRig, folder: Path, path: str) -> None:
    async with open_rig(model_path=folder) as rig:
        saying(rig, "▁cat", "▁the", "▁dog")
        assert text_of(await ask(rig, path, stop=" the"), path) == " cat"
        assert streamed_text(await streamed(rig, path, stop=[" cat"]), path) == ""


async def test_tokens_are_named_by_what_they_are_in_the_text(open_rig: OpenRig, folder: Path) -> None:
    async with open_rig(model_path=folder) as rig:
        saying(rig, "▁the", "the", "▁cat")
        found = (await ask(rig, logprobs=2))["choices"][0]
        assert found["logprobs"]["tokens"][:3] == [" the", "the", " cat"]
        assert found["text"] == " thethe cat"
        prompt = ids(rig, "▁the", "▁dog")
        for fields in ({"prompt": prompt, "echo": True}, {"prompt": [2]}):
            for choice in (
                (await ask(rig, logprobs=2, **fields))["choices"][0],
                *[event["choices"][0] for event in await streamed(rig, logprobs=2, max_tokens=1, **fields)][:1],
            ):
                found = choice["logprobs"]
                for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
                    assert choice["text"][offset:].startswith(token) or token == "</s>", (token, offset)


async def test_a_chat_s_tokens_have_their_space(open_rig: OpenRig, folder: Path) -> None:
    async with open_rig(model_path=folder) as rig:
        saying(rig, "▁the", "▁cat")
        content = (await ask(rig, H, logprobs=True))["choices"][0]["logprobs"]["content"]
        assert [(one["token"], bytes(one["bytes"])) for one in content[:2]] == [(" the", b" the"), (" cat", b" cat")]


async def test_tokens_alone_are_a_text_of_their_own(open_rig: OpenRig, folder: Path) -> None:
    async with open_rig(model_path=folder) as rig:
        body = {"tokens": ids(rig, "▁the", "▁cat")}
        assert (await rig.http.post("/detokenize", json=body)).json()["prompt"] == "the cat"


async def test_thoughts_and_calls_are_found_behind_the_space(open_rig: OpenRig, folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "cat"}}]
    call = '<tool_call>{"name":"cat","arguments":{}}</tool_call>'
    async with open_rig(model_path=folder, gateway={"tool_format": "hermes"}) as rig:
        saying(rig, *"▁<think>", "▁the", *"</think>", "▁dog", *call)
        message = (await ask(rig, H, tools=tools))["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"].strip()) == ("the", "dog")
        assert message["tool_calls"][0]["function"] == {"name": "cat", "arguments": "{}"}
        saying(rig, "▁", *call)
        choice = (await ask(rig, H, tools=tools))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


async def test_bad_words_are_bad_with_and_without_a_space(open_rig: OpenRig, folder: Path) -> None:
    async with open_rig(model_path=folder) as rig:
        await ask(rig, bad_words=["the", " dog"])
        the, spaced, *dog, spaced_dog = rig.mesh.runs[-1].sampling.bad_words
        assert [the, spaced, spaced_dog] == [(*ids(rig, word),) for word in ("the", "▁the", "▁dog")]
        assert rig.model.codec.decode(dog[0]) == "dog" and rig.model.codec.token_bytes(dog[0][0])[:1] == b"d"


FORMS = [
    ({"guided_choice": [" the cat"]}, (" the cat",), ("the cat", " the dog")),
    ({"guided_choice": ["the cat"]}, ("the cat",), (" the cat",)),
    ({"guided_regex": "[{] ?a"}, ("{a", "{ a"), (" {a",)),
    ({"guided_json": {"type": "object", "additionalProperties": {"type": "integer"}}}, ('{"a":1}',), (' {"a":1}',)),
]


@pytest.mark.parametrize(("fields", "good", "bad"), FORMS)
@pytest.mark.parametrize(("prompt", "begins"), [("the dog", False), ("<s>", True)])
async def test_a_grammar_speaks_of_the_text_that_the_client_gets(
    open_rig: OpenRig,
    folder: Path,
    fields: dict[str, Any],
    good: Sequence[str],
    bad: Sequence[str],
    prompt: str,
    begins: bool,
) -> None:
    """Each answer that the workers' grammar takes, spelled by whatever tokens, is such a text for the client."""
    async with open_rig(model_path=folder) as rig:
        codec = rig.model.codec
        end = codec.prompt_end(codec.encode(prompt), codec.ids_shown())
        await ask(rig, prompt=prompt, **fields)
        tokenizer = codec._tokenizer  # pyright: ignore[reportPrivateUsage]
        grammars = Grammars(tokenizer, rig.model.vocab_size, rig.model.eos_token_ids)
        grammar = grammars.compile(rig.mesh.runs[-1].sampling.grammar or "").result(60)
        told = set[str]()
        for answer in spellings(rig, [*good, *bad]):
            taken = all(grammar.allowed(answer[:at])[token] for at, token in enumerate(answer))
            if taken and grammar.allowed(answer)[min(rig.model.eos_token_ids)]:
                detokenizer = codec.detokenizer(end)
                told.add(detokenizer.add_tokens(answer) + detokenizer.rest())
        assert told == set(good)
        assert begins == (not end.token_ids)


def spellings(rig: Rig, texts: Sequence[str]) -> Iterator[list[int]]:
    """Return all ways to write these texts, with and without a space before them."""
    vocabulary = rig.model.codec._tokenizer.get_vocab()  # pyright: ignore[reportPrivateUsage]

    def ways(text: str) -> Iterator[list[int]]:
        if not text:
            yield []
        for length in range(1, min(len(text), 4) + 1):
            if (token := vocabulary.get(text[:length])) is not None:
                yield from ([token, *rest] for rest in ways(text[length:]))

    for text in texts:
        for before in ("", "▁"):
            yield from ways(before + text.replace(" ", "▁"))


async def test_an_answer_may_end_the_prompt_s_last_character(open_rig: OpenRig, tmp_path: Path) -> None:
    """A prompt of tokens may end in the middle of one: its own text has U+FFFD there, the text of both has not."""
    async with open_rig(model_path=folder_with(TOKENIZERS["llama"](), tmp_path / "model")) as rig:
        first, *rest = (f"<0x{byte:02X}>" for byte in "東".encode())
        prompt = ids(rig, "▁the", first)
        saying(rig, *rest, "▁dog", first)
        assert text_of(await ask(rig, prompt=prompt), C) == "東 dog\ufffd"
        assert text_of(await ask(rig, prompt=prompt, echo=True), C) == "the東 dog\ufffd"
        assert text_of(await ask(rig, prompt=prompt, echo=True, stop=" dog"), C) == "the東"
        for fields in ({}, {"logprobs": 0}, {"return_token_ids": True}):
            assert streamed_text(await streamed(rig, prompt=prompt, echo=True, **fields)) == "the東 dog\ufffd"
        saying(rig, "▁dog")
        assert text_of(await ask(rig, prompt=prompt), C) == " dog"
        assert streamed_text(await streamed(rig, prompt=prompt, echo=True)) == "the\ufffd dog"
        assert text_of(await ask(rig, prompt=prompt, echo=True, max_tokens=0), C) == "the\ufffd"
        assert streamed_text(await streamed(rig, prompt=prompt, echo=True, max_tokens=1)) == "the\ufffd dog"
