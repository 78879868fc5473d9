"""The built-in corpora: what the documentation of the pinned packages gives, to the last byte."""

import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.process.storage import cache_dir
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from pipeline.sources.quickstart.built_in import corpus_folder
from pipeline.sources.quickstart.corpus import (
    NEAR_DUPLICATE,
    WORDS,
    code_share,
    is_held_out,
    overlap,
    shingles_of,
    split_and_deduplicate,
)
from pipeline.sources.quickstart.harvest import DISTRIBUTIONS, Described, SourceDocument, parameters_of
from pipeline.sources.quickstart.pinned import PINNED_SHA256
from pipeline.sources.quickstart.prose import prose_lines
from pipeline.sources.quickstart.subjects import sentences

ROOT = Path(__file__).parents[2]
SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def corpus():
    """The rows by file; made once for the machine, since it takes a quarter of a minute."""
    folder = corpus_folder(cache_dir())
    return {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in folder.glob("*.jsonl")
    }


def pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def other_versions():
    versions = {name.lower(): version for name, version in pinned().items()}
    return [
        f"{name} {importlib.metadata.version(name)}, not {versions[name]}"
        for name in DISTRIBUTIONS
        if importlib.metadata.version(name) != versions[name]
    ]


def lines_of(rows):
    return [line for row in rows for line in row["text"].split("\n") if line]


def test_every_distribution_that_is_read_is_pinned():
    assert set(DISTRIBUTIONS) <= {name.lower() for name in pinned()}
    assert list(DISTRIBUTIONS) == sorted(DISTRIBUTIONS)
    assert "torch" not in DISTRIBUTIONS


def test_the_corpora_of_the_pinned_set_have_their_known_bytes():
    if other_versions():
        pytest.skip(f"other versions are installed: {'; '.join(other_versions())}")
    folder = corpus_folder(cache_dir())
    assert {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.jsonl"))
    } == PINNED_SHA256


def test_there_are_ten_million_characters_of_training_text_and_a_fortieth_is_held_out(corpus):
    train, validation = (sum(len(row["text"]) for row in corpus[f"quickstart_text-{split}"]) for split in SPLITS)
    assert train >= 10_000_000
    assert 0.015 <= validation / train <= 0.035


@pytest.mark.parametrize("split", SPLITS)
def test_code_and_tables_are_at_most_a_fifth_of_the_text(corpus, split):
    assert code_share(row["text"] for row in corpus[f"quickstart_text-{split}"]) <= 0.20


def test_the_measure_of_code_tells_prose_from_code():
    assert code_share(["This sentence has nothing but ordinary words in it."]) < 0.01
    assert code_share(["for i in range(10): x_i[j] += np.dot(a_ij, b->c) / 2**n"]) > 0.6


def test_every_line_stands_once(corpus):
    keys = [
        "".join(WORDS.findall(line.lower()))
        for split in SPLITS
        for line in lines_of(corpus[f"quickstart_text-{split}"])
    ]
    assert len(keys) == len(set(keys))


def test_held_out_text_is_chosen_by_source_file_and_training_repeats_none_of_it(corpus):
    assert all(is_held_out(row["path"]) for row in corpus["quickstart_text-validation"])
    assert not any(is_held_out(row["path"]) for row in corpus["quickstart_text-train"])
    held = frozenset(
        shingle for line in lines_of(corpus["quickstart_text-validation"]) for shingle in shingles_of(line)
    )
    near = [line for line in lines_of(corpus["quickstart_text-train"]) if overlap(line, held) >= NEAR_DUPLICATE]
    assert not near


def test_no_licence_doctest_or_markup_is_left(corpus):
    lines = [line for split in SPLITS for line in lines_of(corpus[f"quickstart_text-{split}"])]
    assert not [line for line in lines if re.search(r"all rights reserved|licen[sc]e", line, re.IGNORECASE)]
    assert not [line for line in lines if line.startswith((">>>", "```", ".. ", "|", "+--", "====", "#"))]
    assert sum(bool(re.search(r":(?:class|func|meth|ref|math):", line)) for line in lines) < 0.001 * len(lines)


