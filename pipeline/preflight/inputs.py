"""Checks of what a run reads and reaches, before it starts: files, user code, services."""

import importlib.util
import inspect
import json
import netrc
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.process.commands import command
from pipeline.process.errors import DataError, InputMissingError, RecipeError, ServiceError, TandemError
from pipeline.process.storage import cache_dir, can_be_made
from pipeline.process.user_code import import_attribute
from pipeline.recipe import Recipe
from pipeline.recipe.resolve import start_folder
from pipeline.recipe.sizes import model_fields
from pipeline.run_dir.checkpoints import SEAL, by_step, loadable_strays, problems
from pipeline.run_dir.run_directory import RunDirectory
from pipeline.sources.open import with_recorded_inputs

# What the recipe names and only Python can look up: callbacks, tasks, an optimizer, the options of the model.
# Imports torch.


def named_code_problems(recipe: Recipe) -> list[TandemError]:
    """Return each name that cannot be used. A model that starts from weights has their options."""
    return [*_callbacks(recipe), *_tasks(recipe), *_factories(recipe), *_split_pattern(recipe), *_model(recipe)]


def _callbacks(recipe: Recipe) -> list[TandemError]:
    found: list[TandemError] = []
    where = recipe.where("run.callbacks")
    for name in recipe.run.callbacks:
        try:
            inspect.signature(import_attribute(name, recipe.code, where=where)).bind()
        except RecipeError as error:
            found.append(error)
        except (TypeError, ValueError) as error:
            found.append(
                RecipeError(
                    f"{where}: {name} cannot be used ({error}). Name a TrainerCallback class that is made without arguments."
                )
            )
    return found


def _tasks(recipe: Recipe) -> list[TandemError]:
    from pipeline.evals.tasks import load_tasks

    try:
        load_tasks(recipe.evals.tasks, folder=recipe.code, where=recipe.where("evals.tasks"))
    except RecipeError as error:
        return [error]
    return []


def _factories(recipe: Recipe) -> list[TandemError]:
    """Return the optimizer and the model, where they are the user's own. A model that starts from weights is theirs."""
    named = {
        "optimizer.type": recipe.optimizer.type,
        "model.type": "" if recipe.model.start_from else recipe.model.type,
    }
    found: list[TandemError] = []
    for key, name in named.items():
        if ":" not in name:
            continue
        try:
            if not callable(import_attribute(name, recipe.code, where=recipe.where(key))):
                found.append(RecipeError(f"{recipe.where(key)}: {name} cannot be called. Name a function or a class."))
        except RecipeError as error:
            found.append(error)
    return found


def _split_pattern(recipe: Recipe) -> list[TandemError]:
    if recipe.tokenizer.path or recipe.tokenizer.split_pattern in ("nanochat", "gpt2"):
        return []
    from tokenizers import Regex

    try:
        Regex(recipe.tokenizer.split_pattern)
    except Exception as error:  # tokenizers raises bare Exceptions
        return [
            RecipeError(f"{recipe.where('tokenizer.split_pattern')}: is no regular expression ({error}). Correct it.")
        ]
    return []


