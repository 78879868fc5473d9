"""Publishing against a Hub on 127.0.0.1: what arrives, what never leaves, and what happens when the Hub misbehaves."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from pipeline.hub.content import is_pickle, refusals, secrets_in
from pipeline.process.secrets import redacted
from pipeline.process.storage import sum_of, write_text
from pipeline.run_dir.checkpoints import whole_folder
from pipeline.run_dir.rows import append_row
from pipeline.run_dir.run_directory import RunDirectory
from tests.hub.hub_stand_in import Fault, Repo, hub_stand_in

ROOT = Path(__file__).parents[2]
TOKEN = "hf_" + "aBcD1234" * 5


@pytest.fixture
def run(tmp_path, tiny_model):
    directory = RunDirectory(tmp_path / "runs" / "quick-1a2b3c")
    recipe = {
        "run": {"tags": ["toy"]},
        "model": {"n_layer": 1},
        "data": {"sources": [{"id": "org/text"}]},
        "hub": {"id": "somebody/quick", "private": True},
    }
    write_text(directory.recipe, yaml.safe_dump(recipe))
    directory.update_manifest(
        name="quick-1a2b3c",
        stage="pretrain",
        status="finished",
        finished=1.79e9,
        inputs={"protocols": {"val/bpb": "validation-7"}},
        versions={"torch": "2.13"},
    )
    append_row(
        directory.metrics,
        {"step": 5, "attempt": 1, "time": 1.79e9, "tokens": 20480, "train/loss": 3.2, "val/bpb": 1.75},
    )
    with whole_folder(directory.model, step=5, run=directory.name) as folder:
        for path in tiny_model.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.fixture
def hub():
    with hub_stand_in() as state:
        yield state


def environment(hub, tmp_path):
    return {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | {
        "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HOME": str(tmp_path / "hf_home"), "HF_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
    }  # fmt: skip


# The waits between attempts are shorter; the library's own are seconds: 8 attempts are 30.
QUICK = """
import time, types
import huggingface_hub.utils._http as http
import pipeline.hub.client
pipeline.hub.client.FIRST_WAIT_S = 0.05
http.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: time.sleep(min(seconds, 0.05))})
"""
UNLOADED = """
import pipeline.hub.verification
assert pipeline.hub.verification._load_in_isolation  # else a renamed function would be called all the same, for six seconds
pipeline.hub.verification._load_in_isolation = lambda *a, **k: None
"""


@pytest.fixture
def command(warm):
    """Run `python -m pipeline.hub` as a user does.

    load: after a push a process without our package loads the model, which takes some seconds.
    """

    def run(hub, tmp_path, *arguments, load=False):
        variables = environment(hub, tmp_path) | {"BEFORE": QUICK + ("" if load else UNLOADED)}
        own = {name: value for name, value in variables.items() if os.environ.get(name) != value}
        ended = warm.run("hub", *arguments, folder=tmp_path, **own, HF_HUB_OFFLINE="0")
        return SimpleNamespace(returncode=ended.status, stdout=ended.output, stderr=ended.output)

    return run


def files_of(hub, repo_id="somebody/quick"):
    return hub.repos[repo_id].commits[-1][1]


def test_push_makes_a_private_repository_in_one_commit_and_verifies_it(command, hub, run, tmp_path):
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 0, done.stderr
    repo = hub.repos["somebody/quick"]
    assert repo.private
    assert len(repo.commits) == 2  # the empty one, ours
    wanted = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert wanted | {"README.md", "recipe.yaml", "run_manifest.json", "MANIFEST.json"} <= set(files_of(hub))
    for name in wanted:
        assert files_of(hub)[name] == (run.model / name).read_bytes()
        assert any(call == f"GET /somebody/quick/resolve/{repo.commits[-1][0]}/{name}" for call in hub.calls), (
            f"{name} was not verified"
        )
    assert run.read_manifest()["hub"]["commit"] == repo.commits[-1][0]


def test_no_uploaded_byte_holds_the_token(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    assert not any(TOKEN.encode() in body for body in hub.received)
    assert not any(is_pickle(Path(name)) for name in files_of(hub) if name.endswith((".bin", ".pt", ".pkl")))


@pytest.mark.parametrize(
    "secret", [TOKEN, "hf_" + "Z9" * 17, "AKIA" + "ABCD" * 4, "https://me:hunter22@example.org/x"]
)
def test_a_secret_in_any_file_stops_the_push_before_the_first_request(command, hub, run, tmp_path, secret):
    write_text(run.recipe, run.recipe.read_text() + f"# {secret}\n")
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 65
    assert "recipe.yaml: contains" in done.stderr
    assert secret not in done.stderr
    assert hub.calls == []


@pytest.mark.full
def test_a_secret_between_two_blocks_of_a_large_file_is_found(tmp_path, monkeypatch):
    from pipeline.hub import content as secrets

    monkeypatch.setattr(secrets, "_CHUNK", 100)
    path = tmp_path / "file"
    path.write_bytes(b" " * 80 + TOKEN.encode() + b" " * 80)
    assert secrets.secrets_in(path, {}) == ["Hugging Face token"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("Hugging Face token", "hf_" + "Z9" * 17),
        ("Hugging Face organization token", "api_org_" + "Z9" * 17),
        ("W&B key", "wandb_v1_" + "Z9" * 17),
        ("GitHub token", "ghs_" + "Z9" * 18),
        ("GitHub token", "github_pat_" + "Z9" * 20),
        ("AWS access key", "ASIA" + "ABCD" * 4),
        ("Google API key", "AIza" + "abcde" * 7),
        ("OpenAI-style key", "sk-" + "Z9" * 16),
        ("Slack token", "xoxp-" + "Z9" * 10),
        ("private key", "-----BEGIN RSA PRIVATE KEY-----"),
        ("password in a URL", "git+ssh://me:hunter22@example.org/x"),
    ],
)
def test_each_kind_of_secret_is_found_and_lookalikes_are_not(tmp_path, kind, text):
    path = tmp_path / "file"
    begun = text.encode()[:-1] if kind == "private key" else text.encode()[:17]
    path.write_bytes(b"x " + begun + b" y")
    assert secrets_in(path, {}) == []
    path.write_bytes(b"x " + begun + b" " + text.encode() + b" y")
    assert secrets_in(path, {}) == [kind]


@pytest.mark.full
def test_looking_for_secrets_takes_about_as_long_as_a_few_searches(tmp_path):
    path = tmp_path / "model.safetensors"
    data = os.urandom(2**20) * 24
    path.write_bytes(data)
    began = time.process_time()
    assert data.find(b"no such bytes") == -1
    searched = time.process_time()
    assert secrets_in(path, {}) == []
    # About 25 now; 250 where one expression looks for all kinds, which is minutes for a model of 2 GB.
    assert time.process_time() - searched < 80 * (searched - began)


@pytest.mark.full
def test_a_long_line_without_a_secret_is_looked_at_once():
    began = time.process_time()
    assert redacted("a" * 100_000) == "a" * 100_000  # 8 s where every letter could begin a URL
    assert time.process_time() - began < 2.0


@pytest.mark.full
def test_pickles_are_refused_whatever_their_name(tmp_path):
    import pickle

    import torch

    (tmp_path / "a.json").write_bytes(pickle.dumps({"x": 1}))
    torch.save({"x": 1}, tmp_path / "b.dat")
    (tmp_path / "c.bin").write_bytes(b"anything")
    (tmp_path / "d.json").write_text("{}")
    lines = refusals({path.name: path for path in tmp_path.iterdir()})
    assert sorted(line.split(":")[0] for line in lines) == ["a.json", "b.dat", "c.bin"]


@pytest.mark.full
def test_a_pushed_model_loads_by_its_id_and_its_card_tells_how(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    card = files_of(hub)["README.md"].decode()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["library_name"] == "transformers"
    assert front["tags"] == ["tandem", "toy"]
    assert front["datasets"] == ["org/text"]
    assert front["model-index"][0]["results"][0]["metrics"][0]["value"] == 1.75
    assert "trust_remote_code" not in card  # plain gpt2 needs none
    run_the_card(hub, tmp_path)


def run_the_card(hub, tmp_path, *, before=""):
    """Run the card's example as a stranger would: only the Hub, nothing of ours importable."""
    card = files_of(hub)["README.md"].decode()
    use = card.split("```python\n")[1].split("```")[0].replace("max_new_tokens=64", "max_new_tokens=4")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHONPATH"))}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "other"),
        "no_proxy": "127.0.0.1",
    }
    code = "import sys; sys.modules['pipeline'] = None  # importing it is an error\n" + before + use
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def own_code(run, tiny_model):
    """The run's model as one that transformers does not have: its code lies in the folder."""
    from pipeline.model.build import build_model
    from pipeline.model.saved import save_model
    from pipeline.recipe.sizes import MODERN

    sizes = {"vocab_size": 258, "n_positions": 64, "n_layer": 4, "n_embd": 32, "n_head": 2, "sliding_window": 16}
    ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
    model = build_model("tandem", {**MODERN, **sizes, **ids}, seed=1).eval()
    write_model(run, tiny_model, lambda folder: save_model(model, folder))
    return model


