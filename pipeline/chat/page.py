"""The page: a conversation with one model in Gradio, on this machine's loopback address."""

import importlib.util
import itertools
import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any

from pipeline.chat.conversation import ChatModel, Conversation, Sampling, questions
from pipeline.process.errors import InputMissingError, ServiceError, TandemError

# Between two pictures of a growing answer: a small model writes hundreds of tokens a second, too many for a browser.
SHOWN_S = 0.1
MOST_MESSAGE_CHARS = 50_000  # many times what a small model reads
LOOPBACK = ("127.0.0.1", "localhost")


def require_gradio() -> None:
    """Raise InputMissingError when Gradio is not installed; imports nothing."""
    if importlib.util.find_spec("gradio") is None:
        raise InputMissingError(
            'command line: --web needs the package gradio, which is not installed. Run pip install "tandem-llm[web]", '
            "or leave --web out to talk in the terminal."
        )


def show(chat_model: ChatModel, *, system: str | None, sampling: Sampling) -> None:
    """Show the page until Ctrl-C or SIGTERM.

    Where it listens is Gradio's GRADIO_SERVER_NAME and GRADIO_SERVER_PORT: by default 127.0.0.1 and the first free
    port from 7860 on. Raises ServiceError when there is no such address or no free port.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read when Gradio is imported
    # Gradio asks its own address whether it is there; a proxy that the environment names cannot know.
    known = os.environ.get("NO_PROXY") or os.environ.get("no_proxy")
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(filter(None, [known, "127.0.0.1,localhost"]))
    import gradio
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    interface = chat_interface(chat_model, system=system, sampling=sampling)
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    # A website that a browser took for this machine (DNS rebinding) is called by its own name.
    is_local = os.environ.get("GRADIO_SERVER_NAME", LOOPBACK[0]) in LOOPBACK
    guard = [Middleware(TrustedHostMiddleware, allowed_hosts=list(LOOPBACK))] if is_local else []
    # The system's own fonts: Gradio's themes name some of Google's.
    fonts = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
    try:
        _, address, _ = interface.launch(
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            footer_links=[],
            theme=gradio.themes.Default(**fonts),
            app_kwargs={"middleware": guard},
            max_file_size=0,
        )
    except OSError as error:
        raise ServiceError(
            f"command line: the page cannot listen ({error}). Name a free port with GRADIO_SERVER_PORT, an address of "
            "this machine with GRADIO_SERVER_NAME."
        ) from None
    print(f"{address} shows {chat_model.name}. Ctrl-C ends it.", flush=True)
    ended.wait()
    interface.close(verbose=False)


def chat_interface(chat_model: ChatModel, *, system: str | None, sampling: Sampling) -> Any:
    """Return Gradio's chat page with the settings of Sampling."""
    import gradio

    tokens = chat_model.positions or max(4096, sampling.max_new_tokens)
    settings = [
        gradio.Textbox(system or "", label="System message", max_lines=4, visible=chat_model.takes_system),
        gradio.Slider(0, max(2, sampling.temperature), sampling.temperature, step=0.05, label="temperature"),
        gradio.Slider(0, max(200, sampling.top_k or 0), sampling.top_k or 0, step=1, label="top_k (0: all)"),
        gradio.Slider(0, 1, sampling.top_p or 1.0, step=0.01, label="top_p"),
        gradio.Slider(1, tokens, min(sampling.max_new_tokens, tokens), step=1, label="max_new_tokens"),
        gradio.Number(sampling.seed, precision=0, minimum=0, label="seed"),
    ]
    placeholder = "Ask something." if chat_model.chats else "A base model: it continues what you write."
    return gradio.ChatInterface(
        Answers(chat_model).answer,
        title=f"{chat_model.name} ({chat_model.kind})",
        description=f"{chat_model.sizes} - {chat_model.path}",
        chatbot=gradio.Chatbot(placeholder=placeholder, height="60vh", latex_delimiters=[], reasoning_tags=[]),
        textbox=gradio.Textbox(
            placeholder="Message", show_label=False, container=False, submit_btn=True, max_length=MOST_MESSAGE_CHARS
        ),
        additional_inputs=settings,
        additional_inputs_accordion=gradio.Accordion("Settings", open=False),
        examples=[[text] for text in chat_model.examples] or None,
        cache_examples=False,
        analytics_enabled=False,
        concurrency_limit=1,
    )


class Answers:
    """Answers to the messages of any tab; a tab's conversation is what Gradio hands in with each message."""

    def __init__(self, chat_model: ChatModel):
        self.chat_model = chat_model
        self.numbers = itertools.count()  # each answer is drawn with its own seed, a repeated one too
        self.written: dict[str, list[dict]] = {}  # the messages of an answer, tool calls apart, by the text shown

    def answer(
        self,
        text: str,
        history: list[dict],
        system: str = "",
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        max_new_tokens: int = 512,
        seed: int = 0,
    ) -> Generator[str, None, None]:
        """Yield the answer as it grows; the arguments after history are those of the page's settings."""
        import gradio

        conversation = Conversation(self.chat_model, system=system.strip() or None, notify=gradio.Info)
        conversation.messages = self._messages(history) if self.chat_model.chats else []
        sampling = Sampling(
            temperature=temperature,
            top_k=int(top_k) or None,
            top_p=top_p,
            max_new_tokens=int(max_new_tokens),
            seed=int(seed or 0) + next(self.numbers),
        )
        written, shown, shown_at = "", "", 0.0
        try:
            with closing(conversation.answer(text, sampling)) as pieces:
                for piece in pieces:
                    written += piece
                    if time.monotonic() - shown_at > SHOWN_S:
                        shown, shown_at = written, time.monotonic()
                        yield shown
            shown = written
            yield shown
        except TandemError as error:
            raise gradio.Error(str(error)) from None
        finally:
            turns = questions(conversation.messages)
            if turns:
                self.written[shown] = conversation.messages[turns[-1] + 1 :]

    def _messages(self, history: list[dict]) -> list[dict]:
        messages: list[dict] = []
        for turn in history:
            text = turn["content"]
            if not isinstance(text, str):
                text = "".join(part.get("text", "") for part in text)
            read = [{"role": turn["role"], "content": text}]
            if turn["role"] == "assistant":  # as the model wrote it, with its tool calls
                read = self.written.get(text) or read
            messages += read
        return messages
