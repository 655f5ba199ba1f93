"""Tokenizers as SentencePiece has them, whose words begin with the space before them: files, and folders with a model.

A decoder of theirs drops the space that a text would begin with.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.engine.demo_model import DEMO_MODEL_DIR

EOS, BOS = "</s>", "<s>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content }}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{# <think> </think> #}"
)
"""As Llama 2's: an answer follows text. It may begin with thoughts."""
LETTERS = '▁abcdefghijklmnopqrstuvwxyzINST0123456789{}<>_":,[]/.-'
WORDS = ("▁the", "▁dog", "▁cat", "the", "▁▁", "é", "▁{", '{"', "\ufffd")


def llama() -> Tokenizer:
    """As Llama 2's: a space before the text, bytes for what is no token."""
    vocabulary = {word: number for number, word in enumerate((EOS, "<unk>", BOS))}
    for piece in (*(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("d", "o"), ("do", "g"), ("▁", "dog"), ("c", "a"), ("ca", "t"),
              ("▁", "cat"), ("▁", "▁"), ("▁", "{"), ("{", '"')]  # fmt: skip
    for piece in (*("".join(pair) for pair in merges), "é", "\ufffd"):
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def metaspace() -> Tokenizer:
    """As T5's and XLM-R's: the likeliest pieces."""
    pieces = [(EOS, 0.0), ("<unk>", -20.0), (BOS, 0.0), *((word, -2.0) for word in WORDS)]
    pieces += [(letter, -5.0) for letter in LETTERS]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer)


def metaspace_with_bytes() -> Tokenizer:
    """Metaspace behind bytes, as converters wrote it."""
    pieces = [(EOS, 0.0), ("<unk>", -20.0), (BOS, 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    pieces += [*((word, -2.0) for word in WORDS), *((letter, -5.0) for letter in LETTERS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _finished(tokenizer)


TOKENIZERS: Mapping[str, Callable[[], Tokenizer]] = {
    "llama": llama,
    "metaspace": metaspace,
    "metaspace with bytes": metaspace_with_bytes,
}


def folder_with(tokenizer: Tokenizer, path: Path) -> Path:
    """Write a checkpoint with this tokenizer."""
    shutil.copytree(DEMO_MODEL_DIR, path)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"eos_token": EOS, "bos_token": BOS, "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (EOS, "<unk>", BOS)])
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return tokenizer
