"""Where an answer ends, within what it may end, and what of it is left out."""

import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.gateway.conftest import OpenRig, Rig

TEXTS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
USER = [{"role": "user", "content": "How is it in Oslo?"}]
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if opens is defined %}<think>\n{% endif %}"
)
OPENS = {"chat_template_kwargs": {"opens": True}}
THOUGHT = "Hm, END and\n\nmore."


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("thinker") / "demo_model"
    shutil.copytree(DEMO_MODEL_DIR, path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@contextlib.asynccontextmanager
async def saying(open_rig: OpenRig, text: str, *, ends: bool = True, **fields: Any) -> AsyncIterator[Rig]:
    """A gateway whose mesh gives this text, and where it `ends` the model's own end."""
    async with open_rig(**fields) as rig:
        answer = rig.model.codec.encode(text, add_special_tokens=False)
        answer += [min(rig.model.eos_token_ids)] if ends else []
        rig.mesh.answers = lambda prompt: answer
        yield rig


async def ask(rig: Rig, path: str, **fields: Any) -> dict[str, Any]:
    """Return the answer; of a streamed one, what its choice's chunks add up to."""
    about = {TEXTS: {"prompt": "Hi"}, CHAT: {"messages": USER}, RESPONSES: {"input": USER}}[path]
    reply = await rig.http.post(path, json={"model": rig.model.name, **about, **fields})
    assert reply.status_code == 200, reply.text
    if not fields.get("stream"):
        return reply.json() if path == RESPONSES else reply.json()["choices"][0] | {"usage": reply.json()["usage"]}
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    if path == RESPONSES:
        return events[-1]["response"]
    whole: dict[str, Any] = {"message": {}, "token_ids": [], "logprobs": {"content": []}}
    for choice in (event["choices"][0] for event in events):
        for name, value in choice["delta"].items():
            if isinstance(value, str):
                whole["message"][name] = whole["message"].get(name, "") + value
        whole["token_ids"] += choice.get("token_ids") or []
        whole["logprobs"]["content"] += (choice["logprobs"] or {"content": []})["content"]
        whole["finish_reason"] = choice["finish_reason"]
    return whole


@pytest.mark.parametrize("stop", [["4"], [" 4", "1"], "2 3"])
@pytest.mark.parametrize("path", [TEXTS, CHAT, RESPONSES])
async def test_no_stop_string_before_min_tokens(open_rig: OpenRig, path: str, stop: list[str] | str) -> None:
    async with saying(open_rig, " 1 2 3 4 5 6 7 8" * 8) as rig:
        most = {"max_output_tokens" if path == RESPONSES else "max_tokens": 40}
        for num_tokens in (0, 1, 7, 20):
            found = await ask(rig, path, stop=stop, min_tokens=num_tokens, ignore_eos=True, **most)
            num_answer = found["usage"]["output_tokens" if path == RESPONSES else "completion_tokens"]
            assert num_tokens < num_answer < 40
            text = found["text"] if path == TEXTS else json.dumps(found)
            if path == TEXTS:
                first = rig.model.codec.decode(rig.mesh.answers([])[:num_tokens])
                assert text.startswith(first)
                assert not any(end in text[len(first) :] for end in ([stop] if isinstance(stop, str) else stop))
                assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (CALL, {"stop": ["city"]}, "stop"),
        (CALL, {"stop": ['"Os']}, "stop"),
        (CALL, {"max_tokens": 25}, "length"),
        (CALL[: CALL.index("lo")], {}, "stop"),
        (f"{CALL}\n{CALL}", {"stop": ["END", "Oslo"]}, "stop"),
        (CALL, {"stop": ["</tool_call>"]}, "tool_calls"),
        (f"{CALL}END", {"stop": ["END"]}, "tool_calls"),
        (f"{CALL}\n{CALL[:20]}", {}, "stop"),
        (f"{CALL}\n{CALL}", {}, "tool_calls"),
    ],
)
async def test_what_ends_within_a_call_is_no_call(
    open_rig: OpenRig, text: str, fields: dict[str, Any], reason: str, stream: bool
) -> None:
    async with saying(open_rig, text) as rig:
        found = await ask(rig, CHAT, tools=[{"type": "function", "function": FUNCTION}], stream=stream, **fields)
        assert found["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "status"), [(["city"], "incomplete"), (["</tool_call>"], "completed")])
async def test_an_item_that_ends_within_a_call(open_rig: OpenRig, stop: list[str], status: str, stream: bool) -> None:
    async with saying(open_rig, CALL) as rig:
        found = await ask(rig, RESPONSES, tools=[{"type": "function", **FUNCTION}], stop=stop, stream=stream)
        assert [(item["type"], item["status"]) for item in found["output"]] == [("function_call", status)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (f"{THOUGHT}\n</think>\n\nMild.END more", OPENS),
        (f"<think>\n{THOUGHT}\n</think>\n\nMild.END more", {}),
        ("</think>\n\nMild.END more", OPENS),
        ("\n\nMild.END more", OPENS | {"chat_template_kwargs": {}}),
    ],
)
async def test_stop_strings_are_looked_for_behind_the_thoughts(
    open_rig: OpenRig, thinker: Path, text: str, fields: dict[str, Any], stream: bool
) -> None:
    async with saying(open_rig, text, model_path=thinker) as rig:
        found = await ask(rig, CHAT, stop=["END", "more"], stream=stream, **fields)
        assert (found["message"]["content"].strip(), found["finish_reason"]) == ("Mild.", "stop")
        assert found["message"].get("reasoning_content", "") == (THOUGHT if THOUGHT in text else "")
        whole = await ask(rig, CHAT, stop=["END", "more"], stream=stream, separate_reasoning=False, **fields)
        assert (whole["message"]["content"], whole["finish_reason"]) == (text[: text.rindex("END")], "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "fields", "shown"),
    [
        (f"{THOUGHT}\n</think>\n\nMild.", OPENS, "Mild."),
        (f"<think>\n{THOUGHT}\n</think>\n\nMild.", {}, "Mild."),
        (f"\n<think>\n{THOUGHT}", {}, ""),
        (THOUGHT, OPENS, ""),
        ("<this> is Mild.", {}, "<this> is Mild."),
        ("<thin", {}, "<thin"),
    ],
)
async def test_thoughts_that_are_not_told_have_no_tokens_either(
    open_rig: OpenRig, thinker: Path, text: str, fields: dict[str, Any], shown: str, stream: bool
) -> None:
    async with saying(open_rig, text, model_path=thinker) as rig:
        asked = {"include_reasoning": False, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        found = await ask(rig, CHAT, stream=stream, **asked, **fields)
        assert found["message"].get("content", "") == shown and "reasoning_content" not in found["message"]
        tokens = found["token_ids"]
        assert rig.model.codec.decode(tokens).strip() == shown
        spelled = b"".join(bytes(entry["bytes"]) for entry in found["logprobs"]["content"]).decode()
        assert spelled.replace("<|im_end|>", "").replace("<|endoftext|>", "").strip() == shown
        assert len(tokens) == len(found["logprobs"]["content"])
        told = await ask(rig, CHAT, stream=stream, **asked | {"include_reasoning": True}, **fields)
        assert told["token_ids"] == rig.mesh.answers([]) and len(told["logprobs"]["content"]) == len(told["token_ids"])


async def test_logprobs_of_a_message_are_those_of_its_text(open_rig: OpenRig, thinker: Path) -> None:
    async with saying(open_rig, f"<think>\n{THOUGHT}\n</think>\n\nMild.", model_path=thinker) as rig:
        found = await ask(rig, RESPONSES, include=["message.output_text.logprobs"], top_logprobs=1)
        message = next(item for item in found["output"] if item["type"] == "message")
        spelled = b"".join(bytes(entry["bytes"]) for entry in message["content"][0]["logprobs"]).decode()
        assert "think>" not in spelled and "Mild." in spelled


PAIRS = [
    (TEXTS, {"min_tokens": 60}, "", 60),
    (TEXTS, {"min_tokens": 1_000_000}, "min_tokens", 0),
    (CHAT, {"min_tokens": 1_000_000}, "min_tokens", 0),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 9}, "", 5),
    (CHAT, {"max_tokens": 9, "max_completion_tokens": 5}, "", 5),
    (CHAT, {"max_tokens": 5, "max_completion_tokens": 9, "min_tokens": 6}, "min_tokens", 0),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", 0),
    (CHAT, {"logprobs": False, "top_logprobs": 2}, "top_logprobs", 0),
    (CHAT, {"include_stop_str_in_output": True, "no_stop_trim": False}, "no_stop_trim", 0),
    (CHAT, {"include_stop_str_in_output": False, "no_stop_trim": True}, "no_stop_trim", 0),
    (CHAT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort", 0),
    (CHAT, {"separate_reasoning": False, "include_reasoning": False}, "include_reasoning", 0),
    (CHAT, {"tool_choice": "required"}, "tool_choice", 0),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", 0),
    (TEXTS, {"best_of": 2, "n": 1}, "best_of", 0),
    (TEXTS, {"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "guided_regex", 0),
]


@pytest.mark.parametrize(("path", "fields", "param", "num_tokens"), PAIRS)
async def test_two_parameters_that_speak_of_one_thing(
    open_rig: OpenRig, path: str, fields: dict[str, Any], param: str, num_tokens: int
) -> None:
    """Both hold, or one of them is named in a refusal."""
    async with saying(open_rig, " 1 2 3 4" * 40) as rig:
        asked = {"prompt": "Hi"} if path == TEXTS else {"messages": USER}
        reply = await rig.http.post(path, json={"model": rig.model.name, **asked, **fields})
        if param:
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        else:
            assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] == num_tokens
