"""No secret in any byte that is written, printed or uploaded, also when everything fails and an error repeats it."""

import json
import os
import subprocess
import sys

import pytest

from faults.services import HF_TOKEN, TEN_STEPS, WANDB_API_KEY, environment
from pipeline.process import secrets
from pipeline.process.errors import RecipeError
from pipeline.recipe import read_recipe
from pipeline.run_dir.rows import read_rows
from tests.hub.hub_stand_in import Fault, hub_stand_in
from tests.runner import ROOT, WarmRunner

pytestmark = pytest.mark.full

TALKATIVE = '''
import os
from transformers import TrainerCallback


class Talkative(TrainerCallback):
    """Prints the secrets, then fails with them, once, as a library does that repeats the request it sent."""

    def on_step_end(self, args, state, control, **kwargs):
        said = f"token={os.environ['HF_TOKEN']} and key={os.environ['WANDB_API_KEY']}"
        if state.global_step == 3:
            print(said, flush=True)
        if state.global_step == 6 and not os.path.exists("failed"):
            open("failed", "w").close()
            try:
                raise ValueError(said)
            except ValueError as error:
                raise RuntimeError(f"the request failed: {said}") from error
'''


def files_with(secrets, *folders):
    """Every file below the folders that holds one of the secrets, hard to read ones included."""
    return [
        str(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and any(secret.encode() in path.read_bytes() for secret in secrets)
    ]


def test_planted_secrets_appear_in_no_byte_of_a_run_with_every_fault(tmp_path, cache, text_files, warm):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    runner = WarmRunner(tmp_path, cache, text_files, [], warm)
    recipe = runner.recipe(
        "secrets",
        "gpt2",
        train=TEN_STEPS,
        run={"directory": str(tmp_path / "runs"), "name": "secrets", "callbacks": ["talkative:Talkative"]},
        hub={"id": "somebody/secrets", "strategy": "checkpoint"},
        monitor={"trackers": ["wandb"]},
    )
    status = tmp_path / "status"
    planted = (HF_TOKEN, WANDB_API_KEY)
    with hub_stand_in() as hub, hub_stand_in() as wandb:
        wandb.fault = Fault(html=True)
        hub.fault = Fault(status=503)
        secrets = environment(
            hub.url,
            tmp_path / "hf",
            WANDB_BASE_URL=wandb.url,
            WANDB_MODE="online",
            TANDEM_STATUS=str(status),
            WHOLE_REPORT="yes",
        )
        failed = runner.train(recipe, "run.resume=never", status=1, **secrets)  # the Hub has nothing to say yet
        assert "the request failed" in failed.output
        assert "token=[secret] and key=[secret]" in failed.output
        assert "the request failed" in (failed.directory / "failure.json").read_text()
        assert "the request failed" in status.read_text()
        for secret in planted:
            assert secret not in failed.output + status.read_text()
        assert files_with(planted, failed.directory) == []
        hub.fault = None
        finished = runner.train(recipe, **secrets)
        assert [row["item"] for row in read_rows(finished.directory / "hub_queue" / "published.jsonl")][-1] == "model"
        uploaded = [data for _, files in hub.repos["somebody/secrets"].commits for data in files.values()]
        bodies = [*hub.received, *wandb.received]
    assert len(hub.received) > 10
    assert len(wandb.received) > 1
    for secret in planted:
        assert secret not in finished.output
        assert not [data for data in [*uploaded, *bodies] if secret.encode() in data]
    assert files_with(planted, failed.directory, cache, tmp_path / "hf") == []


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {HF_TOKEN}",
        f"key={WANDB_API_KEY}",
        "unknown to this machine: hf_" + "Zz9" * 12,
        "git clone https://me:hunter22@example.org/x",
        "-----BEGIN RSA PRIVATE KEY-----\nAAAA\n-----END RSA PRIVATE KEY-----",
        "from the login file: my-login-token-in-a-file",
        "from netrc: my-password-in-netrc",
    ],
)
def test_what_a_process_prints_holds_no_secret(text, tmp_path):
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password my-password-in-netrc\n")
    (tmp_path / "token").write_text("my-login-token-in-a-file")
    code = (
        "import sys; from pipeline.process.secrets import redact_output; redact_output()\n"
        "print(sys.argv[1]); print(sys.argv[1], file=sys.stderr); raise RuntimeError(sys.argv[1])"
    )
    known = {"HF_TOKEN": HF_TOKEN, "WANDB_API_KEY": WANDB_API_KEY, "NETRC": str(tmp_path / "netrc"), "HF_HOME": str(tmp_path)}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, text],
        env={**os.environ, **known, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    for hidden in (HF_TOKEN, WANDB_API_KEY, "Zz9Zz9", "hunter22", "AAAA", "my-login", "my-password"):
        assert hidden not in done.stdout + done.stderr
    assert done.stdout.count("[secret]") == 1
    assert done.stderr.count("[secret]") == 2


def test_logins_where_other_programs_look_for_them_are_known(tmp_path):
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password key-that-others-may-read\n")
    (tmp_path / ".netrc").chmod(0o644)
    (tmp_path / "_netrc").write_text("what = ever\nmachine a.b login user password key-no-parser-finds\n")
    (tmp_path / "xdg" / "huggingface").mkdir(parents=True)
    (tmp_path / "xdg" / "huggingface" / "token").write_text("login-below-xdg-cache\n")
    hidden = ["key-that-others-may-read", "key-no-parser-finds", "login-below-xdg-cache", "not-even-an-aws-key"]
    known = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg"), "AWS_SECRET_ACCESS_KEY": hidden[-1]}
    others = {k: v for k, v in os.environ.items() if k not in ("NETRC", "HF_HOME", "HF_TOKEN_PATH")}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from pipeline.process.secrets import redacted; print(redacted(sys.argv[1]))", " ".join(hidden)],
        env={**others, **known, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.stdout == "[secret] [secret] [secret] [secret]\n", done.stderr


def test_an_entry_that_fails_with_a_secret_tells_it_to_nobody(tmp_path):
    code = (
        "import os; from pipeline.run_dir.failures import exit_with_status\n"
        "def main(argv): raise RuntimeError('the request failed: ' + os.environ['HF_TOKEN'])\n"
        "exit_with_status(main)"
    )
    known = {"HF_TOKEN": HF_TOKEN, "TANDEM_STATUS": str(tmp_path / "status"), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **known}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "RuntimeError: the request failed: [secret]" in done.stderr
    assert HF_TOKEN not in done.stderr
    assert (tmp_path / "status").read_text() == "1\nRuntimeError: the request failed: [secret]\n"


@pytest.fixture
def environ(monkeypatch):
    """Set variables for known_secrets, which is read once for each process."""

    def forget():
        for function in (secrets.known_secrets, secrets._values, secrets._secret_text):
            function.cache_clear()

    def planted(**variables: str):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        forget()

    yield planted
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    "name",
    [
        "SSHPASS", "PGPASSWORD", "MYSQL_PWD", "GPG_PASSPHRASE", "AZURE_STORAGE_KEY", "AWS_SECRET_ACCESS_KEY", "SIGNING_KEY", "DB_CREDENTIALS",
        "AZURE_STORAGE_CONNECTION_STRING", "HF_TOKEN_2", "OPENAI_APIKEY", "SENTRY_DSN", "SLACK_WEBHOOK_URL",
    ],
)  # fmt: skip
def test_variables_that_hold_secrets_are_known_by_their_names(environ, name):
    environ(**{name: "a-secret-of-nobody"})
    assert secrets.redacted("it is a-secret-of-nobody.") == "it is [secret]."
    assert secrets.redacted(repr("a-secret-of-nobody")) == "'[secret]'"


def test_folders_and_files_that_variables_name_are_no_secrets(environ, tmp_path):
    environ(
        PWD=str(tmp_path),
        OLDPWD="/somewhere/else",
        GOOGLE_APPLICATION_CREDENTIALS=str(tmp_path),
        MONKEY="business as usual",
    )
    for text in (f"{tmp_path}/x", "/somewhere/else", "business as usual"):
        assert secrets.redacted(text) == text


def test_a_password_inside_of_an_address_is_hidden_alone_too(environ):
    environ(
        DATABASE_URL="postgres://me:hunter2222@db/x", AZURE="AccountName=a;AccountKey=QUJDREVGR0g=;EndpointSuffix=core"
    )
    assert secrets.redacted("login me with hunter2222, key QUJDREVGR0g=") == "login me with [secret], key [secret]"


def test_a_secret_that_is_no_utf8_stops_no_command_and_is_hidden(tmp_path):
    code = "import os, sys; from pipeline.run_dir.failures import exit_with_status\nexit_with_status(lambda argv: print(os.environ['X_TOKEN'], repr(os.environ['X_TOKEN'])))"
    known = {os.fsencode(name): os.fsencode(value) for name, value in os.environ.items()}
    known |= {b"X_TOKEN": b"\xff\xfe-secret-bytes", b"Y_KEY": b"\xe9-secret-bytes", b"PYTHONPATH": os.fsencode(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"[secret] '[secret]'\n", b"")


ADDRESS = "https://store.example/data/part-0.jsonl"
SHAPES = {  # what comes before the secret, and the secret
    "an Azure signature": (f"{ADDRESS}?sv=2022-11-02&sig=", "aB3%2Fx9QzK1LmN0pR"),
    "an S3 signature": (f"{ADDRESS}?X-Amz-Date=1&X-Amz-Signature=", "0f" * 32),
    "an S3 session": (f"{ADDRESS}?X-Amz-Security-Token=", "IQoJb3JpZ2lu" * 3),
    "an old S3 key": (f"{ADDRESS}?AWSAccessKeyId=", "SOMEBODYSKEY1"),
    "a query's token": (f"{ADDRESS}?token=", "s3cr3t-t0ken"),
    "an access token": (f"{ADDRESS}?raw=1&access_token=", "s3cr3t-t0ken"),
    "a short password": ("https://me:", "pw@store.example"),
    "a password alone": ("https://:", "hunter2@store.example"),
    "a token before the host": ("https://", "a1b2c3d4" * 5 + "@store.example"),
    "GitLab": ("", "glpat-" + "x1Y2" * 5),
    "Docker": ("", "dckr_pat_" + "x1Y2" * 6),
    "GitHub": ("", "ghp_" + "x1Y2" * 9),
    "GitHub, fine-grained": ("", "github_pat_" + "x1Y2" * 9),
    "Slack": ("", "xoxe.xoxp-" + "1-x1Y2" * 6),
    "OpenAI": ("", "sk-proj-" + "x1Y2" * 9),
    "Anthropic": ("", "sk-ant-api03-" + "x1Y2" * 9),
    "AWS": ("", "AKIA" + "X1Y2" * 4),
    "Google": ("", "AIza" + "x1Y2_" * 7),
    "Hugging Face": ("", "hf_" + "x1Y2" * 8),
    "PyPI": ("", "pypi-AgEIcHlwaS5vcmc" + "x1Y2" * 8),
    "npm": ("", "npm_" + "x1Y2" * 9),
    "NVIDIA": ("", "nvapi-" + "x1Y2" * 9),
    "W&B": ("wandb_api_key: ", "0f" * 20),
}


@pytest.mark.parametrize(("before", "secret"), SHAPES.values(), ids=SHAPES)
def test_a_secret_is_known_by_its_shape_in_recipes_and_printed_text(before, secret, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {{name: a, note: {json.dumps(before + secret)}}}\ndata: {{sources: [{{files: x.jsonl}}]}}\n"
    )
    with pytest.raises(RecipeError) as refused:
        read_recipe([str(recipe)], stage="pretrain")
    assert "holds a token or password" in str(refused.value)
    assert secret not in str(refused.value)

    printed = secrets.redacted(f"reading {before}{secret} failed")
    assert "[secret]" in printed
    assert secret not in printed


@pytest.mark.parametrize(
    "text",
    [
        "https://store.example/data?page=2&sigma=0.123456&tokens=1000000",
        "https://somebody@store.example/part-0.jsonl",
        "ssh://git@github.com/owner/name.git",
        "hf://datasets/owner/name@0123456789abcdef0123456789abcdef01234567",
        "pad_token=tokenizer.eos_token, eos_token=tokenizer.eos_token",
        "commit 0123456789abcdef0123456789abcdef01234567",
        "http://127.0.0.1:8765/ shows the run; write to me@example.org",
        "the task-specific, risk-averse sk-learn-like pipeline",
    ],
)
def test_what_only_resembles_a_secret_is_none(text):
    assert not secrets.looks_secret(text)
    assert secrets.redacted(text) == text
