"""Spelling and counting letters: what a model of subword tokens cannot see and has to learn by heart."""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterable

MIN_COUNT = 4  # A word met less often in the corpus may be a misspelling itself.
LETTERS = (3, 12)
MAX_WORDS = 5_000
HELD_OUT_PER_MILLE = 30
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

SPELL = (
    "How do you spell {word}?",
    "Spell the word {word}.",
    "Please spell {word}.",
    "Can you spell {word} for me?",
    "Spell {word}, letter by letter.",
)
COUNT = (
    "How many times does the letter {letter} occur in {word}?",
    "How many {letter} are in {word}?",
    "Count the letter {letter} in {word}.",
    "How often is {letter} in the word {word}?",
)
LENGTH = ("How many letters does {word} have?", "How long is the word {word}?", "Count the letters of {word}.")


def spelling_conversations(texts: Iterable[str]) -> dict[str, list[dict]]:
    """Rows {messages} by split, one or two questions each; no word of validation stands in training."""
    counts = Counter(
        word
        for text in texts
        for word in re.findall(r"(?<![\w`.-])[a-z]+(?![\w`-])", text)
        if LETTERS[0] <= len(word) <= LETTERS[1]
    )
    frequent = [word for word, count in counts.items() if count >= MIN_COUNT and not re.fullmatch(r"(.)\1*", word)]
    words = sorted(frequent, key=lambda word: (-counts[word], word))[:MAX_WORDS]
    rows: dict[str, list[dict]] = {"train": [], "validation": []}
    for word in sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest()):
        rows["validation" if is_held_out(word) else "train"].append(word_conversation(word))
    return rows


def is_held_out(word: str) -> bool:
    """Whether the word is kept from training, whatever list of words it stands in."""
    digest = hashlib.sha256(f"held out {word}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def word_conversation(word: str) -> dict:
    """A row {messages}: one or two questions about the word, always the same ones."""
    draw = random.Random(word)
    makers = [_spell, _count, _length]
    chosen = draw.sample(makers, draw.choice((1, 1, 2)))
    messages = []
    for maker in chosen:
        asked, answered = maker(word, draw)
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return {"messages": messages}


def _spell(word: str, draw: random.Random) -> tuple[str, str]:
    return draw.choice(SPELL).format(word=word), f"{word}: {', '.join(word)}."


def _count(word: str, draw: random.Random) -> tuple[str, str]:
    letter = draw.choice(word) if draw.random() < 0.85 else draw.choice("abcdefghijklmnopqrstuvwxyz")
    number = word.count(letter)
    said = f"{word} is spelled {', '.join(word)}. The letter {letter} occurs {'once' if number == 1 else NUMBERS[number] + ' times'}."
    return draw.choice(COUNT).format(word=word, letter=letter), said


def _length(word: str, draw: random.Random) -> tuple[str, str]:
    return draw.choice(LENGTH).format(
        word=word
    ), f"{word} is spelled {', '.join(word)}. It has {NUMBERS[len(word)]} letters."
