"""Logprobs as clients get them: OpenAI's forms, echoed prompts, vLLM's prompt logprobs."""

import json
from typing import Any

import pytest

from tests.gateway.conftest import Rig
from tests.gateway.fake_mesh import Conduct, logprob_of

C, H = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


async def ask(rig: Rig, path: str, **fields: object) -> dict[str, Any]:
    text = {"messages": MESSAGES} if path == H else {"prompt": "Hi"}
    answer = await rig.http.post(path, json={"model": rig.model.name, **text, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(rig: Rig, path: str, **fields: object) -> list[dict[str, Any]]:
    text = {"messages": MESSAGES} if path == H else {"prompt": "Hi"}
    answer = await rig.http.post(path, json={"model": rig.model.name, **text, "stream": True, **fields})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", answer.text
    return [json.loads(line) for line in lines[:-1]]


def token_text(rig: Rig, token_id: int) -> str:
    return rig.model.codec.token_bytes(token_id).decode(errors="replace")


def content(rig: Rig, token_ids: list[int], num_top: int) -> list[dict[str, Any]]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(rig, token_id),
            "logprob": logprob,
            "bytes": list(rig.model.codec.token_bytes(token_id)),
        }

    found = [(token_id, logprob_of(token_id, num_top)) for token_id in token_ids]
    return [
        {**named(token_id, one.logprob), "top_logprobs": [named(*other) for other in one.top]}
        for token_id, one in found
    ]


@pytest.mark.parametrize("num_top", [0, 3, 20])
async def test_a_chat_has_one_entry_a_token(rig: Rig, num_top: int) -> None:
    answer = await ask(rig, H, logprobs=True, top_logprobs=num_top, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["token_ids"] == rig.answer[: len(choice["token_ids"])]
    assert choice["logprobs"] == {"content": content(rig, choice["token_ids"], num_top), "refusal": None}


async def test_a_streamed_chat_has_the_same_entries(rig: Rig) -> None:
    whole = (await ask(rig, H, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]["content"]
    choices = [choice for event in await events(rig, H, logprobs=True, top_logprobs=2) for choice in event["choices"]]
    assert [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]] == whole


@pytest.mark.parametrize("num_top", [0, 2])
async def test_a_completion_has_them_in_lists(rig: Rig, num_top: int) -> None:
    answer = await ask(rig, C, logprobs=num_top, return_token_ids=True)
    found, token_ids = answer["choices"][0]["logprobs"], answer["choices"][0]["token_ids"]
    texts = [token_text(rig, token_id) for token_id in token_ids]
    assert found["tokens"] == texts
    assert found["token_logprobs"] == [logprob_of(token_id, 0).logprob for token_id in token_ids]
    assert found["text_offset"] == [sum(map(len, texts[:at])) for at in range(len(texts))]
    for token_id, text, top in zip(token_ids, texts, found["top_logprobs"], strict=True):
        likeliest = {token_text(rig, other): logprob for other, logprob in logprob_of(token_id, num_top).top}
        assert top == {text: logprob_of(token_id, 0).logprob} | likeliest


@pytest.mark.parametrize("path", [C, H])
async def test_without_the_wish_there_are_none(rig: Rig, path: str) -> None:
    assert (await ask(rig, path))["choices"][0]["logprobs"] is None
    assert rig.mesh.runs[0].sampling.logprobs is None and rig.mesh.runs[0].sampling.prompt_logprobs is None


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_an_echo_begins_with_the_prompt_and_its_logprobs(rig: Rig, max_tokens: int) -> None:
    answer = await ask(
        rig, C, logprobs=2, echo=True, max_tokens=max_tokens, prompt="The old harbour", return_token_ids=True
    )
    prompt, choice = rig.model.codec.encode("The old harbour"), answer["choices"][0]
    assert choice["text"] == "The old harbour" + rig.model.codec.decode(choice["token_ids"])
    found, token_ids = choice["logprobs"], [*prompt, *choice["token_ids"]]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == min(max_tokens, len(rig.answer))
    assert found["tokens"] == [token_text(rig, token_id) for token_id in token_ids]
    assert found["token_logprobs"] == [None, *(logprob_of(token_id, 0).logprob for token_id in token_ids[1:])]
    assert found["top_logprobs"][0] is None and len(found["top_logprobs"]) == len(token_ids)
    assert rig.mesh.places[0].block_hashes == b"", "nothing of it may come from elsewhere"


async def test_a_streamed_echo_is_the_same_text(rig: Rig) -> None:
    whole = (await ask(rig, C, logprobs=1, echo=True, seed=1))["choices"][0]
    parts = [choice for event in await events(rig, C, logprobs=1, echo=True, seed=1) for choice in event["choices"]]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts if part["logprobs"] for one in part["logprobs"][name]] == whole["logprobs"][name]


@pytest.mark.parametrize("path", [C, H])
async def test_prompt_logprobs_in_vllms_form(rig: Rig, path: str) -> None:
    answer = await ask(rig, path, prompt_logprobs=1)
    found = answer["prompt_logprobs"] if path == H else answer["choices"][0]["prompt_logprobs"]
    prompt = rig.model.codec.encode("Hi") if path == C else None
    assert found[0] is None and len(found) == answer["usage"]["prompt_tokens"]
    for at, token_id in enumerate(prompt or ()):
        if at:
            own = {"logprob": logprob_of(token_id, 0).logprob, "decoded_token": token_text(rig, token_id), "rank": None}
            best = {"logprob": 0.0, "decoded_token": token_text(rig, 0), "rank": 1}
            assert found[at] == {str(token_id): own} | {"0": best}


async def test_tokens_may_be_named_by_their_ids(rig: Rig) -> None:
    answer = await ask(rig, C, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]


async def test_logprobs_survive_a_lost_message_and_a_second_attempt(rig: Rig) -> None:
    calm = (await ask(rig, H, logprobs=True, top_logprobs=2, seed=3))["choices"][0]
    rig.mesh.conduct = {"p1": Conduct(drops=(0,)), "d1": Conduct(fails_at=3)}
    assert (await ask(rig, H, logprobs=True, top_logprobs=2, seed=3))["choices"][0] == calm


@pytest.mark.parametrize("packed", ["none", "short"])
async def test_tokens_without_the_logprobs_that_are_wanted_are_dropped(rig: Rig, packed: str) -> None:
    from schemas.block import pack_tokens
    from schemas.ids import RequestId, WorkerId
    from schemas.logprobs import TokenLogprob, pack_logprobs
    from schemas.request import RequestTokens, SamplingParams
    from services.gateway.request.job import Job, pack_prompt, tokens_received

    key = rig.model.key_of("")
    sampling = SamplingParams(max_tokens=4, logprobs=0)
    job = Job(
        request_id=RequestId("r"), prompt=pack_prompt([1, 2], key), key=key, sampling=sampling, deadline_ms=1, trace=""
    )  # type: ignore[arg-type]
    logprobs = None if packed == "none" else pack_logprobs([TokenLogprob(-1.0)])
    share = RequestTokens(request_id="r", attempt=1, index=0, tokens=pack_tokens([5, 6]), logprobs=logprobs)
    with pytest.raises(ValueError, match="of 2 tokens"):
        tokens_received(job, WorkerId("w"), share)
