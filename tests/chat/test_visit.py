"""What the page shows of a conversation, without a browser."""

import html
import inspect
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_answers import SUM

from pipeline.chat.conversation import Sampling, open_speaker
from pipeline.chat.page import Visit, html_of
from pipeline.process.errors import DataError

GREEDY = Sampling(temperature=0.0)
# All that Markdown and the copy button make.
TAGS = {
    "div", "span", "p", "strong", "em", "code", "pre", "a", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "br",
    "table", "thead", "tbody", "tr", "th", "td", "s", "button", "svg", "path",
}  # fmt: skip
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[l](javascript:alert(1))", "[l](data:text/html,<script>)",
    "![x](https://example.com/x.png)", "<a href='javascript:alert(1)'>x</a>", "`<b>`", "```\n</code></pre><script>x</script>\n```",
    "[a]: javascript:alert(1)\n\n[a]", "<javascript:alert(1)>", "&lt;script&gt;", "[l](JaVaScRiPt:alert(1))", "| <td onclick=x> |\n|---|\n| <b> |",
    "[l](https://example.com \"x' onclick=alert(1) y='\")", "</span></div><style>*{display:none}</style>", "[l](/gradio_api/x)", "\x00<b\x00>",
]  # fmt: skip


class Tags(HTMLParser):
    """Every tag with its attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


@given(
    st.lists(
        st.one_of(st.sampled_from(HOSTILE), st.text(alphabet="<>&;#\t\n aé\"'6*`[]()!|-", max_size=12)), max_size=5
    ),
    st.booleans(),
)
def test_a_message_makes_no_tags_but_markdowns_and_links_lead_to_websites_alone(parts, markdown):
    for tag, attributes in Tags(html_of(" ".join(parts), markdown=markdown)).found:
        assert tag in TAGS
        assert not any(name.startswith("on") or name in ("style", "src", "id") for name in attributes)
        assert attributes.get("href", "https://").startswith(("https://", "http://", "mailto:"))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_hostile_text_makes_a_picture_or_a_script(text):
    found = Tags(html_of(text, markdown=True)).found
    assert not {"script", "img", "style", "b"} & {tag for tag, _ in found}
    assert all(attributes["href"].startswith("https://example.com") for tag, attributes in found if tag == "a")


@given(st.text(alphabet="<>&;#\t\n aé\"'6", min_size=1, max_size=20).filter(str.strip))
def test_what_is_shown_and_copied_is_the_text_after_gradio_has_dedented_and_the_browser_parsed_it(text):
    shown = html.unescape(inspect.cleandoc(html_of(text, markdown=False)))
    assert shown.count(text) >= 2  # in the bubble and behind the copy button


def test_markdown_is_shown_with_code_as_it_was_written():
    shown = html.unescape(
        inspect.cleandoc(html_of("# T\n\n**b**\nline\n\n```python\n\tif x:\n    y\n```", markdown=True))
    )
    assert "<h1>T</h1>" in shown
    assert "<strong>b</strong><br />\nline" in shown
    assert "<code>\tif x:\n    y\n</code>" in shown


@pytest.fixture
def speaker(run):
    return open_speaker(str(run))


def answered(visit: Visit, *texts: str) -> Visit:
    for text in texts:
        for _ in visit.answer(text, system=None, sampling=GREEDY):
            pass
    return visit


def test_the_last_turn_can_be_taken_back_once(speaker):
    visit = answered(Visit([speaker]), "sum", "again")
    assert [turn["answers"] for turn in visit.turns] == [["It's [7*8][= 56] so 56."], ["still 56"]]
    assert visit.conversations[0].messages == SUM
    assert visit.take_back() == "again"
    assert visit.conversations[0].messages == SUM[:4]
    assert visit.take_back() is None  # no further
    assert len(visit.turns) == 1


def test_a_refused_message_leaves_no_trace_in_any_of_two_conversations(speaker):
    visit = answered(Visit([speaker, speaker]), "ping")
    before = [list(visit.turns), *(list(conversation.messages) for conversation in visit.conversations)]
    template = speaker.tokenizer.chat_template
    speaker.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(DataError):
        answered(visit, "again")
    speaker.tokenizer.chat_template = template
    assert [visit.turns, *(conversation.messages for conversation in visit.conversations)] == before
    assert visit.take_back() == "ping"
    assert visit.take_back() is None
    assert [conversation.messages for conversation in visit.conversations] == [[], []]
    answered(visit, "ping")
    assert answered(visit, "again").turns[-1]["answers"] == ["and pong it is"] * 2


def test_more_tokens_than_any_model_has_positions_are_not_offered():
    from pipeline.chat.page import _longest

    of = [SimpleNamespace(positions=number) for number in (128, 256, None)]
    assert _longest(of[:1], Sampling(max_new_tokens=512)) == 128
    assert _longest(of[:2], Sampling(max_new_tokens=512)) == 256
    assert _longest(of, Sampling(max_new_tokens=5000)) == 5000
