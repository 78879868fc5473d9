"""Before step 1: whether the Hub will take the model."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipeline.process.commands import command
from pipeline.process.errors import ServiceError, TandemError
from pipeline.recipe.schema import Hub
from pipeline.run_dir.run_directory import RunDirectory

PATIENCE_S = 10.0
LOGIN = "Run `hf auth login`, or set HF_TOKEN to a token that may write there; or remove hub.id."


def write_findings(hub: Hub, run: RunDirectory, *, where: str) -> tuple[list[TandemError], list[str]]:
    """Return (problems, notes): whether hub.id may be written, before step 1. where: of hub.id in the recipe."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return [], [f"{where}: HF_HUB_OFFLINE is set, so write access to {hub.id} was not checked."]
    # A thread, since the client may wait for minutes, and a start must not: it is left behind and ends by itself.
    executor = ThreadPoolExecutor(1)
    try:
        outcome = executor.submit(_refusal, hub.id or "", hub.private, hub.license).result(PATIENCE_S)
    except Exception as error:  # the client raises many kinds; whichever it is, the service is away
        reason = " ".join(str(error).split())[:160] or f"no answer in {PATIENCE_S:.0f} s"
        return [], [f"{where}: the Hub did not say whether {hub.id} may be written ({reason})."]
    finally:
        executor.shutdown(wait=False)
    if not outcome:
        return [], []
    if run.has_trained():
        return [], [
            (
                f"{where}: {outcome} The run has trained and continues; publish it later with "
                f"`{command('hub', 'push', run.path)}`."
            )
        ]
    return [ServiceError(f"{where}: {outcome}")], []


def _refusal(repo_id: str, private: bool, license: str | None) -> str | None:
    """Return why a push to the repository would be refused; None when it would not. Raises when the Hub does not
    answer."""
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
        return (
            f"{full} exists and is public, and hub.private is true. Make it private on the Hub, name another one, or "
            "write hub.private: false."
        )
    return _unknown_license(license)


def _unknown_license(license: str | None) -> str | None:
    """Return the Hub refuses a whole upload whose card names a license that it does not know; which it knows, it alone
    can say."""
    from huggingface_hub import ModelCard

    if license is None:
        return None
    try:
        ModelCard(f'---\nlicense: "{license}"\n---\n').validate()
    except ValueError:
        return (
            f"the Hub knows no license {license!r} (hub.license), and would take no model under it. Write one of "
            "huggingface.co/docs/hub/repositories-licenses, or leave it out."
        )
    return None


def _cannot_create(user: dict[str, Any], owner: str, repo_id: str) -> str | None:
    """Return why this user could not create the repository, as far as the token says."""
    roles = {org["name"]: org.get("roleInOrg") for org in user.get("orgs") or []} | {user["name"]: "admin"}
    token = ((user.get("auth") or {}).get("accessToken") or {}).get("role")
    if owner not in roles:
        return (
            f"{repo_id} does not exist, and {user['name']} cannot create it: it is no member of {owner}. Name one of "
            f"{', '.join(sorted(name for name, role in roles.items() if role != 'read'))}, or log in as somebody else."
        )
    if roles[owner] == "read" or token == "read":
        return f"{repo_id} does not exist, and this token may only read. {LOGIN}"
    return None
