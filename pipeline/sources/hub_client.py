"""The HTTP client of huggingface_hub with an end to every wait for a silent Hub, and to what one says: by itself it has none."""

from functools import cache
from typing import Any

# Seconds without a byte, not for a whole transfer: one of hours goes on as long as it moves.
CONNECT_S, SILENCE_S = 10.0, 60.0
ANSWER_BYTES = 2**25  # of the Hub's own words, such as a list of files; a file is read to its end


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
    made.event_hooks["response"] = [*made.event_hooks["response"], _bound_answer]
    return made


def _bound_answer(response: Any) -> None:
    """Let the reading of an answer of the Hub's API end with ValueError when it is too long."""
    if not response.url.path.startswith("/api/"):
        return
    base: Any = next(kind for kind in type(response.stream).__mro__ if kind.__name__ == "SyncByteStream")

    class Bounded(base):
        def __init__(self, stream: Any):
            self.stream = stream

        def __iter__(self) -> Any:
            size = 0
            for block in self.stream:
                size += len(block)
                if size > ANSWER_BYTES:
                    raise ValueError(f"{response.url} answers with more than {ANSWER_BYTES >> 20} MiB")
                yield block

        def close(self) -> None:
            self.stream.close()

    response.stream = Bounded(response.stream)


@cache
def limit_silence() -> None:
    """From now on no request of this process waits for a silent Hub for ever."""
    from huggingface_hub import set_client_factory

    set_client_factory(client_that_gives_up)