def write_model(run, tiny_model, save):
    shutil.rmtree(run.model)
    with whole_folder(run.model, step=5, run=run.name) as folder:
        save(folder)
        for path in tiny_model.glob("tokenizer*"):
            shutil.copy(path, folder)


@pytest.mark.full
def test_a_pushed_model_with_its_own_code_loads_without_our_package(command, hub, run, own_code, tmp_path):
    import torch

    done = command(hub, tmp_path, "push", run.path, load=True)
    assert done.returncode == 0, done.stderr
    assert "downloaded again, equal and loaded" in done.stdout
    assert "trust_remote_code=True" in files_of(hub)["README.md"].decode()
    printed = run_the_card(
        hub,
        tmp_path,
        before="import atexit; atexit.register(lambda: print(model(inputs['input_ids']).logits[0, -1, :5].tolist()))\n",
    )
    remap = json.loads((run.model / "tokenizer.json").read_text())["model"]["vocab"]
    ids = torch.tensor([[256, *(remap["\u0120" if c == " " else c] for c in "The capital of France is")]])
    with torch.no_grad():
        assert json.loads(printed.splitlines()[-1]) == pytest.approx(
            own_code(ids).logits[0, -1, :5].tolist(), abs=1e-4
        )


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("softcap * torch.tanh(logits.float() / softcap)", "1.0 + softcap * torch.tanh(logits.float() / softcap)", "computes other ids or logits"),
        ("import torch\n", "import torch\nimport a_package_of_nobody\n", "cannot load it"),
    ],
)  # fmt: skip
def test_a_model_that_others_load_wrongly_is_reported_after_the_push(
    command, hub, run, own_code, tiny_model, tmp_path, old, new, message
):
    kept = tmp_path / "kept"
    shutil.copytree(run.model, kept, ignore=shutil.ignore_patterns("MANIFEST.json", "tokenizer*"))
    code = kept / "modeling_tandem.py"
    assert old in code.read_text()
    write_text(code, code.read_text().replace(old, new, 1))
    write_model(run, tiny_model, lambda folder: shutil.copytree(kept, folder, dirs_exist_ok=True))
    done = command(hub, tmp_path, "push", run.path, "--trust-code", load=True)
    assert done.returncode == 69, done.stderr
    assert message in done.stderr
    assert "hub" not in run.read_manifest()


