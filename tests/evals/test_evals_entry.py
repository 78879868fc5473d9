"""`python -m pipeline.evals` on a plain GPT-2 folder: what it prints, what it keeps, and what it refuses."""

import json

import pytest
from core_items import write_bundle

from pipeline.evals.__main__ import main
from pipeline.process.errors import DataError, RecipeError
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.train import train_bpe
from tests.conftest import docstrings
from tests.model.tiny_models import tiny


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, a bundle beside it; it is the working folder."""
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe(docstrings(modules=5), vocab_size=420, split_pattern="nanochat")
    model = tiny("gpt2", vocab_size=len(tokenizer), n_positions=256, bos_token_id=tokenizer.bos_token_id)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    write_bundle(tmp_path / "bundle", 3)
    (tmp_path / "text.txt").write_text("A line of text.\n" * 20)
    return tmp_path


def test_a_plain_folder_is_scored_and_results_go_where_output_says(folder, capsys):
    command = ["model", "bpb", "core:copa", "samples", "--text", "text.txt", "--bundle", "bundle"]
    assert main([*command, "--output", "found.json"]) == 0
    printed = capsys.readouterr().out
    assert "core_partial_v1: " in printed
    assert "[greedy] " in printed
    assert "recorded in found.json" in printed
    entry = json.loads((folder / "found.json").read_text())
    names = [row["name"] for row in entry["results"]]
    assert names == ["text/bpb_documents", "core_partial/v1", "core_partial/v2", "core/copa"]
    assert entry["command"].startswith("python -m pipeline.evals model bpb core:copa samples")
    assert entry["subject"] == "model"
    assert {row["dtype"] for row in entry["results"]} == {"float32"}
    assert {row["temperature"] for row in entry["samples"]} == {0.0, 0.8}


def test_scores_that_output_takes_leave_the_run_as_it_is(folder):
    run = RunDirectory(folder / "run")
    run.update_manifest(name="run", status="finished")
    (folder / "model").rename(run.model)
    command = ["run/model", "bpb", "--text", "text.txt"]
    assert main([*command, "--output", "found.json"]) == 0
    assert json.loads((folder / "found.json").read_text())["subject"] == "model"
    assert not run.report.exists()
    assert main(command) == 0
    assert run.evals.exists()


def test_missing_text_or_a_wrong_task_is_reported_before_loading_models(folder, capsys):
    assert main(["model"]) == 0
    assert "[greedy] " in capsys.readouterr().out
    (folder / "model" / "model.safetensors").unlink()
    with pytest.raises(RecipeError, match="Name a run, or text with --text FILE"):
        main(["model", "bpb"])
    with pytest.raises(RecipeError, match="no_such_module:score cannot be imported"):
        main(["model", "core:copa", "no_such_module:score", "--bundle", "bundle"])


def test_a_chat_template_that_marks_no_answer_is_reported_as_that(folder):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert main(["model", "bpb", "--chat", "chat.jsonl"]) == 0
    by_role = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (folder / "model" / "chat_template.jinja").write_text(by_role)
    assert main(["model", "bpb", "--chat", "chat.jsonl"]) == 0
    (folder / "model" / "chat_template.jinja").write_text(by_role + "{% generation %}{% endgeneration %}")
    with pytest.raises(DataError, match=r"nothing in the 1 conversations is the assistant's .*\{% generation %\}"):
        main(["model", "bpb", "--chat", "chat.jsonl"])


def test_what_was_scored_before_an_error_is_kept(folder, capsys):
    (folder / "broken_task.py").write_text("def score(model, tokenizer):\n    return 3\n")
    with pytest.raises(RecipeError, match="broken_task:score gave int"):
        main(["model", "core:copa", "broken_task:score", "--bundle", "bundle", "--output", "found.json"])
    assert [row["name"] for row in json.loads((folder / "found.json").read_text())["results"]][-1] == "core/copa"


def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_scored(folder):
    larger = train_bpe(docstrings(modules=5), vocab_size=500, split_pattern="nanochat")
    larger.save_pretrained(folder / "model")
    with pytest.raises(DataError, match="the tokenizer has 500 ids and the model 420 embeddings"):
        main(["model", "core:copa", "--bundle", "bundle", "--output", "found.json"])
    assert not (folder / "found.json").exists()
