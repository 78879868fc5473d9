"""The HTTP client of who publishes: a Hub that is silent, asks to wait, or is not the Hub at all ends a request."""

import errno
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.process.errors import InputMissingError, ServiceError, TandemError
from pipeline.process.network import client_that_gives_up
from pipeline.process.secrets import redacted

# Asking the Hub again when it is away, and not when it refuses.

ATTEMPTS = 5
FIRST_WAIT_S = 2.0
# A Hub that asks for more is not waited for here: who called decides, with ServiceError.wait_s.
LONGEST_WAIT_S = 60.0
NAMES = (errno.ENOENT, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR)  # what the Hub called a file cannot be one here
T = TypeVar("T")


def retried(action: Callable[[], T], *, what: str) -> T:
    """Return the action's value; a Hub that is away is asked again with growing waits, one that refuses is not."""
    from huggingface_hub.errors import HFValidationError

    wait = FIRST_WAIT_S
    failures: tuple[type[BaseException], ...] = (RuntimeError, OSError, *_transport_errors())
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except HFValidationError as error:
            raise InputMissingError(f"{what}: {error} Give the repository as NAMESPACE/NAME.") from None
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            if isinstance(error, TandemError) or not _is_of_library(error):
                raise
            raise _odd_answer(what, error) from None
        except failures as error:
            answer = _answer_of(error)
            if answer is None and getattr(error, "errno", None) in NAMES and _is_of_library(error):
                raise _odd_answer(what, error) from None
            if answer is None:
                raise  # the disk or our mistake, not the Hub
            status, text = answer
            if status is not None and status < 500 and status not in (408, 429):
                raise ServiceError(f"{what}: the Hub refuses ({status}: {text}). {_cure(status)}") from None
            asked = _asked_to_wait(error)
            if attempt == ATTEMPTS or asked > LONGEST_WAIT_S:
                attempts = f"in {attempt} attempts" if asked <= LONGEST_WAIT_S else f"and asks to wait {asked:.0f} s"
                away = ServiceError(
                    f"{what}: the Hub did not answer well {attempts} ({text}). Nothing is lost: run the same command later."
                )
                away.wait_s = asked
                raise away from None
            pause = max(wait, asked)
            print(f"{what}: {text}; trying again in {pause:.0f} s", flush=True)
            time.sleep(pause)
            wait *= 2
    raise AssertionError("unreachable")


def _odd_answer(what: str, error: BaseException) -> ServiceError:
    text = " ".join(redacted(str(error)).split())[:200]
    return ServiceError(
        f"{what}: the Hub answered what no Hub does ({type(error).__name__}: {text}), so nothing of it was used. "
        "Look at the repository's files, at HF_ENDPOINT and at the proxies between."
    )


def _is_of_library(error: BaseException) -> bool:
    """Return whether it was raised below a call of huggingface_hub: by its reading of an answer."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    # BoundedAnswer (process/network.py) is called by the library.
    ours = [
        name.startswith("pipeline.") and "BoundedAnswer" not in frame.f_code.co_qualname
        for name, frame in zip(modules, frames, strict=True)
    ]
    last_of_ours = max(n for n, is_ours in enumerate(ours) if is_ours)
    return any(name.startswith("huggingface_hub.") for name in modules[last_of_ours + 1 :])


def _transport_errors() -> tuple[type[BaseException], ...]:
    # The HTTP client of huggingface_hub changes its name between versions; its errors share this base.
    from huggingface_hub.errors import HTTPError

    return (HTTPError,)


def _answer_of(error: BaseException | None) -> tuple[int | None, str] | None:
    """Return status (None when nobody answered) and text of the failed request, also when it is behind a RuntimeError.

    None for an error that is none of the Hub's.
    """
    while error is not None:
        if isinstance(error, (*_transport_errors(), ConnectionError, TimeoutError)):
            whole = redacted(" ".join(str(error).split()))  # before it is cut: a secret cut short is not known
            text = whole[:200] or type(error).__name__
            return getattr(getattr(error, "response", None), "status_code", None), text
        error = error.__cause__ or error.__context__
    return None


def _asked_to_wait(error: BaseException | None) -> float:
    """Return seconds of the answer's Retry-After; 0 where there is none, or a date."""
    while error is not None:
        value = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
        if value.strip().isdigit():
            return float(value)
        error = error.__cause__ or error.__context__
    return 0.0


def _cure(status: int) -> str:
    if status in (401, 403):
        return "Log in with `hf auth login`, or set HF_TOKEN to a token that may write there."
    return "Look whether the name is right and the token may see it (`hf auth whoami`)."


def bound_waits() -> None:
    """Bound every request of this process from now on: it ends when the Hub is silent, asks to wait, or is not the Hub at all."""
    from huggingface_hub import set_client_factory

    def client() -> Any:
        made = client_that_gives_up()
        made.event_hooks["response"] = [*made.event_hooks["response"], _look_at]
        return made

    set_client_factory(client)


def _look_at(response: Any) -> None:
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import hf_raise_for_status

    kind = response.headers.get("Content-Type", "")
    if response.status_code == 200 and kind.startswith("text/html"):
        raise HTTPError(f"{response.url}: a web page came instead of an answer; a proxy or a login page stands between")
    if response.status_code in (429, 503) and "Retry-After" in response.headers:
        response.read()
        hf_raise_for_status(
            response
        )  # else the library sleeps for as long as the answer asks for, however long that is
