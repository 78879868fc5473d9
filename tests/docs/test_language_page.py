"""docs/language.md: its commands on a folder of German sentences of our own."""

import itertools

import pytest

from tests.docs.pages import commands, run

pytestmark = pytest.mark.full

WHO = ("Die Bäckerin", "Der Müller", "Das Mädchen", "Ein Jäger", "Die Großmutter", "Der König")
DOES = ("öffnet", "schließt", "hört", "größer macht", "trägt", "übermalt")
WHAT = ("die Tür", "das grüne Fenster", "den süßen Kuchen", "ein Märchen", "die Brücke über den Fluss", "das Rätsel")


def test_the_commands_train_a_german_tokenizer_and_model_and_score_it(tmp_path, cache):
    (tmp_path / "texts").mkdir()
    sentences = [f"{who} {does} {what}." for who, does, what in itertools.product(WHO, DOES, WHAT)]
    for number in range(12):
        (tmp_path / "texts" / f"{number:02}.txt").write_text("\n".join(sentences[number::12] * 8), encoding="utf-8")

    printed = {words[1]: run(words, folder=tmp_path, cache=cache) for words in commands("language.md")}

    assert list(printed) == ["init", "tokenizer", "pretrain", "evals"]
    assert "Bäckerin" in printed["init"]
    assert "bytes per token" in printed["tokenizer"]
    assert "'Das'" in printed["pretrain"]
    assert "bpb" in printed["evals"]
