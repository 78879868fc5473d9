"""`python -m pipeline.chat.serve`, asked once for an answer and then interrupted."""

import json
import os
import signal
import socket
import threading
import time
import urllib.request

BEGIN_S = 30.0
ANSWER_S = 30.0


def main(argv: list[str]) -> int:
    """Serve on a port of its own; the first word is the model."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threading.Thread(target=_ask, args=(port, argv[0]), daemon=True).start()
    from pipeline.chat.serve import main as serve

    return serve([*argv, "--port", str(port)])


def _ask(port: int, model: str) -> None:
    ends = time.monotonic() + BEGIN_S
    while time.monotonic() < ends:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    asked = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "stream": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            print(f"served: {answer.status} {answer.read(500)!r}", flush=True)
    except OSError as error:
        print(f"served: {error!r}", flush=True)
    os.kill(os.getpid(), signal.SIGINT)
