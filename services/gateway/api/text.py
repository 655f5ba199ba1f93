"""Text to tokens and back: the checkpoint's tokenizer, its chat template, and detokenizing token by token.

No torch.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from jinja2 import TemplateError
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer

from services.engine.grammar import with_known_decoder
from services.engine.tokenizer import CheckpointTokenizer
from services.errors import UserError
from services.gateway import limits
from services.gateway.api.pieces import overlap
from services.gateway.api.reasoning import MARKERS
from services.gateway.api.special import GuardedTokens, Masks
from services.gateway.api.template import ChatMessage, ChatOptions, ChatTemplate, ChatTemplateError
from services.gateway.api.tools.formats import PARSERS

REPLACEMENT = "\ufffd"
NO_OPTIONS = ChatOptions()
_OWN_MARKS = frozenset(MARKERS).union(*({*parser.markers, *parser.call_ends} for parser in PARSERS.values()))
"""What a model writes itself around its thoughts and calls."""


class PromptEnd(NamedTuple):
    """What an answer's text stands behind. `shown_ids`: the tokens that are text, of prompt and answer."""

    shown_ids: Collection[int]
    token_ids: tuple[int, ...] = ()
    """The last of the prompt's tokens that are shown; none: the answer's text is a text's beginning."""
    text: str = ""
    is_certain: bool = True
    """No answer can change how it is spelled: it does not end in the middle of a character, or in bytes."""
    drops_space: bool = False
    """Where an answer begins with a space, that is not shown: none stands at a text's beginning."""


