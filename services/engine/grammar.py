"""What an answer must be, token by token: llguidance's grammars, with limits. No torch.

A grammar is understood once, in a thread of its own; each answer then has a copy of its beginning. All copies share
what the library learns of the regular expressions as they are used, and the bound on that. Where it is reached the
grammar is understood anew for those who come next; an answer that shared it with others begins another attempt.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from tokenizers import Tokenizer

from schemas.request import MAX_GRAMMAR_CHARACTERS
from services.engine import limits
from services.engine.interface import Grammar, GrammarError

_LIMITS = LLParserLimits(
    max_items_in_row=limits.ROW_ITEMS_MAX,
    step_max_items=limits.STEP_ITEMS_MAX,
    step_lexer_fuel=limits.STEP_LEXER_FUEL,
    initial_lexer_fuel=limits.LEXER_FUEL,
    max_lexer_states=limits.LEXER_STATES_MAX,
    verbose_errors=False,
)


class Grammars:
    """Those of one checkpoint's tokens. For any thread.

    `eos_token_ids` end an answer: they may follow where it is complete. The tokenizer is taken apart at once, in the
    thread.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Future[_Grammar]] = OrderedDict()
        """By text; those asked for last are at the end."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")
        size = threading.stack_size(limits.COMPILER_STACK_BYTES)
        try:  # the first task starts the thread
            self._tokenizer = self._executor.submit(tokens_of, tokenizer.to_str(), vocab_size, sorted(eos_token_ids))
        finally:
            threading.stack_size(size)

    def compile(self, text: str) -> "Future[Grammar]":
        """Begin to understand a grammar, llguidance's Lark, for one answer. The future has a GrammarError where it
        cannot be. A grammar that is kept, or being understood, is not understood twice."""
        started: Future[Grammar] = Future()
        started.set_running_or_notify_cancel()

        def settle(future: "Future[_Grammar]") -> None:
            if (error := future.exception()) is None:
                started.set_result(_Answer(future.result(), partial(self._spend, text), self._vocab_size))
            else:  # each has an error of its own, as whoever raises one adds to it
                started.set_exception(GrammarError(str(error)))

        self._understood(text).add_done_callback(settle)
        return started

    def _understood(self, text: str) -> "Future[_Grammar]":
        with self._lock:
            future = self._kept.get(text)
            if future is None:
                future = self._kept[text] = self._executor.submit(self._understand, text)
            self._kept.move_to_end(text)
            self._drop_old()
        return future

    def _spend(self, text: str, spent: "_Grammar") -> None:
        """Keep a grammar no more: whoever asks next has another one."""
        with self._lock:
            kept = self._kept.get(text)
            if kept is not None and kept.done() and kept.exception() is None and kept.result() is spent:
                del self._kept[text]

    def _drop_old(self) -> None:
        num_characters = sum(map(len, self._kept))
        while len(self._kept) > limits.MAX_KEPT_GRAMMARS or num_characters > limits.MAX_KEPT_GRAMMAR_CHARACTERS:
            text, _ = self._kept.popitem(last=False)
            num_characters -= len(text)

    def _understand(self, text: str) -> "_Grammar":
        if (error := self._tokenizer.exception()) is not None:
            raise GrammarError(str(error))
        return understood(self._tokenizer.result(), text)


@dataclass(slots=True, eq=False)
class _Grammar:
    """One that is understood, and has seen no token. `num_bits`: of its masks."""

    matcher: LLMatcher
    num_bits: int
    num_answers: int = 0
    """Have begun with it."""


def understood(tokenizer: LLTokenizer, text: str) -> _Grammar:
    """Return a grammar, ready for its first answer. Raises GrammarError. Takes seconds and GiB for a hostile one: the
    library bounds the states that it makes, and not the work of comparing them."""
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise GrammarError(f"it has {len(text)} characters, and at most {MAX_GRAMMAR_CHARACTERS} are taken")
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    _check(matcher)
    if warnings := matcher.get_grammar_warnings():
        raise GrammarError(_line("; ".join(warnings)))
    # That nothing satisfies it, or too much does, is seen with a first token at times.
    first = matcher.deep_copy()
    mask = np.frombuffer(first.compute_bitmask(), np.uint8)
    _check(first)
    allowed = np.flatnonzero(np.unpackbits(mask, count=tokenizer.vocab_size, bitorder="little"))
    first.try_consume_tokens(allowed[:1].tolist())
    _check(first)
    return _Grammar(matcher, tokenizer.vocab_size)


def takes(tokenizer: LLTokenizer, grammar: _Grammar, text: str) -> bool:
    """Return whether a grammar lets an answer be this text."""
    matcher, tokens = grammar.matcher.deep_copy(), tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


class _Answer:
    """Implements `Grammar`. `spend` is called with a grammar that is spent."""

    def __init__(self, grammar: _Grammar, spend: Callable[[_Grammar], None], vocab_size: int) -> None:
        self._grammar = grammar
        grammar.num_answers += 1
        self._spend = spend
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None
        """Has `_seen`; None: is to begin."""
        self._seen: list[int] = []
        self._bits = np.empty(-(-grammar.num_bits // 32), np.int32)

    def allowed(self, answer: Seq[int]) -> npt.NDArray[np.bool_]:
        """Return which tokens may follow: `[vocab]`. Raises GrammarError, as `Grammar.allowed` says."""
        try:
            return self._allowed(answer)
        except GrammarError as error:
            if error.is_spent:
                self._spend(self._grammar)
                error.is_spent = self._grammar.num_answers > 1  # who is alone with it would come no further
                raise
            self._matcher = None  # where it has ended it takes no further end, and from the beginning on it does
            return self._allowed(answer)

    def _allowed(self, answer: Seq[int]) -> npt.NDArray[np.bool_]:
        matcher, num_seen = self._matcher, len(self._seen)
        if matcher is None or list(answer[:num_seen]) != self._seen:
            matcher, num_seen = self._grammar.matcher.deep_copy(), 0
        self._matcher, self._seen = None, list(answer)
        matcher.consume_tokens(self._seen[num_seen:])
        _check(matcher)
        matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        _check(matcher)
        self._matcher = matcher
        # What the tokenizer has beyond the model's vocabulary, no model writes.
        bits = np.unpackbits(self._bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)


def lark_of_regex(regex: str) -> str:
    """Return the grammar of what a regular expression (Rust's syntax, without look-around) matches as a whole."""
    return f"start: /{regex_to_lark(regex)}/"


def lark_of_gbnf(text: str) -> str:
    """Return llama.cpp's GBNF as Lark. Raises GrammarError."""
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # a rule that is missing is a bare one
        raise GrammarError(_line(str(error))) from error


def tokens_of(tokenizer: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Return a tokenizer's tokens as grammars have them, of its JSON. Raises GrammarError."""
    if not eos_token_ids:
        raise GrammarError("this model has no token that ends a text, which structured output needs")
    known = with_known_decoder(tokenizer)
    try:
        try:
            return LLTokenizer(known, n_vocab=vocab_size, eos_token=eos_token_ids)
        except ValueError:  # it may have more tokens than the model
            return LLTokenizer(known, eos_token=eos_token_ids)
    except ValueError as error:
        raise GrammarError(f"structured output does not know this model's tokenizer: {_line(str(error))}") from error


def with_known_decoder(tokenizer: str) -> str:
    """Return a tokenizer's JSON with a decoder of which llguidance makes the same bytes of a token within a text. It
    knows no Metaspace: alone that is refused, behind others passed over."""
    read: dict[str, Any] = json.loads(tokenizer) if '"Metaspace"' in tokenizer else {}
    decoder: dict[str, Any] = read.get("decoder") or {"type": ""}
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    found = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    if not found:
        return tokenizer
    spaces = [{"type": "Replace", "pattern": {"String": mark}, "content": " "} for mark in found]
    # By the bytes' tokens the library tells what kind of decoder it is; no other step has a meaning for it.
    return json.dumps({**read, "decoder": {"type": "Sequence", "decoders": [*spaces, {"type": "ByteFallback"}]}})


def _check(matcher: LLMatcher) -> None:
    """Raise GrammarError where a grammar is invalid, or an answer to it cannot go on."""
    if not matcher.is_error():
        return
    error = matcher.get_error()
    if "NoExtension" in error:
        raise GrammarError("no answer satisfies it")
    if "Current row has" in error:
        most = limits.ROW_ITEMS_MAX
        message = f"at one place of the text it may go on in over {most} ways: a name that may be left out has four"
        raise GrammarError(message)
    if "Regex is empty" in error:
        raise GrammarError("no text that can be written matches its pattern")
    raise GrammarError(_line(error), is_spent="too many states" in error)


def _line(error: str) -> str:
    """Return what the library says of an error, without the text that it quotes."""
    first, _, rest = error.strip().partition("\n")
    if (found := re.search(r"^[ \t]*error: (.+)", rest, re.MULTILINE)) is not None:  # a regular expression's
        return found[1]
    return re.sub(
        r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", first.removesuffix("<non-verbose/>")
    ).strip()
