"""Detokenizing token by token, stop strings, and chat templates."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.tokenizer import read_tokenizer
from services.errors import UserError
from services.gateway import limits
from services.gateway.api.template import ChatMessage, ChatOptions, ChatTemplateError
from services.gateway.api.text import StopMatcher, TextCodec, codec_of
from tests.gateway.sentencepiece import TOKENIZERS
from tests.share import examples


def byte_level() -> TextCodec:
    """One token per byte and a few merges that cut through characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = [("ð", "Ł"), ("Ġ", "t"), ("æ", "Ŀ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return TextCodec(tokenizer)


def word_piece() -> TextCodec:
    words = ["[UNK]", "play", "##ing", "do", "n't", ".", "'", "s", "##x"]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return TextCodec(tokenizer)


CODECS = {
    "demo": codec_of(read_tokenizer(DEMO_MODEL_DIR)),
    "byte_level": byte_level(),
    "word_piece": word_piece(),
    **{name: TextCodec(make()) for name, make in TOKENIZERS.items()},
}


def deltas_of(codec: TextCodec, token_ids: list[int], sizes: list[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = codec.detokenizer(codec.prompt_end(prompt, codec.ids_shown()))
    deltas: list[str] = []
    at = 0
    for size in [*sizes, len(token_ids)]:
        deltas.append(detokenizer.add_tokens(token_ids[at : at + size]))
        at += size
    return [*deltas, detokenizer.rest()]


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_what_an_answer_adds_to_its_prompt(name: str, data: st.DataObject) -> None:
    codec = CODECS[name]
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size + 1), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=60))
    prompt = data.draw(st.lists(st.integers(0, codec.vocab_size + 1), max_size=12))
    if prompt and data.draw(st.booleans()):  # longer than what is looked at of it
        prompt = (prompt * limits.PROMPT_END_TOKENS)[: limits.PROMPT_END_TOKENS + 20]
        assume(num_bytes_at_end(codec, prompt) < limits.PROMPT_END_TOKENS)
    assert "".join(deltas_of(codec, ids, sizes, prompt)) == added_to(codec, prompt, ids)


def added_to(codec: TextCodec, prompt: list[int], answer: list[int]) -> str:
    """Return an answer's text by its definition."""
    alone, both = codec.decode(prompt), codec.decode([*prompt, *answer])
    at = next((at for at, pair in enumerate(zip(alone, both, strict=False)) if pair[0] != pair[1]), len(alone))
    return both[at:]


def num_bytes_at_end(codec: TextCodec, prompt: list[int]) -> int:
    """Return how many byte-fallback tokens a prompt ends in."""
    shown = codec.ids_shown()
    names = [codec._tokenizer.id_to_token(token) for token in reversed(prompt) if token in shown]  # pyright: ignore[reportPrivateUsage]
    return next((at for at, name in enumerate(names) if not name.startswith("<0x")), len(names))


@settings(max_examples=examples(100), deadline=None)
@given(data=st.data())
def test_bytes_beyond_what_is_looked_at_are_whole_characters(data: st.DataObject) -> None:
    """A text in a script of which a tokenizer has bytes alone: a prompt of it, and what goes on from any place."""
    codec = CODECS["llama"]
    text = data.draw(st.text("東京éß🙂", min_size=100, max_size=150)) * 3
    ids = codec.encode(text)
    at = data.draw(st.integers(300, len(ids)))
    assert "".join(deltas_of(codec, ids[at:], [1] * len(ids), ids[:at])) == added_to(codec, ids[:at], ids[at:])


@pytest.mark.parametrize("name", ["demo", "byte_level"])
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(max_size=30))
def test_text_comes_back_and_never_half_a_character(name: str, text: str) -> None:
    codec = CODECS[name]
    ids = codec.encode(text)
    deltas = deltas_of(codec, ids, [1] * len(ids))
    assert "".join(deltas) == codec.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_half_a_character_waits_for_the_other_half() -> None:
    codec = CODECS["byte_level"]
    ids = codec.encode("🙂東")
    assert len(ids) > 3
    deltas = [delta for delta in deltas_of(codec, ids, [1] * len(ids)) if delta]
    assert deltas == ["🙂", "東"]


def test_special_tokens_are_not_text_and_added_ones_are() -> None:
    codec = CODECS["byte_level"]
    ids = codec.encode("a<|end|>b<tool>")
    assert "".join(deltas_of(codec, ids, [])) == "ab<tool>"


