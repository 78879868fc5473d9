"""The services that a recipe asks for: whether the Hub will take the model, W&B knows who is writing, trackers are installed.

One attempt each, with a time limit, and nothing is written. A service that is away is a note: the run queues what it would
have sent. One that refuses is a problem: it will refuse at the end, too. It is a note again for a run that has trained: a
token that expired meanwhile must not keep it from going on after an interruption.
"""

import importlib.util
import netrc
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.artifacts.errors import InputMissingError, ServiceError, TandemError
from pipeline.artifacts.run_directory import RunDirectory
from pipeline.recipe import Recipe

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
            f"{where}: {outcome} The run has trained and goes on; what is not published is listed at its end, for `python -m pipeline.hub push {run.path}`."
        ]
    return [ServiceError(f"{where}: {outcome}")], []


def _refusal(repo_id: str, *, private: bool) -> str | None:
    """Why a push to the repository would be refused; None when it would not. Raises when the Hub does not answer."""
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
    """The Hub refuses a whole upload whose card names a license that it does not know; which it knows, it alone can say."""
    from huggingface_hub import ModelCard

    if license is None:
        return None
    try:
        ModelCard(f'---\nlicense: "{license}"\n---\n').validate()
    except ValueError:
        return f"the Hub knows no license {license!r} (hub.license), and would take no model under it. Write one of huggingface.co/docs/hub/repositories-licenses, or leave it out."
    return None


def _cannot_create(user: dict[str, Any], owner: str, repo_id: str) -> str | None:
    """Why this user could not create the repository, as far as the token says."""
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
    """What `ask` gives, or the exception that kept it from giving anything in that time."""
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
    told = [
        f"{recipe.where('monitor.trackers')}: {name} is asked for and its package is not installed, so it would get no numbers. "
        f"Install it (pip install '{PACKAGES.get(name, name)}'), or remove it from the list."
        for name in missing
    ]
    if _run(recipe).has_trained():
        return [], [f"{text} The run has trained and goes on." for text in told]
    return [InputMissingError(text) for text in told], []


def _run(recipe: Recipe) -> RunDirectory:
    return RunDirectory(Path(recipe.run.directory) / str(recipe.run.name))


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
