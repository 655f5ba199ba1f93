"""Grammars (llguidance's Lark) that hold an answer to calls as a family of models writes them.

Where a call is required the whole answer is calls. Where the model may call, and tools are strict, text is free, and
what stands behind a marker is held. Markers that are tokens of their own are written as such.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from services.gateway.api.json_schema import ESCAPES
from services.gateway.api.tools.asked import Tool, ToolChoice
from services.gateway.api.tools.formats import PARSERS, ToolFormat

_JSON_STYLE = {
    "json_allowed_escapes": ESCAPES,
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""JSON as templates show it to models. With free white space a weak model may write nothing else."""

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_SAY_MORE = frozenset(("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"))
"""Keywords by which an object may have properties that `properties` does not name."""

_MARKERS = [marker for parser in PARSERS.values() for marker in parser.markers]

_TEXT = r"/(.|\n)*/"
_TEXT_WITHOUT_BRACE = r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/"
"""An answer of a Llama that is no call: it does not begin with a brace."""


class _Form(NamedTuple):
    """Calls in a row: `begin opening call (separator call)* closing`, as a model of this family writes them."""

    begin: str
    opening: str
    call: str
    separator: str
    closing: str


def needs_grammar(tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Return whether an answer must be held to a grammar."""
    return choice.mode == "required" or (choice.mode == "auto" and any(tool.strict for tool in tools))


def tool_grammar(
    form_name: ToolFormat,
    template: str,
    tools: Sequence[Tool],
    choice: ToolChoice,
    token_ids: Mapping[str, int],
    *,
    parallel: bool = True,
) -> str:
    """Return the grammar of an answer for which `needs_grammar`. `token_ids`: the added tokens of the vocabulary.

    A required call follows its tool's schema, strict or not. Where calls are free, tools that are not strict take any
    object: a schema that the grammar's library does not support does no harm there.
    """

    is_free = choice.mode == "auto"
    many = parallel and not choice.name
    # Write calls in a row, as this family of models does, around the rule `call`, which follows at the end.
    form = _form(form_name, template)
    begin, opening, _, separator, closing = (_lark(text, token_ids) for text in form)
    more = f"({separator} call)*" if many else ""
    calls = f"{opening} call {more} {closing}"
    # Set where calls may stand: alone where they are required, else behind a marker in free text.
    if not is_free:
        rules = ["start: calls", f"calls: {begin} {calls}"]
    elif form.begin:
        # A marker that is a token may be spelled with others as well: what follows is held all the same.
        rules = [
            "start: calls* TEXT" if many else "start: TEXT | calls",
            f"calls: marked {calls}",
            f"marked: spelled | TEXT {begin}",
            f"spelled[lazy]: TEXT {json.dumps(form.begin)}",
            f"TEXT: {_TEXT}",
        ]
    else:
        # Without a marker a call is recognized by its first brace: free text must not begin with one.
        tag = _lark(PARSERS[form_name].markers[0], token_ids)
        rules = [f"start: TEXT | {tag}? calls", f"calls: {calls}", f"TEXT: {_TEXT_WITHOUT_BRACE}"]
    # Give each tool a rule of its own, so that its name comes with arguments of its own schema only.
    wanted = [tool for tool in tools if choice.name in ("", tool.name)]
    rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(wanted))))
    for index, tool in enumerate(wanted):
        schema = _closed(tool.parameters) if tool.strict or not is_free else _ANY_OBJECT
        rules.append(f"call_{index}: {_lark(form.call, token_ids, tool.name, f'arguments_{index}')}")
        rules.append(f"arguments_{index}: %json {json.dumps({**schema, 'x-guidance': _JSON_STYLE})}")
    return "\n".join(rules)


def _closed(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema of arguments that has no others than those it names, unless it says so: a function takes no
    others, and a weak model goes on to invent them."""
    plain = "properties" in parameters and not _SAY_MORE & parameters.keys()
    return {**parameters, "additionalProperties": False} if plain else parameters


def _form(name: ToolFormat, template: str) -> _Form:
    if name == "hermes":
        call = '\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
        return _Form("<tool_call>", "", call, "\n<tool_call>", "")
    if name == "llama3":
        return _Form("", "", '{"name": "NAME", "parameters": ARGUMENTS}', "; ", "")
    if name == "mistral" and "[ARGS]" in template:
        call = "NAME[CALL_ID]SOME_ID[ARGS]ARGUMENTS" if "[CALL_ID]" in template else "NAME[ARGS]ARGUMENTS"
        return _Form("[TOOL_CALLS]", "", call, "[TOOL_CALLS]", "")
    if name == "mistral":
        return _Form("[TOOL_CALLS]", "[", '{"name": "NAME", "arguments": ARGUMENTS}', ", ", "]")
    begin, call_begin, sep, call_end, end = PARSERS["deepseek"].markers
    if "```json" in template:
        return _Form(begin, "", f"{call_begin}function{sep}NAME\n```json\nARGUMENTS\n```{call_end}", "\n", end)
    return _Form(begin, "", f"{call_begin}NAME{sep}ARGUMENTS{call_end}", "", end)


def _lark(text: str, token_ids: Mapping[str, int], name: str = "", arguments: str = "") -> str:
    """Return a part of a form as Lark: literals, markers that are tokens as these, and what stands for other rules."""
    terms = {"ARGUMENTS": arguments, "SOME_ID": "/[a-zA-Z0-9]{9}/"}
    terms |= {marker: f"<[{token_ids[marker]}]>" for marker in _MARKERS if marker in token_ids}
    pieces = re.split(f"({'|'.join(map(re.escape, terms))})", text)
    return " ".join(terms.get(piece) or json.dumps(piece.replace("NAME", name)) for piece in pieces if piece)
