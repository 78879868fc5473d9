"""A Hub that takes a request and never answers: who asks gives up, in the training process too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.hub_stand_in import Fault, hub_stand_in

ROOT = Path(__file__).parents[2]
SHORTER = """
import pipeline.process.network as client, pipeline.sources.hub_files as files
from types import SimpleNamespace
from pathlib import Path
files.ATTEMPTS = 1
client.SILENCE_S = files.ANSWER_S = 0.5
"""
A_START = """
from pipeline.process.errors import ServiceError
spec = SimpleNamespace(id="org/text", revision=None, config=None, split="train", files=None)
try:
    files.hub_files(spec, where="recipe.yaml:5", cache=Path("cache"))
except ServiceError as error:
    print(error)
"""
WITHOUT_A_TIMEOUT = """
from huggingface_hub import HfApi, get_session
client.set_http_timeouts()
for ask in (lambda: HfApi().model_info("org/model"), lambda: HfApi().get_paths_info("org/text", ["a"], repo_type="dataset")):
    try:
        ask()
    except Exception as error:
        print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("code", "said"), [(A_START, "the Hub does not give org/text"), (WITHOUT_A_TIMEOUT, "ReadTimeout\nReadTimeout\n")]
)
def test_a_request_to_a_silent_hub_ends(tmp_path, code, said):
    with hub_stand_in() as hub:
        hub.fault = Fault(delay_s=100.0)
        done = subprocess.run(
            [sys.executable, "-c", SHORTER + code],
            env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
    assert said in done.stdout, done.stdout + done.stderr
