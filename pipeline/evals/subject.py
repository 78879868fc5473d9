"""RUN_OR_MODEL of the command line: a run, one of its checkpoints, a local folder or a Hub id."""

import argparse
import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.process.errors import DataError, InputMissingError, ServiceError, TandemError, first_line
from pipeline.process.network import is_hub_away, set_http_timeouts
from pipeline.process.storage import refuse_unreadable_files
from pipeline.process.user_code import COMMAND_TRUST, CodeFolder, allow_model_code, guarded, importing
from pipeline.run_dir.checkpoints import MODEL_CONFIGS, SEAL, by_step, is_model, problems, read_seal, step_of
from pipeline.run_dir.run_directory import RunDirectory, find_run


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to load. path: folder or Hub id; run: the run it belongs to; step: its optimizer step, when known.
    trust_code: whether code that came with it is run (process/user_code.py)."""

    path: str
    trust_code: bool = False
    run: RunDirectory | None = None
    step: int | None = None

    @property
    def name(self) -> str:
        """Return how the run's own files call it: model/, checkpoint-<step>, or the folder or id itself."""
        if self.run is None:
            return self.path
        if Path(self.path) == self.run.model:
            return "model/"
        return Path(self.path).name

    @property
    def code(self) -> CodeFolder:
        return CodeFolder(None, trusted=self.trust_code, trust_with=COMMAND_TRUST)

    @property
    def stage(self) -> str | None:
        return self.run.read_manifest().get("stage") if self.run else None


def find_subject(name: str, *, trust_code: bool = False) -> Subject:
    """Return the model that `name` means; of a run its model/, else its newest whole checkpoint. Nothing is moved or
    changed.

    Raises InputMissingError when it is neither a run with a model, nor a folder with config.json, nor shaped like a
    Hub id.
    """
    subject = _find(name)
    if Path(subject.path).is_dir():
        refuse_unreadable_files(subject.path)
    return replace(subject, trust_code=trust_code)


def _find(name: str) -> Subject:
    # 1. A folder with a model. 2. A run. 3. What looks like a path and is none. 4. A Hub id.
    path = Path(name)
    if is_model(path):
        return _folder(path)
    run = find_run(name)
    if run is None and (path / "checkpoints").is_dir():
        run = RunDirectory(path)
    if run is not None:
        return _of_run(run)
    if name.startswith("latest:"):
        raise InputMissingError(
            f"{name}: runs/ has no finished run of that recipe or stage. Name a run, a model folder or a Hub id."
        )
    if path.is_dir():
        raise InputMissingError(
            f"{name}: the folder holds neither a run (run_manifest.json) nor a model (config.json). Name one that "
            "does."
        )
    if path.parent.is_dir() and path.parent == Path("runs"):
        there = sorted(manifest.parent.name for manifest in Path("runs").glob("*/run_manifest.json"))
        raise InputMissingError(
            f"{name}: there is no such run. runs/ has {', '.join(there) or 'none'}. Name one of them."
        )
    if name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise InputMissingError(
            f"{name}: there is no such folder. Name a run, a checkpoint, a model folder or a Hub id."
        )
    from huggingface_hub import try_to_load_from_cache

    repository = name.partition("@")[0]
    if is_hub_away() and not any(try_to_load_from_cache(repository, file) for file in MODEL_CONFIGS):
        raise ServiceError(
            f"{name}: no run, model folder or cached model of that name is here, and the Hub cannot be reached. "
            "Correct the name, or connect this machine."
        )
    return Subject(path=name)


def _folder(path: Path) -> Subject:
    """Return the subject of a folder with a model: of a run where it is RUN/model or RUN/checkpoints/checkpoint-N."""
    folder, step = path.resolve(), step_of(path)
    for parent in (folder.parent, folder.parent.parent):
        run = RunDirectory(parent)
        if not run.manifest.exists():
            continue
        if folder == run.checkpoints.resolve() / path.name:
            return Subject(path=str(path), run=run, step=step)
        if folder == run.model.resolve():  # which may be a link to a checkpoint
            return Subject(path=str(path), run=run, step=_finished_step(run))
    return Subject(path=str(path), step=step)


def _of_run(run: RunDirectory) -> Subject:
    if is_model(run.model):
        return Subject(path=str(run.model), run=run, step=_finished_step(run))
    damaged = []
    for folder in reversed(by_step(run.checkpoints)):
        found = problems(folder)
        if not found:
            return Subject(path=str(folder), run=run, step=step_of(folder))
        damaged.append(f"{folder.name}: {'; '.join(found)}")
    why = "the run has neither model/ nor a whole checkpoint yet"
    if damaged:
        why += f" ({' / '.join(damaged)})"
    raise InputMissingError(f"{run.path}: {why}. Let it train until its first one (train.save_steps).")


def _finished_step(run: RunDirectory) -> int | None:
    return read_seal(run.model).get("step") if (run.model / SEAL).exists() else None


