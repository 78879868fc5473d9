"""The page: one or several speakers side by side, in Gradio, on this machine's loopback address.

A model's Markdown is shown; HTML stays text, and nothing is fetched from elsewhere. The answer to each request forbids
the browser the rest.
"""

import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache, lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from pipeline.chat.conversation import Conversation, Sampling, Speaker
from pipeline.process.errors import InputMissingError, ServiceError, TandemError
from pipeline.process.network import LOOPBACK, host_of

# Messages and models as HTML: neither a model nor a user can write HTML.

# Gradio copies the text of this button's parent, and shows the second picture for two seconds.
COPY = (
    '<button type="button" title="{title}" class="copy_code_button"><span class="copy-text">'
    '<svg viewBox="0 0 15 15" width="15" height="15"><path fill="currentColor" d="M12.7 4.5v8.2H4.5V4.5zm0-.9H4.5a.9.9 0 0 0-.9.9v8.2a.9.9 0 0 0 '  # noqa: E501
    '.9.9h8.2a.9.9 0 0 0 .9-.9V4.5a.9.9 0 0 0-.9-.9"/><path fill="currentColor" d="M1.8 8.2H.9V1.8a.9.9 0 0 1 .9-.9h6.4v.9H1.8Z"/></svg></span>'  # noqa: E501
    '<span class="check"><svg viewBox="0 0 17 17" width="17" height="17" fill="none" stroke="currentColor"><path d="m13.8 4.8-7.4 7.4-3.2-3.2"/>'  # noqa: E501
    "</svg></span></button>"
)
LINKS = ("http://", "https://", "mailto:")


class SafeMarkdown(MarkdownIt):
    """CommonMark with tables, in which HTML is text, pictures are links, and a link leads to a website or an
    address."""

    def __init__(self) -> None:
        super().__init__("commonmark", {"html": False, "breaks": True})
        self.enable(["table", "strikethrough"]).disable("image")
        for kind in ("fence", "code_block"):
            self.add_render_rule(kind, _code)

    def validateLink(self, url: str) -> bool:
        return url.lower().startswith(LINKS)


def _code(self: RendererHTML, tokens: Sequence[Token], place: int, options: OptionsDict, env: EnvType) -> str:
    copy = COPY.format(title="Copy the code")
    return f'<div class="code_wrap">{copy}<pre><code>{escape(tokens[place].content)}</code></pre></div>'


@cache
def _markdown() -> SafeMarkdown:
    return SafeMarkdown()


@lru_cache(maxsize=512)  # A conversation is rendered again with every piece of its last answer.
def html_of(text: str, *, markdown: bool, done: bool = True) -> str:
    """Return a message with its copy button, in one line: Gradio would dedent several. `text` is what the button
    copies."""
    if not text.strip():
        shown = f'<div class="plain empty">{"(an empty answer)" if done else "..."}</div>'
    elif markdown:
        shown = f'<div class="prose">{_markdown().render(text)}</div>'
    else:
        shown = f'<div class="plain">{escape(text)}</div>'
    source = f'<span class="source">{escape(text)}</span>'
    copied = f'<div class="copy">{COPY.format(title="Copy the message")}{source}</div>' if done else ""
    return re.sub(r"[\n\t]", lambda found: f"&#{ord(found[0])};", shown + copied)


def card_of(speaker: Speaker) -> str:
    """Return what the model is: name, kind, sizes, data, place."""
    lines = [speaker.sizes]
    if speaker.trained_on:
        lines.append(f"trained on {speaker.trained_on}")
    facts = "".join(f"<p>{escape(line)}</p>" for line in [*lines, speaker.path])
    return f'<div class="model"><h2>{escape(speaker.name)} <span>{speaker.kind}</span></h2>{facts}</div>'


# A visitor's conversation with every model of the page.


# Between two pictures of a growing answer: a small model writes hundreds of tokens a second, too many for a browser
SHOWN_S = 0.1


