"""What a stage and the command find before step 1 beyond the recipe's own arithmetic: all of it in one list."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import save_file

from pipeline.process.errors import CannotWriteError, DataError, InputMissingError, RecipeError
from pipeline.recipe import read_recipe
from pipeline.recipe.batch import StepRows
from pipeline.recipe.schema import with_values
from pipeline.run.checks import cadence_notes, check_before_training, named_code_problems, reading_findings
from pipeline.run.open_rows import horizon_lines, resolve_warmup
from pipeline.sources.open import open_sources

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
NEEDED = {
    "run": {"stage": "pretrain", "name": "mine"},
    "tokenizer": {"vocab_size": 300},
    "data": {"row_tokens": 64, "batch_tokens": 512},
    "model": {"n_layer": 1, "n_embd": 32, "n_head": 2},
    "train": {"max_steps": 4, "per_device_train_batch_size": 8},
    "monitor": {"trackers": []},
}


@pytest.fixture
def recipe_file(tmp_path, text_files, monkeypatch):
    """Writes a recipe over the text files into tmp_path, where the test then works."""
    monkeypatch.chdir(tmp_path)

    def write(**sections):
        sources = {"sources": [{"files": str(path)} for path in text_files[:2]], "validation": [{"files": str(text_files[2])}]}  # fmt: skip
        recipe = {**NEEDED, "data": {**sources, "cache_dir": str(tmp_path / "cache"), **NEEDED["data"]}}
        for section, keys in sections.items():
            recipe[section] = {k: v for k, v in {**recipe.get(section, {}), **keys}.items() if v is not None}
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
        return "r.yaml"

    return write


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder as save_pretrained writes it: config, weights, and a tokenizer of 300 ids."""
    from transformers import GPT2Config

    from pipeline.tokenizer.train import train_bpe

    folder = tmp_path_factory.mktemp("trained")
    tokenizer = train_bpe(iter(["the quick brown fox jumps over the lazy dog"] * 50), vocab_size=300, split_pattern="gpt2")  # fmt: skip
    tokenizer.save_pretrained(folder)
    GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_embd=32, n_head=2, n_positions=64).save_pretrained(folder)
    import torch

    save_file({"w": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def reading_problems(recipe, **only):
    return reading_findings(recipe, **only)[0]


def problems_of(recipe, kind, check=reading_problems):
    (problem,) = check(recipe)
    assert type(problem) is kind
    return str(problem)


@pytest.mark.parametrize("command", ["stage", "preflight"])
def test_recipe_code_data_disk_and_hub_are_reported_in_one_list(recipe_file, tmp_path, command):
    (tmp_path / "page.jsonl").write_text("<html><head><title>Sign in</title></head></html>\n")
    (tmp_path / "runs").write_text("a file where the folder should be")
    sources = {
        "sources": [{"files": "page.jsonl"}, {"files": "absent.jsonl"}],
        "validation": [{"files": "gone/*.txt"}],
    }
    recipe = recipe_file(
        data=sources,
        model={"attn_implementation": "flash_attention_2", "options": {"activation_function": "gleu"}},
        run={"callbacks": ["mine:Missing"]},
        hub={"id": "somebody/model"},
    )
    entry = [str(ROOT / "pipeline" / "pretrain.py")] if command == "stage" else ["-m", "pipeline.preflight"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *entry, recipe], env=environment, capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 64, done.stderr
    assert "Traceback" not in done.stderr
    for said in (
        "r.yaml:21: model.attn_implementation: flash_attention_2 needs a CUDA device",
        "r.yaml:4: run.callbacks: mine:Missing cannot be imported",
        "r.yaml:22: model.options: tandem cannot be built with them (KeyError: 'gleu')",
        "page.jsonl looks like an HTML page (Sign in)",
        "r.yaml:11: data.sources[1].files: 'absent.jsonl' does not exist",
        "r.yaml:13: data.validation[0].files: 'gone/*.txt' matches no file",
        "runs/mine: cannot be written (Not a directory)",
        "r.yaml:30: hub.id: the model is to be pushed to somebody/model, and there is no token of the Hub here",
    ):
        assert said in done.stderr, f"{said}\n{done.stderr}"
    assert not (tmp_path / "cache" / "tokenizers").exists()


def test_a_finished_run_is_not_checked_since_it_needs_nothing(recipe_file, tmp_path):
    recipe = read_recipe([recipe_file(data={"sources": [{"files": "gone.jsonl"}]})])
    with pytest.raises(InputMissingError):
        check_before_training(recipe, processes=1)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run_manifest.json").write_text(json.dumps({"finished": 1.0}))
    check_before_training(recipe, processes=1)


def test_a_run_that_goes_on_opens_its_sources_at_the_first_commit(recipe_file, tmp_path, monkeypatch):
    """Without the Hub only the list of an earlier start can be opened, and that is kept under its commit."""
    from pipeline.process.storage import write_json
    from pipeline.sources import hub_files

    monkeypatch.setattr(hub_files, "ATTEMPTS", 1)
    recipe = read_recipe([recipe_file(data={"sources": [{"id": "a/b"}]})])
    kept = {"sources": [{"id": "a/b", "revision": "f" * 40}]}
    key = repr(("a/b", "f" * 40, None, "train", None))
    place = tmp_path / "cache" / "hub" / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    place.parent.mkdir(parents=True)
    files = [{"path": "x.jsonl", "bytes": 9, "content": "git:a"}, {"path": "y.jsonl", "bytes": 9, "content": "git:b"}]
    write_json(place, {"id": "a/b", "revision": "f" * 40, "files": files})
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    (run / "run_manifest.json").write_text(json.dumps({"inputs": kept}))
    assert reading_problems(recipe, only=["sources"]) == []
    assert recipe.data.sources[0].revision is None
    shutil.rmtree(run)
    assert reading_problems(recipe, only=["sources"])[0].status == 69


def test_validation_documents_that_are_trained_on_are_counted_with_a_place(recipe_file, tmp_path, capsys):
    def write(name, numbers):
        (tmp_path / name).write_text("".join(json.dumps({"text": f"Document {n}."}) + "\n" for n in numbers))

    write("held.jsonl", range(40))
    write("a.jsonl", range(100, 200))
    write("b.jsonl", [300, *range(7), 0, 301])
    given = "data.sources=[{files: a.jsonl}, {files: b.jsonl}]", "data.validation=[{files: held.jsonl}]"
    recipe = read_recipe([recipe_file(), *given])
    check_before_training(recipe, processes=1)
    said = capsys.readouterr().out
    assert "note: command line: data.validation: 7 of the first 40 validation documents are trained on, too" in said
    assert "(such as b.jsonl:2)" in said
    write("b.jsonl", range(300, 310))
    assert reading_findings(recipe, only=["sources"]) == ([], [])


def test_trained_documents_are_looked_for_once_and_not_on_a_resume(recipe_file, tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"Document {n}."}) + "\n" for n in range(40)))
    (tmp_path / "b.jsonl").write_text((tmp_path / "a.jsonl").read_text() + '{"text": "Another."}\n')
    recipe = read_recipe([recipe_file(), "data.sources=[{files: a.jsonl}]", "data.validation=[{files: b.jsonl}]"])
    assert "40 of the first 41" in reading_findings(recipe, only=["sources"])[1][0]
    (tmp_path / "runs" / "mine" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    assert reading_findings(recipe, only=["sources"]) == ([], [])


@pytest.mark.parametrize("validation", ["[{files: b.jsonl}]", "null"])
def test_the_text_read_for_validation_documents_is_bounded(recipe_file, tmp_path, monkeypatch, validation):
    from pipeline.data import overlap

    for name in ("a", "b"):
        lines = [json.dumps({"text": f"{name} {n:05} " + "x" * 992}) + "\n" for n in range(3000)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    recipe = read_recipe([recipe_file(), "data.sources=[{files: a.jsonl}]", f"data.validation={validation}"])
    _, (source,) = open_sources(recipe.source_settings())
    monkeypatch.setattr(overlap, "HELD_OUT_CHARS", 500_000)
    rows_for_one = source.files[0].period or 1
    assert len(overlap._held_out(source)) == 500 // rows_for_one + 1
    assert rows_for_one == (100 if validation == "null" else 1)


def test_a_tokenizer_with_other_ids_than_the_weights_is_refused(recipe_file, trained, tmp_path):
    own = read_recipe(
        [recipe_file(tokenizer={"vocab_size": None}), f"model.start_from={trained}", f"tokenizer.path={trained}"]
    )
    assert reading_problems(own) == []
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    mixed = read_recipe(
        [recipe_file(tokenizer={"vocab_size": None}), f"model.start_from={trained}", f"tokenizer.path={other}"]
    )
    problem = problems_of(mixed, RecipeError)
    assert "command line: tokenizer.path: " in problem
    assert "gives other ids than the tokenizer that" in problem
    assert "(2 of " in problem


def test_a_tokenizer_whose_ids_have_holes_is_refused_with_the_numbers(recipe_file, trained, tmp_path):
    holed = tmp_path / "holed"
    shutil.copytree(trained, holed)
    tokenizer = json.loads((holed / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    vocabulary[last] = 5000
    (holed / "tokenizer.json").write_text(json.dumps(tokenizer))
    problem = problems_of(read_recipe([recipe_file(tokenizer={"path": str(holed), "vocab_size": None})]), RecipeError)
    assert f"has the id 5000 for {last!r}" in problem
    assert "Number its ids without holes" in problem


def test_damaged_or_absent_weights_are_named_before_data_are_prepared(recipe_file, trained, tmp_path):
    from pipeline.run_dir.checkpoints import whole_folder

    with whole_folder(tmp_path / "sealed") as folder:
        for path in trained.iterdir():
            shutil.copy(path, folder)
    sealed = read_recipe([recipe_file(tokenizer={"vocab_size": None}), f"model.start_from={tmp_path}/sealed"])
    assert reading_problems(sealed) == []
    weights = tmp_path / "sealed" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    assert "model.safetensors has other content than was written" in problems_of(sealed, DataError)
    # A run with a checkpoint of its own reads them no more, so they are not hashed at its starts.
    (tmp_path / "runs" / "mine" / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    assert reading_problems(sealed) == []
    shutil.rmtree(tmp_path / "runs")
    shutil.copytree(trained, tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    bare = read_recipe([recipe_file(tokenizer={"vocab_size": None}), f"model.start_from={tmp_path}/bare"])
    assert "holds no weights" in problems_of(bare, InputMissingError)
    (tmp_path / "bare" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "is an adapter (LoRA), no whole model" in problems_of(bare, InputMissingError)


def test_the_weights_of_a_start_are_hashed_again_only_when_changed(recipe_file, trained, tmp_path, monkeypatch):
    from pipeline.run.inputs import _weights

    start = tmp_path / "start"
    shutil.copytree(trained, start)
    weights = start / "model.safetensors"
    cache = read_recipe([recipe_file()]).data.cache_dir
    first, status = _weights(str(start), None, cache=cache), weights.stat()
    assert first == {"from": str(start), "model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest()}
    with monkeypatch.context() as patched:
        patched.setattr(
            "pipeline.sources.file_facts.sha256_file", lambda path: pytest.fail(f"{path} was hashed again")
        )
        assert _weights(str(start), None, cache=cache) == first
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))  # as rsync -t leaves other content
    assert _weights(str(start), None, cache=cache) != first


MINE = """\
class Fine: ...
class Needs:
    def __init__(self, path): ...
"""


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.callbacks=[mine_code:Needs]"], "run.callbacks: mine_code:Needs cannot be used (missing a required argument"),
        (["run.callbacks=[mine_code:Absent]"], "has no attribute 'Absent'"),
        (["evals.tasks=[nowhere:task]"], "evals.tasks: nowhere:task cannot be imported"),
        (["optimizer.type=mine_code:Absent"], "optimizer.type: mine_code:Absent cannot be imported"),
        (["model.type=lama", "model.options={}"], "command line: model.type: lama is no causal language model of transformers. Did you mean llama"),
        (["model.type=llama", "model.options={rope_scale: 2}"], "command line: model.options: LlamaConfig of model.type llama has no field rope_scale"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_used_is_named_before_the_data_are_prepared(recipe_file, tmp_path, overrides, said):
    (tmp_path / "mine_code.py").write_text(MINE)
    assert said in problems_of(read_recipe([recipe_file(), *overrides]), RecipeError, named_code_problems)


@pytest.mark.parametrize("override", ["run.callbacks=[{}:It]", "evals.tasks=[{}:it]", "optimizer.type={}:it"])
@pytest.mark.parametrize(
    ("module", "source", "said"),
    [("unclosed", "def it(:\n", "SyntaxError: "), ("misspelt", "it = Ti\n", "NameError: name 'Ti' is not defined"), ("asserts", "assert False, 'no'", "AssertionError: no")],
)  # fmt: skip
def test_a_module_that_raises_is_named_with_what_it_raised(recipe_file, tmp_path, override, module, source, said):
    (tmp_path / f"{module}.py").write_text(source)
    recipe = read_recipe([recipe_file(), override.format(module), f"run.code_folder={tmp_path}"])
    problem = problems_of(recipe, RecipeError, named_code_problems)
    assert f"command line: {override.split('=')[0]}: {module}:" in problem
    assert f"({said}" in problem


def test_a_format_whose_module_raises_is_named(recipe_file, tmp_path):
    (tmp_path / "unfinished.py").write_text("def read(row:\n")
    recipe = read_recipe([recipe_file(), "data.sources=[{files: a.jsonl, format: 'unfinished:read'}]"])
    assert "format: unfinished:read cannot be imported (SyntaxError: " in problems_of(recipe, RecipeError)


def test_a_layer_that_asserts_its_sizes_is_reported_as_an_unbuildable_option(recipe_file, monkeypatch):
    def refuse(*arguments, **keywords):
        raise RuntimeError("trying to create a tensor with a negative dimension")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.__init__", refuse)
    recipe = read_recipe([recipe_file(), "model.type=llama"])
    problem = problems_of(recipe, RecipeError, named_code_problems)
    assert "llama cannot be built with them (RuntimeError: trying to create" in problem


def test_code_that_can_be_used_is_no_problem(recipe_file, tmp_path):
    (tmp_path / "mine_code.py").write_text(MINE)
    for overrides in (
        ["run.callbacks=[mine_code:Fine]"],
        ["tokenizer.split_pattern='[a-z]+|\\\\s'"],
        ["model.type=llama"],
        ["model.preset=modern"],
    ):
        assert named_code_problems(read_recipe([recipe_file(), *overrides])) == []


def epochs_recipe(recipe_file, *overrides):
    return read_recipe([recipe_file(train={"max_steps": None, "num_train_epochs": 1}), *overrides])


def test_a_warm_up_beyond_the_epochs_is_refused_and_the_default_shortened(recipe_file):
    grouped = epochs_recipe(recipe_file, "optimizer.type=adamw")
    grouped = resolve_warmup(with_values(grouped, {"train.max_steps": 30}))
    assert grouped.optimizer.schedule.warmup_steps == 6
    for override in (["optimizer.type=adamw", "optimizer.schedule.warmup_steps=31"], ["train.warmup_steps=31"]):
        long = epochs_recipe(recipe_file, *override)
        with pytest.raises(RecipeError, match=r"command line: .*warmup_steps: is 31, longer than the run of 30 steps"):
            resolve_warmup(with_values(long, {"train.max_steps": 30}))
        resolve_warmup(with_values(long, {"train.max_steps": 31}))


def test_the_epochs_planned_are_said_where_they_are_known(recipe_file):
    def lines(**facts):
        return horizon_lines(4, StepRows(8), 64, shares={"text": facts})

    assert lines(epochs=1.5) == ["training: 4 steps of 512 tokens, 2.05k in all", "  text: read 1.50 times (epochs)"]
    assert "not known before all of it is prepared" in lines()[1]
    assert "note: text is repeated more than 4 times" in lines(epochs=4.5)[2]
    warm = read_recipe([recipe_file(), "train.warmup_steps=3"])
    assert any("3 of the run's 4 steps are warm-up" in note for note in cadence_notes(warm, 4))


def test_a_run_that_saves_or_validates_only_at_its_end_is_warned(recipe_file):
    def notes(*overrides, steps=1000):
        return " ".join(cadence_notes(read_recipe([recipe_file(), *overrides]), steps))

    assert notes("train.save_steps=100", "train.eval_steps=100", "train.warmup_steps=1") == ""
    late = notes("train.save_steps=1000", "train.eval_steps=1000", "train.warmup_steps=1")
    assert "train.save_steps: is 1000, and the run has 1000 steps: nothing is saved before its end" in late
    assert "train.eval_steps: is 1000, and the run has 1000 steps: validation is scored at the end alone" in late
    never = notes("train.save_strategy=no", "train.eval_strategy=no", "train.warmup_steps=1")
    assert "command line: train.save_strategy: is no: a run that stops before its end is lost" in never
    assert "train.eval_strategy: is no: validation is scored at the end alone" in never


def test_parquet_text_is_counted_by_its_column_and_compressed_text_not(recipe_file, tmp_path):
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipeline.sources.raw_rows import text_bytes

    texts = [f"document {n} " * 40 for n in range(500)]
    pq.write_table(
        pa.table({"text": texts, "other": ["x" * 1000] * 500}), tmp_path / "a.parquet", use_dictionary=False
    )
    pq.write_table(pa.table({"text": texts[:2]}), tmp_path / "b.parquet")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 50))
    recipe = read_recipe([recipe_file(), "data.sources=[{files: [a.parquet, b.parquet]}, {files: c.jsonl.gz}]", "data.validation=null"])  # fmt: skip
    (parquet, compressed), _ = open_sources(recipe.source_settings())
    assert [file.label for file in parquet.files] == ["a.parquet"]
    assert text_bytes(parquet) == pytest.approx(sum(map(len, texts)), rel=0.05)
    assert text_bytes(compressed) is None


def test_the_text_of_many_parquet_files_is_scaled_from_some_footers(recipe_file, tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipeline.sources.raw_rows import SAMPLED_FOOTERS, text_bytes

    texts = [f"document {n} " * 40 for n in range(500)]
    for number in range(20):  # the last one is held out
        table = pa.table({"text": [f"{number} {text}" for text in texts], "other": ["x" * 1000] * 500})
        pq.write_table(table, tmp_path / f"p{number:02}.parquet", row_group_size=100, use_dictionary=False)
    recipe = read_recipe([recipe_file(), "data.sources=[{files: p*.parquet}]", "data.validation=null"])
    (source,), _ = open_sources(recipe.source_settings())
    read, original = [], pq.read_metadata
    monkeypatch.setattr(pq, "read_metadata", lambda path: read.append(path) or original(path))
    assert text_bytes(source) == pytest.approx(19 * sum(map(len, texts)), rel=0.05)
    assert 1 <= len(read) <= SAMPLED_FOOTERS


def test_a_cache_below_a_file_is_reported_in_a_sentence(recipe_file):
    recipe = read_recipe([recipe_file(data={"cache_dir": "r.yaml/cache"})])
    with pytest.raises(CannotWriteError, match=r"r\.yaml/cache: cannot be written .*Set data\.cache_dir to a folder"):
        check_before_training(recipe, processes=1)
