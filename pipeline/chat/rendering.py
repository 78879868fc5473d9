"""Messages and models as HTML for the page: a model's Markdown is shown, and neither it nor a user can write HTML."""

import re
from collections.abc import Sequence
from functools import cache, lru_cache
from html import escape

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

from pipeline.chat.conversation import Speaker

# Gradio copies the text of this button's parent, and shows the second picture for two seconds.
COPY = (
    '<button type="button" title="{title}" class="copy_code_button"><span class="copy-text">'
    '<svg viewBox="0 0 15 15" width="15" height="15"><path fill="currentColor" d="M12.7 4.5v8.2H4.5V4.5zm0-.9H4.5a.9.9 0 0 0-.9.9v8.2a.9.9 0 0 0 '
    '.9.9h8.2a.9.9 0 0 0 .9-.9V4.5a.9.9 0 0 0-.9-.9"/><path fill="currentColor" d="M1.8 8.2H.9V1.8a.9.9 0 0 1 .9-.9h6.4v.9H1.8Z"/></svg></span>'
    '<span class="check"><svg viewBox="0 0 17 17" width="17" height="17" fill="none" stroke="currentColor"><path d="m13.8 4.8-7.4 7.4-3.2-3.2"/>'
    "</svg></span></button>"
)
LINKS = ("http://", "https://", "mailto:")


class SafeMarkdown(MarkdownIt):
    """CommonMark with tables, in which HTML is text, pictures are links, and a link leads to a website or an address."""

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
    """Return a message with its copy button, in one line: Gradio would dedent several. `text` is what the button copies."""
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