def load(subject: Subject, *, device: str, revision: str | None = None) -> tuple[Any, Any]:
    """Return the model in fp32 on the device and its tokenizer. Raises InputMissingError when either cannot be had,
    and DataError when they do not belong together."""
    import torch

    import pipeline.model.saved  # noqa: F401 - makes our model type known before the tokenizer's config is read
    from pipeline.model.finite import first_nonfinite
    from pipeline.tokenizer.load import open_tokenizer

    if not Path(subject.path).is_dir():
        set_http_timeouts()
    tokenizer = open_tokenizer(subject.path, revision=revision, beside=None, where=subject.path)
    try:
        model = open_model(subject.path, code=subject.code, dtype=torch.float32, revision=revision)
    except OSError as error:
        reason = first_line(error)
        raise InputMissingError(
            f"{subject.path}: the model cannot be loaded ({reason}). Name a folder with its weights, or a Hub id "
            "you may read."
        ) from None
    refuse_nonfinite_model(subject.path, first_nonfinite(model.state_dict()))
    embedded = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedded:
        raise DataError(
            f"{subject.path}: the tokenizer has {len(tokenizer):,} ids and the model {embedded:,} embeddings, so some "
            "texts could not be scored. Put the tokenizer that the model was trained with beside it."
        )
    return model.to(device).eval(), tokenizer


def refuse_nonfinite_model(path: str, name: str | None) -> None:
    """Raise DataError for a model whose tensor of that name is not finite."""
    if name:
        raise DataError(
            f"{path}: {name} holds a NaN or an infinity, so the model computes nothing. Take another checkpoint, or "
            "save the model again."
        )


def open_model(path: str, *, code: CodeFolder, where: str = "", revision: str | None = None, **settings: Any) -> Any:
    """Return load_model of a folder or Hub id; code files that come with it are run only where `code` says that they
    are trusted. Of an adapter the base is opened so, and the adapter put around its layers.

    Raises RecipeError for a model that needs others, OSError when nothing is there, DataError when its files make no
    model.
    """
    from pipeline.model.errors import ModelOptionsError
    from pipeline.model.load import files_beside, load_model

    at = f"{where}: {path}" if where else path
    try:
        if files_beside(path, ("adapter_config.json",), revision):
            return _open_adapter(path, code=code, at=at, revision=revision, **settings)
        # Code of the model may end the process or raise anything: `guarded` names the file then.
        trust = trusts_model_code(path, code=code, where=where, revision=revision)
        with guarded(at) if trust else nullcontext():
            return load_model(path, revision=revision, trust_remote_code=trust, **settings)
    except (OSError, TandemError, MemoryError):
        raise
    except ModelOptionsError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # its files are somebody else's, and may hold anything
        reason = first_line(error)
        raise DataError(f"{at}: no model can be made of its files ({reason}). Take another one.") from error


def _open_adapter(path: str, *, code: CodeFolder, at: str, revision: str | None, **settings: Any) -> Any:
    refuse_without_peft(at)
    from pipeline.model.adapter import load_adapter, read_adapter_config
    from pipeline.model.load import generation_config_of

    given = read_adapter_config(path, revision)
    base, commit = given["base_model_name_or_path"], given.get("revision")
    if Path(base).is_absolute() and not is_model(Path(base)):
        raise InputMissingError(
            f"{at}: is an adapter, and its base {base} is not here. Put it back, or write its place into "
            "adapter_config.json."
        )
    model = open_model(base, code=code, where=at, revision=commit, **settings, native=True)
    if hasattr(model, "peft"):
        raise DataError(f"{at}: its base {base} is an adapter too. Merge that one first: hub export --merge.")
    load_adapter(model, path, given, revision=revision)
    generation, _ = generation_config_of(path, revision)
    if generation is not None:
        model.generation_config = generation
    return model


def refuse_without_peft(where: str) -> None:
    """Raise InputMissingError where PEFT is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise InputMissingError(
            f'{where}: adapters need the package peft, which is not installed. Run: pip install "tandem-llm[peft]"'
        )


def trusts_model_code(path: str, *, code: CodeFolder, where: str = "", revision: str | None = None) -> bool:
    """Return whether the model needs code files that come with it, which are imported then.

    Raises RecipeError where they are not trusted, and as import_attribute does for what they do at their import.
    """
    from transformers import PreTrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from pipeline.model.build import needs_no_code

    config, _ = PreTrainedConfig.get_config_dict(path, revision=revision)
    known = needs_no_code(config.get("model_type"))
    if not allow_model_code(config, path, known=known, code=code, where=where):
        return False
    classes = config["auto_map"]
    with importing(f"{where}: {path}" if where else path):
        for name in ("AutoConfig", "AutoModelForCausalLM"):
            if isinstance(classes, dict) and isinstance(classes.get(name), str):
                get_class_from_dynamic_module(classes[name], path, revision=revision)
    return True


def code_of_command(arguments: argparse.Namespace) -> CodeFolder:
    """Return where module:attr of the command line points: to modules in the working folder."""
    return CodeFolder(str(Path.cwd()), trusted=arguments.trust_code, trust_with=COMMAND_TRUST)