@pytest.mark.full
def test_an_sft_card_shows_the_chat_template_and_asks_for_trust(run):
    from pipeline.hub.card import model_card
    from pipeline.report.run_data import read_run

    run.update_manifest(stage="sft")
    config = json.loads((run.model / "config.json").read_text()) | {"auto_map": {"AutoConfig": "x.Y"}}
    write_text(run.model / "config.json", json.dumps(config))
    card = model_card(read_run(str(run.path)), repo_id="a/b")
    assert "apply_chat_template" in card
    assert 'from_pretrained("a/b", trust_remote_code=True)' in card
    assert "conversational" in card


@pytest.mark.full
def test_a_hub_that_is_away_for_a_moment_is_asked_again(command, hub, run, tmp_path):
    hub.faults += [("POST /api/repos/create", 500), ("commit/main", 503), ("resolve", 500)]
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 0, done.stderr
    assert hub.faults == []


@pytest.mark.full
def test_a_failed_upload_of_a_large_file_is_tried_again(command, hub, run, tmp_path):
    hub.faults += [("PUT /blobs/", 500)] * 7  # more than the client's own attempts
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_a_refused_card_is_reported_and_an_unreadable_answer_retried(command, hub, run, tmp_path):
    hub.fault = Fault(to="validate-yaml", status=400)
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 65
    assert "the Hub does not take the card" in done.stderr
    assert len(hub.repos["somebody/quick"].commits) == 1
    hub.fault = Fault(to="validate-yaml", html=True, status=502, times=1)
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    assert len(hub.repos["somebody/quick"].commits) == 2