def _model(recipe: Recipe) -> list[TandemError]:
    """Return the model is built once without its weights: its config refuses then what it would refuse after the data are prepared."""
    if recipe.model.start_from or ":" in recipe.model.type:
        return []
    import torch

    from pipeline.model.build import ModelOptionsError, build_model

    fields = model_fields(
        recipe, vocab_size=recipe.tokenizer.vocab_size or 512, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    try:
        with torch.device("meta"):
            build_model(recipe.model.type, fields, seed=0)
    except ModelOptionsError as error:
        key = str(error).partition(":")[0]
        return [RecipeError(f"{recipe.places.get(key) or recipe.path}: {error}")]
    except Exception as error:  # a value that its config took and its layers do not
        return [
            RecipeError(
                f"{recipe.where('model.options')}: {recipe.model.type} cannot be built with them ({type(error).__name__}: {error}). Correct the value."
            )
        ]
    return []


# The services that a recipe asks for: whether the Hub will take the model, W&B knows who is writing, trackers are
# installed.

PATIENCE_S = 10.0
PACKAGES = {"trackio": "trackio>=0.43,<1"}  # as the extra of pyproject.toml says
LOGIN = "Run `hf auth login`, or set HF_TOKEN to a token that may write there; or remove hub.id."


def service_findings(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """(problems, notes)"""
    findings = [_hub(recipe), _packages(recipe), ([], _wandb(recipe))]
    return [problem for problems, _ in findings for problem in problems], [
        note for _, notes in findings for note in notes
    ]


def _hub(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    if recipe.hub.id is None:
        return [], []
    where = recipe.where("hub.id")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [], [f"{where}: HF_HUB_OFFLINE is set, so write access to {recipe.hub.id} was not checked."]
    outcome = _within(
        PATIENCE_S,
        lambda: _refusal(recipe.hub.id or "", private=recipe.hub.private) or _unknown_license(recipe.hub.license),
    )
    if isinstance(outcome, BaseException):
        reason = " ".join(str(outcome).split())[:160] or type(outcome).__name__
        return [], [f"{where}: the Hub did not say whether {recipe.hub.id} may be written ({reason})."]
    if not outcome:
        return [], []
    run = _run(recipe)
    if run.has_trained():
        return [], [
            f"{where}: {outcome} The run has trained and goes on; what is not published is listed at its end, for `{command('hub', 'push', run.path)}`."
        ]
    return [ServiceError(f"{where}: {outcome}")], []


def _refusal(repo_id: str, *, private: bool) -> str | None:
    """Return why a push to the repository would be refused; None when it would not. Raises when the Hub does not answer."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import validate_repo_id

    if get_token() is None:
        return f"the model is to be pushed to {repo_id}, and there is no token of the Hub here. {LOGIN}"
    api = HfApi()
    try:
        validate_repo_id(repo_id)
        user = api.whoami()
        owner = repo_id.split("/")[0] if "/" in repo_id else user["name"]
        full = repo_id if "/" in repo_id else f"{owner}/{repo_id}"
        try:
            api.auth_check(full, write=True)
            public = api.model_info(full).private is False
        except RepositoryNotFoundError:
            return _cannot_create(user, owner, full)
    except HFValidationError as error:
        return f"{error} Write NAMESPACE/NAME."
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status not in (401, 403):
            raise
        return f"the Hub refuses to let this token write to {repo_id} (status {status}). {LOGIN}"
    if private and public:
        return f"{full} exists and is public, and hub.private is true. Make it private on the Hub, name another one, or write hub.private: false."
    return None


def _unknown_license(license: str | None) -> str | None:
    """Return the Hub refuses a whole upload whose card names a license that it does not know; which it knows, it alone can say."""
    from huggingface_hub import ModelCard

    if license is None:
        return None
    try:
        ModelCard(f'---\nlicense: "{license}"\n---\n').validate()
    except ValueError:
        return f"the Hub knows no license {license!r} (hub.license), and would take no model under it. Write one of huggingface.co/docs/hub/repositories-licenses, or leave it out."
    return None


def _cannot_create(user: dict[str, Any], owner: str, repo_id: str) -> str | None:
    """Return why this user could not create the repository, as far as the token says."""
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs") or []} | {user["name"]: "admin"}
    token = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if owner not in roles:
        return (
            f"{repo_id} does not exist, and {user['name']} cannot create it: it is no member of {owner}. Name one of {', '.join(sorted(name for name, role in roles.items() if role != 'read'))}, or log in "
            "as somebody else."
        )
    if roles[owner] == "read" or token == "read":
        return f"{repo_id} does not exist, and this token may only read. {LOGIN}"
    return None


def _within(seconds: float, ask: Callable[[], Any]) -> Any:
    """Return what `ask` gives, or the exception that kept it from giving anything in that time."""
    answer: list[Any] = [TimeoutError(f"no answer in {seconds:.0f} s")]

    def run() -> None:
        try:
            answer[0] = ask()
        except Exception as error:  # the client raises many kinds; whichever it is, the service is away
            answer[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answer[0]


def _packages(recipe: Recipe) -> tuple[list[TandemError], list[str]]:
    """A tracker whose package is missing."""
    missing = [name for name in recipe.monitor.trackers if importlib.util.find_spec(name) is None]
    messages = [
        f"{recipe.where('monitor.trackers')}: {name} is asked for and its package is not installed, so it would get no numbers. "
        f"Install it (pip install '{PACKAGES.get(name, name)}'), or remove it from the list."
        for name in missing
    ]
    if _run(recipe).has_trained():
        return [], [f"{text} The run has trained and goes on." for text in messages]
    return [InputMissingError(text) for text in messages], []


def _wandb(recipe: Recipe) -> list[str]:
    if "wandb" not in recipe.monitor.trackers or _wandb_can_log_in():
        return []
    return [
        f"{recipe.where('monitor.trackers')}: W&B is asked for and nobody is logged in, so it will get no numbers; metrics.jsonl has them all. "
        "Set WANDB_API_KEY, run `wandb login`, or set WANDB_MODE=offline to upload them later."
    ]


def _wandb_can_log_in() -> bool:
    if os.environ.get("WANDB_MODE", "online").lower() != "online" or os.environ.get("WANDB_DISABLED"):
        return True
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    given = os.environ.get("NETRC")
    files = [Path(given)] if given else [Path.home() / name for name in (".netrc", "_netrc")]
    return any(_names(file, host) for file in files)


def _names(file: Path, host: str) -> bool:
    try:
        return host in netrc.netrc(str(file)).hosts
    except (OSError, netrc.NetrcParseError):
        # wandb reads a file that Python's parser refuses (its permissions, another line): what counts is the machine.
        try:
            return re.search(rf"\bmachine\s+{re.escape(host)}\b", file.read_text(errors="replace")) is not None
        except OSError:
            return False


# What the run will read: its sources, its tokenizer, the weights that it starts from, all opened before step 1.


def reading_findings(
    recipe: Recipe, *, only: Sequence[str] = ("sources", "tokenizer", "weights")
) -> tuple[list[TandemError], list[str]]:
    """(problems, notes) of what the recipe names; model.start_from is resolved by now.

    only: `changes` is for who trains nothing: what becomes of a ready tokenizer is said again when a run loads it.
    """
    found: list[TandemError] = []
    notes: list[str] = []
    for what in only:
        try:
            notes += {"sources": _sources, "tokenizer": _tokenizer, "weights": _weights, "changes": _changes}[what](
                recipe
            ) or []
        except TandemError as error:
            found.append(error)
    return found, notes


def _sources(recipe: Recipe) -> list[str]:
    """Opened as the stage will open them; what is found out about a file is kept, so that this costs the start nothing."""
    from pipeline.sources.open import open_sources
    from pipeline.sources.verify import overlap_of

    if not can_be_made(cache_dir(recipe.data.cache_dir)):  # where it is kept; the check of the folders says so
        return []
    run = _run(recipe)
    goes_on = run.has_trained()
    if goes_on:
        recipe = with_recorded_inputs(recipe, run.read_manifest().get("inputs", {}))
    train, validation = open_sources(recipe, kind="chat" if recipe.stage == "sft" else "text")
    note = None if goes_on else overlap_of(train, validation).note()  # it was said before the first step
    return [f"{recipe.where('data.validation')}: {note}"] if note else []


def _run(recipe: Recipe) -> RunDirectory:
    return RunDirectory(Path(recipe.run.directory) / str(recipe.run.name))


def _tokenizer(recipe: Recipe) -> None:
    """A ready tokenizer can be read, its ids have no holes, and they are those that the weights were trained with."""
    path, start = recipe.tokenizer.path, start_folder(recipe)
    if path is None:
        return
    from pipeline.tokenizer.load import open_tokenizer, ready_tokenizer

    tokenizer, _ = ready_tokenizer(recipe)
    where, ids = recipe.where("tokenizer.path"), tokenizer.get_vocab()
    largest, rows = max(ids.values()), max(len(tokenizer), _rows(start))
    if largest >= rows:
        raise RecipeError(
            f"{where}: {path} has the id {largest} for {_shown(ids, largest)} and {len(ids)} ids in all: the model would have {rows} embeddings and none "
            "for it. Number its ids without holes, or take another tokenizer."
        )
    if start is None or Path(path) == start or not (start / "tokenizer.json").is_file():
        return
    own = open_tokenizer(str(start), revision=None, beside=None, where="model.start_from").get_vocab()
    moved = sorted((number, token) for token, number in own.items() if ids.get(token) != number)
    if moved:
        number, token = moved[0]
        raise RecipeError(
            f"{where}: {path} gives other ids than the tokenizer that {start} was trained with ({len(moved):,} of {len(own):,} tokens; {token!r} was "
            f"{number} and is {ids.get(token, 'none')}), so its embeddings would stand for other text. Leave tokenizer.path out: the tokenizer comes with the weights."
        )


def _changes(recipe: Recipe) -> list[str]:
    """Return what a run keeps of the ready tokenizer and of the vocabulary, and each change to them."""
    if recipe.tokenizer.path is None:
        return []
    from pipeline.tokenizer.load import ready_tokenizer

    try:
        tokenizer, lines = ready_tokenizer(recipe)
    except TandemError:  # which `tokenizer` has found as well
        return []
    have = _rows(start_folder(recipe))
    if have:
        added = max(0, len(tokenizer) - have)
        lines.append(
            f"model: {added} embeddings are added for new tokens ({have:,} -> {len(tokenizer):,})"
            if added
            else f"model: its {have:,} embeddings stay as they are; none is added"
        )
    return lines or [
        f"tokenizer: {recipe.tokenizer.path} keeps its chat template and its {len(tokenizer):,} ids; nothing is added"
    ]


def _rows(start: Path | None) -> int:
    if start is None:
        return 0
    return int(json.loads((start / "config.json").read_text(encoding="utf-8")).get("vocab_size") or 0)


def _shown(ids: dict[str, int], number: int) -> str:
    return repr(next(token for token, n in ids.items() if n == number))


def _weights(recipe: Recipe) -> None:
    """Sealed weights are whole, and a folder that something else wrote has weights at all.

    A run with a checkpoint of its own goes on from that one and reads them no more.
    """
    start = recipe.model.start_from
    if start is None or not Path(start).is_dir() or by_step(_run(recipe).checkpoints):
        return
    folder, where = Path(start), recipe.where("model.start_from")
    if (folder / SEAL).is_file():
        damaged = problems(folder) or [f"{name} does not belong to it" for name in loadable_strays(folder)]
        if damaged:
            raise DataError(
                f"{where}: {folder} is damaged ({'; '.join(damaged)}). Copy it again, or start from another checkpoint of that run."
            )
    elif not any(_is_weights(path) for path in folder.iterdir()):
        raise InputMissingError(
            f"{where}: {folder} holds no weights (*.safetensors or pytorch_model*.bin). Name a folder that save_pretrained wrote, or a run."
        )


def _is_weights(path: Any) -> bool:
    return path.suffix == ".safetensors" or path.name.startswith("pytorch_model")