@pytest.mark.parametrize("split", SPLITS)
def test_conversations_are_sound_short_and_end_properly(corpus, split):
    from pipeline.sources.formats import problem

    rows = corpus[f"quickstart_chat-{split}"]
    assert not [row for row in rows if problem(row["messages"])]
    answers = [message["content"] for row in rows for message in row["messages"] if message["role"] == "assistant"]
    assert max(len(answer.split()) for answer in answers) <= 60
    assert not [answer for answer in answers if not answer.endswith((".", "!", "?"))]


def test_there_are_five_thousand_conversations_and_a_fifth_have_several_turns(corpus):
    train = corpus["quickstart_chat-train"]
    several = [row for row in train if sum(message["role"] == "user" for message in row["messages"]) > 1]
    assert len(train) >= 5000
    assert len(several) >= 0.2 * len(train)
    assert len(corpus["quickstart_chat-validation"]) >= 200
    assert any(row["messages"][0]["role"] == "system" for row in train)
    assert any(message["content"] == "Who are you?" for row in train for message in row["messages"])


def test_no_held_out_answer_is_answered_in_training(corpus):
    def sayings(split):
        said = [
            m["content"]
            for row in corpus[f"quickstart_chat-{split}"]
            for m in row["messages"]
            if m["role"] == "assistant"
        ]
        # What comes from a docstring; the frames (`It takes ...`) are meant to be shared.
        return [
            text
            for text in said
            if not re.match(r"It (takes|is|returns)\b|Call |Write |I |No\b|Hello|Hi|Hey|You are|Goodbye|Good|Ask", text)
        ]

    held = frozenset(shingle for text in sayings("validation") for shingle in shingles_of(text))
    train = sayings("train")
    assert not set(train) & set(sayings("validation"))
    assert not [text for text in train if overlap(text, held) >= NEAR_DUPLICATE]


def test_spelling_answers_are_right_and_no_word_is_on_both_sides(corpus):
    words = {}
    for split in SPLITS:
        rows = corpus[f"spelling-{split}"]
        assert len(rows) > 100
        words[split] = set()
        for row in rows:
            for asked, answered in zip(row["messages"][::2], row["messages"][1::2], strict=True):
                spelled = re.search(r"[a-z](, [a-z])+", answered["content"]).group().replace(", ", "")
                words[split].add(spelled)
                assert re.search(rf"\b{spelled}\b", asked["content"])
                counted = re.search(r"The letter (.) occurs (\w+)", answered["content"])
                if counted:
                    number = {"no": 0, "once": 1, "two": 2, "three": 3, "four": 4, "five": 5}[counted.group(2)]
                    assert spelled.count(counted.group(1)) == number
    assert not words["train"] & words["validation"]


def test_the_built_in_sources_open_like_any_other_with_their_own_validation():
    for name, kind in (("quickstart_text", "text"), ("quickstart_chat", "chat"), ("spelling", "chat")):
        made = Recipe()
        made.data.sources = [Source(id=f"tandem:{name}")]
        train, validation = open_sources(made, kind=kind)
        assert [file.label for file in train[0].files + validation[0].files] == [
            f"{name}-train.jsonl",
            f"{name}-validation.jsonl",
        ]
        assert train[0].files[0].sha256 != validation[0].files[0].sha256
        assert next(validation[0].read()).items


