"""Which family of models a chat template is of: in what form its model writes calls."""

from collections.abc import Mapping

from services.config import ToolFormat
from services.gateway.api.tools.parser import DeepSeekParser, HermesParser, LlamaParser, MistralParser, ToolParser

PARSERS: Mapping[ToolFormat, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3": LlamaParser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
}

_NOT_JSON = ("<function=", "<arg_key>")
"""Qwen3-Coder's and GLM's calls have Hermes' markers, and no JSON between them."""


def format_of(template: str) -> ToolFormat | None:
    """Return the form of calls that a chat template teaches; None: none that is known here."""
    if HermesParser.markers[0] in template and not any(marker in template for marker in _NOT_JSON):
        return "hermes"
    if MistralParser.markers[0] in template:
        return "mistral"
    if DeepSeekParser.markers[0] in template:
        return "deepseek"
    is_llama = "<|start_header_id|>" in template and '"parameters"' in template
    return "llama3" if is_llama or LlamaParser.markers[0] in template else None
