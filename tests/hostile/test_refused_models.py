"""Models, runs and tasks of somebody else that compute nothing, hold the program up or would write elsewhere: one sentence each."""

import json
import shutil

import pytest
import torch

from pipeline.evals.subject import open_model
from pipeline.process.errors import DataError, RecipeError
from pipeline.process.storage import cache_of_run
from pipeline.process.user_code import CodeFolder
from tests.hostile.test_code_gate import CHAT, Case
from tests.hostile.test_code_gate import warm as warm
from tests.hostile.test_code_gate import whole as whole

pytestmark = pytest.mark.full


def spoil(folder, value: float) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("ln_f.weight"))[0] = value
    save_file(tensors, file, metadata={"format": "pt"})


def ran(warm, words, folder, **environment):
    ended = warm.run(*words, folder=folder, **environment)
    return ended.status, ended.output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "command", [CHAT, CHAT + " --greedy", "evals {} samples", "evals {} bpb --text in/train.jsonl"]
)
def test_weights_that_are_no_numbers_are_named_before_anything_is_computed(command, value, whole, warm, tmp_path):
    Case(tmp_path, whole)
    spoil(tmp_path / "model", value)
    status, output = ran(warm, command.format("model").split(), tmp_path)
    assert (status, "Traceback" in output) == (65, False), output
    assert "ln_f.weight holds a NaN or an infinity, so the model computes nothing" in output


def test_serve_refuses_what_a_chat_would(whole, tmp_path):
    from pipeline.chat.serve import main

    case = Case(tmp_path, whole)
    spoil(tmp_path / "model", float("nan"))
    with pytest.raises(DataError, match=r"ln_f.weight holds a NaN"):
        main([str(tmp_path / "model")])
    case.auto_map()
    with pytest.raises(RecipeError, match=r"known only to code files of its own.*--trust-code"):
        main([str(tmp_path / "model")])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_choose_no_token(temperature, value):
    from pipeline.generation.texts import generator_of, next_tokens

    logits_BV = torch.zeros(2, 8)
    logits_BV[1, 3] = value
    with pytest.raises(DataError, match="computes no numbers"):
        next_tokens(logits_BV, temperature=temperature, top_k=4, top_p=None, generators=[generator_of(0)] * 2)


def test_a_score_that_is_no_number_ends_an_evaluation_with_65(tmp_path):
    from types import SimpleNamespace

    from pipeline.evals.__main__ import EvalsCommand

    command = EvalsCommand.__new__(EvalsCommand)
    command.subject = SimpleNamespace(path="runs/x")
    command.results = [{"name": "core/a", "value": 0.5}, {"name": "bpb/b", "value": float("nan")}]
    with pytest.raises(DataError, match="runs/x: bpb/b is no finite number"):
        command.refuse_nonfinite()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", r"it ends the program with SystemExit\(0\)"),
        ("class Odd(BaseException): ...\nraise Odd('no')", "Odd: no"),
    ],
)  # fmt: skip
def test_trusted_model_code_that_exits_or_hangs_at_import_is_named(whole, tmp_path, monkeypatch, source, said):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    case = Case(tmp_path, whole)
    case.auto_map()
    case.put("model/evil.py", source + "\n")
    with pytest.raises(RecipeError, match=rf"model cannot be imported \({said}"):
        open_model(str(tmp_path / "model"), code=CodeFolder(None, trusted=True), dtype=torch.float32)


def test_a_folder_of_lm_eval_tasks_is_code_and_needs_trust(whole, warm, tmp_path):
    case = Case(tmp_path, whole)
    case.put("tasks/t.yaml", "task: t\ndoc_to_text: !function evil.f\n")
    case.put("tasks/evil.py", "import os\nopen(os.environ['MARK'], 'a').write('x')\n")
    words = ["evals", "model", "lm_eval:t", "--include-path", "tasks"]
    status, output = ran(warm, words, tmp_path, MARK=str(tmp_path / "MARK"))
    assert (status, (tmp_path / "MARK").exists()) == (64, False), output
    assert "--include-path tasks: the task files of lm_eval are code" in output
    _, output = ran(warm, [*words, "--trust-code"], tmp_path, MARK=str(tmp_path / "MARK"))
    assert "running your code: tasks of lm_eval from tasks" in output


def test_a_recipe_of_a_run_decides_no_place_that_evals_writes_to(whole, warm, tmp_path):
    case = Case(tmp_path, whole)
    run = case.run(data={"cache_dir": str(tmp_path / "elsewhere"), "validation": [{"files": str(tmp_path / "in" / "valid.jsonl")}]})  # fmt: skip
    case.put("elsewhere/notes.txt", "mine")
    status, output = ran(warm, ["evals", run, "bpb"], tmp_path, TANDEM_CACHE=str(tmp_path / "own"))
    assert status == 0, output
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["notes.txt"]
    assert any((tmp_path / "own").iterdir())


def test_a_run_s_own_cache_is_used_where_it_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    named = tmp_path / "named"
    for part in ("files", "tokenizers"):
        assert cache_of_run(str(named)) == tmp_path / "own"
        (named / part).mkdir(parents=True)
    assert cache_of_run(str(named)) == named
    assert cache_of_run(str(tmp_path / "own" / "below")) == tmp_path / "own" / "below"


def test_a_push_loads_no_model_whose_classes_lie_in_another_repository(whole, tmp_path):
    from pipeline.hub.verification import unknown_code

    shutil.copytree(whole / "model", tmp_path / "model")
    assert unknown_code(tmp_path / "model") == []
    for name, found in (
        ("config.json", {"AutoConfig": "evil/repo--evil.EvilConfig"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil/repo--evil.T", None]}),
    ):
        file = tmp_path / "model" / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": found}))
    assert unknown_code(tmp_path / "model") == ["config.json", "tokenizer_config.json"]


@pytest.mark.parametrize("in_a_run", [False, True])
def test_memory_that_runs_out_speaks_of_the_batch_only_in_a_training(in_a_run, monkeypatch, tmp_path):
    from pipeline.run_dir import failures
    from pipeline.run_dir.run_directory import RunDirectory

    monkeypatch.setattr(failures, "_current_run", RunDirectory(tmp_path) if in_a_run else None)
    status, message = failures._classify(MemoryError())
    assert (status, "train.per_device_train_batch_size" in message) == (71, in_a_run)
