"""Conversations about the documentation: what things do, how they are called, what they take and return, where they are.

Deterministic: the phrasing of a conversation is drawn by a hash of the subject's name. Held-out conversations come from
the same source files as the held-out text, and nothing they answer is answered in training. There are few such files: their
subjects are asked about until nothing is left to ask.
"""

import random
from collections.abc import Callable, Iterable, Iterator

from pipeline.sources.quickstart.corpus import NEAR_DUPLICATE, overlap, shingles_of
from pipeline.sources.quickstart.harvest import SourceDocument
from pipeline.sources.quickstart.small_talk import GREETINGS, small_talk
from pipeline.sources.quickstart.subjects import Subject, key_of, subjects_of

MAX_CONVERSATIONS = 10_000
FOLLOW_UPS = ((0, 0.55), (1, 0.25), (2, 0.15), (3, 0.05))  # How many questions follow the first, and how often.
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Answer in one or two sentences.",
    "You answer questions about Python packages.",
    "You are Tandem. Be brief.",
)
SHOWN_PARAMETERS = 5

QUESTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # first questions, follow-ups
    "what": (
        (
            "What does {name} do?",
            "What is {name} for?",
            "Tell me about {name}.",
            "Can you explain {name}?",
            "Describe {name} in short.",
            "Please tell me what {name} does.",
            "I came across {name}. What is it?",
            "Explain {name} to me, please.",
        ),
        ("What does it do?", "And what is it for?", "Can you say what it does?", "What is it good for?"),
    ),
    "call": (
        (
            "How do I call {name}?",
            "How is {name} called?",
            "Show me how to call {name}.",
            "What is the signature of {name}?",
            "How do I use {name} in code?",
        ),
        ("How do I call it?", "And how is it called?", "What is its signature?", "Show me a call."),
    ),
    "parameters": (
        (
            "Which parameters does {name} take?",
            "What are the parameters of {name}?",
            "What arguments does {name} accept?",
            "Name the parameters of {name}.",
        ),
        (
            "Which parameters does it take?",
            "What arguments does it accept?",
            "And its parameters?",
            "What do I pass to it?",
        ),
    ),
    "parameter": (
        (
            "What is the parameter {parameter} of {name}?",
            "What does {parameter} mean in {name}?",
            "In {name}, what is {parameter} for?",
        ),
        (
            "What is {parameter} for?",
            "And what does {parameter} mean?",
            "Tell me about {parameter}.",
            "What should I pass as {parameter}?",
        ),
    ),
    "returns": (
        ("What does {name} return?", "What do I get back from {name}?", "What is the return value of {name}?"),
        ("What does it return?", "And what do I get back?", "What is its return value?"),
    ),
    "module": (
        ("Which module is {name} in?", "Where do I find {name}?", "In which module is {name} defined?"),
        ("Which module is it in?", "Where do I find it?", "And where is it defined?"),
    ),
    "import": (
        ("How do I import {name}?", "What do I write to import {name}?"),
        ("How do I import it?", "And how do I import it?"),
    ),
    "package": (
        ("Which package does {name} belong to?", "What package is {name} part of?"),
        ("Which package is it part of?", "What package does it belong to?"),
    ),
}
SHARES = {"what": 6, "call": 2, "parameters": 2, "parameter": 2, "returns": 2, "module": 1, "import": 1, "package": 1}


def conversations(training: list[SourceDocument], held_out: list[SourceDocument]) -> dict[str, list[dict]]:
    """Return rows {messages} by split. Training is mixed with small talk and ordered by hash."""
    seen: set[str] = set()
    names: set[str] = set()
    validation = [row for subject in _distinct(held_out, seen, names, frozenset()) for row in _conversations(subject)]
    said = (message["content"] for row in validation for message in row["messages"] if message["role"] == "assistant")
    avoid = frozenset(shingle for text in said for shingle in shingles_of(text))
    train = [row for subject in _distinct(training, seen, names, avoid) if (row := next(_conversations(subject), None))]
    train = _mixed(train)[:MAX_CONVERSATIONS]
    return {"train": _mixed(train + small_talk()), "validation": _mixed(validation)}


