"""Each parameter that is honoured does something: each is sent on each of its routes, and its effect is seen.

What workers make of their parameters is tested with the engines; here it is seen that they are told them. The model is
the demo model with a tokenizer and a template that have something for every parameter to do.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from schemas.block import unpack_tokens
from schemas.request import SamplingParams
from services.engine.demo_model import DEMO_MODEL_DIR
from services.gateway.api.capabilities import BODIES
from services.gateway.api.parameters import Route
from services.gateway.api.responses import LOGPROBS
from tests.gateway.conftest import TEXT, OpenRig, Rig
from tests.gateway.test_chats import WEATHER

C, H, R = Route.COMPLETIONS, Route.CHAT, Route.RESPONSES
SPECIAL, THOUGHT = "<|im_start|>", "<think>hm</think>"
HI, HO = ([{"role": "user", "content": text}] for text in ("Hi", "Ho"))
CONTINUED = [*HI, {"role": "assistant", "content": "The old"}]
NEEDED: Mapping[Route, dict[str, Any]] = {C: {"prompt": "Hi"}, H: {"messages": HI}, R: {"input": "Hi"}}
TOOL = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
_EXTRAS = """\
{#- <think></think> -#}
{%- for document in documents or [] %}{{ document.text }}{% endfor %}
{%- if reasoning_effort is defined %}effort: {{ reasoning_effort }}{% endif %}
{%- if enable_thinking is defined and not enable_thinking %}quiet{% endif %}
"""


class Seen(NamedTuple):
    """What has come of a request: the answer, or a stream's events; and what the workers were told of it."""

    status: int
    answer: dict[str, Any]
    events: list[dict[str, Any]]
    sampling: SamplingParams | None
    prompt: str

    @property
    def choice(self) -> dict[str, Any]:
        return self.answer["choices"][0]

    @property
    def said(self) -> str:
        """The answer's text."""
        if "output" in self.answer:
            parts = [part for item in self.answer["output"] if item["type"] == "message" for part in item["content"]]
            return "".join(part["text"] for part in parts)
        choice = self.choice
        return choice["message"]["content"] if "message" in choice else choice["text"]

    @property
    def num_tokens(self) -> int:
        usage = self.answer["usage"]
        return usage.get("completion_tokens") or usage["output_tokens"]


class Case(NamedTuple):
    """A value that is not the default. `shows` gets what came without and with it; `beside`: what goes with both."""

    value: object
    shows: Callable[[Seen, Seen], bool]
    beside: Mapping[str, Any] = {}


def told(name: str, value: Any, as_told: Any = None) -> tuple[str, Case]:
    """A parameter that goes to the workers."""
    expected = value if as_told is None else as_told

    def shows(without: Seen, seen: Seen) -> bool:
        return getattr(without.sampling, name) != getattr(seen.sampling, name) == expected

    return name, Case(value, shows)


def held(value: object, **beside: object) -> Case:
    """What an answer must be: the workers get a grammar, another one than without."""

    def shows(without: Seen, seen: Seen) -> bool:
        assert without.sampling is not None and seen.sampling is not None
        return without.sampling.grammar != seen.sampling.grammar != ""

    return Case(value, shows, beside)


def prompted(value: object, text: str, **beside: object) -> Case:
    """What the model is shown."""
    return Case(value, lambda without, seen: text in seen.prompt and text not in without.prompt, beside)


def cut(num_tokens: int) -> Case:
    return Case(num_tokens, lambda without, seen: without.num_tokens > seen.num_tokens == num_tokens)


def keeps_stop() -> Case:
    def shows(without: Seen, seen: Seen) -> bool:
        return without.said.endswith("harbour of ") and seen.said.endswith("harbour of Bergen")

    return Case(True, shows, {"stop": "Bergen"})


def streamed(value: object, shows: Callable[[list[dict[str, Any]]], bool]) -> Case:
    return Case(value, lambda without, seen: shows(seen.events) and not shows(without.events), {"stream": True})


SHARED: dict[str, Case] = dict(
    [
        told("seed", 7),
        told("temperature", 0.5),
        told("top_p", 0.5),
        told("presence_penalty", 0.5),
        told("frequency_penalty", 0.25),
        told("logit_bias", {"5": -100}, ((5, -100.0),)),
        told("top_k", 3),
        told("min_p", 0.25),
        told("min_tokens", 2),
        told("repetition_penalty", 1.25),
        told("stop_token_ids", [9], (9,)),
        told("ignore_eos", True),
        told("allowed_token_ids", [5, 6], (5, 6)),
    ]
) | {
    "model": Case("nobody", lambda _, seen: (seen.status, seen.answer["error"]["param"]) == (404, "model")),
    "stream": Case(True, lambda without, seen: len(seen.events) > 3 > len(without.events)),
    "stop": Case(["Bergen"], lambda without, seen: "Bergen" in without.said and seen.said.endswith("harbour of ")),
    "bad_words": Case(["harbour"], lambda _, seen: seen.sampling is not None and len(seen.sampling.bad_words) == 2),
    "include_stop_str_in_output": keeps_stop(),
    "no_stop_trim": keeps_stop(),
    "skip_special_tokens": Case(False, lambda without, seen: SPECIAL in seen.said and SPECIAL not in without.said),
    "structured_outputs": held({"regex": "a+"}),
}
COMMON = SHARED | {
    "n": Case(2, lambda without, seen: (len(without.answer["choices"]), len(seen.answer["choices"])) == (1, 2)),
    "max_tokens": cut(3),
    "stream_options": streamed({"include_usage": True}, lambda events: bool(events[-1].get("usage"))),
    "prompt_logprobs": Case(
        1,
        lambda without, seen: (
            "prompt_logprobs" in json.dumps(seen.answer) and "prompt_logprobs" not in json.dumps(without.answer)
        ),
    ),
    "return_token_ids": Case(
        True, lambda without, seen: "token_ids" not in without.choice and seen.choice["token_ids"]
    ),
    "response_format": held({"type": "json_object"}),
    "guided_json": held({"type": "integer"}),
    "guided_regex": held("a+"),
    "guided_choice": held(["a", "b"]),
    "guided_grammar": held('root ::= "a"'),
}
TOOLED: dict[Route, dict[str, Case]] = {
    route: {
        "tools": prompted([tool], '"name": "weather"'),
        "tool_choice": held("required", tools=[tool]),
        "parallel_tool_calls": held(False, tools=[tool], tool_choice="required"),
        "chat_template_kwargs": prompted({"enable_thinking": False}, "quiet"),
    }
    for route, tool in ((H, WEATHER), (R, TOOL))
}
CASES: dict[Route, dict[str, Case]] = {
    C: COMMON
    | {
        "prompt": Case("Ho", lambda without, seen: without.prompt != seen.prompt == f"{SPECIAL}Ho"),
        "logprobs": Case(1, lambda without, seen: not without.choice["logprobs"] and seen.choice["logprobs"]["tokens"]),
        "return_tokens_as_token_ids": Case(
            True, lambda _, seen: seen.choice["logprobs"]["tokens"][0].startswith("token_id:"), {"logprobs": 0}
        ),
        "echo": Case(True, lambda without, seen: seen.said == f"Hi{without.said}"),
        "add_special_tokens": Case(
            False, lambda without, seen: (without.prompt, seen.prompt) == (f"{SPECIAL}Hi", "Hi")
        ),
    },
    H: COMMON
    | TOOLED[H]
    | {
        "messages": prompted(HO, "Ho"),
        "max_completion_tokens": cut(3),
        "logprobs": Case(
            True, lambda without, seen: not without.choice["logprobs"] and seen.choice["logprobs"]["content"]
        ),
        "return_tokens_as_token_ids": Case(
            True,
            lambda _, seen: seen.choice["logprobs"]["content"][0]["token"].startswith("token_id:"),
            {"logprobs": True},
        ),
        "top_logprobs": Case(
            2, lambda _, seen: len(seen.choice["logprobs"]["content"][0]["top_logprobs"]) == 2, {"logprobs": True}
        ),
        "reasoning_effort": prompted("low", "effort: low"),
        "include_reasoning": Case(
            False,
            lambda without, seen: (
                without.choice["message"]["reasoning_content"] == "hm" and "hm" not in json.dumps(seen.choice)
            ),
        ),
        "separate_reasoning": Case(
            False, lambda without, seen: (without.said, seen.said) == (TEXT, f"{THOUGHT}{TEXT}")
        ),
        "documents": prompted([{"text": "of whales"}], "of whales"),
        "add_generation_prompt": Case(
            False,
            lambda without, seen: without.prompt == f"{seen.prompt}{SPECIAL}assistant\n",
        ),
        "continue_final_message": Case(
            True,
            lambda without, seen: seen.prompt.endswith("The old") and not without.prompt.endswith("The old"),
            {"messages": CONTINUED},
        ),
    },
    R: SHARED
    | TOOLED[R]
    | {
        "input": prompted("Ho", "Ho"),
        "instructions": prompted("Be brief.", "system\nBe brief."),
        "max_output_tokens": cut(3),
        "text": held({"format": {"type": "json_object"}}),
        "reasoning": prompted({"effort": "low"}, "effort: low"),
        "include": Case(
            [LOGPROBS],
            lambda without, seen: (
                '"logprob"' in json.dumps(seen.answer) and '"logprob"' not in json.dumps(without.answer)
            ),
        ),
        "top_logprobs": Case(
            2,
            lambda _, seen: len(seen.answer["output"][-1]["content"][0]["logprobs"][0]["top_logprobs"]) == 2,
            {"include": [LOGPROBS]},
        ),
        "metadata": Case({"a": "b"}, lambda without, seen: without.answer["metadata"] != seen.answer["metadata"]),
        "stream_options": Case(
            {"include_obfuscation": True},
            lambda without, seen: "obfuscation" not in json.dumps(seen.events) and len(seen.events) > 3,
            {"stream": True},
        ),
    },
}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer begins each text with a special token, and whose template knows every variable."""
    path = tmp_path_factory.mktemp("honoured") / "demo_model"
    shutil.copytree(DEMO_MODEL_DIR, path)
    tokenizer = json.loads((path / "tokenizer.json").read_bytes())
    special = {"id": SPECIAL, "ids": [1], "tokens": [SPECIAL]}
    tokenizer["post_processor"]["special_tokens"] = {SPECIAL: special}
    tokenizer["post_processor"]["single"].insert(0, {"SpecialToken": {"id": SPECIAL, "type_id": 0}})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = path / "chat_template.jinja"
    template.write_text(_EXTRAS + template.read_text())
    return path


async def ask(rig: Rig, route: Route, fields: Mapping[str, object]) -> Seen:
    rig.mesh.runs.clear()
    reply = await rig.http.post(route, json={"model": rig.model.name, **NEEDED[route], **fields})
    lines = [line[len("data: ") :] for line in reply.text.splitlines() if line.startswith("data: {")]
    sampling, prompt = None, ""
    if rig.mesh.runs:
        run = rig.mesh.runs[0]
        sampling, prompt = run.sampling, rig.model.codec.decode_shown(unpack_tokens(run.prompt))
    answer = {} if lines else reply.json()
    return Seen(reply.status_code, answer, [json.loads(line) for line in lines], sampling, prompt)


@pytest.mark.parametrize("route", BODIES)
async def test_each_parameter_has_its_effect(open_rig: OpenRig, folder: Path, route: Route) -> None:
    async with open_rig(model_path=folder) as rig:
        rig.mesh.answers = lambda prompt: answer
        codec = rig.model.codec
        text = codec.encode(f"{THOUGHT}{TEXT}", add_special_tokens=False)
        answer = [*text[:-1], rig.model.codec.added_ids[SPECIAL], text[-1], min(rig.model.eos_token_ids)]
        num_tokens = {"max_output_tokens" if route is R else "max_tokens": 200}
        for name, (value, shows, beside) in CASES[route].items():
            base = num_tokens | beside
            without, seen = await ask(rig, route, base), await ask(rig, route, base | {name: value})
            assert without.status == 200, (name, without.answer)
            assert seen.status == 200 or name == "model", (name, seen.answer)
            assert shows(without, seen), (name, without, seen)


@pytest.mark.parametrize("route", BODIES)
def test_no_parameter_is_left_out(route: Route) -> None:
    assert set(CASES[route]) == set(BODIES[route].__struct_fields__)
