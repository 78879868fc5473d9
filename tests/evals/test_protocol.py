"""A score's protocol: its id is the hash of its parts, and figures of unequal ids are never put side by side."""

import itertools
import json
import unicodedata

import pytest
import torch
from core_items import write_bundle
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.evals import texts as documents
from pipeline.evals.__main__ import read_arguments
from pipeline.evals.core import core_results, score_core
from pipeline.evals.core_bundle import open_bundle
from pipeline.evals.subject import Subject
from pipeline.evals.tasks import append_entry, entry_of, in_precision
from pipeline.evals.texts import bpb_results, documents_protocol, print_figures
from pipeline.metrics import Protocol
from pipeline.process.errors import DataError
from pipeline.report.benchmarks import score_rows
from pipeline.report.comparison import comparison
from pipeline.report.run_data import read_run
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.tokenizer.coverage import coverage
from pipeline.tokenizer.encode import keeps_every_text
from tests.model.tiny_models import tiny

TEXT = (
    "A line of text with a caf"
    + unicodedata.normalize("NFD", "\u00e9")
    + ".\n"
    + "And then another line, and no end.\n" * 200
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("Other words stand here, and they are fewer.\n" * 40)
    (tmp_path / "c.txt").write_text("The last of three files.\n" * 30)
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day to you"}]
    longer = [*talk, {"role": "user", "content": "and now?"}, {"role": "assistant", "content": "nothing more " * 4}]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps({"messages": m}) + "\n" for m in (talk, longer)))
    write_bundle(tmp_path / "bundle", 3)
    return tmp_path


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    return tiny("gpt2", vocab_size=len(tokenizer), n_positions=128, bos_token_id=tokenizer.bos_token_id)


