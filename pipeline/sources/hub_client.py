"""The HTTP client of huggingface_hub with an end to every wait for a silent Hub: by itself it waits for ever."""

from functools import cache
from typing import Any

# Seconds without a byte, not for a whole transfer: one of hours goes on as long as it moves.
CONNECT_S, SILENCE_S = 10.0, 60.0


def client_that_gives_up() -> Any:
    """A client whose requests end after that silence, those included that the library sends with timeout=None."""
    from huggingface_hub.utils._http import default_client_factory

    made = default_client_factory()
    limits = {"connect": CONNECT_S, "read": SILENCE_S, "write": SILENCE_S, "pool": SILENCE_S}

    def limit(request: Any) -> None:
        # model_info and its like pass None, which stands above the client's own timeout.
        asked = request.extensions.get("timeout") or {}
        request.extensions["timeout"] = limits | {name: s for name, s in asked.items() if s is not None}

    made.event_hooks["request"] = [*made.event_hooks["request"], limit]
    return made


@cache
def limit_silence() -> None:
    """From now on no request of this process waits for a silent Hub for ever."""
    from huggingface_hub import set_client_factory

    set_client_factory(client_that_gives_up)
