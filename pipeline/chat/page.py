"""The page: one or several speakers side by side, in Gradio, on this machine's loopback address.

What is said stays text: no Markdown, no HTML, nothing is fetched from elsewhere. The answer to each request forbids the
browser the rest.
"""

import importlib.util
import os
import re
import signal
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from typing import Any
from urllib.parse import urlsplit

from pipeline.chat.conversation import Conversation, Sampling, Speaker
from pipeline.process.errors import InputMissingError, ServiceError, TandemError

# The page, its scripts and its event stream come from the address it was opened at, and from nowhere else.
POLICY = (
    "default-src 'self' data: blob:; frame-ancestors 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'"
)
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
MOST_MESSAGE_CHARS = (
    50_000  # many times what a small model can read; a message of 20 MB took 2 GB and all others waited
)
MOST_REQUEST_BYTES = 2**20
VISIT_S = 3600.0  # after which a tab that was closed is forgotten
STYLE = """
.gradio-container { max-width: 1200px !important; margin: 0 auto !important; }
.conversation { height: calc(100dvh - 13rem) !important; min-height: 14rem; }
.conversation .md { overflow-wrap: anywhere; white-space: pre-wrap; }
.conversation button[aria-label="Clear"], .conversation button[title="Clear"] { display: none; }
@media (max-width: 700px) { .conversation { height: calc(50dvh - 4rem) !important; } }
footer { display: none !important; }
"""


def require_gradio() -> None:
    """Raises InputMissingError when Gradio is not installed; imports nothing."""
    if importlib.util.find_spec("gradio") is None:
        raise InputMissingError(
            'command line: --web needs the package gradio, which is not installed. Run pip install "tandem-llm[web]", '
            "or leave --web out to talk in the terminal."
        )


def show(speakers: list[Speaker], *, system: str | None, sampling: Sampling) -> None:
    """Show the page until Ctrl-C or SIGTERM.

    Where it listens is Gradio's GRADIO_SERVER_NAME and GRADIO_SERVER_PORT: by default 127.0.0.1 and the first free port from
    7860 on (GRADIO_NUM_PORTS: of so many). Raises ServiceError when there is no such address or no free port.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    # Gradio asks its own address whether it is there; a proxy that the environment names cannot know.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(
        filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1,localhost"])
    )
    import gradio

    blocks = page(speakers, system=system, sampling=sampling)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    from starlette.middleware import Middleware

    # The system's own fonts: Gradio's themes name some of Google's.
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    try:
        _, address, _ = blocks.launch(
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            run_history=False,
            footer_links=[],
            theme=gradio.themes.Default(**fonts),
            css=STYLE,
            app_kwargs={"middleware": [Middleware(Guard, own_hosts=own_hosts(os.environ))]},
            max_file_size=0,
        )
    except OSError as error:
        raise ServiceError(
            f"command line: the page cannot listen ({error}). Name a free port with GRADIO_SERVER_PORT, an address of this machine "
            "with GRADIO_SERVER_NAME."
        ) from None
    print(f"{address} shows {', '.join(speaker.name for speaker in speakers)}. Ctrl-C ends it.", flush=True)
    ended.wait()
    blocks.close(verbose=False)


def own_hosts(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the names that a browser on this machine calls the page by; None where it listens for other machines too."""
    name = environ.get("GRADIO_SERVER_NAME", "127.0.0.1").strip("[]").lower()
    return LOOPBACK if name in LOOPBACK else None


