"""Hub datasets against a server on this machine that speaks the few endpoints which reading needs."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from pipeline.artifacts.errors import InputMissingError, RecipeError
from pipeline.recipe.schema import Source
from pipeline.sources.hub_splits import chosen_paths

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "somebody/corpus"


class HubServer(ThreadingHTTPServer):
    """One dataset. failures: how many requests for content are answered by 503 first; asked: paths of what was fetched."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.card: dict = {}
        self.commit = COMMIT
        self.earlier: dict[str, dict[str, bytes]] = {}
        self.failures = 0
        self.status = 200
        self.asked: list[str] = []

    def at(self, revision: str) -> dict[str, bytes] | None:
        return self.files if revision in ("main", self.commit) else self.earlier.get(revision)

    def push(self, commit: str, **files: bytes) -> None:
        self.earlier[self.commit] = self.files
        self.commit, self.files = commit, {**self.files, **files}

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *_):
        pass

    def answer(self, content, headers=None, status=200):
        self.send_response(status)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        server = self.server
        if server.status != 200:
            code = {401: "RepoNotFound", 403: "GatedRepo"}[server.status]
            return self.answer(b"{}", {"X-Error-Code": code}, server.status)
        if self.path.startswith(f"/api/datasets/{REPO}"):
            revision = self.path.split("/revision/")[1].split("?")[0] if "/revision/" in self.path else "main"
            files = server.at(revision)
            if files is None:
                return self.answer(b"{}", {"X-Error-Code": "RevisionNotFound"}, 404)
            info = {
                "id": REPO,
                "sha": server.commit if revision == "main" else revision,
                "cardData": server.card,
                "siblings": [{"rfilename": name} for name in files],
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "private": False,
                "disabled": False,
                "gated": False,
            }
            return self.answer(json.dumps(info).encode(), {"Content-Type": "application/json"})
        commit, _, name = self.path.removeprefix(f"/datasets/{REPO}/resolve/").partition("/")
        if name in (server.at(commit) or {}):
            if server.failures:
                server.failures -= 1
                return self.answer(b"busy", status=503)
            if self.command == "GET":
                server.asked.append(name)
            content = server.at(commit)[name]
            return self.answer(content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": commit})
        return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        paths = parse_qs(asked.decode())["paths"]
        listed = [
            {
                "type": "file",
                "path": path,
                "size": len(content),
                "oid": "a" * 40,
                "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 100},
            }
            for path in paths
            if (content := self.server.at(self.path.rpartition("/")[2]).get(path)) is not None
        ]
        self.answer(json.dumps(listed).encode(), {"Content-Type": "application/json"})


@pytest.fixture
def hub():
    server = HubServer()
    server.files = {
        f"data/train-{n:05d}-of-00004.jsonl": "".join(
            json.dumps({"text": f"file {n} row {r}"}) + "\n" for r in range(5)
        ).encode()
        for n in range(4)
    }
    server.files["data/test-00000-of-00001.jsonl"] = b'{"text": "a test"}\n'
    server.files["README.md"] = b"# A corpus"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


READ = """
import json, logging, sys, time
logging.basicConfig(level=logging.INFO, format="%(message)s")
import pipeline.sources.hub_files as hub_files
hub_files.FIRST_WAIT_S = 0.02
from pipeline.artifacts.errors import TandemError
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
recipe = Recipe()
recipe.data.cache_dir = sys.argv[1]
recipe.data.sources = [Source(**json.loads(sys.argv[2]))]
try:
    train, validation = open_sources(recipe, kind="text")
    blocks = []
    for block in train[0].read():
        blocks.append(block)
        if len(blocks) == int(sys.argv[3]):
            break
    print(json.dumps({"revision": train[0].revision, "order": [f.label for f in train[0].files], "held": [f.label for f in validation[0].files], "texts": [i.text for b in blocks for i in b.items], "fingerprint": train[0].fingerprint}))
except TandemError as error:
    print(json.dumps({"status": error.status, "message": str(error)}))
"""


def environment_for(hub, folder, *, offline=False, endpoint=None):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": endpoint or hub.url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_OFFLINE": "1" if offline else "0",
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    return environment


def read(hub, folder, *, blocks=99, offline=False, endpoint=None, **source):
    environment = environment_for(hub, folder, offline=offline, endpoint=endpoint)
    spec = {"id": REPO, **source}
    command = [sys.executable, "-c", READ, str(folder / "cache"), json.dumps(spec), str(blocks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stderr}


def test_only_the_files_that_are_reached_are_fetched_and_the_next_start_fetches_none_again(hub, tmp_path):
    first = read(hub, tmp_path, blocks=1)
    assert first["revision"] == COMMIT
    assert sorted(first["order"]) == [f"data/train-{n:05d}-of-00004.jsonl" for n in range(3)]
    assert first["held"] == ["data/train-00003-of-00004.jsonl"]
    assert hub.asked == first["order"][:1]
    assert "have 1 of 3 files" in first["log"]
    second = read(hub, tmp_path)
    assert len(second["texts"]) == 15
    assert hub.asked == first["order"]
    assert second["fingerprint"] == first["fingerprint"]


def test_without_the_hub_a_cached_dataset_goes_on_and_says_so(hub, tmp_path):
    first = read(hub, tmp_path)
    for away in ({"offline": True}, {"endpoint": "http://127.0.0.1:9"}):
        again = read(hub, tmp_path, **away)
        assert again["texts"] == first["texts"]
        assert again["fingerprint"] == first["fingerprint"]
        assert "the Hub is away" in again["log"]


def test_without_the_hub_and_without_a_cache_the_start_fails_with_status_69(hub, tmp_path):
    for away in ({"offline": True}, {"endpoint": "http://127.0.0.1:9"}):
        failed = read(hub, tmp_path, **away)
        assert failed["status"] == 69
        assert REPO in failed["message"]


def test_an_overloaded_hub_is_asked_again(hub, tmp_path):
    hub.failures = 2
    assert len(read(hub, tmp_path)["texts"]) == 15


def test_content_that_is_not_what_it_should_be_is_named_when_it_is_fetched(hub, tmp_path):
    for name in list(hub.files):
        if "train" in name and "00003" not in name:
            hub.files[name] = b"<html><head><title>Too many requests</title></head></html>"
    failed = read(hub, tmp_path)
    assert failed["status"] == 65
    assert "looks like an HTML page (Too many requests)" in failed["message"]


@pytest.mark.parametrize(("status", "said"), [(401, "does not exist on the Hub, or is private"), (403, "is gated")])
def test_a_dataset_that_this_user_may_not_read_says_what_to_do(hub, tmp_path, status, said):
    hub.status = status
    failed = read(hub, tmp_path)
    assert failed["status"] == 66
    assert said in failed["message"]
    assert "HF_TOKEN" in failed["message"]


def test_a_missing_revision_is_named(hub, tmp_path):
    failed = read(hub, tmp_path, revision="v9")
    assert failed["status"] == 66
    assert "has no revision 'v9'" in failed["message"]


RUN = f"""\
run: {{name: hub, callbacks: ["mine:FailsOnce"]}}
tokenizer: {{vocab_size: 400}}
data:
  sources: [{{id: {REPO}, text_column: text}}]
  row_tokens: 16
  batch_tokens: 32
model: {{n_layer: 1, n_embd: 16, n_head: 2}}
train: {{max_steps: 8, per_device_train_batch_size: 2, save_steps: 3, logging_steps: 1}}
evals: {{bpb: {{tokens: 64, document_bytes: 64, at_start: false}}}}
samples: {{every_steps: 0}}
monitor: {{trackers: []}}
"""
FAILS_ONCE = """\
from pathlib import Path
from transformers import TrainerCallback


class FailsOnce(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5 and not Path("failed").exists():
            Path("failed").touch()
            raise RuntimeError("once")
"""


def test_a_run_goes_on_with_the_commit_that_it_began_with_also_without_the_hub(hub, tmp_path):
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "mine.py").write_text(FAILS_ONCE)
    command = [sys.executable, str(ROOT / "pipeline" / "pretrain.py"), "run.yaml"]

    def train(*overrides, **how):
        environment = environment_for(hub, tmp_path, **how) | {"TANDEM_CACHE": str(tmp_path / "cache")}
        how = {"capture_output": True, "text": True, "timeout": 120, "check": False}
        return subprocess.run([*command, *overrides], cwd=tmp_path, env=environment, **how)

    assert "RuntimeError: once" in train().stderr
    hub.push("f" * 40, **{"data/train-00004-of-00005.jsonl": b'{"text": "a new file"}\n'})
    new = train("run.name=new")
    assert f"commit {'f' * 12}" in new.stdout, new.stdout + new.stderr
    again = train(offline=True)
    assert again.returncode == 0, again.stderr
    assert "going on from checkpoint-3" in again.stdout
    assert f"commit {COMMIT[:12]}" in again.stdout


def test_a_named_split_and_chosen_files_are_read(hub, tmp_path):
    hub.files["data/test-00001-of-00002.jsonl"] = b'{"text": "held"}\n'
    assert read(hub, tmp_path, split="test")["texts"] == ["a test"]
    chosen = read(hub, tmp_path, files=["data/train-00001*", "data/train-00002*"])
    assert chosen["texts"] == [f"file 1 row {n}" for n in range(5)]


PATHS = ["README.md", "train.jsonl", "validation.jsonl", "sub/dev-0.parquet", "sub/test-0.parquet", ".gitattributes"]
CONFIGS = [
    {
        "config_name": "small",
        "data_files": [
            {"split": "train", "path": "small/*.parquet"},
            {"split": "test", "path": ["small-test/a.parquet", "small-test/b.parquet"]},
        ],
    },
    {"config_name": "large", "data_files": "large/**"},
]
CONFIG_PATHS = [
    "small/0.parquet",
    "small/deep/1.parquet",
    "small-test/a.parquet",
    "small-test/b.parquet",
    "large/x/0.parquet",
]


@pytest.mark.parametrize(
    ("paths", "configs", "source", "chosen"),
    [
        (PATHS, None, {}, ["train.jsonl"]),
        (PATHS, None, {"split": "validation"}, ["validation.jsonl", "sub/dev-0.parquet"]),
        (PATHS, None, {"split": "test"}, ["sub/test-0.parquet"]),
        (["a.parquet", "b.parquet"], None, {}, ["a.parquet", "b.parquet"]),
        (PATHS, None, {"files": "sub/*"}, ["sub/dev-0.parquet", "sub/test-0.parquet"]),
        (PATHS, None, {"files": "sub"}, ["sub/dev-0.parquet", "sub/test-0.parquet"]),
        (CONFIG_PATHS, CONFIGS, {"config": "small"}, ["small/0.parquet"]),
        (CONFIG_PATHS, CONFIGS, {"config": "small", "split": "test"}, ["small-test/a.parquet", "small-test/b.parquet"]),
        (CONFIG_PATHS, CONFIGS, {"config": "large"}, ["large/x/0.parquet"]),
        (CONFIG_PATHS, [{**CONFIGS[0], "default": True}, CONFIGS[1]], {}, ["small/0.parquet"]),
    ],
)
def test_files_of_a_split_are_chosen_as_the_card_or_the_names_say(paths, configs, source, chosen):
    assert chosen_paths(paths, configs, spec=Source(id=REPO, **source), where="data.sources[0]") == chosen


@pytest.mark.parametrize(
    ("configs", "source", "error", "said"),
    [
        (CONFIGS, {}, RecipeError, "several configurations and none is the default: small, large"),
        (CONFIGS, {"config": "smal"}, RecipeError, "Did you mean 'small'"),
        (
            CONFIGS,
            {"config": "small", "split": "dev"},
            RecipeError,
            "no split 'dev' in its configuration 'small'; it has train, test",
        ),
        (None, {"files": "nothing/*.parquet"}, InputMissingError, "matches no file"),
        (None, {"split": "validation"}, InputMissingError, "no files of the split 'validation'"),
    ],
)
def test_a_choice_that_the_dataset_does_not_have_lists_what_it_has(configs, source, error, said):
    with pytest.raises(error, match=said):
        chosen_paths(CONFIG_PATHS, configs, spec=Source(id=REPO, **source), where="data.sources[0]")
