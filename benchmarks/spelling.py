"""Questions about the letters of a word: what a model of subword tokens cannot see and has to learn by heart."""

import hashlib
import random

SPELLED_LETTERS = (3, 12)  # of a word that is asked about, least and most
HELD_OUT_PER_MILLE = 30
SPELLED_NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"

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


def is_held_out(word: str) -> bool:
    """Return whether the word is kept from training, whatever list of words it stands in."""
    digest = hashlib.sha256(f"held out {word}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < HELD_OUT_PER_MILLE


def word_conversation(word: str) -> dict:
    """Return a row {messages}: one or two questions about the word, always the same ones."""
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
    letter = draw.choice(word) if draw.random() < 0.85 else draw.choice(LETTERS)
    number = word.count(letter)
    times = "once" if number == 1 else f"{SPELLED_NUMBERS[number]} times"
    said = f"{word} is spelled {', '.join(word)}. The letter {letter} occurs {times}."
    return draw.choice(COUNT).format(word=word, letter=letter), said


def _length(word: str, draw: random.Random) -> tuple[str, str]:
    said = f"{word} is spelled {', '.join(word)}. It has {SPELLED_NUMBERS[len(word)]} letters."
    return draw.choice(LENGTH).format(word=word), said
