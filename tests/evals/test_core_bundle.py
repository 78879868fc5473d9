"""The files of CORE: from folders, from mirrors that give wrong things, and what is wrong with them reported."""

import dataclasses
import json
import shutil
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from pipeline.evals import core_bundle as fetch
from pipeline.evals.core_bundle import TASKS, git_blob, open_bundle
from pipeline.process.errors import DataError, InputMissingError, ServiceError
from tests.evals.conftest import SHARED
from tests.evals.core_items import write_bundle

ERROR_PAGE = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>'
COPA = next(task for task in TASKS if task.name == "copa")


@pytest.fixture
def folder(tmp_path):
    return write_bundle(tmp_path / "bundle", 4)


def test_folder_and_its_parent_are_one_bundle(folder, tmp_path):
    folder.rename(tmp_path / "eval_bundle")
    one, other = open_bundle(str(tmp_path)), open_bundle(str(tmp_path / "eval_bundle"))
    assert one.id == other.id == dataclasses.replace(one, sha256=dict([*one.sha256.items()][::-1])).id
    assert one.items == other.items
    assert not one.missing
    assert not any(one.published(task) for task in TASKS)


def test_a_missing_task_is_named_and_refused_when_asked_for(folder):
    (folder / "eval_data" / COPA.file).unlink()
    assert set(open_bundle(str(folder)).missing) == {"copa"}
    with pytest.raises(InputMissingError, match=r"the bundle lacks copa \(commonsense_reasoning/copa.jsonl is not in"):
        open_bundle(str(folder), wanted=["copa", "piqa"])


def test_every_wrong_row_is_reported_with_its_place(folder):
    path = folder / "eval_data" / COPA.file
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["gold"] = len(rows[0]["choices"])
    rows[1]["choices"] = "ab"
    del rows[2]["query"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:3]) + '{"query": "torn')
    with pytest.raises(DataError) as caught:
        open_bundle(str(folder))
    for number, what in enumerate(
        ("gold is", "choices is 'ab', where list belongs", "query is None", "is no JSON"), 1
    ):
        assert f"copa.jsonl:{number}: {what}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("copa", {"query": "q", "choices": ["a", "b"], "gold": True}, "gold is True, where int belongs"),
        ("copa", {"query": "q", "choices": ["a", "b"], "gold": -1}, "gold is -1, of 2 choices"),
        ("copa", {"query": "q", "choices": ["a"], "gold": 0}, "two texts or more"),
        ("copa", {"query": "q", "choices": ["a", 3], "gold": 0}, "two texts or more"),
        ("copa", ["q"], "is list, no object"),
        ("winograd", {"context_options": ["a", "b"], "gold": 0}, "continuation is None, where str belongs"),
        ("squad", {"context": "a", "continuation": ""}, "continuation is empty"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused(folder, name, row, said):
    file = next(task.file for task in TASKS if task.name == name)
    (folder / "eval_data" / file).write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"{file}:1: .*{said}"):
        open_bundle(str(folder))


def test_of_many_wrong_rows_the_first_are_reported_and_the_others_counted(folder):
    (folder / "eval_data" / COPA.file).write_text("{}\n" * 25)
    with pytest.raises(DataError, match="and 15 more") as caught:
        open_bundle(str(folder))
    assert "copa.jsonl:10: " in str(caught.value)
    assert "copa.jsonl:11: " not in str(caught.value)


def test_a_row_ends_at_a_newline_and_nowhere_else(folder):
    row = {"query": "one\u2028two\x85three", "choices": ["a", "b"], "gold": 0}
    (folder / "eval_data" / COPA.file).write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert open_bundle(str(folder)).items[COPA.file] == [row]


def test_tasks_not_asked_for_are_listed_as_missing_with_absent_ones(folder):
    (folder / "eval_data" / COPA.file).unlink()
    some = open_bundle(str(folder)).only(["piqa", "squad", "copa"])
    assert set(some.missing) == {task.name for task in TASKS} - {"piqa", "squad"}


def test_half_a_character_in_a_row_is_reported_by_its_row(folder):
    path = folder / "eval_data" / COPA.file
    lines = path.read_text().splitlines()
    item = json.loads(lines[1]) | {"query": "HALF"}
    path.write_text("\n".join([lines[0], json.dumps(item).replace("HALF", "\\ud83d"), *lines[2:]]) + "\n")
    with pytest.raises(DataError, match=r"copa\.jsonl:2: holds half of a character"):
        open_bundle(str(folder))


