"""Requests to the Hub that end: each is made again while the Hub is away, and not when it refuses."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pipeline.process.errors import InputMissingError, ServiceError, TandemError
from pipeline.process.network import client_with_timeouts, is_hub_away
from pipeline.process.secrets import redacted

ATTEMPTS = 5
FIRST_WAIT_S = 2.0  # doubled after each attempt
# A Hub that asks for more is not waited for here: the caller decides, with ServiceError.wait_s.
LONGEST_WAIT_S = 60.0
T = TypeVar("T")


def retried(action: Callable[[], T], *, what: str) -> T:
    """Return the action's value; try again with growing waits while the Hub is away.

    Raises ServiceError when the Hub refuses or stays away, InputMissingError for a name that is no repository's.
    """
    from huggingface_hub.errors import HFValidationError, HTTPError

    if is_hub_away():
        time.sleep(FIRST_WAIT_S)  # a machine that has just started may be about to get its network
        if is_hub_away():
            raise ServiceError(
                f"{what}: this machine has no network to the Hub, or HF_HUB_OFFLINE is set. Nothing is lost: connect "
                "it, and run the same command again."
            )
    wait_s = FIRST_WAIT_S
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except HFValidationError as error:
            raise InputMissingError(f"{what}: {error} Give the repository as NAMESPACE/NAME.") from None
        except (RuntimeError, OSError, HTTPError, json.JSONDecodeError) as error:
            failed = _request_error(error)
            if failed is None or isinstance(error, TandemError):
                raise  # the disk or our mistake, not the Hub
            response = getattr(failed, "response", None)
            status = getattr(response, "status_code", None)
            # Before it is cut: a secret cut short is not known.
            text = redacted(" ".join(str(failed).split()))[:200] or type(failed).__name__
            # 408: the Hub waited too long for us; 429: too many requests. Other 4xx stay what they are.
            if status is not None and status < 500 and status not in (408, 429):
                raise ServiceError(f"{what}: the Hub refuses ({status}: {text}). {_remedy(status)}") from None
            # Seconds; a date, which the header may hold too, is not waited for.
            retry_after = getattr(response, "headers", {}).get("Retry-After", "").strip()
            asked_s = float(retry_after) if retry_after.isdigit() else 0.0
            if attempt == ATTEMPTS or asked_s > LONGEST_WAIT_S:
                away = ServiceError(
                    f"{what}: the Hub did not answer well in {attempt} attempts ({text}). Nothing is lost: run the "
                    "same command later."
                )
                away.wait_s = asked_s
                raise away from None
            pause_s = max(wait_s, asked_s)
            print(f"{what}: {text}; trying again in {pause_s:.0f} s", flush=True)
            time.sleep(pause_s)
            wait_s *= 2
    raise AssertionError("unreachable")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _request_error(error: BaseException) -> BaseException | None:
    """Return the failed request's own error, also when it is behind a RuntimeError; None for an error of another
    kind."""
    from huggingface_hub.errors import HTTPError

    kinds = (HTTPError, ConnectionError, TimeoutError, json.JSONDecodeError)
    return next((cause for cause in _causes(error) if isinstance(cause, kinds)), None)


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there."
    return "Look whether the name is right and the token may see it (`hf auth whoami`)."


def bound_waits() -> None:
    """Bound every request of this process from now on: it ends when the Hub is silent, asks to wait, or is a proxy's
    login page."""
    from huggingface_hub import set_client_factory

    def client() -> Any:
        made = client_with_timeouts()
        made.event_hooks["response"] = [*made.event_hooks["response"], _check_response]
        return made

    set_client_factory(client)


def _check_response(response: Any) -> None:
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import hf_raise_for_status

    if response.status_code == 200 and response.headers.get("Content-Type", "").startswith("text/html"):
        raise HTTPError(f"{response.url}: a web page came instead of an answer, perhaps a proxy's login page")
    if response.status_code in (429, 503) and "Retry-After" in response.headers:
        response.read()
        hf_raise_for_status(response)  # else the library sleeps for as long as the answer asks for
