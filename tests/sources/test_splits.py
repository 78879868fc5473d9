"""Configurations, splits and data files are those of `datasets`, asked itself for the same trees, here and on a Hub."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import datasets
import pytest
from dataset_hub import HubServer
from split_layouts import DOCUMENTED, LAYOUTS

from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Source
from pipeline.sources.files import IGNORED
from pipeline.sources.hub_files import dataset_files

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
THEIRS = """
import json, sys
import datasets
asked = json.loads(sys.argv[1])
found = []
for name, config in asked:
    try:
        files = datasets.load_dataset_builder(f"layouts/{name}", config).config.data_files
        at = f"hf://datasets/layouts/{name}@"
        found.append({str(split): sorted(f.removeprefix(at).split("/", 1)[1] for f in paths) for split, paths in files.items()})
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""
OURS = """
import json, sys
from pathlib import Path
from pipeline.process.errors import TandemError
from pipeline.recipe.schema import Source
from pipeline.sources.hub_files import dataset_files
found = []
for name, config, split in json.loads(sys.argv[1]):
    try:
        source = Source(id=f"layouts/{name}", config=config, split=split)
        revision, files = dataset_files(source, where="r.yaml:3", cache=Path(sys.argv[2]))
        found.append([file.label for file in files])
    except TandemError as error:
        found.append([error.status, str(error)])
print(json.dumps(found))
"""
ASKED = [(name, config) for name, (_, configs) in LAYOUTS.items() for config in configs]
NO_SPLIT = "no-such-split"


def asked_of_a_hub(code, folder, *arguments):
    """The answers of a process whose Hub holds every layout, and what that process asked for."""
    hub = HubServer()
    for name, (files, _) in LAYOUTS.items():
        hub.others[f"layouts/{name}"] = files
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | {
        "HF_ENDPOINT": hub.url, "HF_HOME": str(folder), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0", "PYTHONPATH": str(ROOT), "no_proxy": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    hub.shutdown()
    hub.server_close()
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), hub.asked


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    found, _ = asked_of_a_hub(THEIRS, tmp_path_factory.mktemp("theirs"), json.dumps(ASKED))
    return dict(zip(ASKED, found, strict=True))


@pytest.fixture(scope="module")
def ours(tmp_path_factory, theirs):
    questions = [
        (*asked, split)
        for asked, found in theirs.items()
        for split in [*(found if isinstance(found, dict) else ["train"]), NO_SPLIT]
    ]
    folder = tmp_path_factory.mktemp("ours")
    found, fetched = asked_of_a_hub(OURS, folder, json.dumps(questions), str(folder / "cache"))
    assert fetched == []  # No data is fetched to choose it.
    return dict(zip(questions, found, strict=True))


def written(folder, name):
    root = folder / name
    for path, content in LAYOUTS[name][0].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def test_there_are_fifteen_documented_layouts_that_datasets_can_load(theirs):
    assert (
        sum(any(isinstance(theirs[name, config], dict) for config in DOCUMENTED[name][1]) for name in DOCUMENTED) >= 15
    )


@pytest.mark.parametrize(("name", "config"), ASKED)
def test_a_hub_dataset_has_the_splits_and_files_that_datasets_finds(theirs, ours, name, config):
    expected = theirs[name, config]
    if isinstance(expected, str):
        status, _ = ours[name, config, "train"]
        assert status in (64, 66), expected
        return
    assert {split: ours[name, config, split] for split in expected} == expected
    status, message = ours[name, config, NO_SPLIT]
    assert status == 64
    assert f"it has {', '.join(expected)}." in message


@pytest.mark.parametrize(("name", "config"), ASKED)
def test_a_local_folder_has_the_splits_and_files_that_datasets_finds(tmp_path, name, config):
    root = written(tmp_path, name)
    (tmp_path / "beside.jsonl").write_text('{"text": "of somebody else"}\n')

    def found(split):
        source = Source(id=f"./{name}", config=config, split=split)
        return dataset_files(source, where="r.yaml:3", cache=tmp_path, folder=str(tmp_path))

    try:
        expected = datasets.load_dataset_builder(
            str(root), config, cache_dir=str(tmp_path / "cache")
        ).config.data_files
    except (ValueError, FileNotFoundError, RuntimeError):
        expected = {}
    if not expected or name == "outside":
        with pytest.raises(TandemError, match=r"config|no data files|script|default|outside the dataset"):
            found("train")
        return
    for split, files in expected.items():
        revision, ours = found(str(split))
        assert revision is None
        assert sorted(str(file.path) for file in ours) == sorted(files)
    with pytest.raises(TandemError, match=f"it has {', '.join(map(str, expected))}"):
        found(NO_SPLIT)


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("yaml-subsets", None, "r.yaml:3.config: layouts/yaml-subsets has several configurations and none is the default: main_data, additional_data. Write config: main_data."),
        ("yaml-subsets", "main-data", "has no configuration 'main-data'; it has main_data, additional_data. Did you mean 'main_data'?"),
        ("no-data", None, "`datasets` finds no data files in layouts/no-data"),
        ("no-data", None, "It has LICENSE, script.sh."),
        ("missing-file", None, "Unable to find 'layouts/missing-file/b.jsonl'"),
        ("a-script", None, "is loaded by a script, which is not run here"),
        ("two-defaults", None, "several default configs"),
        ("outside", None, "names files outside the dataset (../*.jsonl)"),
    ],
)  # fmt: skip
def test_a_choice_absent_from_a_hub_dataset_is_answered_with_its_choices(ours, name, config, said):
    _, message = ours[name, config, "train"]
    assert said in message
    assert "/tmp" not in message


def test_what_datasets_ignores_in_a_folder_is_known():
    from datasets.data_files import FILES_TO_IGNORE

    assert set(IGNORED) == set(FILES_TO_IGNORE)
