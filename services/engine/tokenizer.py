"""A checkpoint's tokenizer, its special tokens and chat templates, as transformers' own loader reads them. No torch:
where a process has none the loader does without it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from tokenizers import Tokenizer

from services.engine.checkpoint import Checkpoint
from services.errors import CheckpointError


class CheckpointTokenizer(NamedTuple):
    """`template`: the chat template; `tools_template`: that of a conversation with tools. Empty: there is none.
    `special`: the named special tokens, `bos_token` and its like, as templates use them."""

    tokenizer: Tokenizer
    template: str
    tools_template: str
    special: Mapping[str, str]
    eos_token_id: int | None

    def ends(self, checkpoint: Checkpoint) -> frozenset[int]:
        """Return the ids that end an answer: those that the checkpoint's configurations name, and the tokenizer's end
        of a text, which no model can write where it is beyond its vocabulary."""
        eos = self.eos_token_id
        return checkpoint.eos_token_ids.union(() if eos is None or eos >= checkpoint.vocab_size else (eos,))


def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Raises CheckpointError for what transformers does not load, or only with Python code of the checkpoint's."""
    from transformers import AutoTokenizer  # noqa: PLC0415  (a second of imports)
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    try:
        found = cast(Any, AutoTokenizer).from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its tokenizers do
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"transformers cannot load the tokenizer of {folder} ({type(error).__name__}: {reason}): mend its files, "
            "or choose another checkpoint"
        ) from error
    # Only a fast tokenizer has a backend of the `tokenizers` library, and only this backend is kept.
    if not getattr(found, "is_fast", False):
        raise CheckpointError(f"{folder} has no tokenizer.json: convert its tokenizer with transformers, save it there")
    # A checkpoint has one chat template or several named ones, of which `tool_use` is for conversations with tools.
    templates: Any = found.chat_template or ""
    named = {"default": templates} if isinstance(templates, str) else cast(dict[str, str], templates)
    default = named.get("default", "")
    return CheckpointTokenizer(
        tokenizer=Tokenizer.from_str(found.backend_tokenizer.to_str()),
        template=default,
        tools_template=named.get("tool_use", default),
        special=found.special_tokens_map,
        eos_token_id=found.eos_token_id,
    )
