"""What a hostile thing is laid into: a folder of its own with a whole model, text, a recipe and a run as `pull` leaves it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import yaml

from pipeline.run_dir.checkpoints import whole_folder
from tests.hub.hub_stand_in import Repo

MARKING = """\
import os
open(os.environ["MARK"], "a").write(__name__ + "\\n")
def f(*given, **named):
    open(os.environ["MARK"], "a").write("called\\n")
class C:
    pass
"""
MODELING = (
    MARKING
    + """
from transformers import PretrainedConfig, GPT2LMHeadModel, PreTrainedTokenizerFast
class EvilConfig(PretrainedConfig):
    model_type = "evil"
class EvilModel(GPT2LMHeadModel):
    pass
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""
)
ROW = {"touch": 1, "MARK": 2}


def lay_whole(folder: Path) -> Path:
    """Write a tokenizer with a model beside it: what each case begins with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<b>": 256, "<e>": 257}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<b>", eos_token="<e>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = GPT2Config(vocab_size=258, n_positions=64, n_layer=1, n_embd=16, n_head=2, bos_token_id=256, eos_token_id=257)  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


class Case:
    """A folder of its own: model/ (whole), text, and what a stranger put there."""

    def __init__(self, folder: Path, whole: Path):
        self.folder = folder
        self.repositories: dict[str, Repo] = {}  # of the Hub, by id
        self.answers: dict[str, Callable] = {}  # of the Hub, as StandIn.answers has them
        shutil.copytree(whole, folder, dirs_exist_ok=True)
        (folder / "lib").mkdir()
        (folder / "lib" / "evil_installed.py").write_text(MARKING)
        mark = str(folder / "MARK")
        rows = [{"text": f"a text of some words {n}", **{k if k != "MARK" else mark: v for k, v in ROW.items()}} for n in range(60)]  # fmt: skip
        (folder / "in").mkdir()
        (folder / "in" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "in" / "valid.jsonl").write_text("".join(json.dumps(row | {"text": f"other words {n}"}) + "\n" for n, row in enumerate(rows)))  # fmt: skip
        popen = [{k if k != "MARK" else mark: v for k, v in ROW.items()}] * 60
        (folder / "in" / "popen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in popen))

    def recipe(self, path: str = "in/r.yaml", file: str = "train.jsonl", form: str | None = None, ready: bool = False, **sections) -> str:  # fmt: skip
        """ready: tokenizer and sizes are those of what the command names."""
        data = self.folder / "in"
        source = {"files": str(data / file)} | ({"format": form} if form else {})
        recipe = {
            "run": {"stage": "pretrain", "name": "x", "directory": str(self.folder / "out")},
            "tokenizer": {} if ready else {"vocab_size": 300, "train_chars": 3000},
            "data": {"sources": [source], "validation": [{"files": str(data / "valid.jsonl")}], "row_tokens": 16, "batch_tokens": 32, "cache_dir": str(self.folder / "cache")},
            "model": {} if ready else {"n_layer": 1, "n_embd": 16, "n_head": 2},
            "optimizer": {"type": "adamw"},
            "train": {"max_steps": 2, "use_cpu": True},
            "monitor": {"trackers": []},
            "samples": {"every_steps": 0},
        }  # fmt: skip
        for section, keys in sections.items():
            recipe[section] = {**recipe.get(section, {}), **keys}
        file_of_recipe = self.folder / path
        file_of_recipe.parent.mkdir(parents=True, exist_ok=True)
        file_of_recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return path

    def put(self, name: str, content: str | bytes) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def change(self, name: str, **keys) -> None:
        path = self.folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))

    def run(self, form: str | None = None, **sections) -> str:
        """A run as `pull` leaves it: recipe, manifest, and a sealed model/ with a module in it."""
        with whole_folder(self.folder / "runs" / "x" / "model", step=2, run="x") as folder:
            shutil.copytree(self.folder / "model", folder, dirs_exist_ok=True)
            (folder / "evil.py").write_text(MARKING)
        self.recipe("runs/x/recipe.yaml", form=form, **sections)
        manifest = {"name": "x", "stage": "pretrain", "status": "finished", "finished": 1.0, "attempts": 1}
        self.put("runs/x/run_manifest.json", json.dumps(manifest))
        self.put("runs/x/metrics.jsonl", '{"step": 2, "train/loss": 1.0}\n')
        self.put("runs/x/evil.py", MARKING)
        return "runs/x"

    def auto_map(self, model_type: str = "evil", **classes) -> str:
        names = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"} | classes
        self.change("model/config.json", model_type=model_type, auto_map=names)
        self.put("model/evil.py", MODELING)
        return "model"

    def repository(self, files: dict[str, bytes], name: str = "evil/run") -> str:
        """A repository of the Hub; files: what it holds."""
        self.repositories[name] = Repo(private=False, branches={"main": [("a" * 40, files)]})
        return name

    def pushed(self, **changed: bytes | None) -> dict[str, bytes]:
        """The files of a run as `push` lays them out. changed: what lies there instead; None: the file is missing."""
        run = self.folder / self.run()
        files = {str(file.relative_to(run / "model")): file.read_bytes() for file in (run / "model").rglob("*") if file.is_file()}  # fmt: skip
        files |= {name: (run / name).read_bytes() for name in ("recipe.yaml", "run_manifest.json", "metrics.jsonl")}
        shutil.rmtree(run)
        return {name: content for name, content in (files | changed).items() if content is not None}