class Visit:
    """One browser tab. turns: questions, each with the answer of every speaker."""

    def __init__(self, speakers: list[Speaker], *, notify: Callable[[str], Any] = print):
        self.speakers, self.notify = speakers, notify
        self.conversations = [Conversation(speaker, notify=notify) for speaker in speakers]
        self.turns: list[dict[str, Any]] = []
        # Each conversation's messages before the last turn; None where that turn cannot be taken back.
        self.before: list[list[dict]] | None = None

    def __deepcopy__(self, memo: dict) -> "Visit":
        """Return an empty visit: Gradio begins each tab with a copy of the first one, and the models are the same for
        all."""
        return Visit(self.speakers, notify=self.notify)

    def answer(self, text: str, *, system: str | None, sampling: Sampling) -> Generator[None, None, None]:
        """Let the last turn grow by pieces of every speaker's answer.

        Raises DataError when a chat template refuses the messages; the conversations are then as they were.
        """
        earlier, self.before = self.before, [list(conversation.messages) for conversation in self.conversations]
        for conversation in self.conversations:
            conversation.system = system
        answers = ["" for _ in self.conversations]
        self.turns.append({"question": text, "answers": answers})
        try:
            yield
            yield from self._grow(answers, text, sampling)
        except TandemError:
            self.take_back()
            self.before = earlier
            raise

    def _grow(self, answers: list[str], text: str, sampling: Sampling) -> Generator[None, None, None]:
        with ExitStack() as left:
            growing = {
                place: left.enter_context(closing(conversation.answer(text, sampling)))
                for place, conversation in enumerate(self.conversations)
            }
            shown = time.monotonic()
            while growing:
                for place, pieces in list(growing.items()):
                    piece = next(pieces, None)
                    if piece is None:
                        del growing[place]
                    else:
                        answers[place] += piece
                if time.monotonic() - shown > SHOWN_S:
                    yield
                    shown = time.monotonic()

    def take_back(self) -> str | None:
        """Take the last turn out of the conversations and return its question; None where that is not possible."""
        if not self.turns or self.before is None:
            return None
        for conversation, messages in zip(self.conversations, self.before, strict=True):
            conversation.messages = messages
        self.before = None
        return self.turns.pop()["question"]

    def shown(self, *, growing: bool = False) -> list[list[dict[str, Any]]]:
        """Return the value of each speaker's Chatbot. growing: the last answers are not at their end."""
        return [
            self._shown(place, conversation.speaker, growing=growing)
            for place, conversation in enumerate(self.conversations)
        ]

    def _shown(self, place: int, speaker: Speaker, *, growing: bool) -> list[dict[str, Any]]:
        messages = []
        for turn in self.turns:
            done = not (growing and turn is self.turns[-1])
            answer = html_of(turn["answers"][place], markdown=speaker.chats, done=done)
            messages += [
                {"role": "user", "content": html_of(turn["question"], markdown=False)},
                {"role": "assistant", "content": answer},
            ]
        return messages


# The page, its scripts and its event stream come from the address it was opened at, and from nowhere else.
POLICY = (
    "default-src 'self' data: blob:; frame-ancestors 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; object-src 'none'; base-uri 'self'; form-action 'self'"
)
MOST_MESSAGE_CHARS = 50_000  # many times what a small model reads; a message of 20 MB took 2 GB and all others waited
MOST_REQUEST_BYTES = 2**20
STYLE = """
.gradio-container { width: 100% !important; max-width: min(100%, 56rem) !important; margin: 0 auto !important; }
.gradio-container:has(.talk + .talk) { max-width: min(100%, 90rem) !important; }
.gradio-container > .main { padding: 1rem !important; max-width: none !important; }
.models { display: grid !important; grid-auto-columns: minmax(0, 1fr); grid-template-rows: auto minmax(14rem, 1fr); column-gap: 1rem; row-gap: .5rem; }
.models > .talk { display: grid; grid-row: span 2; grid-template-rows: subgrid; min-width: 0 !important; }
.model h2 { font-size: 1.1rem; font-weight: 600; margin: 0; overflow-wrap: anywhere; }
.model h2 span { font-size: .75rem; font-weight: 400; padding: .1rem .5rem; margin-left: .25rem; white-space: nowrap;
  border: 1px solid var(--border-color-primary); border-radius: 1rem; }
.model p { font-size: .8rem; line-height: 1.4; margin: 0; opacity: .75; overflow-wrap: anywhere; }
.talk > .conversation { height: 0; min-height: 100%; }
.conversation button[aria-label="Clear"], .conversation button[title="Clear"] { display: none; }
.conversation .message-content, .conversation .message-markdown-disabled { white-space: normal !important; }
.conversation .message-content { padding-right: 1rem; }
.conversation .md { overflow-wrap: anywhere; }
.conversation .plain { white-space: pre-wrap; }
.conversation .empty { opacity: .6; }
.conversation .copy { position: absolute; right: -.4rem; bottom: -.35rem; opacity: .5; }
.conversation .copy:hover, .conversation .copy:focus-within { opacity: 1; }
.conversation .copy .check { position: absolute; inset: 0; background: var(--background-fill-primary); }
.conversation .copy .source { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: pre; user-select: none; }
.conversation .prose table { display: block; overflow-x: auto; border: 0 !important; padding: 0; }
.conversation .prose li { font-size: inherit; }
footer { display: none !important; }
@media (max-width: 700px) {
  .models:has(.talk + .talk) { grid-template-rows: none; grid-auto-rows: auto minmax(12rem, 1fr); }
  .models:has(.talk + .talk) p:not(:first-of-type) { display: none; }
}
@media (min-width: 701px) { .models > .talk { grid-row: 1 / span 2; } }
"""  # noqa: E501