def test_a_long_run_of_garbage_is_exact() -> None:
    codec = CODECS["byte_level"]
    lone = codec.encode("é")[0]
    ids = [lone] * 500 + codec.encode("fine é")
    assert "".join(deltas_of(codec, ids, [1] * len(ids))) == codec.decode(ids)


def cut_at_first_completed(text: str, stops: list[str]) -> str | None:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return None


@settings(max_examples=examples(500), deadline=None)
@given(
    st.text("abc", max_size=20),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 4), max_size=20),
)
def test_stop_strings_at_any_split(text: str, stops: list[str], sizes: list[int]) -> None:
    matcher = StopMatcher(stops)
    out, at = "", 0
    for size in [*sizes, len(text)]:
        out += matcher.feed(text[at : at + size])
        at += size
        assert text.startswith(out)
    out += matcher.flush()
    expected = cut_at_first_completed(text, stops)
    assert matcher.matched == (expected is not None)
    assert out == (text if expected is None else expected)


def test_text_that_may_begin_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\n\nUser"])
    assert [matcher.feed(part) for part in ("Hello\n", "\nUs", "eful", "\n\nUse", "r: ")] == [
        "Hello", "", "\n\nUseful", "", "",
    ]  # fmt: skip
    assert matcher.matched
    assert matcher.flush() == ""


# Chat templates.


def chat(template: str, *contents: str, **special: str) -> str:
    codec = TextCodec(Tokenizer(models.BPE()), template, special)
    return codec.render_chat([ChatMessage(role="user", content=text) for text in contents])


def test_the_demo_template() -> None:
    codec = CODECS["demo"]
    text = codec.render_chat([ChatMessage(role="user", content="Hi")])
    assert "Hi" in text
    assert text != "Hi"
    ids = codec.encode(text, add_special_tokens=False)
    assert ids
    assert all(token_id < codec.vocab_size for token_id in ids)


def test_what_templates_use() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y')[:2] }}{% if add_generation_prompt %}>{% endif %}"
    )
    rendered = chat(template, "<é>", "b", "c", bos_token="<s>")
    assert rendered == '<s>{"role": "user", "content": "<é>"}{"role": "user", "content": "b"}20>'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only one user') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].content.x }}",
        "{{ 1 + messages }}",
    ],
)
def test_templates_that_refuse_or_misbehave(template: str) -> None:
    with pytest.raises(ChatTemplateError):
        chat(template, "Hi")


def test_no_template() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        chat("", "Hi")


def checkpoint_with(folder: Path, config: dict[str, object], jinja: str = "") -> Path:
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((DEMO_MODEL_DIR / name).read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja:
        (folder / "chat_template.jinja").write_text(jinja)
    return folder


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "C{{ eos_token }}", "eos_token": "</s>"}, "", "C</s>"),
        (
            {"chat_template": "C{{ eos_token }}", "eos_token": {"content": "<e>", "__type": "AddedToken"}},
            "F{{ eos_token }}",
            "F<e>",
        ),
        ({"chat_template": [{"name": "x", "template": "X"}, {"name": "default", "template": "D"}]}, "", "D"),
    ],
)
def test_where_a_template_is_found(tmp_path: Path, config: dict[str, object], jinja: str, expected: str) -> None:
    codec = codec_of(read_tokenizer(checkpoint_with(tmp_path, config, jinja)))
    assert codec.render_chat([ChatMessage(role="user", content="Hi")]) == expected


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"backend tokenizer.*: mend its files"):
        read_tokenizer(tmp_path)
    found = read_tokenizer(checkpoint_with(tmp_path, {}, "{% if %}"))
    with pytest.raises(UserError, match="cannot be compiled"):
        codec_of(found)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        read_tokenizer(tmp_path)


def test_a_tool_template_is_that_of_conversations_with_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    codec = codec_of(read_tokenizer(checkpoint_with(tmp_path, {"chat_template": templates})))
    turns = [ChatMessage(role="user", content="Hi")]
    assert codec.render_chat(turns) == "D"
    assert codec.render_chat(turns, ChatOptions(tools=({"type": "function"},))) == "T1"


def test_the_gateway_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from services.gateway.service import *; from services.engine.tokenizer import read_tokenizer\n"
        "from pathlib import Path; print(read_tokenizer(Path(sys.argv[1])).eos_token_id)"
    )
    out = subprocess.run([sys.executable, "-c", code, DEMO_MODEL_DIR], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "0"