@pytest.mark.parametrize(
    ("content", "said"),
    [(ERROR_PAGE, "XML error page"), (b"", "is empty"), (b"<html><title>404</title>", "HTML page")],
)
def test_an_error_page_instead_of_a_file_is_reported_as_such(folder, content, said):
    (folder / "eval_data" / COPA.file).write_bytes(content)
    with pytest.raises(DataError, match=f"copa.jsonl.*{said}"):
        open_bundle(str(folder))


@pytest.fixture
def mirrors(folder, tmp_path, monkeypatch):
    """A server with a mirror of error pages, one of other content, and one of files; and what was asked of it."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            _, kind, file = self.path.split("/", 2)
            content = {"page": ERROR_PAGE, "other": b"{}\n", "cut": b"{"}.get(kind)
            if kind == "files":
                content = (folder / "eval_data" / file).read_bytes()
            self.send_response(200 if content is not None else 404)
            if kind == "cut":
                self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(fetch, "MIRRORS", ())
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield root, asked, monkeypatch
    server.shutdown()
    server.server_close()


def test_the_first_mirror_with_the_right_bytes_is_believed_once(mirrors, folder, tmp_path):
    root, asked, monkeypatch = mirrors
    addresses = [f"{root}/gone/{{file}}", f"{root}/page/{{file}}", f"{root}/other/{{file}}", f"{root}/files/{{file}}"]
    monkeypatch.setenv("TANDEM_CORE_MIRRORS", " ".join(addresses))
    content = (folder / "eval_data" / COPA.file).read_bytes()
    cache = tmp_path / "cache"
    assert fetch.fetch_file(COPA.file, git_blob(content), folder=cache) == content
    assert [path.split("/")[1] for path in asked] == ["gone", "page", "other", "files"]
    assert fetch.fetch_file(COPA.file, git_blob(content), folder=cache) == content
    assert len(asked) == 4
    (cache / git_blob(content)).write_bytes(b"damaged")
    assert fetch.fetch_file(COPA.file, git_blob(content), folder=cache) == content


def test_a_mirror_that_breaks_off_or_is_no_address_is_passed_over(mirrors, folder, tmp_path):
    root, asked, monkeypatch = mirrors
    addresses = [f"{root}/cut/{{file}}", "mirror.org/{file}", f"{root}/page/all.zip"]
    monkeypatch.setenv("TANDEM_CORE_MIRRORS", " ".join(addresses))
    monkeypatch.setattr(fetch, "MIRRORS", (f"{root}/files/{{file}}",))  # behind one's own
    content = (folder / "eval_data" / COPA.file).read_bytes()
    assert fetch.fetch_file(COPA.file, git_blob(content), folder=tmp_path / "cache") == content
    assert [path.split("/")[1] for path in asked] == ["cut", "page", "files"]


def test_nothing_is_asked_of_a_mirror_offline(mirrors, tmp_path):
    root, asked, monkeypatch = mirrors
    monkeypatch.setenv("TANDEM_CORE_MIRRORS", f"{root}/files/{{file}}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ServiceError, match="HF_HUB_OFFLINE is set"):
        fetch.fetch_file(COPA.file, COPA.blob, folder=tmp_path / "cache")
    assert not asked


def test_what_each_mirror_gave_is_reported_when_none_has_the_file(mirrors, tmp_path):
    root, _, monkeypatch = mirrors
    monkeypatch.setenv("TANDEM_CORE_MIRRORS", f"{root}/gone/{{file}} {root}/page/{{file}} {root}/other/{{file}}")
    with pytest.raises(ServiceError) as caught:
        open_bundle(cache=str(tmp_path / "cache"))
    for what in ("HTTP Error 404", "XML error page (AccessDenied)", "another content than the published file"):
        assert what in str(caught.value)
    assert not list((tmp_path / "cache" / "core").glob("[0-9a-f]*"))


def test_the_hash_of_a_file_is_the_one_git_uses():
    assert git_blob(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared evaluation bundle")
def test_the_published_files_are_known_by_their_hashes(tmp_path):
    shutil.unpack_archive(SHARED / "core_eval" / "eval_bundle.zip", tmp_path)
    bundle = open_bundle(str(tmp_path))
    assert {task.name for task in TASKS if not bundle.published(task)} == {
        "hellaswag",
        "hellaswag_zeroshot",
    }  # rebuilt
    assert {task.name: len(bundle.items[task.file]) for task in TASKS} == {task.name: task.rows for task in TASKS}
    assert bundle.sha256[COPA.file] == "595dca44dec54c849490bd403a3e24a29e3b944065783222ebb0eb1a55298846"
