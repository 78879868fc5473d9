"""The HTTP client of who publishes: a Hub that is silent, asks to wait, or is not the Hub at all ends a request."""

from typing import Any

from pipeline.sources.hub_client import client_that_gives_up


def bound_waits() -> None:
    """From now on a request of this process ends when the Hub is silent, asks to wait, or is not the Hub at all."""
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
        hf_raise_for_status(response)  # else the library sleeps for as long as it was told, however long that is
