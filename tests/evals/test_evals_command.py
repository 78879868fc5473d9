"""`python -m pipeline.evals`: what it scores, on which text, and what it leaves behind."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pipeline.artifacts.atomic import write_text
from pipeline.artifacts.checkpoints import whole_folder
from pipeline.artifacts.errors import DataError, InputMissingError, RecipeError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.evals.__main__ import main
from pipeline.evals.bpb import bits_per_byte
from pipeline.evals.documents import document_batches, documents_protocol_id
from pipeline.evals.sft import conversation_batches, conversations_protocol_id
from pipeline.evals.subject import find_subject
from pipeline.evals.texts import read_conversations, read_texts
from pipeline.tokenizer.byte_lengths import byte_lengths
from pipeline.tokenizer.specials import BOS

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("TANDEM_SHARED_DATA", ROOT.parent / "shared" / "data"))
STORIES = SHARED / "reference_model_stories260K"

TEXTS = [
    "The caf\u00e9 was na\u00efve \u2603 \U0001f600.",
    "A <|bos|> in a text is text.\n\n  Indented.",
    "x",
    "Longer. " * 30,
]
CHAT = [
    [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well, \u00e4h."}],
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": "It."},
        {"role": "user", "content": "Again. " * 40},
        {"role": "assistant", "content": "No."},
    ],
]


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_layer=2, n_embd=32, n_head=2, initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


@pytest.fixture
def run(tmp_path, model, tokenizer):
    """A finished run whose recipe names its held-out text."""
    for name, texts in (("train", TEXTS * 40), ("validation", TEXTS)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    directory = RunDirectory(tmp_path / "runs" / "a")
    with whole_folder(directory.model, step=7) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    recipe = {
        "tokenizer": {"path": str(directory.model)},
        "data": {
            "sources": [{"files": str(tmp_path / "train.jsonl")}],
            "validation": [{"files": str(tmp_path / "validation.jsonl")}],
            "row_tokens": 32, "batch_tokens": 64, "cache_dir": str(tmp_path / "cache"),
        },
        "model": {"n_layer": 2, "n_embd": 32, "n_head": 2},
        "train": {"max_steps": 4, "learning_rate": 0.001},
        "evals": {"bpb": {"tokens": 256}},
        "samples": {"prompts": ["The caf", "x"]},
    }  # fmt: skip
    write_text(directory.recipe, yaml.safe_dump(recipe))
    directory.update_manifest(name="a", stage="pretrain")
    return directory


def entries(run):
    return json.loads(run.evals.read_text())["entries"]


def plain_bpb(model, sequences):
    """Bits per byte over (ids with a first context token, bytes of each following id), one forward pass a sequence."""
    nats = num_bytes = 0.0
    with torch.no_grad():
        for ids, counts in sequences:
            log_p = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)
            nats -= sum(log_p[t, token].item() for t, token in enumerate(ids[1:]))
            num_bytes += sum(counts)
    return nats / num_bytes / math.log(2), int(num_bytes)


@pytest.mark.skipif(not STORIES.is_dir(), reason="the shared data is not here")
def test_the_reference_model_scores_as_an_independent_computation_from_offsets(tmp_path, capsys):
    texts = [
        "Once upon a time, there was a girl named Lily. She saw a caf\u00e9, \u738b and \U0001f600.",
        " Two  spaces\n\nand lines. " * 120,
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(STORIES).eval(), AutoTokenizer.from_pretrained(STORIES)
    sequences = []
    for text in texts:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        counts, covered = [], 0
        for first, end in encoded["offset_mapping"]:
            counts.append(len(text[max(first, covered) : end].encode()))
            covered = max(covered, end)
        assert sum(counts) == len(text.encode())
        for cut in range(0, len(counts), 512):
            sequences.append(
                ([tokenizer.bos_token_id, *encoded["input_ids"][cut : cut + 512]], counts[cut : cut + 512])
            )
    expected, num_bytes = plain_bpb(reference, sequences)
    assert len(sequences) > 2  # the window was exceeded
    assert main([str(STORIES), "bpb", "--text", str(tmp_path / "texts.jsonl")]) == 0
    name, value, _, scored, _, protocol = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, int(scored.replace(",", ""))) == ("text/bpb_documents", num_bytes)
    assert float(value) == pytest.approx(expected, abs=1e-6)
    assert protocol == documents_protocol_id(texts)


def test_document_batches_score_every_byte_once_for_any_window_and_batch(model, tokenizer):
    total = sum(len(text.encode()) for text in TEXTS)
    for window in (5, 16, 64):
        expected = plain_bpb(
            model,
            [
                ([tokenizer.bos_token_id, *ids[cut : cut + window]], [1] * len(ids[cut : cut + window]))
                for ids in ([tokenizer.get_vocab()[c] for c in _alphabet(text)] for text in TEXTS)
                for cut in range(0, len(ids), window)
            ],
        )
        for rows in (1, 7):
            got = bits_per_byte(model, document_batches(tokenizer, TEXTS, window=window, rows=rows), None, device="cpu")
            assert (got.bytes, got.tokens) == (total, total) == (expected[1], expected[1])
            assert got.bpb == pytest.approx(expected[0], rel=1e-6)


def _alphabet(text):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def test_protocol_ids_name_the_text_and_nothing_else(tokenizer):
    assert documents_protocol_id(TEXTS) == documents_protocol_id(list(TEXTS))
    assert len({documents_protocol_id(t) for t in (TEXTS, TEXTS[:-1], ["".join(TEXTS)])}) == 3
    other = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token=BOS)
    other.chat_template = "{{ messages }}"
    ids = {conversations_protocol_id(t, CHAT, scored_bytes=n) for t in (tokenizer, other) for n in (5, 6)}
    assert len(ids) == 4  # another template and another cut are other texts


def test_conversations_are_scored_on_the_assistants_words_only(model, tokenizer):
    lengths = byte_lengths(tokenizer)
    got = bits_per_byte(model, conversation_batches(tokenizer, CHAT, window=63, rows=2), lengths, device="cpu")
    # The second conversation is cut before its second question: the end token is a target without bytes.
    answers = [CHAT[0][-1]["content"], CHAT[1][2]["content"]]
    assert got.bytes == sum(len(answer.encode()) for answer in answers)
    assert got.tokens == got.bytes + len(answers)
    one_by_one = bits_per_byte(model, conversation_batches(tokenizer, CHAT, window=63, rows=1), lengths, device="cpu")
    assert got.nats == pytest.approx(one_by_one.nats, rel=1e-6)


def test_conversations_that_do_not_fit_at_all_are_an_error(tokenizer):
    with pytest.raises(DataError, match="none of the 2 conversations"):
        list(conversation_batches(tokenizer, CHAT, window=4, rows=2))


def test_a_runs_own_validation_is_scored_under_the_ids_of_its_training(run, model, tokenizer):
    from pipeline.data.prepare import prepare_now
    from pipeline.data.validation import ValidationRows
    from pipeline.recipe import read_recipe
    from pipeline.sources.open import open_sources

    assert main([str(run.path), "bpb"]) == 0
    recipe = read_recipe([str(run.recipe)], stage="pretrain")
    rows = ValidationRows.open(prepare_now(recipe, tokenizer, sources=open_sources(recipe, kind="text")))
    (entry,) = entries(run)
    by_name = {result["name"]: result for result in entry["results"]}
    assert by_name["val/bpb"]["protocol"] == rows.protocol_id
    assert by_name["val/bpb_documents"]["protocol"] == rows.documents_protocol_id
    assert by_name["val/bpb_documents"]["bytes"] == sum(len(text.encode()) for text in TEXTS)
    expected = bits_per_byte(model, rows.batches(rows=3), byte_lengths(tokenizer), device="cpu")
    assert by_name["val/bpb"]["value"] == pytest.approx(expected.bpb, rel=1e-6)
    assert entry["command"] == f"python -m pipeline.evals {run.path} bpb"
    assert (entry["subject"], entry["step"]) == ("model/", 7)
    assert entry["versions"]["torch"] == torch.__version__


def test_entries_are_added_and_the_report_shows_them(run, tmp_path):
    from pipeline.report.run_data import read_run
    from pipeline.report.single import report

    (tmp_path / "t.txt").write_text(TEXTS[0])
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CHAT))
    assert main([str(run.path), "bpb", "--text", str(tmp_path / "t.txt")]) == 0
    assert main([str(run.path), "bpb", "--chat", str(tmp_path / "c.jsonl")]) == 0
    first, second = entries(run)
    assert first["results"][0]["name"] == "text/bpb_documents"
    assert second["results"][0]["name"] == "text/assistant_bpb"
    assert f"{second['results'][0]['value']:.6f}" in report(read_run(str(run.path)))


def test_samples_are_greedy_and_sampled_continuations_of_the_recipes_prompts_and_repeat(run):
    state = torch.get_rng_state()
    for _ in range(2):
        assert main([str(run.path), "samples"]) == 0
    assert torch.equal(state, torch.get_rng_state())
    first, second = (entry["samples"] for entry in entries(run))
    assert first == second
    assert [(row["prompt"], row["temperature"]) for row in first] == [
        ("The caf", 0.0),
        ("x", 0.0),
        ("The caf", 0.8),
        ("x", 0.8),
    ]
    assert not first[0]["chat"]


def test_a_checkpoint_of_a_run_is_scored_as_that_step(run):
    with whole_folder(run.checkpoints / "checkpoint-3") as folder:
        for path in run.model.iterdir():
            if path.name != "MANIFEST.json":
                (folder / path.name).write_bytes(path.read_bytes())
    assert main([str(run.checkpoints / "checkpoint-3"), "samples"]) == 0
    assert (entries(run)[0]["subject"], entries(run)[0]["step"]) == ("checkpoint-3", 3)


def test_of_an_unfinished_run_the_newest_whole_checkpoint_is_taken_and_nothing_is_moved(run):
    for step in (3, 5):
        with whole_folder(run.checkpoints / f"checkpoint-{step}") as folder:
            (folder / "config.json").write_text("{}")
    (run.checkpoints / "checkpoint-5" / "config.json").write_text("{ }")
    run.model.rename(run.path / "elsewhere")
    assert find_subject(str(run.path)).name == "checkpoint-3"
    assert (run.checkpoints / "checkpoint-5").is_dir()
    (run.checkpoints / "checkpoint-3" / "config.json").unlink()
    with pytest.raises(InputMissingError, match="neither model/ nor a whole checkpoint"):
        find_subject(str(run.path))


def test_names_that_are_no_model_are_told_apart(tmp_path):
    with pytest.raises(InputMissingError, match="neither a run"):
        find_subject(str(tmp_path))
    with pytest.raises(InputMissingError, match="no such folder"):
        find_subject(str(tmp_path / "nothing"))
    assert find_subject("somebody/model").path == "somebody/model"
    assert find_subject("gpt2").run is None


def test_texts_are_read_from_txt_jsonl_and_parquet_alike(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": ""}\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": ["three"], "x": [1]}), tmp_path / "c.parquet")
    assert read_texts([str(tmp_path / "*")], max_bytes=10**6) == ["one", "two", "three"]
    assert read_texts([str(tmp_path / "*")], max_bytes=4) == ["one", "two"]


def test_a_bad_row_is_named_and_no_figure_is_made_of_the_rest(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n{"text": 3}\n{"tex')
    with pytest.raises(DataError, match=r"(?s)2 bad rows.*row 1.*row 2"):
        read_texts([str(tmp_path / "b.jsonl")], max_bytes=10**6)
    (tmp_path / "c.jsonl").write_text("\n")
    with pytest.raises(InputMissingError, match="hold no text"):
        read_conversations([str(tmp_path / "c.jsonl")], max_conversations=5)


def test_misspelt_evaluations_and_parts_of_them_are_refused(run):
    with pytest.raises(RecipeError, match=r"no evaluation called bbp.*Did you mean bpb"):
        main([str(run.path), "bbp"])
    with pytest.raises(RecipeError, match=r"CORE has no task called copy, .*hellaswag_zeroshot"):
        main([str(run.path), "core:copa,copy"])
    with pytest.raises(RecipeError, match="lm_eval names no task"):
        main([str(run.path), "lm_eval:"])


def test_an_own_evaluation_is_scored_and_recorded_by_its_name(run, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_task.py").write_text(
        "def depth(model, tokenizer):\n    return {'model/layers': model.config.n_layer}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([str(run.path), "my_own_task:depth"]) == 0
    assert entries(run)[0]["results"] == [{"name": "model/layers", "value": 2.0, "protocol": None}]
    assert "model/layers" in capsys.readouterr().out


def test_a_model_without_validation_text_asks_for_text(run, tmp_path):
    run.model.rename(tmp_path / "alone")
    with pytest.raises(RecipeError, match="--text FILE"):
        main([str(tmp_path / "alone"), "bpb"])


def test_a_window_beyond_the_models_positions_is_refused(run, tmp_path):
    (tmp_path / "t.txt").write_text("x")
    with pytest.raises(RecipeError, match="--window 65 is more than the model's 64 positions"):
        main([str(run.path), "bpb", "--text", str(tmp_path / "t.txt"), "--window", "65"])


@pytest.mark.parametrize(
    "arguments", [["--help"], ["nowhere/at/all"], ["nowhere/at/all", "core:copa", "chat"], ["x", "bbp"]]
)
def test_help_and_mistakes_of_the_command_line_import_no_torch(arguments):
    code = (
        "import sys\nfrom pipeline.evals.__main__ import main\nfrom pipeline.artifacts.errors import TandemError\n"
        "try: main(sys.argv[1:])\nexcept (SystemExit, TandemError): pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=ROOT, capture_output=True)


def test_the_evaluate_metric_gives_the_same_figure_in_one_batch_and_in_many():
    from pipeline.evals.metric import BitsPerByte

    nats, counts = [1.5, 2.25, 0.5, 7.0], [3, 0, 2, -1]
    expected = (1.5 + 2.25 + 0.5) / (math.log(2) * 5)
    assert BitsPerByte().compute(predictions=nats, references=counts)["bits_per_byte"] == pytest.approx(
        expected, rel=1e-12
    )
    metric = BitsPerByte()
    for first in range(0, 4, 2):
        metric.add_batch(predictions=nats[first : first + 2], references=counts[first : first + 2])
    assert metric.compute()["bytes"] == 5
    with pytest.raises(ValueError, match="no byte of text"):
        BitsPerByte().compute(predictions=[1.0], references=[-1])


def test_the_metric_of_centred_accuracy_gives_what_core_averages():
    from pipeline.evals.metric import CentredAccuracy

    predictions, references = [0, 1, 2, 3, 0, 0], [0, 1, 2, 0, 1, 0]
    found = CentredAccuracy().compute(predictions=predictions, references=references, baseline=0.25)
    assert (found["accuracy"], found["centred_accuracy"]) == pytest.approx((4 / 6, (4 / 6 - 0.25) / 0.75))
    assert 0 <= found["low"] < found["accuracy"] < found["high"] <= 1
    with pytest.raises(ValueError, match="no answer"):
        CentredAccuracy()._compute([], [])