def require_gradio() -> None:
    """Raise InputMissingError when Gradio is not installed; imports nothing."""
    if importlib.util.find_spec("gradio") is None:
        raise InputMissingError(
            'command line: --web needs the package gradio, which is not installed. Run pip install "tandem-llm[web]", '
            "or leave --web out to talk in the terminal."
        )


def show(speakers: list[Speaker], *, system: str | None, sampling: Sampling) -> None:
    """Show the page until Ctrl-C or SIGTERM.

    Where it listens is Gradio's GRADIO_SERVER_NAME and GRADIO_SERVER_PORT: by default 127.0.0.1 and the first free
    port from 7860 on (GRADIO_NUM_PORTS: of so many). Raises ServiceError when there is no such address or no free
    port.
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
            f"command line: the page cannot listen ({error}). Name a free port with GRADIO_SERVER_PORT, an address of "
            "this machine with GRADIO_SERVER_NAME."
        ) from None
    print(f"{address} shows {', '.join(speaker.name for speaker in speakers)}. Ctrl-C ends it.", flush=True)
    ended.wait()
    blocks.close(verbose=False)


def own_hosts(environ: Mapping[str, str]) -> frozenset[str] | None:
    """Return the names that a browser on this machine calls the page by; None where it listens for other machines
    too."""
    name = environ.get("GRADIO_SERVER_NAME", "127.0.0.1").strip("[]").lower()
    return LOOPBACK if name in LOOPBACK else None


class Guard:
    """Refuse what no visitor of the page sends, and add the policy to every answer (ASGI).

    own_hosts: the hosts that Host and Origin may name. A website that a browser was led to believe to be this machine
    (DNS rebinding) names its own. None: any, as behind a Space's proxy.
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


async def _refuse(send: Any, status: int, reason: str) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-security-policy", POLICY.encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason.encode()})


def page(speakers: list[Speaker], *, system: str | None, sampling: Sampling) -> Any:
    """Return the Gradio app."""
    import gradio

    names = ", ".join(speaker.name for speaker in speakers)
    with gradio.Blocks(title=f"{names} - Tandem", analytics_enabled=False, fill_height=True) as blocks:
        visit = gradio.State(Visit(speakers, notify=gradio.Info))  # Gradio forgets it an hour after its tab is closed.
        with gradio.Row(scale=1, equal_height=True, elem_classes="models"):
            chatbots = [
                _chatbot(speaker, examples=_examples(speakers) if speaker is speakers[0] else [])
                for speaker in speakers
            ]
        box = gradio.Textbox(
            placeholder="Message (Shift+Enter begins a line)",
            show_label=False,
            container=False,
            submit_btn=True,
            max_lines=8,
            max_length=MOST_MESSAGE_CHARS,
            autofocus=True,
        )
        with gradio.Row(elem_classes="actions"):
            again = gradio.Button("Regenerate", size="sm", scale=0, min_width=150)
            new = gradio.Button("New conversation", size="sm", scale=0, min_width=150)
        with gradio.Accordion("Settings", open=False):
            system_box = gradio.Textbox(
                system or "",
                label="System message",
                max_lines=4,
                max_length=MOST_MESSAGE_CHARS,
                visible=any(speaker.takes_system for speaker in speakers),
            )
            with gradio.Row():
                controls = _controls(sampling, longest=_longest(speakers, sampling))
        _connect(visit, chatbots, box, [system_box, *controls], again, new, speakers)
    return blocks


