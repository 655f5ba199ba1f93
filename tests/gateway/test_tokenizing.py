"""`/tokenize`, `/detokenize` and `/version` over real HTTP."""

from importlib.metadata import version
from typing import Any

import pytest

from services.gateway import limits
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.test_chats import USER, WEATHER

TEXT = "The harbour – naïve 東京 🙂"


async def ask(rig: Rig, path: str, **body: Any) -> dict[str, Any]:
    answer = await rig.http.post(path, json=body)
    return {"status": answer.status_code, **answer.json()}


async def test_a_text_and_back(rig: Rig) -> None:
    found = await ask(rig, "/tokenize", prompt=TEXT, add_special_tokens=False)
    tokens = rig.model.codec.encode(TEXT, add_special_tokens=False)
    assert (found["tokens"], found["count"], found["token_strs"]) == (tokens, len(tokens), None)
    assert found["max_model_len"] == rig.model.context_length
    assert (await ask(rig, "/detokenize", tokens=tokens, model=rig.model.name))["prompt"] == TEXT
    named = await ask(rig, "/tokenize", prompt="Hi there", return_token_strs=True)
    assert "".join(named["token_strs"]) == "Hi there"


async def test_a_chat_has_the_tokens_that_its_answer_counts(rig: Rig) -> None:
    for more in ({}, {"tools": [WEATHER]}):
        found = await ask(rig, "/tokenize", messages=USER, **more)
        body = {"model": rig.model.name, "messages": USER, "max_tokens": 1} | more
        usage = (await rig.http.post("/v1/chat/completions", json=body)).json()["usage"]
        assert found["count"] == usage["prompt_tokens"]
    shown = (await ask(rig, "/detokenize", tokens=found["tokens"]))["prompt"]
    assert shown.startswith("<|im_start|>") and '"weather"' in shown
    shorter = await ask(rig, "/tokenize", messages=USER, tools=[WEATHER], add_generation_prompt=False)
    assert shorter["count"] < found["count"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": USER}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "tools": [WEATHER]}, 400, "tools"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": USER, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": USER, "chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs"),
        ("/tokenize", {"prompt": "x", "more": 1}, 400, "more"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * (limits.MAX_TEXT_BYTES + 1)}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_taken(rig: Rig, path: str, body: dict[str, Any], status: int, param: str) -> None:
    found = await ask(rig, path, **body)
    assert (found["status"], found["error"]["param"]) == (status, param)


async def test_strangers_are_told_nothing(open_rig: OpenRig) -> None:
    async with open_rig(gateway={"tenants": {"secret": "team"}}) as rig:
        for path in ("/tokenize", "/detokenize"):
            assert (await rig.http.post(path, json={"prompt": "x"})).status_code == 401
        assert (await rig.http.get("/version")).status_code == 401
        known = await rig.http.get("/version", headers={"authorization": "Bearer secret"})
        assert known.json() == {"version": version("kvmesh")}