class Guard:
    """Refuse what no visitor of the page sends, and add the policy to every answer (ASGI).

    own_hosts: the hosts that Host and Origin may name. A website that a browser was led to believe to be this machine (DNS
    rebinding) names its own. None: any, as behind a Space's proxy.
    """

    def __init__(self, app: Any, *, own_hosts: frozenset[str] | None):
        self.app, self.own_hosts = app, own_hosts

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        asked = [headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin")]
        if self.own_hosts is not None and any(host and host_of(host) not in self.own_hosts for host in asked):
            await _refuse(send, 403, "This page answers the machine that it runs on, by its own address.")
        elif scope["path"].rstrip("/").endswith("/upload"):
            await _refuse(send, 404, "This page takes no files.")
        elif int(headers.get(b"content-length", b"0") or 0) > MOST_REQUEST_BYTES or b"transfer-encoding" in headers:
            await _refuse(send, 413, f"A request holds at most {MOST_REQUEST_BYTES:,} bytes.")
        else:

            async def with_policy(message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
                await send(message)

            await self.app(scope, receive, with_policy)


def host_of(value: str) -> str:
    """Return the name in a Host or Origin header, without scheme and port."""
    return urlsplit(value if "//" in value else f"//{value}").hostname or value


async def _refuse(send: Any, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-security-policy", POLICY.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})


def escaped(text: str) -> str:
    """Return a message for Chatbot, which takes it for HTML and dedents it: shown, it is `text` to the last space."""
    return re.sub(r"(?m)[&<>\t]|^ |\A\n", lambda found: f"&#{ord(found[0])};", text)


class Visit:
    """One browser tab: a conversation with each speaker, and its transcript."""

    def __init__(self, speakers: list[Speaker]):
        import gradio

        self.conversations = [Conversation(speaker, notify=gradio.Info) for speaker in speakers]
        self.transcripts: list[list[dict[str, str]]] = [[] for _ in speakers]

    def answer(self, text: str, *, system: str | None, sampling: Sampling) -> Generator[None, None, None]:
        """Let `said` grow by a piece of every speaker's answer at a time."""
        for conversation, transcript in zip(self.conversations, self.transcripts, strict=True):
            conversation.system = system
            transcript += [{"role": "user", "content": text}, {"role": "assistant", "content": ""}]
        yield
        with ExitStack() as left:
            answers = [
                (left.enter_context(closing(conversation.answer(text, sampling))), transcript[-1])
                for conversation, transcript in zip(self.conversations, self.transcripts, strict=True)
            ]
            while answers:
                for answer in list(answers):
                    pieces, message = answer
                    piece = next(pieces, None)
                    if piece is None:
                        answers.remove(answer)
                    else:
                        message["content"] += piece
                yield

    def shown(self) -> list[list[dict[str, str]]]:
        """Return the value of each speaker's Chatbot."""
        return [
            [message | {"content": escaped(message["content"])} for message in transcript]
            for transcript in self.transcripts
        ]


def page(speakers: list[Speaker], *, system: str | None, sampling: Sampling) -> Any:
    """Return the Gradio app."""
    import gradio

    with gradio.Blocks(title="Tandem", analytics_enabled=False, fill_height=True) as blocks:
        visit = gradio.State(lambda: Visit(speakers), time_to_live=VISIT_S)
        with gradio.Row():
            chatbots = [
                gradio.Chatbot(
                    label=speaker.name if speaker.chats else f"{speaker.name} (base)",
                    placeholder="Ask something." if speaker.chats else "A base model: it continues what you write.",
                    elem_classes="conversation",
                    min_width=320,
                    render_markdown=False,
                    reasoning_tags=[],
                    feedback_options=None,
                    buttons=[],  # Copying would give the escapes.
                )
                for speaker in speakers
            ]
        box = gradio.Textbox(
            placeholder="Message",
            show_label=False,
            container=False,
            submit_btn=True,
            max_lines=8,
            max_length=MOST_MESSAGE_CHARS,
            autofocus=True,
        )
        with gradio.Accordion("Settings", open=False):
            system_box = gradio.Textbox(
                system or "", label="System message", max_lines=4, max_length=MOST_MESSAGE_CHARS
            )
            with gradio.Row():
                controls = _controls(sampling)
        with gradio.Row():
            new = gradio.Button("New conversation", size="sm", scale=0, min_width=180)
        _connect(visit, chatbots, box, system_box, controls, new, speakers)
    return blocks


def _controls(sampling: Sampling) -> list[Any]:
    """In the order of `Sampling`'s fields."""
    import gradio

    look = {"min_width": 180, "buttons": []}
    longest = max(4096, sampling.max_new_tokens)
    return [
        gradio.Slider(0, max(2, sampling.temperature), sampling.temperature, step=0.05, label="temperature", **look),
        gradio.Slider(0, max(200, sampling.top_k or 0), sampling.top_k or 0, step=1, label="top_k (0: all)", **look),
        gradio.Slider(0, 1, sampling.top_p or 1.0, step=0.01, label="top_p", **look),
        gradio.Slider(1, longest, sampling.max_new_tokens, step=1, label="max_new_tokens", **look),
        gradio.Number(sampling.seed, precision=0, minimum=0, label="seed", min_width=180),
    ]


def _connect(visit, chatbots, box, system_box, controls, new, speakers: list[Speaker]) -> None:
    import gradio

    private = {"api_visibility": "private", "show_progress": "hidden"}
    at_rest, busy = {"submit_btn": True, "stop_btn": False}, {"submit_btn": False, "stop_btn": True}

    def send(visit: Visit, text: str, system: str, temperature, top_k, top_p, max_new_tokens, seed):
        if not text.strip():
            yield [gradio.skip()] * (1 + len(chatbots))
            return
        if len(text) + len(system) > MOST_MESSAGE_CHARS:
            raise gradio.Error(
                f"The message has {len(text) + len(system):,} characters; at most {MOST_MESSAGE_CHARS:,} are read."
            )
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k or None,
            top_p=top_p,
            max_new_tokens=max_new_tokens,
            seed=int(seed or 0),
        )
        first = gradio.update(value="", **busy)
        try:
            with closing(visit.answer(text.strip(), system=system.strip() or None, sampling=sampling)) as growing:
                for _ in growing:
                    yield [first, *visit.shown()]
                    first = gradio.skip()
        except TandemError as error:
            raise gradio.Error(str(error)) from None

    def rest(visit: Visit):
        return [gradio.update(**at_rest), *visit.shown()]

    def start_over():
        return Visit(speakers), gradio.update(**at_rest), *([] for _ in chatbots)

    sending = box.submit(send, [visit, box, system_box, *controls], [box, *chatbots], **private)
    sending.then(rest, visit, [box, *chatbots], **private)
    box.stop(rest, visit, [box, *chatbots], cancels=sending, **private)
    new.click(start_over, None, [visit, box, *chatbots], cancels=sending, **private)