def _examples(speakers: list[Speaker]) -> list[dict[str, str]]:
    """Return the prompts that the first run with some was sampled with, as an empty Chatbot takes them."""
    return [{"text": text} for text in next((speaker.examples for speaker in speakers if speaker.examples), ())]


def _chatbot(speaker: Speaker, *, examples: list[dict[str, str]]) -> Any:
    import gradio

    with gradio.Column(min_width=300, elem_classes="talk"):
        gradio.HTML(card_of(speaker))
        return gradio.Chatbot(
            show_label=False,
            placeholder="Ask something." if speaker.chats else "A base model: it continues what you write.",
            examples=examples or None,
            elem_classes="conversation",
            scale=1,
            height=None,
            render_markdown=False,  # html_of has done it, and Gradio's would take HTML for HTML.
            latex_delimiters=[],
            reasoning_tags=[],
            feedback_options=None,
            buttons=[],  # Copying would give the HTML.
        )


def _longest(speakers: list[Speaker], sampling: Sampling) -> int:
    """Return the most tokens that an answer of any of them can have."""
    positions = [speaker.positions for speaker in speakers]
    known = [number for number in positions if number]
    return max(known) if len(known) == len(positions) else max(4096, sampling.max_new_tokens)


def _controls(sampling: Sampling, *, longest: int) -> list[Any]:
    """Return the controls in the order of `Sampling`'s fields."""
    import gradio

    look = {"min_width": 180, "buttons": []}
    tokens = min(sampling.max_new_tokens, longest)
    return [
        gradio.Slider(0, max(2, sampling.temperature), sampling.temperature, step=0.05, label="temperature", **look),
        gradio.Slider(0, max(200, sampling.top_k or 0), sampling.top_k or 0, step=1, label="top_k (0: all)", **look),
        gradio.Slider(0, 1, sampling.top_p or 1.0, step=0.01, label="top_p", **look),
        gradio.Slider(1, longest, tokens, step=1, label="max_new_tokens", **look),
        gradio.Number(sampling.seed, precision=0, minimum=0, label="seed", min_width=180),
    ]


def _connect(visit, chatbots, box, settings, again, new, speakers: list[Speaker]) -> None:
    import gradio

    quiet = {"api_visibility": "private", "show_progress": "hidden"}
    answering = quiet | {"concurrency_id": "answer"}  # A model answers one tab at a time.
    at_rest, busy = {"submit_btn": True, "stop_btn": False}, {"submit_btn": False, "stop_btn": True}
    outputs = [box, again, *chatbots]

    def answer(visit: Visit, text: str, settings: list[Any], **first: Any):
        """Yield values of the outputs while the answers grow."""
        system, temperature, top_k, top_p, max_new_tokens, seed = settings
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
        begun = [gradio.update(**first, **busy), gradio.update(interactive=False)]
        try:
            with closing(visit.answer(text, system=system.strip() or None, sampling=sampling)) as growing:
                for _ in growing:
                    yield [*begun, *visit.shown(growing=True)]
                    begun = [gradio.skip()] * len(begun)
        except TandemError as error:
            raise gradio.Error(str(error)) from None

    def send(visit: Visit, text: str, *settings: Any):
        if text.strip():
            yield from answer(visit, text.strip(), list(settings), value="")
        else:
            yield [gradio.skip()] * len(outputs)

    def regenerate(visit: Visit, *settings: Any):
        if (question := visit.take_back()) is None:
            yield [gradio.skip()] * len(outputs)
        else:
            yield from answer(visit, question, list(settings))

    def rest(visit: Visit):
        return [gradio.update(**at_rest), gradio.update(interactive=True), *visit.shown()]

    def start_over():
        fresh = Visit(speakers, notify=gradio.Info)
        return fresh, *rest(fresh)

    def example(event: gradio.SelectData):
        return event.value["text"]

    running = [
        box.submit(send, [visit, box, *settings], outputs, **answering),
        again.click(regenerate, [visit, *settings], outputs, **answering),
    ]
    for chatbot in chatbots:
        chosen = chatbot.example_select(example, None, box, **quiet)
        running.append(chosen.then(send, [visit, box, *settings], outputs, **answering))
    for event in running:
        event.then(rest, visit, outputs, **quiet)
    box.stop(rest, visit, outputs, cancels=running, **quiet)
    new.click(start_over, None, [visit, *outputs], cancels=running, **quiet)