@pytest.mark.full
def test_the_card_names_the_whole_id_where_the_hub_chose_the_namespace(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path, "--id", "quick").returncode == 0
    assert 'from_pretrained("somebody/quick")' in files_of(hub)["README.md"].decode()


@pytest.mark.full
def test_a_hub_that_refuses_ends_with_status_69_and_the_cure(command, hub, run, tmp_path):
    hub.faults += [("POST /api/repos/create", 403)]
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 69
    assert "hf auth login" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_an_unreachable_hub_ends_with_status_69(command, hub, run, tmp_path):
    hub.url = "http://127.0.0.1:9"
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 69, done.stderr
    assert "Traceback" not in done.stderr


def test_bytes_damaged_on_the_hub_are_noticed(command, hub, run, tmp_path):
    hub.damaged.add("model.safetensors")
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 69
    assert "other bytes than were sent for model.safetensors" in done.stderr
    assert "hub" not in run.read_manifest()


def test_a_damaged_model_is_not_pushed(command, hub, run, tmp_path):
    (run.model / "config.json").write_text("{}")
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 65
    assert "config.json has" in done.stderr
    assert hub.calls == []


@pytest.mark.full
def test_a_public_repository_does_not_silently_take_a_private_run(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path, "--public").returncode == 0
    assert not hub.repos["somebody/quick"].private
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 69
    assert "is public" in done.stderr


