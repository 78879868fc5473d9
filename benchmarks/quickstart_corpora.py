"""Write the built-in sources `tandem:...` again: python -m benchmarks.quickstart_corpora [FOLDER].

The package ships what this script makes (pipeline/sources/quickstart/*.jsonl.xz): the same bytes on every machine,
which tests/sources/test_quickstart_world.py holds.
"""

import hashlib
import json
import lzma
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.spelling import (
    LETTERS,
    SPELLED_LETTERS,
    SPELLED_NUMBERS,
    is_held_out,
    word_conversation,
)
from pipeline.sources.built_in import CORPORA


def main(folder: Path = CORPORA) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in corpora().items():
        (folder / f"{name}.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


def corpora() -> dict[str, str]:
    """Return the text of every file by its name."""
    made: dict[str, dict[str, Any]] = {
        "quickstart_text": {"train": documents("train"), "validation": documents("validation")},
        "quickstart_chat": {split: conversations(split) for split in ("train", "validation", "test")},
        "spelling": spelling_conversations(spelling_words()),
    }
    return {
        f"{name}-{split}.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        for name, splits in made.items()
        for split, rows in splits.items()
    }


def _words(text: str) -> list[str]:
    return text.split()


# Verbs that take s, ed, ing and er as they are; nouns that take s; adjectives that take er, est, ly and ness.
VERBS = """
act add aim answer ask attack attend avoid bark bend blend blink blow boil bomb book borrow bother build burn burst buy
call camp cheat check cheer chew claim clean clear climb collect comb comfort command comment complain consider cook
correct count cover crack crash crawl cross cry deal deliver demand design direct discover distract doubt dream dress
drift drink drown dry earn eat end enjoy enter explain fail fall faint farm fasten fear feel fight fill film fix float
flow fold follow form gather golf greet grill groan grow guard guess guest hammer hand hang harm harvest haunt heal
hear heat help hold hunt hurry insist install jump keep kick knit knock land last laugh launch lead lean leap learn
lend lift light limp link list listen load lock look mail march mark market matter melt mend milk mind mix moan mourn
murmur name need number obey offer open order own paint pass pay peel perform pick plant play point poison pour pray
preach press pretend print proceed pull pump punch push rain reach read record reflect remain remember repair repeat
report request respond rest return reward ring roar roast rock roll row ruin rush sail scatter scream search send
shelter shift shock shout show sigh sign sing sink sleep smell soak sort sound speak spell spend spill splash spoil
spray stand start stay steal steam stick stretch suggest suffer supply support surround suspect swallow sweep swing
talk teach tell test thank think train travel treat trick trust turn twist visit wait walk wander want warm warn wash
watch water wear weigh whisper wink wish wonder work worry yawn yell
"""
NOUNS = """
animal apple arm army arrow artist author autumn award axe bag balcony ball banana band bank barn barrel basket bean
bear bed bell belt bird blanket blossom board boat body bone bottle bowl boy brain branch bread breakfast brick bridge
brother bucket button cabin cake camel camera candle captain car card carpet carrot castle cat cave ceiling chain chair
cheese chicken child circle city cloud coast coat coffee coin color corner country cousin cow cradle crown cup curtain
daughter desert desk diamond dinner doctor dog doll donkey door dragon drawer driver drum duck eagle ear earth elbow
elephant engine evening eye face farmer father feather fence field finger fire flag flame flower folder forest fork
fountain friend frog fruit garden gate ghost girl glacier glove goat grape hammer harbor hat heart hill horse hospital
hotel hour house idea insect iron island jacket jewel journey kettle key king kitchen kitten ladder lake lamp language
lantern lawyer leg lemon lesson letter lion lizard magnet map marble meadow meal medal metal minute mirror moment
monkey month moon morning mother motor mountain mouth museum napkin neck needle nephew nest night nose notebook oak
ocean office onion orange oven owl page palace paper parent park parrot pearl pen pencil pepper petal piano picture pig
pillow pilot pirate planet plate pocket pond potato prince puppy puzzle pyramid queen question rabbit raincoat river
road robot rocket roof room rope rose sailor sandal saucer school scooter season secret seed shadow shark ship shirt
shoe shop shoulder silver sister skirt snail snake sock soldier song spider spoon squirrel stair star station stone
storm stove stranger street student summer sun sweater table tail teacher temple tent throat thunder ticket tiger toad
toe tomato tool town tower toy tractor tree tunnel turtle uncle valley vegetable village violin wagon wall week whale
wheel whistle window winter wizard zebra
"""
IRREGULAR = """
bend blow build burst buy deal drink eat fall feel fight grow hang hear hold keep knit lead lend light pay read ring
send show sing sink sleep speak spell spend spill spoil stand steal stick sweep swing teach tell think wear dream lean
leap learn burn
"""
ADJECTIVES = """
blind bright calm cheap clever cold cool damp dark dear deep dull fair faint firm fresh grand great hard harsh kind
light long loud mild moist near neat odd plain poor proud quick quiet rich rough round sharp short sick slow small
smart smooth soft sour steep stern stiff strong sweet swift tall tender thick tight tough vast warm weak wild young
"""


def spelling_words() -> list[str]:
    """Return the words that `tandem:spelling` asks about, each once, in the order of the alphabet."""
    made = set()
    for stems, endings in (
        (VERBS, ("", "s", "ed", "ing", "er")),
        (NOUNS, ("", "s")),
        (ADJECTIVES, ("", "er", "est", "ly")),
    ):
        made |= {stem + ending for stem in stems.split() for ending in endings if _takes(stem, ending)}
    return sorted(word for word in made if SPELLED_LETTERS[0] <= len(word) <= SPELLED_LETTERS[1])


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


# A small world, made by rule: stories, facts and tasks whose answers can be checked.
#
# Stage 1 reads it as text; stage 2 asks about it. What is asked in the end is held out: no training text of either
# stage puts a held-out person beside a held-out place or thing, the questions of the test about a held-out fact are
# asked nowhere in these words, and letters whose reversal is held out stand nowhere. Only `Random.random` is drawn
# from: its sequence is the same on every Python and machine, and so are the bytes.


DOCUMENTS = {"train": 40_000, "validation": 800}
CONVERSATIONS = {"train": 20_000, "validation": 300, "test": 300}
SEEDS = {"train": 1, "validation": 2, "test": 3}

PEOPLE = _words("Anna Ben Clara David Emma Felix")
PLACES = _words("kitchen garden school park forest office")
THINGS = _words("cup book key ball hat coin")
HELD_OUT_PEOPLE = _words("Lucy Oscar Simon")
HELD_OUT_PLACES = _words("bedroom stable tower")
HELD_OUT_THINGS = _words("drum ring lamp")
OPPOSITES = (
    "hot cold,big small,old young,fast slow,hard soft,light dark,wet dry,happy sad,early late,full empty,clean "
    "dirty,strong weak,loud quiet,near far"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words("January February March April May June July August September October November December")
AGES = range(2, 10)  # one digit each
WORDS = _words(
    "cat dog sun pen bus fox fish bird milk tree door hand moon star rain snow wind fire king ship road farm cake "
    "corn duck frog goat"
)
HELD_OUT_EVERY = 3  # of the facts and words


class Turn(NamedTuple):
    """A piece of text, the question after it, and the right answer."""

    text: str
    question: str
    answer: str


class Draw:
    """Choices that are equal on every Python."""

    def __init__(self, seed: int):
        self._random = random.Random(seed).random

    def below(self, n: int) -> int:
        return int(self._random() * n)

    def chance(self, share: float) -> bool:
        return self._random() < share

    def one(self, choices: Sequence[Any]) -> Any:
        return choices[self.below(len(choices))]

    def some(self, choices: Sequence[Any], n: int) -> list[Any]:
        """Return n different ones in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(n)]


class Cast(NamedTuple):
    """Names that a story may use."""

    people: Sequence[str]
    places: Sequence[str]
    things: Sequence[str]


HELD_OUT_CAST = Cast(HELD_OUT_PEOPLE, HELD_OUT_PLACES, HELD_OUT_THINGS)
TRAINING_CASTS = (
    Cast(PEOPLE + HELD_OUT_PEOPLE, PLACES, THINGS),
    Cast(PEOPLE, PLACES + HELD_OUT_PLACES, THINGS + HELD_OUT_THINGS),
)


class Story:
    """A few people who move, take, give and leave things; what was told, and where everything is now."""

    def __init__(self, cast: Cast, draw: Draw):
        self.cast, self.draw = cast, draw
        self.people = draw.some(cast.people, 2)
        self.places = draw.some(cast.places, 3)
        self.things = draw.some(cast.things, 2)
        self.where: dict[str, list[str]] = {person: [] for person in self.people}  # every place, in order
        self.holder: dict[str, str] = {}  # by thing
        self.left_in: dict[str, str] = {}  # by thing that nobody has

    def begin(self) -> str:
        sentences = []
        for person in self.people:
            self.where[person].append(self.draw.one(self.places))
            sentences.append(f"{person} is in the {self.where[person][-1]}.")
        return " ".join(sentences)

    def go_on(self) -> str:
        """Let something happen, and return the sentence that tells it."""
        draw, person = self.draw, self.draw.one(self.people)
        has, here = self.things_of(person), self.where[person][-1]
        others = [p for p in self.people if p != person and self.where[p][-1] == here]
        free = [t for t in self.things if t not in self.holder and self.left_in.get(t, here) == here]
        if has and others and draw.chance(0.5):
            thing, other = draw.one(has), draw.one(others)
            del self.holder[thing]  # what came last stands last
            self.holder[thing] = other
            return f"{person} gave {other} the {thing}."
        if has and draw.chance(0.2):
            thing = draw.one(has)
            del self.holder[thing]
            self.left_in[thing] = here
            return f"{person} left the {thing} in the {here}."
        if free and draw.chance(0.65):
            thing = draw.one(free)
            self.left_in.pop(thing, None)
            self.holder[thing] = person
            return f"{person} took the {thing}."
        place = draw.one([p for p in self.places if p != here])
        self.where[person].append(place)
        return f"{person} went to the {place}."

    def things_of(self, person: str) -> list[str]:
        return [thing for thing, holder in self.holder.items() if holder == person]


Asked = tuple[str, str] | None  # question and answer; None where the story gives none


def where_person(story: Story) -> Asked:
    person = story.draw.one(story.people)
    return f"Where is {person}?", f"{person} is in the {story.where[person][-1]}."


def who_has(story: Story) -> Asked:
    if not story.holder:
        return None
    thing = story.draw.one(list(story.holder))
    return f"Who has the {thing}?", f"{story.holder[thing]} has the {thing}."


def where_thing(story: Story) -> Asked:
    if not (known := [*story.holder, *story.left_in]):
        return None
    thing = story.draw.one(known)
    if holder := story.holder.get(thing):
        return f"Where is the {thing}?", f"{holder} has the {thing}. {holder} is in the {story.where[holder][-1]}."
    return f"Where is the {thing}?", f"The {thing} is in the {story.left_in[thing]}."


def where_before(story: Story) -> Asked:
    moved = [person for person, been in story.where.items() if len(been) > 1]
    if not moved:
        return None
    person = story.draw.one(moved)
    before, last = story.where[person][-2:]
    return f"Where was {person} before the {last}?", f"{person} was in the {before} before the {last}."


def how_many(story: Story) -> Asked:
    if not story.holder and story.draw.chance(0.7):
        return None
    person = story.draw.one(story.people)
    things = story.things_of(person)
    listed = " and ".join(f"the {thing}" for thing in things)
    what = f"{listed}: {SPELLED_NUMBERS[len(things)]} thing{'s' if len(things) > 1 else ''}" if things else "no things"
    return f"How many things does {person} have?", f"{person} has {what}."


def unknown(story: Story) -> Asked:
    if story.draw.chance(0.5):
        person = story.draw.one([p for p in story.cast.people if p not in story.people])
        return f"Where is {person}?", "I do not know."
    thing = story.draw.one([t for t in story.cast.things if t not in story.holder and t not in story.left_in])
    return story.draw.one((f"Who has the {thing}?", f"Where is the {thing}?")), "I do not know."


STORY_KINDS = {ask.__name__: ask for ask in (where_person, who_has, where_thing, where_before, how_many, unknown)}


def story_turns(cast: Cast, draw: Draw, *, questions: int, last: str | None = None) -> list[Turn]:
    """Return a story told in parts, with a question after each; the last one of that kind."""
    story, turns = Story(cast, draw), []
    sentences = [story.begin()]
    for number in range(questions):
        sentences += [story.go_on() for _ in range(1 + draw.below(2))]
        final = last is not None and number == questions - 1
        while (asked := STORY_KINDS[last if final and last else draw.one(list(STORY_KINDS))](story)) is None:
            sentences.append(story.go_on())
        turns.append(Turn(" ".join(sentences), *asked))
        sentences = []
    return turns


def compare(cast: Cast, draw: Draw) -> Turn:
    """Return two people's ages, and a question about them; the answer restates, compares, and then names."""
    people = draw.some(cast.people, 2)
    ages = dict(zip(people, draw.some(AGES, 2), strict=True))
    a, b = draw.some(people, 2)
    word = draw.one(("older", "younger"))
    low, high = sorted(people, key=ages.__getitem__)
    right, compared = (high, "more") if word == "older" else (low, "less")
    other = low if right == high else high
    text = " ".join(f"{person} is {age} years old." for person, age in ages.items())
    restated = " and ".join(f"{person} is {age}" for person, age in ages.items())  # in the text's order
    answer = f"{restated}. {ages[right]} is {compared} than {ages[other]}. {right} is {word}."
    return Turn(text, f"Who is {word}, {a} or {b}?", answer)


def look_up(cast: Cast, draw: Draw) -> list[Turn]:
    """Return a place, thing or age of each of some people, and questions about them all and one more: the first
    lessons."""
    n = 2 + draw.below(4)
    people = draw.some(cast.people, n + 1)
    kind = draw.one(("where", "where", "who", "who", "age"))
    if kind == "where":
        places = draw.some(cast.places, n + 1)
        facts = [(f"Where is {p}?", f"{p} is in the {place}.") for p, place in zip(people, places, strict=True)]
    elif kind == "who":
        things = draw.some(cast.things, n + 1)
        facts = [(f"Who has the {thing}?", f"{p} has the {thing}.") for p, thing in zip(people, things, strict=True)]
    else:
        ages = draw.some(AGES, n + 1)
        facts = [(f"How old is {p}?", f"{p} is {age} years old.") for p, age in zip(people, ages, strict=True)]
    stated = [Turn(answer.replace("has the", "took the"), "", "") for _, answer in facts[:n]]
    again = [Turn(answer, "", "") for _, answer in draw.some(facts[:n], n)] if draw.chance(0.5) else []
    asked = [*facts[:n], (facts[n][0], "I do not know.")]
    return [*stated, *again, *(Turn("", *fact) for fact in draw.some(asked, n + 1))]


class Fact(NamedTuple):
    """questions: all with the same answer; of a held-out fact training asks the first alone, and the test the
    others."""

    kind: str
    questions: tuple[str, ...]
    answer: str
    held_out: bool


def _facts() -> Iterator[Fact]:
    pairs = [pair.split() for pair in OPPOSITES.split(",")]
    for number, (a, b) in enumerate([*pairs, *(pair[::-1] for pair in pairs)]):
        said = f"The opposite of {a} is {b}."
        asked = tuple(
            f"{q} the opposite of {a}{end}"
            for q, end in (("What is", "?"), ("Tell me", "."), ("Which word is", "?"), ("Say", "."))
        )
        yield Fact("opposite", asked, said, number % HELD_OUT_EVERY == 0)
    number = 0
    for unit, names in (("day", DAYS), ("month", MONTHS)):
        for word, step in (("after", 1), ("before", -1)):
            for place, name in enumerate(names):
                said = f"The {unit} {word} {name} is {names[(place + step) % len(names)]}."
                asked = tuple(
                    f"{q} {word} {name}?" for q in (f"Which {unit} comes", f"What is the {unit}", f"Which {unit} is")
                )
                yield Fact("calendar", asked, said, number % HELD_OUT_EVERY == 0)
                number += 1
    for number, (one, two) in enumerate((one, two) for one in range(1, 7) for two in range(1, 7)):
        sum_of = f"{one} + {two}"
        said = f"{sum_of} = {one + two}."
        asked = (f"What is {sum_of}?", f"How much is {sum_of}?", f"Add {one} and {two}.", f"Tell me {sum_of}.")
        yield Fact("sum", asked, said, (number + number // 6) % HELD_OUT_EVERY == 0)
    for number, word in enumerate(WORDS):
        said = f"The word {word} is spelled {' '.join(word)}."
        asked = (f"How do you spell {word}?", f"Spell {word}.", f"Spell the word {word}.", f"How is {word} spelled?")
        yield Fact("spell", asked, said, number % HELD_OUT_EVERY == 0)


FACTS = tuple(_facts())
FACT_KINDS = tuple(dict.fromkeys(fact.kind for fact in FACTS))
OF_KIND = {kind: [fact for fact in FACTS if fact.kind == kind] for kind in FACT_KINDS}
HELD_OUT = {kind: [fact for fact in found if fact.held_out] for kind, found in OF_KIND.items()}


def backwards(draw: Draw, *, held_out: bool) -> Turn:
    """Return three letters to say backwards; a quarter of all such are held out."""
    letters = draw.some(LETTERS, 3)
    while (sum(map(LETTERS.index, letters)) % HELD_OUT_EVERY == 0) != held_out:
        letters = draw.some(LETTERS, 3)
    said, back = " ".join(letters), " ".join(reversed(letters))
    return Turn("", f"What is {said} backwards?", f"The letters {said} backwards are {back}.")


TALK = (
    ("Hello!", "Hello! Ask me about the small world."),
    ("Hi", "Hello! Ask me about the small world."),
    ("Who are you?", "I am Tandem, a small model of a small world."),
    ("What can you do?", "I know who is where and who has what, a few facts, and small sums."),
    ("Thank you!", "You are welcome."),
)
KINDS = (*STORY_KINDS, "compare", *FACT_KINDS, "backwards")
TAUGHT = (*3 * (*STORY_KINDS, "compare"), *FACT_KINDS, "backwards")  # in stage 2; what is harder comes more often


LESSONS = 800  # documents before the first story: what is looked up, compared or known by heart


def documents(split: str) -> Iterator[dict]:
    """Yield rows {text}: a story with questions and answers, or some facts; training begins with what is short."""
    draw = Draw(SEEDS[split])
    for number in range(DOCUMENTS[split]):
        cast = draw.one(TRAINING_CASTS)
        lesson = split == "train" and number < LESSONS
        roll = 10 + draw.below(10) if lesson else draw.below(20)
        if roll < 10:
            turns = story_turns(cast, draw, questions=3 + draw.below(3))
        elif roll < 15:
            turns = look_up(cast, draw)
        elif roll < 17:
            turns = [compare(cast, draw) for _ in range(3)]
        elif roll < 18:
            turns = [backwards(draw, held_out=False) for _ in range(4)]
        else:
            turns = [_fact(draw) for _ in range(8)]
        yield {"text": " ".join(part for turn in turns for part in turn if part)}


def _fact(draw: Draw) -> Turn:
    turn = _turns(draw.one(FACT_KINDS), draw, held_out=False)[0]
    return Turn(turn.answer, "", "") if draw.chance(0.4) else turn


def conversations(split: str) -> Iterator[dict]:
    """Yield rows {messages, subject} whose last question is of the kind `subject`; validation and test ask what is
    held out.

    No two questions of the test are the same, and it has as many of each kind.
    """
    draw, held_out, seen = Draw(10 + SEEDS[split]), split != "train", set()
    for number in range(CONVERSATIONS[split]):
        kind = draw.one(TAUGHT) if split == "train" else KINDS[number % len(KINDS)]
        if split == "train" and draw.chance(0.03):
            question, answer = draw.one(TALK)
            yield {"messages": _messages([Turn("", question, answer)]), "subject": "talk"}
            continue
        while (turns := _turns(kind, draw, held_out=held_out)) and split == "test" and repr(turns) in seen:
            pass
        seen.add(repr(turns))
        yield {"messages": _messages(turns), "subject": kind}


def _messages(turns: list[Turn]) -> list[dict]:
    messages = []
    for text, question, answer in turns:
        messages.append({"role": "user", "content": f"{text} {question}".strip()})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _turns(kind: str, draw: Draw, *, held_out: bool) -> list[Turn]:
    cast = HELD_OUT_CAST if held_out else draw.one(TRAINING_CASTS)
    if kind in STORY_KINDS:
        return story_turns(cast, draw, questions=1 + draw.below(2), last=kind)
    if kind == "compare":
        return [compare(cast, draw)]
    if kind == "backwards":
        return [backwards(draw, held_out=held_out)]
    if held_out:
        fact = draw.one(HELD_OUT[kind])
        return [Turn("", draw.one(fact.questions[1:]), fact.answer)]
    fact = draw.one(OF_KIND[kind])
    return [Turn("", fact.questions[0] if fact.held_out else draw.one(fact.questions), fact.answer)]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
