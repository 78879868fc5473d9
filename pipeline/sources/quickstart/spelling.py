"""Spelling and counting letters: what a model of subword tokens cannot see and has to learn by heart."""

import hashlib
import random
from collections.abc import Iterable

LETTERS = (3, 12)
# Verbs that take s, ed, ing and er as they are; nouns that take s; adjectives that take er, est, ly and ness.
VERBS = """
act add aim answer ask attack attend avoid bark bend blend blink blow boil bomb book borrow bother build burn burst buy call
camp cheat check cheer chew claim clean clear climb collect comb comfort command comment complain consider cook correct count
cover crack crash crawl cross cry deal deliver demand design direct discover distract doubt dream dress drift drink drown dry
earn eat end enjoy enter explain fail fall faint farm fasten fear feel fight fill film fix float flow fold follow form gather
golf greet grill groan grow guard guess guest hammer hand hang harm harvest haunt heal hear heat help hold hunt hurry insist
install jump keep kick knit knock land last laugh launch lead lean leap learn lend lift light limp link list listen load lock
look mail march mark market matter melt mend milk mind mix moan mourn murmur name need number obey offer open order own paint
pass pay peel perform pick plant play point poison pour pray preach press pretend print proceed pull pump punch push rain reach
read record reflect remain remember repair repeat report request respond rest return reward ring roar roast rock roll row ruin
rush sail scatter scream search send shelter shift shock shout show sigh sign sing sink sleep smell soak sort sound speak spell
spend spill splash spoil spray stand start stay steal steam stick stretch suggest suffer supply support surround suspect
swallow sweep swing talk teach tell test thank think train travel treat trick trust turn twist visit wait walk wander want warm
warn wash watch water wear weigh whisper wink wish wonder work worry yawn yell
"""
NOUNS = """
animal apple arm army arrow artist author autumn award axe bag balcony ball banana band bank barn barrel basket bean bear bed
bell belt bird blanket blossom board boat body bone bottle bowl boy brain branch bread breakfast brick bridge brother bucket
button cabin cake camel camera candle captain car card carpet carrot castle cat cave ceiling chain chair cheese chicken child
circle city cloud coast coat coffee coin color corner country cousin cow cradle crown cup curtain daughter desert desk diamond
dinner doctor dog doll donkey door dragon drawer driver drum duck eagle ear earth elbow elephant engine evening eye face farmer
father feather fence field finger fire flag flame flower folder forest fork fountain friend frog fruit garden gate ghost girl
glacier glove goat grape hammer harbor hat heart hill horse hospital hotel hour house idea insect iron island jacket jewel
journey kettle key king kitchen kitten ladder lake lamp language lantern lawyer leg lemon lesson letter lion lizard magnet map
marble meadow meal medal metal minute mirror moment monkey month moon morning mother motor mountain mouth museum napkin neck
needle nephew nest night nose notebook oak ocean office onion orange oven owl page palace paper parent park parrot pearl pen
pencil pepper petal piano picture pig pillow pilot pirate planet plate pocket pond potato prince puppy puzzle pyramid
queen question rabbit raincoat river road robot rocket roof room rope rose sailor sandal saucer school scooter season secret
seed shadow shark ship shirt shoe shop shoulder silver sister skirt snail snake sock soldier song spider spoon squirrel
stair star station stone storm stove stranger street student summer sun sweater table tail teacher temple tent throat thunder
ticket tiger toad toe tomato tool town tower toy tractor tree tunnel turtle uncle valley vegetable village violin wagon wall
week whale wheel whistle window winter wizard zebra
"""
IRREGULAR = """
bend blow build burst buy deal drink eat fall feel fight grow hang hear hold keep knit lead lend light pay read ring send show
sing sink sleep speak spell spend spill spoil stand steal stick sweep swing teach tell think wear dream lean leap learn burn
"""
ADJECTIVES = """
blind bright calm cheap clever cold cool damp dark dear deep dull fair faint firm fresh grand great hard harsh kind light long
loud mild moist near neat odd plain poor proud quick quiet rich rough round sharp short sick slow small smart smooth soft sour
steep stern stiff strong sweet swift tall tender thick tight tough vast warm weak wild young
"""
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


def spelling_words() -> list[str]:
    """Return the words that `tandem:spelling` asks about, each once, in the order of the alphabet."""
    made = set()
    for stems, endings in (
        (VERBS, ("", "s", "ed", "ing", "er")),
        (NOUNS, ("", "s")),
        (ADJECTIVES, ("", "er", "est", "ly")),
    ):
        made |= {stem + ending for stem in stems.split() for ending in endings if _takes(stem, ending)}
    return sorted(word for word in made if LETTERS[0] <= len(word) <= LETTERS[1])


def _takes(stem: str, ending: str) -> bool:
    """Return whether the ending changes nothing of the stem and makes a word."""
    if ending in ("ed", "er"):
        return not stem.endswith(("e", "y")) and not (ending == "ed" and stem in IRREGULAR.split())
    return not (ending == "s" and stem.endswith(("s", "x", "z", "ch", "sh", "y", "f", "fe", "o")))


def spelling_conversations(words: Iterable[str]) -> dict[str, list[dict]]:
    """Return rows {messages} by split, one or two questions each; no word of validation stands in training."""
    rows: dict[str, list[dict]] = {"train": [], "validation": []}
    for word in sorted(words, key=lambda word: hashlib.sha256(word.encode()).digest()):
        rows["validation" if is_held_out(word) else "train"].append(word_conversation(word))
    return rows


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
    letter = draw.choice(word) if draw.random() < 0.85 else draw.choice("abcdefghijklmnopqrstuvwxyz")
    number = word.count(letter)
    said = f"{word} is spelled {', '.join(word)}. The letter {letter} occurs {'once' if number == 1 else NUMBERS[number] + ' times'}."
    return draw.choice(COUNT).format(word=word, letter=letter), said


def _length(word: str, draw: random.Random) -> tuple[str, str]:
    return draw.choice(LENGTH).format(
        word=word
    ), f"{word} is spelled {', '.join(word)}. It has {NUMBERS[len(word)]} letters."