@pytest.mark.full
def test_pull_restores_the_run_exactly_and_a_second_pull_is_refused(command, hub, run, tmp_path):
    write_text(run.contamination, '{"tasks": {}}')
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    done = command(hub, tmp_path, "pull", "somebody/quick", "--runs", tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    restored = RunDirectory(tmp_path / "elsewhere" / "quick-1a2b3c")
    for path in [*run.model.iterdir(), run.recipe, run.contamination]:
        assert (restored.path / path.relative_to(run.path)).read_bytes() == path.read_bytes()
    assert restored.read_manifest()["pulled_from"]["id"] == "somebody/quick"
    assert command(hub, tmp_path, "pull", "somebody/quick", "--runs", tmp_path / "elsewhere").returncode == 73


@pytest.mark.full
def test_pull_notices_damaged_files_and_leaves_nothing_behind(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    hub.damaged.add("model.safetensors")
    done = command(hub, tmp_path, "pull", "somebody/quick", "--runs", tmp_path / "elsewhere")
    assert done.returncode == 69
    assert "model.safetensors has other content" in done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.full
def test_pull_refuses_a_run_name_that_leaves_the_folder(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    files = files_of(hub)
    files["run_manifest.json"] = files["run_manifest.json"].replace(b"quick-1a2b3c", b"../../escaped")
    done = command(hub, tmp_path, "pull", "somebody/quick", "--runs", tmp_path / "elsewhere")
    assert done.returncode == 65
    assert not (tmp_path / "escaped").exists()


@pytest.mark.full
def test_pulling_what_does_not_exist_says_so(command, hub, tmp_path):
    done = command(hub, tmp_path, "pull", "somebody/nothing")
    assert done.returncode == 69
    assert "404" in done.stderr


@pytest.mark.full
def test_help_and_a_missing_run_need_neither_torch_nor_network(tmp_path):
    code = "import sys; from pipeline.hub.__main__ import main\ntry: main(sys.argv[1:])\nfinally: assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "push" in done.stdout


@pytest.mark.full
def test_a_run_without_a_repository_is_told_how_to_name_one(command, hub, run, tmp_path):
    write_text(run.recipe, "run: {}\n")
    done = command(hub, tmp_path, "push", run.path)
    assert done.returncode == 64
    assert "--id NAMESPACE/NAME" in done.stderr


def sealed_as(**values):
    """A seal that agrees with itself and says anything."""
    value = {"step": 5, "run": "quick-1a2b3c", "files": {}, **values}
    return json.dumps({**value, "sha256": sum_of(value)}).encode()


FACTS = {"bytes": 1, "sha256": "0" * 64}
DEEP = b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
HOSTILE = {
    "a deep manifest": {"run_manifest.json": DEEP},
    "a manifest that is a list": {"run_manifest.json": b"[]"},
    "a manifest that is no JSON": {"run_manifest.json": b"<html>"},
    "a manifest with a number of 5,000 digits": {
        "run_manifest.json": b'{"name": "a", "attempts": ' + b"9" * 5000 + b"}"
    },
    "a deep seal": {"MANIFEST.json": DEEP},
    "a seal that is a list": {"MANIFEST.json": b"[1]"},
    "a seal without files": {"MANIFEST.json": sealed_as(files=None)},
    "a seal of a list of files": {"MANIFEST.json": sealed_as(files=["config.json"])},
    "a seal of files without facts": {"MANIFEST.json": sealed_as(files={"config.json": 3})},
    "a seal whose step is text": {"MANIFEST.json": sealed_as(step="5")},
    "a seal whose step is negative": {"MANIFEST.json": sealed_as(step=-5)},
    "a seal of a name above": {"MANIFEST.json": sealed_as(files={"../../evil": FACTS})},
    "a state whose step is text": {"last-checkpoint/MANIFEST.json": sealed_as(step="x")},
    "a state whose seal is a list": {"last-checkpoint/MANIFEST.json": b"[]"},
}


PULL_ALL = """
import json, sys
from pipeline.process.errors import TandemError
from pipeline.hub.pull import pull
for number in range(int(sys.argv[1])):
    try:
        pull(f"somebody/hostile-{number}", runs=sys.argv[2])
        print(json.dumps([0, ""]))
    except TandemError as error:
        print(json.dumps([error.status, str(error)]))
"""


@pytest.mark.full
def test_a_hostile_repository_is_refused_in_a_sentence_and_leaves_nothing_behind(command, hub, run, tmp_path):
    assert command(hub, tmp_path, "push", run.path).returncode == 0
    repo = hub.repos["somebody/quick"]
    for number, files in enumerate(HOSTILE.values()):
        commit = (f"{number:040x}", {**repo.commits[-1][1], **files})
        hub.repos[f"somebody/hostile-{number}"] = Repo(private=False, branches={"main": [commit]})
    elsewhere = tmp_path / "elsewhere"
    arguments = [sys.executable, "-c", PULL_ALL, str(len(HOSTILE)), str(elsewhere)]
    variables = environment(hub, tmp_path)
    done = subprocess.run(arguments, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for number, (name, line) in enumerate(zip(HOSTILE, done.stdout.splitlines(), strict=True)):
        status, message = json.loads(line)
        assert status in (65, 69), f"{name}: {status} {message}"
        assert message.startswith(f"somebody/hostile-{number}: "), f"{name}: {message}"
    assert list(elsewhere.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} <= {"elsewhere", "hf_home", "runs"}
