"""Nine public datasets by their `id` alone, or with the one key that the error names, through `python -m pipeline.data`."""

import json
import re
import subprocess
import sys
import threading
from collections import Counter

import pytest
import yaml
from dataset_hub import COMMIT, HubServer
from public_datasets import DATASETS, alpaca_rows
from test_hub_files import environment_for

from tests.runner import Runner

pytestmark = pytest.mark.full

TEXT_BESIDE = ("tatsu-lab/alpaca",)  # Its rows have a column `text` as well.

# For each recipe: try it, and where it is refused, once more with the key that the sentence says to write.
WALK = """
import contextlib, io, json, re, sys, yaml
import pipeline.sources.hub_files as hub_files
hub_files.FIRST_WAIT_S = 0.02
from pipeline.process.errors import TandemError
from pipeline.data.__main__ import main
from pipeline.recipe import read_recipe
from pipeline.sources.open import open_sources

def walk(path, key):
    source = {**yaml.safe_load(open(path))["data"]["sources"][0], **key}
    recipe = [path, "data.sources=" + json.dumps([source])]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            main([*recipe, "--show", "2"])
    except TandemError as error:
        named = re.findall(r'Write (\\w+: (?:"[^"]+"|[^ ]+))\\.(?: |$)', str(error))
        refused = {"key": key, "refused": str(error), "status": error.status}
        return refused if key or len(named) != 1 else {**walk(path, yaml.safe_load(named[0])), **refused, "key": yaml.safe_load(named[0])}
    recipe = read_recipe(recipe, stage=None)
    sources = open_sources(recipe.source_settings())
    blocks = [block for part in sources for one in part for block in one.read()]
    return {
        "key": key, "printed": printed.getvalue(), "revision": sources[0][0].revision,
        "items": [getattr(item, "messages", None) or item.text for block in blocks for item in block.items],
        "left_out": sum(block.empty_rows for block in blocks), "bad": [row for block in blocks for row in block.bad_rows],
    }

for path in sys.argv[1:]:
    print(json.dumps(walk(path, {})))
"""


@pytest.fixture(scope="module")
def hub():
    server = HubServer()
    server.others = {name: published.files for name, published in DATASETS.items()}
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def recipe_for(folder, name, stage, **source):
    path = folder / f"{name.replace('/', '--')}-{stage}.yaml"
    sections = {
        "run": {"stage": stage, "directory": str(folder / "runs")},
        "tokenizer": {"vocab_size": 320},
        "model": {"n_layer": 1, "n_embd": 32, "n_head": 2},
        "data": {"sources": [{"id": name, **source}], "row_tokens": 256, "batch_tokens": 1024, "cache_dir": str(folder / "cache")},
        "train": {"max_steps": 3, "per_device_train_batch_size": 4},
        "evals": {"bpb": {"tokens": 1024, "document_bytes": 0}},
        "samples": {"every_steps": 0},
        "monitor": {"trackers": []},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture(scope="module")
def found(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    stages = {name: published.stage for name, published in DATASETS.items()}
    asked = [*stages.items(), *((name, "pretrain") for name in TEXT_BESIDE)]
    command = [sys.executable, "-c", WALK, *(str(recipe_for(folder, name, stage)) for name, stage in asked)]
    environment = environment_for(hub, folder) | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    in_stage = {(name, stage): answer for (name, stage), answer in zip(asked, answers, strict=True)}
    natural = {name: in_stage[name, stage] for name, stage in stages.items()}
    return natural | {"in_stage": in_stage, "log": done.stderr, "asked": list(hub.asked)}


def counted(items):
    return Counter(json.dumps(item, sort_keys=True) for item in items)


@pytest.mark.parametrize("name", DATASETS)
def test_a_public_dataset_is_prepared_by_its_id_or_one_named_key(found, name):
    published, answer = DATASETS[name], found[name]
    assert answer["key"] == published.key
    assert ("refused" in answer) == bool(published.key)
    assert counted(answer.get("items", [])) == counted(published.expected), answer
    assert answer["left_out"] == published.left_out
    assert answer["bad"] == []
    assert answer["revision"] == COMMIT
    assert re.search(r"^data: [1-9]\d* rows, ", answer["printed"], re.M)


@pytest.mark.parametrize("name", DATASETS)
def test_only_files_of_the_chosen_split_of_a_public_dataset_are_fetched(found, name):
    published = DATASETS[name]
    others = set(published.files) - set(published.whole)
    assert set(published.whole) <= set(found["asked"])
    assert not others & set(found["asked"])


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("HuggingFaceH4/ultrachat_200k", 64, "has no split 'train'; it has train_sft, test_sft, train_gen, test_gen. Write split: train_sft."),
        ("allenai/c4", 64, "none is the default: en, en.noblocklist, en.noclean, realnewslike, multilingual, af, am, ar and 5 more. Write config: en."),
        ("Salesforce/wikitext", 64, "none is the default: wikitext-103-raw-v1, wikitext-103-v1, wikitext-2-raw-v1, wikitext-2-v1. Write config: wikitext-103-raw-v1."),
    ],
)  # fmt: skip
def test_where_an_id_is_not_enough_the_sentence_has_the_key(found, name, status, said):
    assert said in found[name]["refused"]
    assert found[name]["status"] == status
    assert len(found[name]["refused"]) < 500


def test_files_that_datasets_passes_over_are_named(found):
    assert "of roneneldan/TinyStories 4 data files belong to no split" in found["log"]
    assert "TinyStories-train.txt" in found["log"]


def test_pretraining_reads_the_text_of_alpaca(found):
    alpaca = found["in_stage"]["tatsu-lab/alpaca", "pretrain"]
    assert counted(alpaca["items"]) == counted(row["text"] for row in alpaca_rows())
    assert alpaca["key"] == {}


def test_sft_trains_on_a_public_dataset_with_the_split_an_error_named(hub, found, tmp_path):
    name = "HuggingFaceH4/ultrachat_200k"
    recipe = recipe_for(tmp_path, name, "sft", **found[name]["key"])
    runner = Runner(tmp_path, tmp_path / "cache", [], [])
    done = runner.train(recipe, "run.name=chat", stage="sft", **environment_for(hub, tmp_path))
    assert list(done.values("train/loss"))[-1] == 3
    assert (done.directory / "model" / "model.safetensors").is_file()