def test_prose_is_taken_out_of_a_numpy_docstring():
    text = """Return the answer.

    The answer is computed slowly,
    but it is :func:`~mypackage.core.right` in the end [1]_.

    Parameters
    ----------
    a : array_like, optional
        The array that is looked at, over
        several lines.
    b : int

    Returns
    -------
    out : ndarray
        The answer as an array of numbers.

    See Also
    --------
    other_function : This line is left out with its section.

    Examples
    --------
    >>> answer(1)
    array([1])

    A sentence between two examples stays in.

    >>> answer(2)
    2

    References
    ----------
    .. [1] A. Author, "A title that is left out".
    """
    assert prose_lines(text) == (
        "The answer is computed slowly, but it is `right` in the end.",
        "a: The array that is looked at, over several lines.",
        "out: The answer as an array of numbers.",
        "A sentence between two examples stays in.",
    )


def test_prose_is_taken_out_of_a_google_docstring_and_markdown():
    text = """Build a model from its configuration.

    Args:
        config (`Config`, *optional*): The sizes of the
            model and its options.
        seed (int): Where the weights come from.

    Example:

    ```python
    model = build(Config())
    ```

    | a | b |
    |---|---|
    | 1 | 2 |

    - The first item of a list of items.
    - The second item, which goes on
      in the next line.

    See [the guide](https://example.org/guide) for more about all of this.
    """
    assert prose_lines(text) == (
        "Build a model from its configuration.",
        "config: The sizes of the model and its options.",
        "seed: Where the weights come from.",
        "- The first item of a list of items.",
        "- The second item, which goes on in the next line.",
        "See the guide for more about all of this.",
    )


def test_literal_blocks_formulas_and_licences_are_left_out():
    text = """Call it like this::

        x = call(1, 2)
        y = x + 1

    Then look at the result of the call.

    The formula $x = y^2$ is no prose at all.

    .. note:: This is worth a second look, too.

    .. code-block:: python

        z = 3

    Licensed under the Apache License, Version 2.0.
    """
    assert prose_lines(text) == ("Then look at the result of the call.", "This is worth a second look, too.")


def test_a_line_of_held_out_text_is_removed_from_training_also_when_slightly_changed():
    line = "The quick model reads every row of the file once and learns what follows in it."
    changed = "The quick model reads every row of the file once and learns what follows it."
    other = "Something else entirely is written in this line, which therefore has to stay in training. "
    paths = [f"p/{n}.py" for n in range(400)]
    held, trained = next(p for p in paths if is_held_out(p)), next(p for p in paths if not is_held_out(p))
    documents = [
        SourceDocument(trained, [Described("a", "module", [changed, *(f"{other}{n}" for n in range(3)), line])]),
        SourceDocument(
            held,
            [
                Described(
                    "b",
                    "module",
                    [line, *(f"Held out words number {n} are here to make it long enough." for n in range(5))],
                )
            ],
        ),
    ]
    training, validation = split_and_deduplicate(documents)
    assert [line for thing in training[0].things for line in thing.lines] == [f"{other}{n}" for n in range(3)]
    assert line in validation[0].things[0].lines


def test_parameters_are_written_as_a_call_would_have_them():
    import ast

    arguments = ast.parse("def f(self, a, b: int = 3, *args, c='x', d=g(1), **kwargs): pass").body[0].args
    assert parameters_of(arguments) == ["a", "b=3", "*args", "c='x'", "d=...", "**kwargs"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Return the sum of all the numbers", "Return the sum of all the numbers."),
        ("Return the sum of it. Then return it again.", "Return the sum of it. Then return it again."),
        ("for internal use only, not public", ""),
        ("See below for what this does exactly.", ""),
        ("Deprecated since version two of this.", ""),
    ],
)
def test_an_answer_is_a_whole_plain_sentence(line, said):
    assert sentences(line) == said


def test_the_processes_that_read_the_documentation_end_when_the_run_is_killed(tmp_path):
    command = [sys.executable, "-m", "pipeline.sources.quickstart.harvest", str(tmp_path / "0.jsonl"), "0", "1"]
    code = f"import os, subprocess, time; print(subprocess.Popen({command!r}).pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    child = psutil.Process(int(parent.stdout.readline()))
    while not (tmp_path / "0.jsonl").exists():
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=20)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
