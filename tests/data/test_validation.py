import os
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.data.validation import ValidationRows, held_out_coverage
from pipeline.evals.bpb import score_validation
from pipeline.recipe.schema import Source
from pipeline.tokenizer.encode import byte_lengths
from tests.model.tiny_models import tiny

SHARED = Path(os.environ.get("TANDEM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def pairs(rows, method, *, batch, world_size):
    """(input, label) of every scored row, over all ranks, in any order."""
    found = []
    for rank in range(world_size):
        for batch_of_rank in getattr(rows, method)(rows=batch, rank=rank, world_size=world_size):
            both = zip(batch_of_rank["input_ids"].tolist(), batch_of_rank["labels"].tolist(), strict=True)
            found += [pair for pair in both if any(label != -100 for label in pair[1])]
    return sorted(found)


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
@pytest.mark.parametrize("method", ["batches", "document_batches"])
def test_validation_scores_the_same_rows_for_any_batch_and_processes(bench, stage, method):
    rows = ValidationRows(bench.prepared(bench.recipe(stage=stage)))
    expected = pairs(rows, method, batch=4, world_size=1)
    assert expected or (stage, method) == ("sft", "document_batches")
    for batch, world_size in ((1, 1), (3, 2), (5, 3)):
        assert pairs(rows, method, batch=batch, world_size=world_size) == expected
        counts = {
            len(list(getattr(rows, method)(rows=batch, rank=r, world_size=world_size))) for r in range(world_size)
        }
        assert len(counts) == 1  # a rank that left the loop early would leave the others waiting


def test_document_batches_score_every_byte_of_whole_documents_once(bench):
    recipe = bench.recipe()
    rows = ValidationRows(bench.prepared(recipe))
    _, validation = bench.sources(recipe)
    expected, documents = 0, []
    for document in next(validation[0].read()).items:
        if expected >= recipe.evals.bpb.document_bytes:
            break
        documents.append(document.text)
        expected += len(document.text.encode())
    lengths = byte_lengths(bench.tokenizer)
    labels = np.concatenate([batch["labels"].numpy().ravel() for batch in rows.document_batches(rows=3)])
    assert int(lengths[labels[labels >= 0]].sum()) == expected
    assert all("position_ids" in batch for batch in rows.document_batches(rows=3))


def test_val_rows_are_as_many_as_asked_full_and_not_isolated(bench):
    rows = ValidationRows(bench.prepared(bench.recipe()))
    batches = list(rows.batches(rows=4))
    assert len(batches) * 4 == 2048 // 64
    assert all((batch["labels"] >= 0).all() for batch in batches)
    assert all("position_ids" not in batch for batch in batches)


def test_validation_isolates_documents_as_training_does_under_its_own_protocol(bench):
    together = ValidationRows(bench.prepared(bench.recipe()))
    isolated = ValidationRows(bench.prepared(bench.recipe(isolate_documents=True)))
    for batch, other in zip(isolated.batches(rows=4), together.batches(rows=4), strict=True):
        assert torch.equal(batch["input_ids"], other["input_ids"])
        assert (batch["position_ids"] == 0).sum() == (batch["input_ids"] == bench.tokenizer.bos_token_id).sum()
    both = [rows.protocol("val/bpb", scored_bytes=1, dtype="float32") for rows in (together, isolated)]
    assert both[0].id != both[1].id
    assert "isolated" not in both[0].parts
    of_documents = [
        rows.protocol("val/bpb_documents", scored_bytes=1, dtype="float32").id for rows in (together, isolated)
    ]
    assert of_documents[0] == of_documents[1]


def protocols(bench, **change):
    tokens = change.pop("tokens", None)
    held_out = change.pop("held_out", None)
    recipe = bench.recipe(**change)
    if tokens:
        recipe.evals.bpb.tokens = tokens
    if held_out:
        recipe.data.validation = [Source(files=str(held_out))]
        recipe.data.sources = [Source(files=str(bench.text_files[0]))]
    rows = ValidationRows(bench.prepared(recipe))
    scored = rows.scored_bytes(bench.tokenizer)
    return [
        rows.protocol(name, scored_bytes=scored[name], dtype="float32").id for name in ("val/bpb", "val/bpb_documents")
    ]


def test_protocols_change_only_with_what_is_scored_and_how(bench):
    rows, documents = protocols(bench)
    for change in (
        {"packing": "best_fit_crop"},
        {"packing_documents": 9},
        {"shard_rows": 8},
        {"batch_tokens": 64},
        {"train": {"max_steps": 3, "seed": 9}},
    ):
        assert protocols(bench, **change) == [rows, documents]
    assert protocols(bench, row_tokens=32)[0] != rows
    assert protocols(bench, row_tokens=32)[1] != documents  # a model that sees less behind it predicts worse
    assert protocols(bench, tokens=1024)[0] != rows
    assert protocols(bench, tokens=1024)[1] == documents
    other = protocols(bench, held_out=bench.text_files[1])
    assert other[0] != rows
    assert other[1] != documents


def test_rows_of_a_tokenizer_without_fixed_bytes_carry_bytes_per_target(bench):
    if not (SHARED / "reference_model_stories260K").is_dir():
        pytest.skip("the tokenizer is not here")
    bench.tokenizer = AutoTokenizer.from_pretrained(SHARED / "reference_model_stories260K")
    recipe = bench.recipe()
    rows = ValidationRows(bench.prepared(recipe))
    _, validation = bench.sources(recipe)
    expected = 0
    for document in next(validation[0].read()).items:
        if expected < recipe.evals.bpb.document_bytes:
            expected += len(document.text.encode())
    found = 0
    for batch in rows.document_batches(rows=3):
        scored = batch["labels"] >= 0
        found += int(batch["target_bytes"][scored].clamp(min=0).sum())
        special = batch["labels"] == rows.plan["bos"]
        assert (batch["target_bytes"][special] == -1).all()
    assert found == expected
    assert all("target_bytes" in batch for batch in rows.batches(rows=4))


def test_a_tokenizer_that_loses_text_gives_loss_without_bits_per_byte(bench):
    recipe = bench.recipe()
    rows = ValidationRows(bench.prepared(recipe))
    held_out = bench.sources(recipe)[1]
    assert held_out_coverage(bench.tokenizer, held_out) == 1.0
    backend = Tokenizer.from_str(bench.tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    lower = PreTrainedTokenizerFast(tokenizer_object=backend, **bench.tokenizer.special_tokens_map)
    rows.coverage = held_out_coverage(lower, held_out)
    assert 0.5 < rows.coverage < 0.999
    assert not rows.keeps_text
    lengths_V = byte_lengths(bench.tokenizer)
    model = tiny("gpt2", vocab_size=len(lengths_V), n_positions=64)
    settings = {"stage": "pretrain", "rows": 8, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    numbers = score_validation(model, rows, byte_lengths_V=lengths_V, autocast_dtype=None, **settings)
    assert list(numbers) == ["val/loss"]
    rows.coverage = 1.0
    known = score_validation(model, rows, byte_lengths_V=lengths_V, autocast_dtype=None, **settings)
    assert list(known) == ["val/bpb", "val/loss", "val/bpb_documents"]
    assert known["val/loss"] == numbers["val/loss"]
