"""Code that came with a run, a recipe, a model, a tokenizer or a template is not run: each case would leave a mark."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.process.errors import RecipeError
from pipeline.process.user_code import CodeFolder, import_attribute
from tests.hostile.case import MARKING, MODELING, Case, lay_whole
from tests.hub.hub_stand_in import Repo, hub_stand_in
from tests.warm_commands import WarmCommands

HELPER = """\
import os
import subprocess
from subprocess import check_output
TABLE = {}
def read(row):
    return "a text"
"""
ESCAPES = {
    "a template that walks to os": "{{ cycler.__init__.__globals__.os.system('touch $MARK') }}",
    "a template that walks by a filter": "{{ (lipsum|attr('__globals__'))['os'].popen('touch $MARK').read() }}",
    "a template that walks over subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a template that imports": "{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch $MARK') }}",
    "a template of a range without end": "{% for i in range(10**9) %}a{% endfor %}",
    "a template of loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a template that doubles a text": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a template that repeats a text": "{{ 'a' * 100000000000 }}",
    "a template that raises to a power": "{{ 9 ** 9 ** 9 }}",
    "a template that pads a text": "{{ '%100000000000d' % 1 }}",
    "a template that includes a file": "{% include '/etc/passwd' %}",
    "a template that is no text": 7,
}


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    commands = WarmCommands(tmp_path_factory.mktemp("warm"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return lay_whole(tmp_path_factory.mktemp("whole"))


# By name: (what is put there, the command). The command's words are formatted with what the first gives.
Cases = dict[str, tuple[Callable[[Case], object], str]]
CASES: Cases = {}
KEYS = {
    "a source's format": {"form": "{}"},
    "validation's format": {"data": {"validation": [{"files": "valid.jsonl", "format": "{}"}]}},
    "model.type": {"model": {"type": "{}"}},
    "optimizer.type": {"optimizer": {"type": "{}"}},
    "run.callbacks": {"run": {"callbacks": ["{}"]}},
    "evals.tasks": {"evals": {"tasks": ["{}"]}},
    "an own task's checker": {"evals": {"chat": {"every_steps": 1, "own": [{"name": "own", "files": "in/train.jsonl", "checker": "{}"}]}}},
    "an own task's format": {"evals": {"chat": {"every_steps": 1, "own": [{"name": "own", "files": "in/train.jsonl", "format": "{}"}]}}},
}  # fmt: skip
PLACES = {
    "an installed module": ("evil_installed:f", None),
    "a module of the run": ("model.evil:f", "run"),
}


def filled(keys: dict, name: str) -> dict:
    return json.loads(json.dumps(keys).replace("{}", name))


for key, keys in KEYS.items():
    given = filled(keys, "evil_installed:f")
    CASES[f"preflight: {key} is an installed module"] = (lambda case, given=given: case.recipe(**given), "preflight {} --probe 0")  # fmt: skip
    CASES[f"pretrain: {key} is an installed module"] = (lambda case, given=given: case.recipe(**given), "pretrain {}")
    of_run = filled(keys, "evil:f") | {}
    CASES[f"pretrain: the run's recipe names its own module as {key}"] = (lambda case, given=of_run: case.run(**given), "pretrain {}/recipe.yaml run.name=y")  # fmt: skip

for name in ("subprocess:check_output", "helper:subprocess.check_output", "helper:check_output", "helper:os.system",
             "helper:read.__globals__", "helper:TABLE.update", "helper:__builtins__", "link:f", "linked.evil:f", "..elsewhere.evil:f",
             "pipeline.process.storage:remove_folder", "site-packages.evil:f", "lib.evil_installed:f", "json:loads", "evil.f:f"):  # fmt: skip

    def beside(case: Case, name: str = name) -> str:
        case.put("in/helper.py", HELPER)
        case.put("elsewhere/evil.py", MARKING)
        (case.folder / "in" / "link.py").symlink_to(case.folder / "elsewhere" / "evil.py")
        (case.folder / "in" / "linked").symlink_to(case.folder / "elsewhere")
        return case.recipe(file="popen.jsonl", form=name)

    CASES[f"data: the format is {name}"] = (beside, "data {} --show 1")


def in_folder(key: str, value: object) -> Callable[[Case], str]:
    def build(case: Case) -> str:
        case.put("elsewhere/evil.py", MARKING)
        return case.recipe(form="evil:f" if key == "code_folder" else "evil_installed:f", run={key: value})

    return build


def extended(case: Case) -> str:
    case.recipe("elsewhere/base.yaml", form="evil_installed:f", run={"trust_code": True})
    case.put("in/r.yaml", "extends: ../elsewhere/base.yaml\n")
    return "in/r.yaml"


CASES |= {
    "data: the recipe names another code_folder": (in_folder("code_folder", "elsewhere"), "data {}"),
    "data: the recipe names a code_folder above": (in_folder("code_folder", "in/../elsewhere"), "data {}"),
    "data: the recipe trusts itself": (in_folder("trust_code", True), "data {}"),
    "pretrain: the recipe trusts itself": (in_folder("trust_code", True), "pretrain {}"),
    "preflight: what the recipe extends trusts it": (extended, "preflight {} --probe 0"),
    "tokenizer: the format is an installed module": (
        lambda case: case.recipe(form="evil_installed:f"),
        "tokenizer {}",
    ),
}

OWN = {"form": "evil:f", "run": {"code_folder": "runs/x"}}
IN_MODEL = {"form": "model.evil:f"}
HELD_OUT = {"data": {"validation": [{"files": "in/valid.jsonl", "format": "model.evil:f"}]}}
CASES |= {
    "evals: the run's validation": (lambda case: case.run(**HELD_OUT), "evals {}"),
    "evals: the run's training text": (lambda case: case.run(**IN_MODEL), "evals {} bpb"),
    "evals: the run's folder": (lambda case: case.run(**OWN), "evals {} bpb"),
    "evals: the run trusts itself": (lambda case: case.run(form="evil:f", run={"trust_code": True}), "evals {} bpb"),
    "evals: a checkpoint folder of the run": (lambda case: case.run(**OWN), "evals {}/model bpb"),
    "evals: an installed module on the command line": (lambda case: case.run(), "evals {} evil_installed:f"),
    "evals: the run's checker": (lambda case: case.run(evals=filled(KEYS["an own task's checker"], "evil:f")["evals"]), "evals {} samples"),
    "evals: an installed checker": (lambda case: case.run(), "evals {} --own-task mine=in/train.jsonl --checker evil_installed:f"),
    "chat: the run": (lambda case: case.run(**OWN), "chat {} -p hello --max-new-tokens 2"),
    "report: the run": (lambda case: case.run(**OWN), "report {}"),
    "hub export: the run": (lambda case: case.run(**OWN), "hub export {} --to safetensors --output exported"),
    "data: the run's recipe": (lambda case: case.run(**IN_MODEL), "data {}/recipe.yaml"),
    "preflight: the run's recipe": (lambda case: case.run(**IN_MODEL), "preflight {}/recipe.yaml --probe 0"),
    "pretrain: start_from the run": (lambda case: (case.run(**OWN), case.recipe(ready=True))[1], "pretrain {} model.start_from=runs/x"),
}  # fmt: skip


def of_tandem(case: Case) -> str:
    from pipeline.model.build import build_model
    from pipeline.model.saved import save_model

    fields = {"vocab_size": 258, "n_positions": 64, "n_layer": 4, "n_embd": 32, "n_head": 2, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}  # fmt: skip
    from pipeline.recipe.sizes import MODERN

    save_model(build_model("tandem", {**MODERN, **fields}, seed=0), case.folder / "model")
    for file in (case.folder / "model").glob("*_tandem.py"):
        file.write_text(MARKING + file.read_text())
    return "model"


def tokenizer_with(**keys) -> Callable[[Case], str]:
    def build(case: Case) -> str:
        case.put("model/evil.py", MODELING)
        case.change("model/tokenizer_config.json", **keys)
        return "model"

    return build


def with_pickle(case: Case) -> str:
    import pickle

    class Mark:
        def __reduce__(self):
            return (Path.touch, (case.folder / "MARK",))

    (case.folder / "model" / "model.safetensors").unlink()
    (case.folder / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Mark()))
    return "model"


def with_file(name: str, content: str) -> Callable[[Case], str]:
    return lambda case: (case.put(f"model/{name}", content), "model")[1]


def started(case: Case) -> str:
    case.auto_map()
    return case.recipe(ready=True)


START = "model.start_from=model"
LISTED = ["evil.EvilTokenizer", "evil.EvilTokenizer"]
CHAT = "chat {} -p hello --max-new-tokens 2"
CASES |= {
    "chat: a model of its own code": (lambda case: case.auto_map(), CHAT),
    "evals: a model of its own code": (lambda case: case.auto_map(), "evals {} samples"),
    "evals: text with a model of its own code": (lambda case: case.auto_map(), "evals {} bpb --text in/train.jsonl"),
    "hub export: a model of its own code": (lambda case: case.auto_map(), "hub export {} --to safetensors"),
    "pretrain: start_from a model of its own code": (started, "pretrain {} " + START),
    "preflight: start_from a model of its own code": (started, "preflight {} --probe 0 " + START),
    "data: the tokenizer beside a model of its own code": (started, "data {} tokenizer.path=model model.n_layer=1 model.n_embd=16 model.n_head=2"),
    "chat: code in another repository": (lambda case: case.auto_map(AutoConfig="evil/repo--evil.EvilConfig"), CHAT),
    "chat: code for a type that transformers has": (lambda case: case.auto_map("gpt2"), CHAT),
    "chat: code for a type that writes no text": (lambda case: case.auto_map("vit"), CHAT),
    "chat: code for a type that is no name": (lambda case: case.auto_map(7), CHAT),
    "chat: an auto_map that is a list": (lambda case: (case.auto_map(), case.change("model/config.json", auto_map=["evil.EvilConfig"]))[0], CHAT),
    "chat: our own type with other code files": (of_tandem, CHAT),
    "evals: our own type with other code files": (of_tandem, "evals {} samples"),
    "chat: a tokenizer of its own code": (tokenizer_with(auto_map={"AutoTokenizer": LISTED}, tokenizer_class="EvilTokenizer"), CHAT),
    "chat: a tokenizer of its own code, as a list": (tokenizer_with(auto_map=LISTED, tokenizer_class="EvilTokenizer"), CHAT),
    "data: a tokenizer of its own code": (lambda case: (tokenizer_with(auto_map={"AutoTokenizer": LISTED})(case), case.recipe(ready=True))[1], "data {} tokenizer.path=model model.n_layer=1 model.n_embd=16 model.n_head=2"),
    "chat: weights that are a pickle": (with_pickle, CHAT),
    "chat: a generate of its own": (with_file("custom_generate/generate.py", MARKING), CHAT),
    "chat: a module named as a library": (with_file("wandb.py", MARKING), CHAT),
    "chat: kernels of the Hub": (lambda case: (case.change("model/config.json", attn_implementation="evil/kernel", _attn_implementation="evil/kernel"), "model")[1], CHAT),
    "chat: an adapter of another library": (with_file("adapter_config.json", '{"peft_type": "LORA", "auto_mapping": {"parent_library": "evil_installed"}}'), CHAT),
}  # fmt: skip
for name, template in ESCAPES.items():
    CASES[f"chat: {name}"] = (lambda case, t=template: (case.change("model/tokenizer_config.json", chat_template=t), (case.folder / "model" / "chat_template.jinja").unlink(missing_ok=True), "model")[2], CHAT)  # fmt: skip
    if isinstance(template, str):
        CASES[f"data: {name}, of the recipe"] = (lambda case, t=template: (case.put("in/t.jinja", "{% generation %}" + t + "{% endgeneration %}"), case.recipe(ready=True, tokenizer={"chat_template": "t.jinja"}))[1], "data {} tokenizer.path=model model.n_layer=1 model.n_embd=16 model.n_head=2")  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_no_code_of_others_is_run(name, whole, warm, tmp_path):
    build, command = CASES[name]
    case = Case(tmp_path, whole)
    words = command.format(build(case)).split()
    ended = warm.run(*words, folder=tmp_path, MARK=str(tmp_path / "MARK"), INSTALLED=str(tmp_path / "lib"))
    status, output = ended.status, ended.output
    assert not (tmp_path / "MARK").exists(), f"{(tmp_path / 'MARK').read_text()}\n{output}"
    assert "Traceback" not in output, output
    assert status in (0, 64, 65, 66, 69), output
    assert "running your code" not in output or "helper" in name  # which lies beside the recipe, and does nothing


@pytest.mark.full
@pytest.mark.parametrize(
    ("build", "command"),
    [
        (lambda case: case.run(**HELD_OUT), "evals {} bpb --trust-code"),
        (lambda case: case.recipe(form="evil_installed:f"), "data {} run.trust_code=true"),
        (lambda case: case.recipe(form="evil_installed:f"), "pretrain {} run.trust_code=true"),
        (lambda case: case.run(**OWN), "data {}/recipe.yaml run.trust_code=true"),
        (lambda case: case.run(**OWN), "data {}/recipe.yaml run.code_folder=runs/x"),
        (lambda case: (case.put("in/own.py", MARKING), case.recipe(form="own:f"))[1], "data {}"),
        (lambda case: (case.put("own.py", MARKING), case.run())[1], "evals {} own:f"),
        (lambda case: case.auto_map(), CHAT + " --trust-code"),
        (lambda case: case.auto_map(), "evals {} samples --trust-code"),
        (started, "pretrain {} run.trust_code=true " + START),
    ],
)
def test_code_that_the_user_named_or_trusts_is_run_and_said_before(build, command, whole, warm, tmp_path):
    case = Case(tmp_path, whole)
    words = command.format(build(case)).split()
    output = warm.run(*words, folder=tmp_path, MARK=str(tmp_path / "MARK"), INSTALLED=str(tmp_path / "lib")).output
    assert (tmp_path / "MARK").exists(), output
    assert "running your code: " in output


def test_code_of_a_pulled_repository_is_not_run(whole, warm, tmp_path):
    case = Case(tmp_path, whole)
    run = tmp_path / case.run(**HELD_OUT)
    with hub_stand_in() as hub:
        names = {file: str(file.relative_to(run / "model")) for file in (run / "model").rglob("*") if file.is_file()}
        files = {name: file.read_bytes() for file, name in names.items()}
        files |= {name: (run / name).read_bytes() for name in ("recipe.yaml", "run_manifest.json", "metrics.jsonl")}
        hub.repos["evil/run"] = Repo(False, {"main": [("a" * 40, files)]})
        case.auto_map()
        model = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
        hub.repos["evil/model"] = Repo(False, {"main": [("b" * 40, model)]})
        shutil.rmtree(run)
        given = {"MARK": str(tmp_path / "MARK"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}  # fmt: skip
        for command, expected in (
            ("hub pull evil/run", 0),
            ("evals runs/x", 64),
            ("chat runs/x -p hello --max-new-tokens 2", 0),
            ("report runs/x", 0),
            ("pretrain runs/x/recipe.yaml run.name=y", 64),
            ("chat evil/model -p hello", 64),
            ("evals evil/model samples", 64),
        ):
            ended = warm.run(*command.split(), folder=tmp_path, **given)
            assert (ended.status, (tmp_path / "MARK").exists()) == (expected, False), f"{command}\n{ended.output}"
            assert "Traceback" not in ended.output
            assert expected == 0 or "trust" in ended.output
        assert (run / "model" / "evil.py").exists()  # it lies there, and nobody has run it


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", r"it ends the program with SystemExit\(0\)"),
        ("import sys; sys.exit()", r"it ends the program with SystemExit\(\)"),
        ("class Odd(BaseException): ...\nraise Odd('no')", "Odd: no"),
        ("raise GeneratorExit", "GeneratorExit"),
    ],
)  # fmt: skip
def test_a_module_that_exits_or_hangs_at_import_is_named(tmp_path, monkeypatch, source, said):
    (tmp_path / "holds.py").write_text(source + "\n")
    with pytest.raises(RecipeError, match=rf"run.callbacks: holds:It cannot be imported \({said}"):
        import_attribute("holds:It", str(tmp_path), where="run.callbacks")


@pytest.mark.full
def test_a_callback_that_exits_ends_the_run_with_64_and_place(whole, warm, tmp_path):
    case = Case(tmp_path, whole)
    case.put("in/mine.py", "import sys\nfrom transformers import TrainerCallback\nclass Ends(TrainerCallback):\n    def on_step_end(self, *given, **named):\n        sys.exit(0)\n")  # fmt: skip
    ended = warm.run("pretrain", case.recipe(run={"callbacks": ["mine:Ends"]}), folder=tmp_path)
    assert ended.status == 64, ended.output
    assert "mine.py:5: raised SystemExit(0), so the run ended unfinished" in ended.output
    manifest = json.loads((tmp_path / "out" / "x" / "run_manifest.json").read_text())
    (ran,) = manifest["code"]["ran"]
    assert (manifest["code"]["trusted"], ran["name"], len(ran["sha256"])) == (False, "mine:Ends", 64)


@pytest.mark.full
def test_a_module_named_like_a_library_is_refused_and_never_replaced(tmp_path):
    (tmp_path / "json.py").write_text("def loads(row): return 'mine'\n")
    with pytest.raises(RecipeError, match=r"json is the name of another module, which is loaded\). Rename json.py"):
        import_attribute("json:loads", str(tmp_path))


@pytest.mark.full
def test_equal_names_in_two_folders_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "twice.py").write_text(f"def where(): return {folder!r}\n")
    for folder in ("a", "b", "a"):
        assert import_attribute("twice:where", CodeFolder(str(tmp_path / folder)))() == folder


@pytest.mark.full
def test_an_entry_point_of_ours_needs_no_trust(tmp_path, monkeypatch):
    from importlib.metadata import EntryPoint

    point = EntryPoint(name="loads", value="json:loads", group="tandem")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point] if group == "tandem" else [])
    assert import_attribute("json:loads", str(tmp_path)) is json.loads
    with pytest.raises(RecipeError, match=r"there is no module os in .*run.trust_code=true"):
        import_attribute("os:system", str(tmp_path))


@pytest.mark.full
def test_a_push_loads_no_model_with_foreign_code(tmp_path):
    from pipeline.hub.verification import unknown_code
    from pipeline.model.saved import CODE_FILES

    for file in CODE_FILES:
        shutil.copy(file, tmp_path)
    assert unknown_code(tmp_path) == []
    (tmp_path / "evil.py").write_text(MARKING)
    (tmp_path / "modeling_tandem.py").write_text(MARKING)
    assert unknown_code(tmp_path) == ["evil.py", "modeling_tandem.py"]


@pytest.mark.parametrize(("words", "trusts"), [([], False), (["--trust-code"], True)])
def test_serve_trusts_code_only_when_it_is_told_to(whole, monkeypatch, words, trusts):
    from transformers.cli import transformers as program
    from transformers.utils import import_utils

    from pipeline.chat.serve import main

    given: list[str] = []
    monkeypatch.setattr(import_utils, "is_serve_available", lambda: True)
    monkeypatch.setattr(program, "app", lambda words, **_: given.extend(words))
    main([str(whole / "model"), *words])
    assert ("--trust-remote-code" in given) == trusts