class TextCodec:
    """One checkpoint's tokenizer and template. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str = "",
        special: Mapping[str, str] | None = None,
        tools_template: str = "",
    ) -> None:
        # The tokenizer's file may ask to cut or pad texts: a prompt must be encoded as it is.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.template = template
        """The chat template's source; empty: there is none."""
        self.tools_template = tools_template or template
        """That of a conversation with tools."""
        # Compile the templates before sorting the added tokens: what a template writes decides which ones are guarded.
        self._template = ChatTemplate(template, special or {}) if template else None
        other = self.tools_template != template
        self._tools_template = ChatTemplate(self.tools_template, special or {}) if other else self._template
        self.vocab_size = tokenizer.get_vocab_size()
        added = tokenizer.get_added_tokens_decoder()
        self.added_ids: Mapping[str, int] = {token.content: token_id for token_id, token in added.items()}
        """The tokens that were added to the vocabulary, special or not, by their text."""
        self._names = {token_id: token.content.encode() for token_id, token in added.items() if token.special}
        guarded = {token_id: token for token_id, token in added.items() if self._is_guarded(token)}
        self._guarded = GuardedTokens(guarded)
        # An assistant's content is what the model wrote, and templates look in it for where its thoughts end.
        own = {n: token for n, token in guarded.items() if not token.special and token.content in _OWN_MARKS}
        self._guarded_in_answers = GuardedTokens({n: token for n, token in guarded.items() if n not in own})
        self._bytes = _token_bytes(tokenizer)
        # Make a second tokenizer that encodes the spellings of guarded tokens as plain text: clients may write them.
        self._plain_tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._plain_tokenizer.encode_special_tokens = True  # the library's name for: as the text that they are
        self._plain_tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
            [_as_special(token) for token in guarded.values()]
        )
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._plain_ids = frozenset(vocab.values()) - self._names.keys()
        self._bytes_by_id = _byte_fallback_ids(tokenizer)
        # Try whether the decoder drops a space at a text's beginning: the answer's text lacks it then.
        blank = tokenizer.token_to_id("▁")
        self._drops_space = blank is not None and self.token_bytes(blank) == b" " and not self.decode([blank])
        self.longest_token_bytes = max((len(token.encode()) for token in vocab), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the text's token ids."""
        # The batch call, unlike the single one, lets other threads run meanwhile and skips the offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_within(self, text: str) -> list[int]:
        """Return a text's tokens as they are within another one, behind a new line: at a text's beginning some
        tokenizers add a space."""
        before, both = (self.encode(each, add_special_tokens=False) for each in ("\n", f"\n{text}"))
        is_apart = both[: len(before)] == before
        return both[len(before) :] if is_apart else self.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> list[int]:
        """Return the token ids of the prompt that the template makes of the messages: only the template itself writes
        special tokens, and those that are its own. An assistant's content alone may have its thoughts' marks and its
        calls'. Raises ChatTemplateError."""
        masks = Masks()
        text = self._render(messages, options, masks)
        whole, written = masks.unmask(text), self._guarded.spelled_in(text)
        if self._guarded.spelled_in(whole) == written:
            token_ids = self.encode(whole, add_special_tokens=False)
            # A tokenizer may see others than are spelled: it may compare what its normalizer makes of the text.
            if [token_id for token_id in token_ids if token_id in self._guarded.ids] == written:
                return token_ids
        return [token_id for piece in self._guarded.split(text) for token_id in self._encode_piece(piece, masks)]

    def render_chat(self, messages: Sequence[ChatMessage], options: ChatOptions = NO_OPTIONS) -> str:
        """Return the prompt that the template makes of the messages. Raises ChatTemplateError."""
        masks = Masks()
        return masks.unmask(self._render(messages, options, masks))

    def _render(self, messages: Sequence[ChatMessage], options: ChatOptions, masks: Masks) -> str:
        template = self._tools_template if options.tools else self._template
        if template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        return template.render(messages, options, partial(self._mask, masks))

    def _mask(self, masks: Masks, value: Any, *, is_answer: bool = False) -> Any:
        guarded = self._guarded_in_answers if is_answer else self._guarded
        return guarded.mask_all(value, masks)

    def _is_guarded(self, token: AddedToken) -> bool:
        """Return whether only a template may write this token: a special one, or one of its own. White space and words
        begin and end nothing."""
        text = token.content
        if token.special or text.isspace() or text.isalnum():
            return token.special
        return any(template.writes(text) for template in (self._template, self._tools_template) if template)

    def _encode_piece(self, piece: str | int, masks: Masks) -> list[int]:
        if isinstance(piece, int):
            return [piece]
        text = masks.unmask(piece)
        return self._plain_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text before it; of a special token, its name."""
        if token_id in self._names:
            return self._names[token_id]
        if self._bytes is None:
            before, both = self._tokenizer.decode([token_id]), self._tokenizer.decode([token_id, token_id])
            return both.removeprefix(before).encode()
        return self._bytes.decode_bytes([token_id]) if token_id < self.vocab_size else b""

    def first_bytes(self, token_id: int) -> bytes:
        """Return what a token is at a text's beginning, where a decoder may drop a space; of a special token, its
        name."""
        within, alone = self.token_bytes(token_id), self.decode([token_id]).encode()
        return within if token_id in self._names or not within.endswith(alone) else alone

    def decode_shown(self, token_ids: Sequence[int]) -> str:
        """Return the text with special tokens as they are spelled."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def ids_shown(self, shown: Collection[str] = ()) -> Collection[int]:
        """Return all tokens that are text: none that are special, but for those that are spelled like one of
        `shown`."""
        return self._plain_ids.union(self.added_ids[text] for text in shown if text in self.added_ids)

    def prompt_end(self, prompt: Sequence[int], shown_ids: Collection[int]) -> PromptEnd:
        """Return what the answers to a prompt stand behind."""
        found = [*islice((token for token in reversed(prompt) if token in shown_ids), limits.PROMPT_END_TOKENS)][::-1]
        for _ in range(3 if len(found) == limits.PROMPT_END_TOKENS else 0):  # not from the middle of a character on
            if 0x80 <= self._bytes_by_id.get(found[0], 0) < 0xC0:
                del found[0]
        text = self.decode_shown(found)
        return PromptEnd(
            shown_ids=shown_ids,
            token_ids=tuple(found),
            text=text,
            is_certain=not found or (found[-1] not in self._bytes_by_id and not text.endswith(REPLACEMENT)),
            drops_space=self._drops_space and not found,
        )

    def detokenizer(self, end: PromptEnd) -> "Detokenizer":
        """Return one of an answer to this prompt."""
        return Detokenizer(self, end, self._bytes_by_id)


class Detokenizer:
    """Turns an answer's tokens into text as they come. What `add_tokens` and `rest` return adds up, exactly, to what
    stands in the text of prompt and answer, decoded as one, behind what it has in common with the prompt's alone. Of
    both the shown tokens are decoded.

    A prompt may end in the middle of a character, which its own text has as U+FFFD: then the answer's text begins with
    the character, and `num_respelled` is how much of the prompt's it replaces. A run of byte-fallback tokens that
    reaches further back than the prompt's end is whole characters there.

    Half a UTF-8 character is held back until it is whole. So is a run of byte-fallback tokens until it ends: such a
    run is decoded as a whole or not at all.
    """

    def __init__(self, codec: TextCodec, end: PromptEnd, byte_ids: Collection[int]) -> None:
        self._codec = codec
        # Hidden special tokens and unknown ids are no text; they do not even end a run of byte-fallback tokens.
        self._shown_ids = end.shown_ids
        self._byte_ids = byte_ids
        self._window = list(end.token_ids)
        """The tokens of the last text returned, as context (a decoder may treat the first token differently), and
        those whose text is held back."""
        self._num_returned = len(end.token_ids)
        self._returned_text = end.text
        self.num_respelled = 0
        """So many characters at the end of the prompt's text are part of the answer's, spelled anew. Known with the
        first text returned."""

    def add_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now certain."""
        return "".join([self._feed_one(token_id) for token_id in token_ids if token_id in self._shown_ids])

    def rest(self) -> str:
        """Return what was held back: the answer has ended."""
        text = self._codec.decode_shown(self._window)
        delta = self._take(text)
        self._window, self._num_returned, self._returned_text = [], 0, ""
        return delta

    def _feed_one(self, token_id: int) -> str:
        self._window.append(token_id)
        if token_id in self._byte_ids:
            return ""
        # Garbage that never becomes a character must not be decoded again from its start for each of its tokens.
        num_held = len(self._window) - self._num_returned
        if num_held > limits.MAX_HELD_TOKENS and REPLACEMENT in self._codec.decode_shown([token_id]):
            return ""
        text = self._codec.decode_shown(self._window)
        if text.endswith(REPLACEMENT) or not (delta := self._take(text)):
            return ""
        del self._window[: self._num_returned]
        self._num_returned = len(self._window)
        self._returned_text = self._codec.decode_shown(self._window)
        return delta

    def _take(self, text: str) -> str:
        """Return what is new in the window's text."""
        returned = self._returned_text
        num_common = len(returned)
        while not text.startswith(returned[:num_common]):
            num_common -= 1
        if len(text) > num_common:
            self.num_respelled += len(returned) - num_common
        return text[num_common:]


class StopMatcher:
    """Cuts a text at the first stop string to be completed, however the text is divided.

    Text that may turn out to be the beginning of a stop string is held back. `keeps_stop`: it is cut behind it.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._keeps_stop = keeps_stop
        self._held: str = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Return the text that is certain to stand before any stop string. Nothing once `matched`."""
        if not self._stops or self.matched:
            return "" if self.matched else text
        text = f"{self._held}{text}"
        # The stop that is complete first wins, so that the result does not depend on how the text came in.
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.matched = True
            end, at = min(found)
            return text[: end if self._keeps_stop else at]
        num_held = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return "" if self.matched else held


def codec_of(found: CheckpointTokenizer) -> TextCodec:
    """Raises UserError where a chat template cannot be compiled."""
    try:
        return TextCodec(found.tokenizer, found.template, found.special, found.tools_template)
    except TemplateError as error:
        raise UserError(f"the model's chat template cannot be compiled: {error}") from error


def _as_special(token: AddedToken) -> AddedToken:
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


def _token_bytes(tokenizer: Tokenizer) -> LLTokenizer | None:
    """Return what knows the bytes of each token; None: they are no bytes, but words."""
    try:
        return LLTokenizer(with_known_decoder(tokenizer.to_str()))
    except ValueError:
        return None


def _byte_fallback_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Return the bytes of `<0x00>` … `<0xFF>`, by their ids, where the decoder joins them to characters."""
    if '"ByteFallback"' not in tokenizer.to_str():
        return {}
    found = ((tokenizer.token_to_id(f"<0x{byte:02X}>"), byte) for byte in range(256))
    return {token_id: byte for token_id, byte in found if token_id is not None}