def copy_of(tokenizer, **changes):
    """The tokenizer again, with a normalizer or a chat template of its own."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = changes.get("normalizer")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    made.chat_template = changes.get("template", tokenizer.chat_template)
    return made


def lossy(tokenizer):
    """The tokenizer again, reading another letter for each e."""
    return copy_of(tokenizer, normalizer=normalizers.Replace("e", "i"))


def scored(model, tokenizer, *words):
    arguments = read_arguments(["model", "bpb", *words])
    return bpb_results(Subject(path="model"), model, tokenizer, arguments, device="cpu")


def rows_under_many_protocols(model, tokenizer, monkeypatch):
    """The rows of one model, each under a protocol of its own, by what differs from the first of its metric."""
    text = ["--text", "a.txt"]
    found = {
        "": scored(model, tokenizer, *text),
        "texts": scored(model, tokenizer, "--text", "b.txt"),
        "bytes": scored(model, tokenizer, "--text", "a.txt", "b.txt"),
        "window 16 against 128": scored(model, tokenizer, *text, "--window", "16"),
        "window 32 against 128": scored(model, tokenizer, *text, "--window", "32"),
        "dtype bfloat16 against float32": scored(model, tokenizer, *text, "--dtype", "bfloat16"),
        "dtype float16 against float32": scored(model, tokenizer, *text, "--dtype", "float16"),
        "coverage 0.99": scored(model, copy_of(tokenizer, normalizer=normalizers.NFC()), *text),
    }
    with monkeypatch.context() as patch:
        patch.setattr(documents, "DOCUMENTS_RULE", 2)
        found["rule 2 against 1"] = scored(model, tokenizer, *text)
    plain = tokenizer.chat_template.replace("{%", " {%", 1)
    found |= {
        "chat": scored(model, tokenizer, "--chat", "chat.jsonl"),
        "window 64 against 128": scored(model, tokenizer, "--chat", "chat.jsonl", "--window", "64"),
        "template": scored(model, copy_of(tokenizer, template=plain), "--chat", "chat.jsonl"),
    }
    bundle = open_bundle("bundle").only(["copa"])
    for name, options in {
        "core": {},
        "items 2 against all": {"max_per_task": 2},
        "crop": {"long_prompts": "crop"},
    }.items():
        score = score_core(bundle, model, tokenizer, device="cpu", **options)
        found[name] = in_precision(core_results(score)[:1], "float32")
    found["coverage"] = in_precision(
        core_results(score_core(bundle, model, lossy(tokenizer), device="cpu"))[:1], "float32"
    )
    found["core in bfloat16"] = in_precision(core_results(score)[:1], "bfloat16")
    return found


def test_seventeen_protocols_have_seventeen_ids_and_are_never_compared(folder, model, tokenizer, monkeypatch):
    found = rows_under_many_protocols(model, tokenizer, monkeypatch)
    ids = [row["protocol"] for rows in found.values() for row in rows]
    assert len(ids) == len(set(ids)) == 17
    for name, rows in found.items():
        run = RunDirectory(folder / "runs" / (name.replace(" ", "_") or "first"))
        run.evals.parent.mkdir(parents=True)
        run.update_manifest(name=run.path.name, stage="pretrain")
        append_entry(run, entry_of(subject="model/", step=1, device="cpu", results=json.loads(json.dumps(rows))))
    runs = {path.name: read_run(str(path)) for path in (folder / "runs").iterdir()}
    assert score_rows(list(runs.values()))[0] == []
    for one, other in itertools.combinations(runs.values(), 2):
        assert score_rows([one, other])[0] == []
    for name in list(found)[1:9]:
        text = comparison([runs["first"], runs[name.replace(" ", "_")]])
        assert f"Against {name.replace(' ', '_')} ({found[name][0]['protocol']}): " in text
        assert name in text.split("Against first")[1]
    again = scored(model, tokenizer, "--text", "a.txt", "--batch-rows", "3")  # how many rows at once changes nothing
    assert (again[0]["protocol"], again[0]["bytes"]) == (found[""][0]["protocol"], found[""][0]["bytes"])
    assert again[0]["value"] == pytest.approx(found[""][0]["value"], rel=1e-6)


def test_the_id_is_the_hash_of_the_parts_and_of_nothing_else(folder, model, tokenizer, capsys):
    (row,) = scored(model, tokenizer, "--text", "a.txt")
    parts = row["protocol_parts"]
    assert Protocol(json.loads(json.dumps(parts))).id == row["protocol"]
    assert Protocol(dict(reversed(parts.items()))).id == row["protocol"]
    changed = {"stride": 8, "bos": "each document", "bytes": 1, "score": "rows", "texts": "x", "new": 1}
    others = {Protocol(parts).having(**{name: value}).id for name, value in changed.items()}
    assert len(others | {row["protocol"]}) == len(changed) + 1
    print_figures([row])
    assert f"{row['protocol']}: texts {parts['texts']}, bytes {row['bytes']}, window 128," in capsys.readouterr().out


def test_a_row_of_an_earlier_version_compares_with_its_own_id_alone(tmp_path):
    row = {"name": "text/bpb_documents", "value": 1.0, "protocol": "documents-8fd12ee8a4ab"}
    new = documents_protocol(["a"], window=8, scored_bytes=1, coverage=1.0, dtype="float32").row()
    rows = {"a": row, "b": row | {"value": 2.0}, "c": row | new}
    for name, one in rows.items():
        run = RunDirectory(tmp_path / name)
        run.evals.parent.mkdir(parents=True)
        run.update_manifest(name=name)
        append_entry(run, entry_of(subject="model/", step=1, device="cpu", results=[one]))
    a, b, c = (read_run(str(tmp_path / name)) for name in rows)
    assert len(score_rows([a, b])[0]) == 1
    compared, refused = score_rows([a, c])
    assert compared == []
    assert all("an earlier version measured one of them" in line for line in refused)


def test_a_file_that_is_not_scored_whole_is_reported(folder, model, tokenizer, capsys):
    names = ["a.txt", "b.txt", "c.txt"]
    (row,) = scored(model, tokenizer, "--text", *names)
    assert "not all" not in capsys.readouterr().out
    assert [(file["label"], file["complete"]) for file in row["files"]] == [(name, True) for name in names]
    rows = ["x" * 50, "y" * 50, "z" * 50]
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    (row,) = scored(model, tokenizer, "--text", "b.jsonl", "c.txt", "--max-bytes", "100")
    printed = capsys.readouterr().out
    size = (folder / "b.jsonl").stat().st_size
    assert f"b.jsonl: not all of it is scored, 100 of {size} bytes (--max-bytes 100)\n" in printed
    assert "c.txt: not all of it is scored, 0 of 750 bytes (--max-bytes 100)\n" in printed
    assert [file["bytes"] for file in row["files"]] == [100, 0]


def trained(kind, texts):
    """A tokenizer of that kind, trained on the texts."""
    special = ["[UNK]"]
    if kind == "word":
        backend, trainer = (
            Tokenizer(models.WordLevel(unk_token="[UNK]")),
            trainers.WordLevelTrainer(special_tokens=special),
        )
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif kind == "uncased":
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        backend.decoder, trainer = decoders.WordPiece(), trainers.WordPieceTrainer(special_tokens=special)
    elif kind == "sentencepiece":
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="[UNK]")
    else:
        backend = Tokenizer(models.BPE())
        if kind == "lower":
            backend.normalizer = normalizers.Lowercase()
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", bos_token="[UNK]")


CHINESE, ENGLISH = "\u4e2d\u6587\u6587\u672c\u3002" * 30, "The quick brown fox\njumps  over the Lazy dog.\n" * 30


@pytest.mark.parametrize(
    ("kind", "of_english", "of_chinese"),
    [
        ("word", "part", 0.0),  # white space is lost
        ("uncased", "part", 0.0),  # capitals too
        ("sentencepiece", 1.0, 0.0),
        ("lower", "part", 1.0),
        ("bytes", 1.0, 1.0),
    ],
)
def test_coverage_counts_the_bytes_that_the_ids_spell(kind, of_english, of_chinese):
    tokenizer = trained(kind, [ENGLISH])
    found = coverage(tokenizer, [ENGLISH])
    assert 0.6 < found < 0.95 if of_english == "part" else found == of_english
    assert coverage(tokenizer, [CHINESE]) == of_chinese
    assert keeps_every_text(tokenizer) == (kind == "bytes")


def test_a_sentencepiece_tokenizer_with_byte_fallback_keeps_everything_but_its_own_blank(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    assert coverage(tokenizer, [ENGLISH, CHINESE, "\x00\r\n\t </s> <0x41> \U0001f642 e\u0301"]) == 1.0
    assert coverage(tokenizer, ["a\u2581b"]) < 1.0


@pytest.mark.parametrize("kind", ["word", "uncased", "lower"])
def test_a_tokenizer_that_drops_or_replaces_text_gets_no_bpb(folder, kind):
    tokenizer = trained(kind, [ENGLISH])
    (folder / "text.txt").write_text(ENGLISH if kind == "lower" else CHINESE)
    model = tiny("gpt2", vocab_size=len(tokenizer), n_positions=128)
    with pytest.raises(DataError, match=r"--text: the tokenizer drops or replaces \S+ % of the text's bytes"):
        scored(model, tokenizer, "--text", "text.txt")
