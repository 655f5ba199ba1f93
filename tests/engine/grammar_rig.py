"""Tokenizers of the kinds that checkpoints have, and walks through a grammar's masks."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.grammar import Grammars
from services.engine.interface import Grammar

EOS, TURN_END = "<eos>", "<|im_end|>"
SPARE_TOKENS = 7
"""So many more the model has than its tokenizer."""
KINDS = ("demo", "byte_level", "byte_fallback")


class Checkpoint:
    """A tokenizer in a folder, as a checkpoint has it, and the grammars of its tokens."""

    def __init__(self, kind: str, folder: Path) -> None:
        if kind == "demo":
            self.tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
            self.eos = [self.tokenizer.token_to_id("<|endoftext|>")]
        else:
            self.tokenizer = byte_level() if kind == "byte_level" else byte_fallback()
            self.tokenizer.add_special_tokens([EOS, TURN_END])
            think = [AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")]
            self.tokenizer.add_tokens(think)
            self.eos = [self.tokenizer.token_to_id(EOS), self.tokenizer.token_to_id(TURN_END)]
        self.num_tokens = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocab_size = self.num_tokens + SPARE_TOKENS
        self.grammars = Grammars(self.tokenizer, self.vocab_size, self.eos)

    def grammar(self, text: str) -> Grammar:
        return self.grammars.compile(text).result(60)

    def check(self, text: str) -> Callable[[str], bool]:
        """Return whether a grammar takes a text. Raises GrammarError for one that cannot be held."""
        self.grammar(text)
        return partial(self.takes, text)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token not in self.eos])

    def takes(self, grammar: str, text: str) -> bool:
        """Say whether a grammar lets an answer be this text."""
        answer, found = self.ids(text), self.grammar(grammar)
        for at, token in enumerate(answer):
            if not found.allowed(answer[:at])[token]:
                return False
        return bool(found.allowed(answer)[self.eos[0]])

    def walk(self, grammar: Grammar, seed: int, max_tokens: int = 600) -> list[int]:
        """Return an answer of random tokens, which ends as soon as it may, and soon may: where nothing else makes an
        end, what closes a string or a bracket is taken more often than by chance."""
        rng = random.Random(seed)
        closing = [token for text in ('"', "}", "]", ">") for token in self.ids(text)]
        answer: list[int] = []
        while len(answer) < max_tokens:
            mask = grammar.allowed(answer)
            assert mask.shape == (self.vocab_size,) and mask.dtype == np.bool_ and mask.any()
            assert not mask[self.num_tokens :].any(), "no token that the tokenizer does not have"
            assert len({bool(mask[token]) for token in self.eos}) == 1, "all that end an answer, or none"
            chosen = [token for token in closing if mask[token]] if rng.random() < 0.3 else []
            answer.append(self.eos[-1] if mask[self.eos[-1]] else rng.choice(chosen or np.flatnonzero(mask).tolist()))
            if answer[-1] in self.eos:
                return answer
        return answer


def byte_level() -> Tokenizer:
    """As GPT-2's and Qwen's: each byte is a letter, and some words are tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["{", '{"', '":', '",', "},", "Ġa", "th", "the", "in", "Ċ", "ĠĠ", "true", "null", "12"]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys([*letters, *words]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("Ġ", "a"), ("i", "n"), ("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2's: characters, and bytes for those that are no tokens."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *'▁abcdefghijklmnopqrstuvwxyz0123456789{}":,[].-']
    vocabulary = {word: number for number, word in enumerate([*words, "▁a", "th", '{"', '":', "é"])}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("t", "h")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer
