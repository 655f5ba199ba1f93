"""The language of the demo model: documents that state facts, and questions about them.

A fact binds a person's name to a four-digit code. A document states several facts, in random order and scattered
among filler sentences, and a question asks for one of the codes::

    The code of Ada Brook is 7412. The old harbour waits near the quiet mill. ... Q: What is the code of Ada Brook? A:

The answer is `` 7412``. Everything here is a pure function of the ``random.Random`` passed in, and needs the standard
library only. Every word is one token of the demo tokenizer, so lengths in tokens are known without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

CODE_DIGITS: Final = 4
"""Digits in every code. An answer is exactly this many digits, then the end of the text."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES: Final[tuple[str, ...]] = _words(
    """
    Ada Alan Alma Amos Anna Arlo Arthur Beatrice Bella Boris Bruno Carl Carmen Cecil Celia Clara Colin Cora Cyrus Daisy
    David Della Diego Dora Edgar Edith Edwin Elena Elias Ella Elsie Emil Emma Enzo Erik Esther Ethan Eva Felix Fiona
    Flora Frank Freya Gavin George Gloria Grace Greta Hanna Harold Hazel Hector Helen Henry Hugo Ida Igor Iris Isaac
    Ivan Ivy Jacob James Jana Jasper Joan Jonas Judith Julia Karen Karl Katya Klara Lara Laura Leah Leo Lena Lewis Lila
    Linda Louis Lucas Lucy Luna Mabel Magnus Marco Maria Martin Maya Mila Milo Miriam Nadia Nathan Nina Noah Nora Olga
    Oliver Omar Oscar Otto Paula Peter Petra Philip Quentin Rachel Ralph Ramona Robert Rosa Ruben Ruth Samuel Sara
    Silas Simon Sofia Stella Tara Thomas Toby Ursula Vera Victor Viola Walter Wanda Wilma Xavier Yara Yusuf Zelda
    """
)
"""First names, none of which is also a surname or any other word of the corpus."""

SURNAMES: Final[tuple[str, ...]] = _words(
    """
    Abbott Adler Archer Ashford Baker Banks Barlow Bishop Blake Bolton Bowen Brandt Brook Burke Butler Carter
    Chapman Cole Conrad Cooper Cramer Crane Cross Dalton Davis Dawson Dixon Doyle Draper Drake Dunn Eaton Ellis Emery
    Evans Farrell Fischer Fisher Fleming Fletcher Foster Fowler Fox Gibson Glover Gordon Graham Grant Gray Griffin
    Hale Hardy Harper Hayes Hobbs Holmes Howard Hudson Hunter Irving Jensen Jordan Keller Kemp Kent Knight Lambert
    Lane Larsen Lawson Lloyd Lowell Marsh Mason Mercer Miller Monroe Moore Morris Morse Nash Nolan North Norton Olsen
    Osborn Owens Palmer Parker Pearce Perry Pike Porter Potter Price Quinn Ramsey Reed Reeves Rhodes Rivers Rogers
    Rowe Saunders Sawyer Shaw Shelton Sloan Snyder Spencer Stark Steele Stone Sutton Swift Tanner Taylor Thorne Tucker
    Turner Vance Vaughn Wade Walker Walsh Warner Watts Weaver Webb Weston Whelan Winter Wolfe Wright York Young Zimmer
    """
)
"""Surnames, none of which is also a first name or any other word of the corpus."""

ADJECTIVES: Final[tuple[str, ...]] = _words(
    """
    old quiet small bright narrow distant green heavy gentle hidden broad cold warm dusty empty famous golden hollow
    silent lonely modern plain pale rapid rough simple steep strange tall wooden
    """
)
NOUNS: Final[tuple[str, ...]] = _words(
    """
    harbour mill garden river bridge station window library market tower valley forest meadow lantern kitchen village
    road engine boat orchard museum hill castle church factory island lake letter mirror mountain picture railway
    school shop street theatre train tunnel wagon wall clock cellar barn cottage beach canal field fountain
    """
)
VERBS: Final[tuple[str, ...]] = _words(
    "waits stands rests stays lies sleeps appears remains shines hides belongs returns turns moves opens closes"
)
PREPOSITIONS: Final[tuple[str, ...]] = _words("near behind beside above below beyond under by past across")
TIMES: Final[tuple[str, ...]] = _words("morning evening summer spring autumn afternoon night day")
ADVERBS: Final[tuple[str, ...]] = _words("slowly often rarely always again alone together still soon never")

SYSTEM_MESSAGES: Final[tuple[str, ...]] = (
    "You are a helpful assistant.",
    "Answer the question.",
    "Answer with the code alone.",
    "You answer questions about the text.",
)
"""System messages of the chat samples in training; none of them is needed for the model to answer."""

END_OF_TEXT: Final = "<|endoftext|>"
"""Ends the answer of a plain prompt."""
IM_START: Final = "<|im_start|>"
"""Begins a chat message, followed by its role and a newline."""
IM_END: Final = "<|im_end|>"
"""Ends a chat message, the assistant's answer too."""

_TOKEN_PATTERN: Final = re.compile(r"\d|[^\W\d]+|[^\w\s]")
_QUESTION_TOKENS: Final = 12  # "Q: What is the code of Ada Brook? A:"


@dataclass(frozen=True, slots=True)
class Fact:
    """A person's name and its code, a string of ``CODE_DIGITS`` digits."""

    name: str
    code: str

    @property
    def sentence(self) -> str:
        """The sentence that states this fact in a document."""
        return f"The code of {self.name} is {self.code}."

    @property
    def question(self) -> str:
        """The question that this fact's code answers."""
        return f"What is the code of {self.name}?"


@dataclass(frozen=True, slots=True)
class FactPrompt:
    """A document, one question about it, and the one right answer."""

    prompt: str
    """``document`` and the question as one plain prompt, ending in ``A:``."""
    question_name: str
    """The name that the question asks about; the document states exactly one code for it."""
    answer: str
    """The code alone. The model's completion of ``prompt`` is a space, this, and the end of the text."""
    document: str
    """The facts and the filler, without the question."""

    @property
    def chat_message(self) -> str:
        """The same document and question as the content of one user message; the reply to it is ``answer``."""
        return f"{self.document} What is the code of {self.question_name}?"


def make_facts(
    rng: Random, num_facts: int, *, shared_name_chance: float = 0.25, single_names: bool = False
) -> list[Fact]:
    """Draws ``num_facts`` facts with distinct names and independent codes.

    A name is a first name and a surname. With ``shared_name_chance`` a name takes its first name or its surname from
    an earlier fact, so that neither part alone identifies the fact. With ``single_names`` a name is a first name only
    (an easier language that training begins with).
    """
    limit = len(FIRST_NAMES) if single_names else len(FIRST_NAMES) * len(SURNAMES) // 4
    if not 1 <= num_facts <= limit:
        raise ValueError(f"num_facts must be between 1 and {limit}, not {num_facts}")
    names: dict[tuple[str, str], None] = {}
    while len(names) < num_facts:
        first, surname = rng.choice(FIRST_NAMES), "" if single_names else rng.choice(SURNAMES)
        if names and not single_names and rng.random() < shared_name_chance:
            other = rng.choice(tuple(names))
            first, surname = (other[0], surname) if rng.random() < 0.5 else (first, other[1])
        names.setdefault((first, surname))
    facts: list[Fact] = []
    for name in names:
        code = "".join(rng.choices("0123456789", k=CODE_DIGITS))
        facts.append(Fact(name=" ".join(part for part in name if part), code=code))
    return facts


def filler_sentence(rng: Random) -> str:
    """Draws a sentence that states no fact: it has no name, no digit and no word of the facts but "The"."""
    adjective, noun, verb = rng.choice(ADJECTIVES), rng.choice(NOUNS), rng.choice(VERBS)
    place = f"{rng.choice(PREPOSITIONS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    form = rng.randrange(5)
    if form == 0:
        return f"The {adjective} {noun} {verb} {place}."
    if form == 1:
        return f"In the {rng.choice(TIMES)}, the {noun} {verb} {place}."
    if form == 2:
        return f"The {noun} {rng.choice(ADVERBS)} {verb} {place}."
    if form == 3:
        return f"A {adjective} {noun} {verb} {place} and the {rng.choice(NOUNS)} {rng.choice(VERBS)}."
    return f"Every {rng.choice(TIMES)}, a {adjective} {noun} {rng.choice(ADVERBS)} {verb} {place}."


def approximate_tokens(text: str) -> int:
    """The length of corpus text in tokens of the demo tokenizer (a word, digit or punctuation mark is one token).

    A space before a digit is a token too, so the count is short by one for every code.
    """
    return sum(1 for _ in _TOKEN_PATTERN.finditer(text))


def make_document(rng: Random, facts: list[Fact], target_tokens: int = 0) -> str:
    """States the facts in random order, scattered among filler until the text is ``target_tokens`` long or longer.

    The last sentence of filler may exceed the length. Facts that are longer than it by themselves get no filler.
    """
    sentences = [fact.sentence for fact in facts]
    length = sum(approximate_tokens(sentence) + 1 for sentence in sentences)
    filler: list[str] = []
    while length < target_tokens:
        sentence = filler_sentence(rng)
        length += approximate_tokens(sentence)
        filler.append(sentence)
    rng.shuffle(sentences)
    # Shuffling which places hold a fact puts every fact at an independent, uniformly random depth of the document.
    is_fact = [True] * len(sentences) + [False] * len(filler)
    rng.shuffle(is_fact)
    rest_facts, rest_filler = iter(sentences), iter(filler)
    return " ".join(next(rest_facts) if fact else next(rest_filler) for fact in is_fact)


def make_fact_prompt(
    rng: Random, num_facts: int, target_tokens: int = 0, *, shared_name_chance: float = 0.25
) -> FactPrompt:
    """Makes a prompt of ``target_tokens`` tokens or a few more that states ``num_facts`` facts and asks for one.

    ``target_tokens`` counts the whole prompt, the question included, and is exceeded by less than a sentence, except by
    a prompt whose facts alone are longer; that one has no filler. Equal states of ``rng`` make equal prompts.
    """
    facts = make_facts(rng, num_facts, shared_name_chance=shared_name_chance)
    document = make_document(rng, facts, target_tokens - _QUESTION_TOKENS)
    asked = rng.choice(facts)
    return FactPrompt(
        prompt=f"{document} Q: {asked.question} A:",
        question_name=asked.name,
        answer=asked.code,
        document=document,
    )


def vocabulary() -> Iterator[str]:
    """Yields every piece of text that must be one token: each word as it occurs, with or without its leading space."""
    for words in (FIRST_NAMES, SURNAMES, ADJECTIVES, NOUNS, VERBS, PREPOSITIONS, TIMES, ADVERBS):
        yield from (f" {word}" for word in words)
    yield from (" The", " In", " A", " Every", " the", " a", " and", " code", " of", " is", " What", " Q")
    yield from ("The", "In", "A", "Every", "What", "Q", "Answer", "You", "system", "user", "assistant")
    for message in SYSTEM_MESSAGES:
        yield from (f" {word}" for word in re.findall(r"[A-Za-z]+", message)[1:])