def _distinct(
    documents: list[SourceDocument], seen: set[str], names: set[str], avoid: frozenset[int]
) -> Iterable[Subject]:
    """Subjects of which no other has the name or says the same, and which say nothing that stands in `avoid`."""
    for document in documents:
        for subject in subjects_of(document):
            keys = [key_of(subject.summary), *(key_of(said) for _, said in subject.descriptions)]
            if subject.name in names or keys[0] in seen or overlap(subject.summary, avoid) >= NEAR_DUPLICATE:
                continue
            fresh = tuple(
                (n, s) for n, s in subject.descriptions if key_of(s) not in seen and overlap(s, avoid) < NEAR_DUPLICATE
            )
            names.add(subject.name)
            seen.update(keys)
            yield Subject(**{**vars(subject), "descriptions": fresh})


def _mixed(rows: list[dict]) -> list[dict]:
    """In an order that has nothing to do with where the rows come from."""
    order = list(range(len(rows)))
    random.Random("tandem quickstart").shuffle(order)
    return [rows[index] for index in order]


def _conversations(subject: Subject) -> Iterator[dict]:
    """Yield conversations about the subject, no two on the same topic, until nothing is left to ask about it."""
    draw = random.Random(f"{subject.module}.{subject.name}")
    topics = [topic for topic in QUESTIONS if _answer(subject, topic, draw) is not None]
    while topics:
        yield _conversation(subject, topics, draw)


def _conversation(subject: Subject, topics: list[str], draw: random.Random) -> dict:
    """Return one conversation, and take what it is about from the topics."""
    follow_ups = draw.choices([n for n, _ in FOLLOW_UPS], [share for _, share in FOLLOW_UPS])[0]
    messages: list[dict] = []
    if draw.random() < 0.05:
        messages.append({"role": "system", "content": draw.choice(SYSTEM_PROMPTS)})
    if draw.random() < 0.03:
        greeting, answers = draw.choice(GREETINGS)
        messages += [{"role": "user", "content": greeting}, {"role": "assistant", "content": draw.choice(answers)}]
    for turn in range(1 + follow_ups):
        if not topics:
            break
        topic = draw.choices(topics, [SHARES[topic] for topic in topics])[0]
        topics.remove(topic)
        answer = _answer(subject, topic, draw)
        assert answer is not None
        parameter, text = answer
        asked = draw.choice(QUESTIONS[topic][min(turn, 1)])
        name = f"`{subject.name}`" if draw.random() < 0.5 else subject.name
        messages += [
            {"role": "user", "content": asked.format(name=name, parameter=f"`{parameter}`")},
            {"role": "assistant", "content": text},
        ]
    return {"messages": messages}


def _answer(subject: Subject, topic: str, draw: random.Random) -> tuple[str, str] | None:
    """(the parameter asked about, the answer), or None when the documentation does not say."""
    if topic == "parameter":
        return draw.choice(subject.descriptions) if subject.descriptions else None
    text = ANSWERS[topic](subject)
    return ("", text) if text else None


def _call(subject: Subject) -> str:
    if subject.kind != "function":
        return ""
    shown = list(subject.parameters[:SHOWN_PARAMETERS]) + (
        ["..."] if len(subject.parameters) > SHOWN_PARAMETERS else []
    )
    return f"Call `{subject.name}({', '.join(shown)})`."


def _parameters(subject: Subject) -> str:
    names = [f"`{name}`" for name in subject.parameter_names]
    if subject.kind != "function":
        return ""
    if not names:
        return "It takes no parameters."
    if len(names) == 1:
        return f"It takes one parameter, {names[0]}."
    if len(names) <= SHOWN_PARAMETERS:
        return f"It takes {len(names)} parameters: {', '.join(names[:-1])} and {names[-1]}."
    return f"It takes {len(names)} parameters. The first ones are {', '.join(names[:3])} and {names[3]}."


def _returns(subject: Subject) -> str:
    if subject.returns == "None":
        return "It returns nothing."
    first, _, rest = subject.summary.partition(" ")
    if first in ("Return", "Returns") and rest[:1].islower():
        return f"It returns {rest}"
    return f"It returns `{subject.returns}`." if 0 < len(subject.returns) <= 40 else ""


def _import(subject: Subject) -> str:
    return "" if "." in subject.name else f"Write `from {subject.module} import {subject.name}`."


ANSWERS: dict[str, Callable[[Subject], str]] = {
    "what": lambda subject: subject.summary,
    "call": _call,
    "parameters": _parameters,
    "returns": _returns,
    "module": lambda subject: f"It is in the module `{subject.module}`.",
    "import": _import,
    "package": lambda subject: f"It is part of {subject.package}.",
}
