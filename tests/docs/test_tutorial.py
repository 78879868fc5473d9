"""docs/tutorial.md: each of its commands, in its order, on a small folder of texts and conversations."""

import shutil

import pytest

from tests.docs.pages import ROOT, commands, page_text, run

TEXTS = ("data.md", "finetune.md", "hub.md")  # 25 KB: a few steps


@pytest.mark.full
def test_the_commands_run_in_order_and_end_in_chat_and_export(tmp_path, cache):
    (tmp_path / "my_texts").mkdir()
    for name in TEXTS:
        shutil.copy(ROOT / "docs" / name, tmp_path / "my_texts")
    shutil.copy(ROOT / "recipes" / "identity.jsonl", tmp_path / "my_chats.jsonl")

    printed = {" ".join(words[1:3]): run(words, folder=tmp_path, cache=cache) for words in commands("tutorial.md")}

    assert {"init my_texts", "pretrain my_texts.yaml", "sft my_chats.yaml", "chat latest:sft"} <= printed.keys()
    assert printed["chat latest:pretrain"].strip()
    assert printed["chat latest:sft"].strip()
    assert "mine" in printed["evals latest:sft"]
    assert (tmp_path / "comparison" / "comparison.html").is_file()
    (chat_run,) = (tmp_path / "runs").glob("my_chats-*")
    assert (chat_run / "model" / "config.json").is_file()
    assert (chat_run / "report" / "report.html").is_file()
    assert list((chat_run / "export").iterdir())


def test_every_command_that_the_tutorial_names_in_passing_is_one_of_tandem():
    from pipeline.launch.console import MODULES, STAGES

    named = {line.split()[1] for line in page_text("tutorial.md").splitlines() if line.startswith("tandem ")}
    assert len(named) > 6
    assert named <= {*MODULES, *STAGES}
