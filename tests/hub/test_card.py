"""The model card: nothing empty, no figure but those of the run's files, nothing that a text could break."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import eval_results_to_model_index, model_index_to_eval_results

from pipeline.hub.card import model_card
from pipeline.hub.content import collect
from pipeline.process.storage import read_json, write_json, write_text
from pipeline.report.cost import spent
from pipeline.report.markdown import visible
from pipeline.report.run_data import read_run
from pipeline.run_dir.checkpoints import whole_folder
from pipeline.run_dir.rows import append_row
from tests.hub.card_walk import body_of, problems_of, walk
from tests.report.evaluated_run import chat_rows, contaminated, core_rows, lm_eval_row, write_evaluated_run

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 258}
LLAMA = {"model_type": "llama", "num_hidden_layers": 3, "max_position_embeddings": 128, "auto_map": {"AutoConfig": "a.B"}}  # fmt: skip
SOURCE = {
    "name": "text",
    "id": "org/text",
    "revision": "c0ffee" * 6,
    "fingerprint": "beef" * 8,
    "files": [{"label": "a"}],
}
RECIPE = {
    "run": {"tags": ["toy"], "gpu_hour_cost": 3.0},
    "tokenizer": {"split_pattern": "gpt2", "train_chars": 5000},
    "data": {"sources": [{"id": "org/text"}]},
    "optimizer": {"type": "muon_adamw"},
    "hub": {"license": "apache-2.0", "language": ["en"]},
}
MANIFEST = {
    "recipe_name": "toy",
    "note": "a toy",
    "git": {"commit": "abc123" * 6, "changed_files": 2},
    "versions": {"python": "3.11", "torch": "2.13"},
    "world_size": 4,
    "shape": {"device": "H100", "processes": 4, "dtype": "bfloat16"},
    "model": {"class": "GPT2LMHeadModel", "parameters": 33058},
    "inputs": {
        "tokenizer": {"identity": "feed" * 16, "size": 258},
        "sources": [SOURCE],
        "validation": [SOURCE],
        "protocols": {"val/bpb": "validation-7", "val/bpb_documents": "documents-7"},
        "batch_tokens": 20,
        "max_steps": 20,
        "start_from": None,
    },
    "shares": {"text": {"share": 1.0}},
    "ended": 1.79e9,
}
EVERY_ROW = [contaminated(core_rows(2)[0], 1, 0.2), *core_rows(2)[1:], *chat_rows(), lm_eval_row()]


def finished(folder, *entries, recipe=RECIPE, manifest=MANIFEST, config=GPT2, stage="pretrain", steps=20):
    """A run whose files hold all that a card can tell."""
    run = write_evaluated_run(folder, *entries, stage=stage, steps=steps)
    write_text(run.recipe, yaml.safe_dump(recipe))
    run.update_manifest(**manifest)
    row = {"step": steps, "attempt": 1, "time": 7202.0, "tokens": 400, "train/loss": 2.5, "train/loss_ema": 2.75}
    bpb = (
        {"sft/assistant_bpb": 1 / 3} if stage == "sft" else {"val/bpb": 4 / 3, "val/bpb_documents": 1.0000000000000002}
    )
    append_row(run.metrics, row | bpb | {"perf/total_s": 3600.0, "perf/energy_kwh": 1.5})
    for step in (0, steps):
        for prompt in ("The sky is", "Once upon a time"):
            append_row(run.samples, {"step": step, "attempt": 1, "prompt": prompt, "text": f"written at {step}"})
    for name in ("curves.png", "report.md", "report.html"):
        write_text(run.report / name, "made by the report")
    with whole_folder(run.model, step=steps, run=run.name) as model:
        write_json(model / "config.json", config)
    return run


def card_of(run, repo_id="me/a", **options):
    return model_card(read_run(str(run.path)), repo_id=repo_id, **options)


def front_of(card):
    return yaml.safe_load(card[4:].split("\n---\n")[0])


def whole_base(folder):
    return finished(folder, ("model/", 20, EVERY_ROW))


def whole_chat(folder):
    begun = {"start_from": {"from": "runs/gone/model", "model.safetensors": "ab" * 32}}
    manifest = MANIFEST | {"inputs": MANIFEST["inputs"] | begun}
    recipe = RECIPE | {
        "model": {"start_from": "runs/gone/model"},
        "data": {"sources": [{"files": "/home/me/chat.jsonl"}]},
    }
    return finished(folder, ("model/", 20, chat_rows()), recipe=recipe, manifest=manifest, config=LLAMA, stage="sft")


def bare(folder):
    """A run that tells no more than it must: no recipe, no report, no samples, no scores."""
    run = write_evaluated_run(folder)
    with whole_folder(run.model, step=20, run=run.name) as model:
        write_json(model / "config.json", {"model_type": "gpt2"})
    return run


@pytest.mark.parametrize("make", [whole_base, whole_chat, bare])
def test_nothing_on_the_card_is_empty_and_every_link_leads_somewhere(tmp_path, make):
    run = make(tmp_path / "a")
    folder = tmp_path / "upload"
    folder.mkdir()
    files = collect(read_run(str(run.path)), model=run.model, step=20, repo_id="me/a", folder=folder)
    card = files["README.md"].read_text()
    assert problems_of(card, set(files)) == []
    assert all(value not in (None, "", [], {}) for value in front_of(card).values())
    assert list(ModelCard(card).data.to_dict())  # the client of the Hub reads it


def test_the_card_of_a_checkpoint_tells_of_the_run_up_to_there(tmp_path):
    run = finished(tmp_path / "a", ("step 10", 10, core_rows(1)), ("model/", 20, core_rows(3)))
    append_row(
        run.metrics, {"step": 10, "attempt": 1, "time": 1802.0, "tokens": 200, "train/loss": 3.5, "val/bpb": 1.75}
    )
    with whole_folder(run.checkpoints / "checkpoint-10") as checkpoint:
        write_json(checkpoint / "config.json", GPT2)
    card = card_of(run, model=run.checkpoints / "checkpoint-10", step=10)
    assert problems_of(card, {"recipe.yaml", "run_manifest.json", "evals.json", "report.md", "report.html"}) == []
    assert "This is the model after step 10 of 20: the run had not finished." in card
    assert "| val/bpb | packed into rows | 1.750000 |" in card
    assert "written at step 0." in card
    assert "curves.png" not in card  # which were drawn at another step
    assert "| tokens (row positions) | 200 |" in card
    assert "| time running, all attempts | 30.02 min |" in card
    values = [
        result.metric_value for result in ModelCard(card).data.eval_results if result.metric_type == "bits_per_byte"
    ]
    assert values == [1.75]


def test_the_card_of_a_branch_names_it_wherever_the_model_is_loaded(tmp_path):
    run = finished(tmp_path / "a")
    recipe = yaml.safe_load(run.recipe.read_text())
    write_text(run.recipe, yaml.safe_dump({**recipe, "hub": {"id": "me/a", "revision": "runs/{run}"}}))
    use = card_of(run).split("## Use")[1].split("\n## ")[0]
    loading = [line for line in use.splitlines() if "me/a" in line and "start_from" not in line]
    assert len(loading) >= 6
    assert [line for line in loading if "runs/a" not in line] == []


def figures_of(run):
    """(name, protocol) -> value of everything that evals.json and metrics.jsonl hold of the last step, as they hold it."""
    protocols = read_json(run.manifest)["inputs"]["protocols"]
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    found = {
        (name, protocols[name]): value
        for row in rows
        if row.get("step") == 20
        for name, value in row.items()
        if name in protocols
    }
    for entry in read_json(run.evals)["entries"]:
        found |= {(result["name"], result["protocol"]): result["value"] for result in entry["results"]}
    return found


def test_every_figure_of_the_index_equals_its_evaluation_file_exactly(tmp_path):
    thirds = [row | {"value": row["value"] / 3 - 1e-9} for row in EVERY_ROW]
    run = finished(tmp_path / "a", ("model/", 20, thirds))
    results = ModelCard(card_of(run)).data.eval_results
    said = {(result.metric_name, result.dataset_config): result.metric_value for result in results}
    assert said == figures_of(run)
    assert len(results) == len(said) == len(thirds) + 2


def test_a_figure_of_another_model_is_not_published_as_this_one(tmp_path):
    mine = {"name": "val/bpb", "value": 1.25, "protocol": "validation-7"}
    others = [mine | {"value": 8.75}, {"name": "val/bpb_documents", "value": 9.75, "protocol": "another"}]
    run = finished(tmp_path / "a", ("model/", 20, [mine]), ("checkpoint-10", 10, others))
    card = card_of(run)
    values = {result.metric_name: result.metric_value for result in ModelCard(card).data.eval_results}
    assert values["val/bpb"] == 1.25
    assert "8.75" not in card
    assert "9.75" not in card


def test_the_hubs_client_writes_the_index_back_as_it_read_it(tmp_path):
    index = front_of(card_of(whole_base(tmp_path / "a")))["model-index"]
    name, results = model_index_to_eval_results(index)
    assert eval_results_to_model_index(name, results) == index


def test_the_metadata_names_license_language_data_and_tags(tmp_path):
    front = front_of(card_of(whole_base(tmp_path / "a")))
    expected = {
        "license": "apache-2.0", "language": ["en"], "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["tandem", "toy"], "datasets": ["org/text"],
    }  # fmt: skip
    assert {name: value for name, value in front.items() if name != "model-index"} == expected
    chat = front_of(card_of(whole_chat(tmp_path / "b")))
    assert chat["tags"] == ["tandem", "conversational", "custom_code", "toy"]
    assert "datasets" not in chat


def test_a_license_that_nobody_stated_is_not_made_up(tmp_path):
    run = finished(tmp_path / "a", recipe={**RECIPE, "hub": {}})
    card = card_of(run)
    assert not {"license", "language"} & set(front_of(card))
    assert "## License\n\nThe publisher states none: ask before you use it." in card
    assert "Stated by the publisher: apache-2.0." in card_of(whole_base(tmp_path / "b"))
    assert "has terms of its own: [org/text](https://huggingface.co/datasets/org/text)." in card


def test_time_device_hours_cost_and_energy_are_the_reports_own(tmp_path):
    run = whole_base(tmp_path / "a")
    card = card_of(run)
    rows = spent(read_run(str(run.path)))
    assert [what.split(" ")[0] for what, _ in rows] == ["time", "time", "processes", "device", "cost", "energy"]
    for what, value in rows:
        assert f"| {what} | {value} |" in card
    assert "| cost (device hours x run.gpu_hour_cost) | 24 |" in card  # two hours of four devices at 3
    assert "| energy of the GPUs, kWh | 1.5 |" in card
    assert "| precision and hardware | bfloat16, 4 x H100 |" in card


def test_samples_are_the_newest_of_the_model_and_no_more_than_five(tmp_path):
    run = whole_base(tmp_path / "a")
    for n in range(6):
        append_row(run.samples, {"step": 20, "attempt": 1, "prompt": f"prompt {n}", "text": "x" * 700})
    samples = card_of(run).split("## Samples\n")[1].split("\n## ")[0]
    assert samples.count("Prompt: ") == 5
    assert "written at 20\n" in samples
    assert "written at 0\n" not in samples
    assert "x" * 600 + " [... 100 characters more]\n" in samples


def test_a_model_that_ends_at_once_is_said_to(tmp_path):
    run = whole_base(tmp_path / "a")
    append_row(run.samples, {"step": 20, "attempt": 1, "prompt": "The sky is", "text": " \n"})
    card = card_of(run)
    assert "Prompt: The sky is\n\nIt ended at once.\n" in card
    assert problems_of(card, {"curves.png", "recipe.yaml", "run_manifest.json", "evals.json", "report.md", "report.html"}) == []  # fmt: skip


HOSTILE = [
    "<script>alert(1)</script>", "</table></pre><img src=x onerror=alert(1)>", "[x](javascript:alert(1))", "![x](http://evil/x.png)",
    "---\nlicense: mit\n---", "\n\n# A heading\n\n- a list", "````\n```\n~~~", "\u202egnp.exe\u2066", "a\x00b\x1b[31m\x85c\r\nd", "| a | b |",
    "[ref]: http://evil\n[ref]", "&lt;b&gt; &#60;b&#62;", "*a* _b_ `c` **d** ~~e~~", "yes", "1e5", "null", "~", "# x", "'\"\\", "{a: [b", "!!python/name:os.system",
    "@", "%TAG", "&a *a", "> quote", "$$\\frac{1}{2}$$", "http://evil.example", "\\", "- ", "\u2028x", "x" * 3000,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_anywhere_in_the_run_stays_text(tmp_path, text):
    source = {"name": text, "id": text, "revision": text, "fingerprint": text, "files": [{"label": text}]}
    inputs = MANIFEST["inputs"] | {
        "sources": [source, SOURCE],
        "validation": [],
        "tokenizer": {"identity": text, "size": 258},
    }
    start = {"from": text, "model.safetensors": text}
    manifest = {
        "name": text, "recipe_name": text, "note": text, "git": {"commit": text, "changed_files": 1}, "versions": {text: text},
        "shape": {"device": text, "processes": 1, "dtype": text}, "inputs": inputs | {"start_from": start}, "shares": {text: {"share": 0.5}},
    }  # fmt: skip
    recipe = {
        "run": {"tags": [text]}, "data": {"sources": [{"id": text}, {"files": [text, f"/home/me/{text}"]}]}, "optimizer": {"type": text},
        "model": {"start_from": text}, "tokenizer": {"path": text, "split_pattern": text},
    }  # fmt: skip
    row = core_rows(names=["copa"])[-1] | {
        "name": f"chat/{text}",
        "protocol": text,
        "protocol_parts": {"task": text, text: text},
    }
    bpb = {"name": "val/bpb", "value": 1.0, "protocol": text, "protocol_parts": {"texts": text, text: [text]}}
    run = finished(tmp_path / "a", ("model/", 20, [row, bpb]), recipe=recipe, manifest=MANIFEST | manifest)
    append_row(run.samples, {"step": 20, "attempt": 1, "prompt": text, "text": f"{text}\nend of the sample"})
    card = card_of(run)
    files = {"curves.png", "recipe.yaml", "run_manifest.json", "evals.json", "report.md", "report.html"}
    found = walk(card)
    assert [
        problem for problem in problems_of(card, files) if not problem.startswith("'")
    ] == []  # markup, shown as text
    assert " ".join(visible(text.replace("\r", " ")).split()) in found.texts("td")
    titles = {"Use", "Samples", "Training", "Bits per byte", "Benchmarks", "Limits", "License", "Reproduce"}
    assert set(found.texts("h2")) == titles
    assert any("end of the sample" in sample for sample in found.texts("pre")) or len(text) > 600
    assert not set("\x00\x1b\x85\u202e\u2066") & set(card)
    front = ModelCard(card).data
    assert front.tags == ["tandem", text]
    assert front.license is None
    assert {result.dataset_config for result in front.eval_results} >= {text}


def test_a_chat_model_and_its_published_base_name_each_other(tmp_path):
    base = whole_base(tmp_path / "base")
    (base.model / "model.safetensors").write_bytes(b"weights")
    shutil.copytree(base.model, tmp_path / "model")
    shutil.rmtree(base.model)
    with whole_folder(base.model, step=20, run=base.name) as model:
        for path in (tmp_path / "model").iterdir():
            if path.name != "MANIFEST.json":
                shutil.copy(path, model / path.name)
    digest = read_json(base.model / "MANIFEST.json")["files"]["model.safetensors"]["sha256"]
    start = {"from": str(base.model), "model.safetensors": digest}
    manifest = MANIFEST | {"inputs": MANIFEST["inputs"] | {"start_from": start}}
    recipe = RECIPE | {"model": {"start_from": str(base.model)}, "tokenizer": {"path": str(base.model)}}
    chat = finished(tmp_path / "chat", recipe=recipe, manifest=manifest, stage="sft")
    unpublished = card_of(chat, "me/chat")
    assert "base_model" not in front_of(unpublished)
    assert "It began as the model of run base, which is not published" in unpublished
    base.update_manifest(hub={"id": "me/base", "commit": "c0ffee", "time": 1.0})
    card = card_of(chat, "me/chat")
    assert (front_of(card)["base_model"], front_of(card)["base_model_relation"]) == ("me/base", "finetune")
    assert "It began as [me/base](https://huggingface.co/me/base), and was trained further on conversations" in card
    assert "Weights it began with: me/base at commit c0ffee." in card
    assert "[the Hub's list](https://huggingface.co/models?other=base_model:finetune:me/base)" in card_of(
        base, "me/base"
    )


def with_start(folder, start, **manifest):
    inputs = MANIFEST["inputs"] | {"start_from": start}
    return finished(folder, recipe=RECIPE | {"model": {"start_from": start["from"]}}, manifest=MANIFEST | {"inputs": inputs} | manifest)  # fmt: skip


def test_a_hub_model_that_a_run_began_with_is_its_base(tmp_path):
    card = card_of(with_start(tmp_path / "a", {"from": "openai-community/gpt2"}))
    assert front_of(card)["base_model"] == "openai-community/gpt2"
    assert (
        "It began as [openai-community/gpt2](https://huggingface.co/openai-community/gpt2), and was trained further"
        in card
    )
    assert "recipe.yaml\n```" in card  # which names it already


@pytest.mark.parametrize("start", ["my/folder", "runs/gone/model", "runs/gone/checkpoints/checkpoint-5"])
def test_a_folder_that_is_gone_is_not_taken_for_a_hub_model(tmp_path, start):
    card = card_of(with_start(tmp_path / "a", {"from": start, "model.safetensors": "ab" * 32}))
    assert "base_model" not in front_of(card)
    assert f"the model of run {'folder' if start == 'my/folder' else 'gone'}, which is not published" in card


def test_every_command_on_the_card_is_one_that_the_program_takes(tmp_path, monkeypatch):
    from pipeline.chat.__main__ import read_arguments as read_chat
    from pipeline.evals.__main__ import read_arguments as read_evals
    from pipeline.recipe import read_recipe

    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "my.jsonl", "")
    recipes = Path(__file__).parents[2] / "recipes"
    for make in (whole_base, whole_chat):
        card = card_of(make(tmp_path / make.__name__))
        lines = body_of(card).split("```bash\n")[1].split("```")[0].replace("\\\n", "").splitlines()
        commands = [shlex.split(line) for line in lines if not line.startswith("#")]
        kinds = {" ".join(words[:3]): words for words in commands}
        assert set(kinds) >= {"python -m pipeline.chat", "python -m pipeline.evals", "python -m pipeline.hub", "accelerate launch pipeline/sft.py"}  # fmt: skip
        for words in commands:
            if words[2] == "pipeline.chat":
                assert read_chat(words[3:]).model == "me/a"
            if words[2] == "pipeline.evals":
                assert read_evals(words[3:]).model == "me/a"
        recipe = read_recipe([str(recipes.parent / kinds["accelerate launch pipeline/sft.py"][3]), *kinds["accelerate launch pipeline/sft.py"][4:]], stage="sft")  # fmt: skip
        assert recipe.model.start_from == "me/a"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("hub.license=Apache-2.0", "hub.license: is 'Apache-2.0'; it must be a license"),
        ("hub.license=apache 2", "hub.license: is 'apache 2'"),
        ("hub.language=[English]", "hub.language.0: is 'English'; it must be an ISO 639 code"),
    ],
)
def test_card_metadata_that_the_hub_would_refuse_is_refused_in_the_recipe(override, said):
    from pipeline.process.errors import RecipeError
    from pipeline.recipe import read_recipe

    recipe = str(Path(__file__).parents[2] / "recipes" / "quickstart_pretrain.yaml")
    with pytest.raises(RecipeError) as error:
        read_recipe([recipe, override])
    assert said in str(error.value)
    read_recipe([recipe, "hub.license=cc-by-sa-4.0", "hub.language=[en, no, code]"])
