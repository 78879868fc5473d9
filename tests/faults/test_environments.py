"""What a shell, a container or a batch system gives a command: other encodings, closed streams, names that are no UTF-8."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from pipeline.run_dir.rows import append_row, read_rows
from pipeline.run_dir.run_directory import RunDirectory
from tests.runner import ROOT, WarmRunner

pytestmark = pytest.mark.full

# As entries do: what it reads is printed, a file is opened first, and a library writes to the streams itself.
COMMAND = """
import os, sys
from pipeline.run_dir.failures import exit_with_status

def main(argv):
    with open("rows", "w") as file:
        number = file.fileno()
        said = sys.stdin.read()
        print("Za\\u017c\\u00f3\\u0142\\u0107 \\u65e5\\u672c \\udcff", said, flush=True)
        sys.stderr.write("a library's warning \\u017c\\n")
        os.write(1, b"a child's word\\n")
        file.write(f"{number} {sys.stdout.isatty()}")
    return 0

exit_with_status(main)
"""
ASCII = [
    {"PYTHONIOENCODING": "ascii"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"LC_ALL": "POSIX"},
    {"LANG": "C", "PYTHONIOENCODING": "latin-1"},
]


def command(folder, redirections: str = "", *, stdin: bytes = b"", **environment: str) -> subprocess.CompletedProcess:
    words = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-c", COMMAND]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(words, input=stdin, capture_output=True, cwd=folder, env=environ)


@pytest.mark.parametrize("environment", ASCII, ids=str)
def test_text_that_a_terminal_cannot_show_ends_no_command(environment, tmp_path):
    done = command(tmp_path, stdin="and \u017c and ".encode() + b"\xff\xfe", **environment)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout.startswith(b"Za")
    assert b"a library's warning" in done.stderr


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&-", ">&- 2>&-", ">&- 2>&- <&-"])
def test_a_command_with_closed_streams_runs_and_keeps_its_files_clean(redirections, tmp_path):
    done = command(tmp_path, redirections)
    assert done.returncode == 0, done.stderr
    number, terminal = (tmp_path / "rows").read_text().split()
    assert (int(number) > 2, terminal) == (True, "False")
    assert b"Traceback" not in done.stdout + done.stderr


def test_python_without_docstrings_is_refused_in_a_sentence(tmp_path):
    done = command(tmp_path, PYTHONOPTIMIZE="2")
    assert (done.returncode, done.stderr.count(b"\n")) == (64, 1)
    assert b"PYTHONOPTIMIZE" in done.stderr


def test_a_run_below_a_folder_name_outside_utf8_trains_and_reports(tmp_path, cache, text_files, warm):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    runner = WarmRunner(folder, cache, text_files, [], warm)
    run = {"directory": str(tmp_path / "runs"), "name": "run"}
    recipe = runner.recipe("tiny", "gpt2", run=run, train={"max_steps": 2, "eval_strategy": "no"})
    ended = warm.run("pretrain", str(recipe), WHOLE_REPORT="yes")
    assert ended.statuses == [0], ended.output[-4000:]
    assert "Traceback" not in ended.output
    directory = RunDirectory(tmp_path / "runs" / "run")
    assert directory.read_manifest()["command"][1] == str(recipe)
    assert "caf\\udce9" in (directory.report / "report.html").read_text()


def test_data_files_whose_names_are_no_utf8_train(tmp_path, cache, text_files, warm):
    folder = tmp_path / "data"
    folder.mkdir()
    for number, path in enumerate(text_files):
        (folder / os.fsdecode(b"%d-\xe9.jsonl" % number)).write_bytes(path.read_bytes())
    runner = WarmRunner(tmp_path, cache, text_files, [], warm)
    recipe = runner.recipe("tiny", "gpt2", train={"max_steps": 2, "eval_strategy": "no"})
    written = yaml.safe_load(recipe.read_text())
    del written["data"]["validation"]
    written["data"]["sources"] = [{"files": str(folder / "*.jsonl")}]
    recipe.write_text(yaml.safe_dump(written))
    assert "Traceback" not in runner.train(recipe).output


def test_rows_keep_text_that_is_no_unicode(tmp_path):
    row = {"text": "caf\udce9 \u017c"}
    append_row(tmp_path / "rows.jsonl", row)
    assert read_rows(tmp_path / "rows.jsonl") == [row]
    assert json.loads((tmp_path / "rows.jsonl").read_bytes()) == row
