"""Where training goes on from somebody's model, documents end with the token that the model ends its texts with."""

import json

import numpy as np
import pytest

from pipeline.data.row_plan import plan_rows
from pipeline.data.rows import TrainingRows
from pipeline.data.validation import ValidationRows
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import Source
from pipeline.tokenizer import load_or_train
from pipeline.tokenizer.encode import document_end, encode_documents
from pipeline.training.build import build_from_recipe
from tests import families

TEXTS = ["One two three.", "Red green blue and white.", "Cats, dogs and birds of many kinds and colours.", "x"]


@pytest.fixture
def going_on(bench, tmp_path):
    def recipe(family: str, **data):
        folder = families.save_model(family, tmp_path / "model")
        file = tmp_path / "docs.jsonl"
        file.write_text("".join(json.dumps({"text": TEXTS[i % 4] * (1 + i % 40)}) + "\n" for i in range(400)))
        train = {"max_steps": 30, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
        made = bench.recipe(sources=[Source(files=str(file))], train=train, **data)
        made.model.start_from = made.tokenizer.path = str(folder)
        made.run.directory = str(tmp_path / "runs")
        bench.tokenizer = load_or_train(made.tokenizer_settings(), [])
        return made

    return recipe


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("llama", "<|end_of_text|>"),  # its eos ends a turn
        ("gemma3", "<eos>"),
        ("smollm3", "<|end_of_text|>"),  # it names no bos
        ("qwen3", None),  # one token is between its texts
        ("gpt_neox", None),
    ],
)
def test_a_text_ends_with_the_token_that_the_family_ends_it_with(family, end):
    tokenizer = families.tokenizer_of(families.FAMILIES[family])
    found = document_end(tokenizer)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


@pytest.mark.parametrize("packing", ["cut_and_fit", "best_fit_crop", "concat"])
def test_every_document_of_continued_pretraining_has_its_end_and_all_its_text(packing, going_on, bench):
    recipe = going_on("llama", packing=packing)
    rows = TrainingRows.open(preparation=bench.prepared(recipe))
    bos, end = (bench.tokenizer.convert_tokens_to_ids(f"<|{name}_of_text|>") for name in ("begin", "end"))
    plan = rows.plan
    assert (plan["bos"], plan["end"]) == (bos, end)
    shard = rows.stream.datasets[0].shard(0)
    shared = packing == "concat"  # the last token of a row is the first one of the next
    ids = np.concatenate([row[: used - shared] for row, used in zip(shard.input_ids, shard.used, strict=True)])
    whole = {
        tuple(e.tolist()) for e in encode_documents(bench.tokenizer, [t * (1 + n) for t in TEXTS for n in range(40)])
    }
    pieces = [tuple(piece.tolist()) for piece in np.split(ids, np.flatnonzero(ids == bos)) if len(piece) > 1]
    ended = [piece[1:-1] for piece in pieces if piece[-1] == end]
    assert len(ended) > 0.5 * len(pieces)
    assert all(any(text[-len(one) :] == one for text in whole) for one in ended)
    assert all(end not in piece[:-1] for piece in pieces)
    if packing == "cut_and_fit":  # a document without its end was cut, or fills its rows
        assert all(len(piece) == 65 for piece in pieces if piece[-1] != end)
        assert all(len(piece) > 2 for piece in pieces)


def test_bytes_of_validation_stay_what_they_are_without_ends(going_on, bench):
    recipe = going_on("llama")
    with_end = ValidationRows(bench.prepared(recipe))
    recipe.model.start_from = None
    without = ValidationRows(bench.prepared(recipe))
    lengths = {}
    for name, rows in (("with", with_end), ("without", without)):
        plan = rows.plan["documents"]["sequences"][0]
        lengths[name] = rows.plan["documents"], plan["settings"].get("end")
    assert lengths["with"][1] is not None
    assert lengths["without"][1] is None
    assert "end" not in without.plan


def test_rows_from_scratch_or_of_a_begun_run_stay_unchanged(going_on, bench, tmp_path):
    recipe = going_on("llama")
    recipe.run.name = "begun"

    def plan():
        return plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))

    assert "end" in plan()
    run = tmp_path / "runs" / "begun"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "attempt": 0}\n')
    assert "end" not in plan()
    (run / "run_manifest.json").write_text(json.dumps({"inputs": {"document_end": 401}}))
    assert plan()["end"] == 401
    recipe.run.name = None
    recipe.model.start_from = None
    assert "end" not in plan()


@pytest.mark.parametrize(
    ("family", "ends"), [("llama", ["<|end_of_text|>", "<|eot_id|>"]), ("gpt_neox", ["<|endoftext|>"])]
)
def test_generation_ends_where_documents_do_and_at_no_untrained_token(family, ends, going_on, bench):
    recipe = going_on(family)
    model = build_from_recipe(recipe, bench.tokenizer)
    found = model.generation_config.eos_token_id
    assert bench.tokenizer.convert_ids_to_tokens(found if isinstance(found, list) else [found]) == ends


def test_a_model_that_ends_at_the_next_beginning_goes_on_so(going_on, bench, tmp_path):
    recipe = going_on("llama")
    bos = bench.tokenizer.bos_token_id
    file = tmp_path / "model" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [bench.tokenizer.eos_token_id, bos]}))
    assert "end" not in plan_rows(row_settings(recipe), bench.tokenizer, sources=bench.sources(recipe))
