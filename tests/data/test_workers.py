"""Preparation by several processes: the same bytes for any number of them, whoever is killed."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest
import yaml

from pipeline.contrib.parts import prepare_part
from pipeline.data import workers
from pipeline.data.encoding import EncodedBlock, read_encoded
from pipeline.data.prepare import ShardBuilder, prepare_now
from pipeline.data.row_plan import locks, streams_of
from pipeline.data.rows import TrainingRows
from pipeline.data.workers import BlockRanges, EncodedReader, EncodeJob, WorkerPool, processes_for
from pipeline.process.errors import DataError
from pipeline.recipe.identity import resume_keys
from pipeline.recipe.schema import Source
from pipeline.sources.raw_rows import BLOCK_ROWS
from pipeline.tokenizer.train import cached_folder
from tests.engines.environments import folder_with, slow_unless_installed

ROOT = Path(__file__).parents[2]


def texts(count: int, first: int = 0) -> list[str]:
    return [f"Document {n} says: " + "word after word, " * (n * 7919 % 23) for n in range(first, first + count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    """One source in many forms: where reading can begin anywhere, or at the start alone; with bad, empty and blank rows."""
    folder = tmp_path_factory.mktemp("forms")
    lines = [json.dumps({"text": text}) for text in texts(3300)]
    lines[5], lines[1500], lines[2100] = "", '{"text": ""}', '{"text": 7}'
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    for name, group in (("b", 500), ("c", 100_000)):
        table = pyarrow.table({"text": texts(2500, first=10_000 * len(name))})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=group)
    (folder / "d.txt").write_text("\n<|endoftext|>\n".join(texts(100, first=50_000)))
    return sorted(folder.iterdir())


def everything(cache: Path) -> dict[str, bytes]:
    """Shards, seals, ends and states; not who uses them, and what is left of the encoding."""
    found = {path.relative_to(cache): path for path in sorted((cache / "shards").rglob("*")) if path.is_file()}
    return {str(name): path.read_bytes() for name, path in found.items() if path.name not in (".lock", "users")}


def prepared(bench, **how) -> dict[str, bytes]:
    recipe = bench.recipe(**{"max_bad_rows": 5, "train": {"num_train_epochs": 1}, "shard_rows": 128, **how})
    bench.prepared(recipe)
    return everything(Path(recipe.data.cache_dir))


@pytest.mark.full_except("cut_and_fit-4")
@pytest.mark.parametrize(("packing", "processes"), [("cut_and_fit", 4), ("best_fit_crop", 2), ("sft", 2)])
def test_any_number_of_processes_makes_the_same_bytes(bench, files, packing, processes):
    if packing == "sft":
        how = {"stage": "sft", "shard_rows": 16}
    else:
        how = {"packing": packing, "sources": [Source(files=[str(path) for path in files])]}
    expected = prepared(bench, **how, cache="one", num_proc=1)
    assert len(expected) > 12
    assert prepared(bench, **how, cache="many", num_proc=processes) == expected


@pytest.mark.full
def test_each_pass_reads_the_whole_source_in_another_order(bench, files):
    once = [Source(files=[str(path) for path in files[:2]])]
    thrice = [Source(files=[str(path) for path in files[:2]], passes=3)]
    content = prepared(bench, sources=thrice, cache="one", num_proc=1)
    assert prepared(bench, sources=thrice, cache="many", num_proc=2) == content
    recipes = [
        bench.recipe(sources=s, max_bad_rows=9, train={"num_train_epochs": 1}, shard_rows=128) for s in (once, thrice)
    ]
    sources = [bench.sources(recipe)[0] for recipe in recipes]
    read = [[item.text for block in source.read() for item in block.items] for (source,) in sources]
    passes = [read[1][at : at + len(read[0])] for at in range(0, len(read[1]), len(read[0]))]
    assert passes[0] == read[0]
    assert len(passes) == 3
    assert all(sorted(each) == sorted(read[0]) for each in passes)
    moved = [sum(a != b for a, b in zip(*pair, strict=True)) for pair in itertools.combinations(passes, 2)]
    assert all(count > 0.9 * len(read[0]) for count in moved)
    labels = [[file["label"] for file in source.describe()["files"]] for (source,) in sources]
    assert labels[1][: len(labels[0])] == labels[0]
    assert sorted(labels[1]) == sorted(3 * labels[0])
    assert cached_folder(recipes[0].tokenizer_settings(), sources[0]) == cached_folder(
        recipes[1].tokenizer_settings(), sources[1]
    )
    assert "read 3 times" in sources[1][0].headline()
    assert not any("passes" in each for each in resume_keys(recipes[0])["data.sources"])

    rows = [TrainingRows.open(preparation=bench.prepared(recipe)) for recipe in recipes]
    assert rows[1].total_rows() == pytest.approx(3 * rows[0].total_rows(), rel=0.02)
    steps = rows[1].total_steps()
    epochs = [rows[1].position(step)["epoch"] for step in (1, steps // 2, steps)]
    assert epochs == [1, 2, 3]
    assert rows[1].shares()["a"]["epochs"] == 3
    recipe = bench.recipe(
        sources=thrice, max_bad_rows=9, train={"max_steps": steps // 2}, shard_rows=128, cache="short"
    )
    half = TrainingRows.open(preparation=bench.prepared(recipe))
    assert half.stream.datasets[0].end is None
    assert [half.position(step)["epoch"] for step in (1, steps // 2)] == [1, 2]


@pytest.mark.full
def test_a_part_of_an_encoded_block_is_none(tmp_path):
    block = EncodedBlock(0, 1, 0, [], np.arange(9, dtype=np.uint16), np.array([4, 5]), np.zeros((2, 2), np.int32))
    (tmp_path / "block").write_bytes(block.content())
    whole = (tmp_path / "block").read_bytes()
    assert read_encoded(tmp_path / "block").ids.tolist() == [*range(9)]
    for at in range(len(whole)):
        (tmp_path / "block").write_bytes(whole[:at])
        assert read_encoded(tmp_path / "block") is None
    assert read_encoded(tmp_path / "nothing") is None


def test_what_the_parts_have_encoded_is_not_encoded_again(bench, files, monkeypatch):
    how = {"sources": [Source(files=[str(path) for path in files[:2]])], "train": {"num_train_epochs": 1}}
    how |= {"num_proc": 1, "max_bad_rows": 5, "shard_rows": 128}
    expected = prepared(bench, **how, cache="alone")
    recipe = bench.recipe(**how, cache="parts")
    sources = bench.sources(recipe)
    plan = bench.plan(recipe, sources=sources)
    assert prepare_part(plan, bench.tokenizer, sources=sources, part=(2, 2)) == [1]
    other = {**plan, "num_proc": 2}  # hosts may differ
    assert prepare_part(other, bench.tokenizer, sources=sources, part=(1, 2)) == []
    monkeypatch.setattr(workers, "encode_block", None)
    monkeypatch.setattr(WorkerPool, "submit", lambda pool, *block_range: in_this_process(pool, *block_range))
    prepare_now(plan, bench.tokenizer, sources=sources)
    assert everything(Path(recipe.data.cache_dir)) == expected


def in_this_process(pool: WorkerPool, *block_range) -> Future:
    future: Future = Future()
    future.set_result(pool.job.encode(*block_range))
    return future


@pytest.mark.full
def test_training_reads_the_first_shards_while_processes_encode_the_rest(bench, files):
    how = {"sources": [Source(files=str(path)) for path in files[:2]], "max_bad_rows": 5, "train": {"max_steps": 200}}
    expected = prepared(bench, **how, cache="before", num_proc=1)
    recipe = bench.recipe(**{"shard_rows": 128, **how}, cache="ahead", num_proc=2)
    preparation = bench.started(recipe)
    stream = streams_of(preparation.plan)["train"]
    while stream.refresh() or stream.missing(8) is not None:  # it runs for 20 ms between two looks
        preparation.child.send_signal(signal.SIGCONT)
        time.sleep(0.02)
        preparation.child.send_signal(signal.SIGSTOP)
    assert stream.missing() is not None
    preparation.child.send_signal(signal.SIGCONT)
    assert preparation.child.wait(120) == 0
    assert everything(Path(recipe.data.cache_dir)) == expected


@pytest.mark.full
def test_a_broken_file_stops_at_the_same_shard_with_any_processes(bench, tmp_path):
    path = tmp_path / "broken.json"  # in its last block, which is not the first of a run of blocks
    path.write_text(json.dumps([{"text": text} for text in texts(6000)])[:-1000])
    found = {}
    for processes in (1, 2):
        how = {"cache": f"by-{processes}", "num_proc": processes, "shard_rows": 32}
        recipe = bench.recipe(sources=[Source(files=str(path))], train={"num_train_epochs": 1}, **how)
        good = path.read_bytes()
        path.write_bytes(json.dumps([{"text": text} for text in texts(6000)]).encode())
        sources = bench.sources(recipe)
        path.write_bytes(good)
        file, status = sources[0][0].files[0], path.stat()  # as if it had been like this when it was verified
        file.bytes, file.mtime_ns, file.ctime_ns = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        with pytest.raises(DataError, match="probably cut off") as raised:
            bench.prepared(recipe, sources=sources)
        content = everything(Path(recipe.data.cache_dir))
        found[processes] = str(raised.value), {k: v for k, v in content.items() if "encoded" not in k}
    assert found[1] == found[2]
    assert len(found[1][1]) > 100


@pytest.mark.full
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_preparation_stopped_inside_its_only_file_goes_on_there(bench, tmp_path, kind):
    path = tmp_path / f"only.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(4500)))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts(4500)}), path, row_group_size=1000)
    how = {"sources": [Source(files=str(path))], "train": {"num_train_epochs": 1}, "shard_rows": 256}
    expected = prepared(bench, **how, cache="uncut", num_proc=1)
    blocks = set()
    for stop in (15, 27):  # behind other blocks than the first of sixteen
        recipe = bench.recipe(**how, max_bad_rows=5, cache=f"stopped-{stop}", num_proc=2)
        sources = bench.sources(recipe)
        plan = bench.plan(recipe, sources=sources)
        with locks(plan), ShardBuilder(plan, bench.tokenizer, sources=sources) as builder:
            for _ in range(stop):
                builder.extend("train", 0)
            blocks.add(builder.streams["train"].datasets[0].seals[-1]["cursor"]["block"])
        bench.prepared(recipe, sources=sources)
        assert everything(Path(recipe.data.cache_dir)) == expected
    assert len(blocks - {0}) == 2


class Everywhere:
    """A source of local files as BlockRanges sees it."""

    def __init__(self, paths):
        self.files = paths

    def path_of(self, number):
        return self.files[number]


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [(0, 0), (1, 2)])
def test_the_parts_share_every_block_of_every_file_out_once(files, parts, start):
    num_blocks = {0: 4, 1: 3, 2: 3, 3: 1}
    given = []
    for part in range(parts):
        ranges = BlockRanges(Everywhere(files), file=start[0], block=start[1], ramp=2, part=(part, parts))
        while (found := ranges.next()) is not None:
            file, first, count = found
            given += [(file, block) for block in range(first, min(first + count, num_blocks[file]))]
            if first + count >= num_blocks[file]:
                ranges.end_file(file)  # as where an answer is short
    wanted = {(file, block) for file, count in num_blocks.items() for block in range(count) if (file, block) >= start}
    assert sorted(given) == sorted(wanted)
    assert num_blocks[0] == -(-3300 // BLOCK_ROWS)


class OneByOne:
    """A pool of four processes that encodes a range when it is asked for. blocks: of each file."""

    count = 4

    def __init__(self, blocks: int):
        self.blocks = blocks

    def submit(self, folder, file, first, count) -> Future:
        future: Future = Future()
        future.set_result([1] * max(0, min(count, self.blocks - first)))
        return future


def test_files_of_unknown_length_are_read_in_order_to_their_end():
    names = [Path(f"{n}.jsonl") for n in range(3)]
    source = SimpleNamespace(files=names, path_of=lambda n: names[n])
    job = EncodeJob({Path("shards"): (source, {})}, None, None)
    reader = EncodedReader(OneByOne(blocks=40), job, Path("shards"))
    results = list(reader.encode(BlockRanges(source, file=0, block=0, ramp=8)))
    assert [sum(answer.result()) for *_, answer in results] == [1] * 8 + [16, 16, 0] + [16, 16, 8] * 2


@pytest.mark.full
def test_the_number_of_processes_follows_cores_memory_and_text(monkeypatch):
    text = SimpleNamespace(files=[SimpleNamespace(bytes=100 * workers.WORTH_A_PROCESS)])
    monkeypatch.setattr(workers, "usable_cores", lambda: 64)
    for gib, processes in ((256, 64), (32, 16), (1, 1)):
        monkeypatch.setattr(workers, "available_bytes", lambda gib=gib: gib << 30)
        assert processes_for(None, text) == processes
    assert processes_for(3, text) == 3
    assert processes_for(None, SimpleNamespace(files=[SimpleNamespace(bytes=9)])) == 1


@pytest.mark.full
def test_workers_end_with_their_parent_even_in_the_middle_of_work(tmp_path):
    work = """
        import pathlib, time
        from pipeline.data.workers import WorkerPool
        class Slow:
            retries = None
            def encode(self, *block_range):
                pathlib.Path(__file__).with_name("begun").touch()
                time.sleep(600)
        def lead():
            WorkerPool(Slow(), 1).submit("folder", 0, 0, 1).result()
    """
    (tmp_path / "slow_work.py").write_text(textwrap.dedent(work))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    leader = subprocess.Popen([sys.executable, "-c", "import slow_work; slow_work.lead()"], env=environment)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        children = psutil.Process(leader.pid).children()
    finally:
        leader.kill()
        leader.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert children
    assert not alive


# The real command, in processes of its own.


@pytest.fixture
def recipe_file(bench, files, tmp_path) -> Path:
    bench.tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = {
        "run": {"directory": str(tmp_path / "runs"), "stage": "pretrain"},
        "tokenizer": {"path": str(tmp_path / "tokenizer"), "vocab_size": 600},
        "data": {
            "sources": [{"files": [str(path) for path in files]}],
            "validation": [{"files": str(bench.text_files[2])}],
            "row_tokens": 64,
            "batch_tokens": 512,
            "shard_rows": 128,
            "packing": "concat",
            "max_bad_rows": 5,
        },
        "model": {"n_layer": 2, "n_embd": 32, "n_head": 2},
        "train": {"num_train_epochs": 1},
        "evals": {"bpb": {"tokens": 2048, "document_bytes": 4000}},
    }
    path = tmp_path / "text.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


class Command(subprocess.Popen):
    """The command, whose output is a file: nobody reads a pipe meanwhile."""

    def __init__(self, recipe_file: Path, cache: Path, *arguments: str):
        with tempfile.NamedTemporaryFile(dir=recipe_file.parent, suffix=".txt", delete=False) as output:
            self.output = Path(output.name)
            super().__init__(
                [sys.executable, "-m", "pipeline.data", str(recipe_file), f"data.cache_dir={cache}", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def said(self) -> str:
        """Return what it printed until its end."""
        self.wait(300)
        return self.output.read_text()


def test_parts_on_two_hosts_make_the_bytes_of_one_process(recipe_file, tmp_path):
    assert "in " in Command(recipe_file, tmp_path / "alone", "data.num_proc=1").said()
    parts = [Command(recipe_file, tmp_path / "shared", "data.num_proc=1", "--part", f"{k}/2") for k in (1, 2)]
    said = [part.said() for part in parts]
    assert [part.returncode for part in parts] == [0, 0], said
    assert sum("The last one" in text for text in said) == 1, said
    expected = everything(tmp_path / "alone")
    assert len(expected) > 12
    assert everything(tmp_path / "shared") == expected
    assert Command(recipe_file, tmp_path / "shared", "--part", "0/2").wait() == 64


DATATROVE = ("datatrove==0.10.1", "humanize==4.17.0", "loguru==0.7.3")  # the rest of its needs is here
LOCAL = """
from datatrove.executor import LocalPipelineExecutor

from pipeline.contrib.datatrove_step import PreparePart

if __name__ == "__main__":
    step = PreparePart("recipes/fineweb_d24.yaml", "data.cache_dir=/shared/cache")
    LocalPipelineExecutor([step], tasks=16, workers=2, logging_dir="/shared/logs/prepare").run()
"""
# Stand-ins for the scheduler, which runs what it is given at once, task after task.
SLURM = {
    "sbatch": """#!/bin/bash
script=$(mktemp); cat "${@: -1}" > "$script"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for SLURM_ARRAY_TASK_ID in $(seq 0 "$last"); do
  export SLURM_ARRAY_TASK_ID SLURM_NODELIST=localhost; bash "$script" >&2 || exit 1
done
echo Submitted batch job 1
""",
    "srun": """#!/bin/bash
while [[ $1 == -* || $1 =~ ^[0-9]+$ ]]; do shift; done; exec "$@"
""",
    "scontrol": "#!/bin/bash\necho localhost\n",
    "merge_stats": "#!/bin/bash\n",
}


@pytest.mark.full
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=slow_unless_installed(*DATATROVE)) for how in ("local", "slurm")]
)
def test_executors_of_datatrove_make_the_bytes_of_one_process(recipe_file, tmp_path, how):
    assert "in " in Command(recipe_file, tmp_path / "alone", "data.num_proc=1").said()
    page = (ROOT / "docs" / "cluster.md").read_text()
    text = LOCAL if how == "local" else re.findall(r"```python\n(.+?)```", page, re.S)[0]
    for theirs, ours in (("recipes/fineweb_d24.yaml", recipe_file), ("/shared", tmp_path), ("tasks=16", "tasks=3")):
        assert theirs in text
        text = text.replace(theirs, str(ours))
    (tmp_path / "executors.py").write_text(text)
    for name, script in SLURM.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    installed = folder_with(*DATATROVE)
    environ = {**os.environ, "PYTHONPATH": f"{installed}:{ROOT}"}
    environ["PATH"] = f"{tmp_path}:{installed}/bin:{environ['PATH']}"
    command = [sys.executable, "executors.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*(tmp_path / "logs" / "prepare" / "completions").iterdir()]) == 3
    assert everything(tmp_path / "cache") == everything(tmp_path / "alone")


def kill_and_go_on(recipe_file: Path, cache: Path, draw: random.Random, *, most: int) -> int:
    """Prepare by two processes while workers and the process that leads them are killed at random; return how many were."""
    kills: int = 0
    leader: Command | None = None
    while leader is None or leader.poll() != 0:
        if leader is None or leader.poll() is not None:
            if leader is not None:
                said = leader.said()
                assert leader.returncode == -signal.SIGKILL or "ended 3 times" in said, said
            leader = Command(recipe_file, cache, "data.num_proc=2")
        time.sleep(draw.random() * 0.3)
        with suppress(psutil.NoSuchProcess):
            workers = psutil.Process(leader.pid).children()
            if workers and kills < most:  # without, it still reads the recipe
                victim = leader.pid if draw.random() < 0.3 else draw.choice(workers).pid
                if leader.poll() is None:
                    os.kill(victim, signal.SIGKILL)
                    kills += 1
                    time.sleep(draw.random() * 3)
    return kills


@pytest.mark.full
@pytest.mark.parametrize(
    ("kills", "files_of"),
    [
        (2, "many"),
        *(pytest.param(60, which, marks=pytest.mark.slow) for which in ("many", "one that is read in turn")),
    ],
)
def test_whoever_is_killed_the_shards_are_those_of_an_undisturbed_process(recipe_file, tmp_path, kills, files_of):
    if files_of != "many":
        (tmp_path / "only.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(12_000)))
        recipe = yaml.safe_load(recipe_file.read_text())
        recipe["data"]["sources"] = [{"files": str(tmp_path / "only.jsonl")}]
        recipe_file.write_text(yaml.safe_dump(recipe))
    assert "in " in Command(recipe_file, tmp_path / "alone", "data.num_proc=1").said()
    expected, made = everything(tmp_path / "alone"), 0
    for trial in range(1000):
        cache = tmp_path / f"killed-{trial}"
        made += kill_and_go_on(recipe_file, cache, random.Random(trial), most=min(6, kills - made))
        assert everything(cache) == expected, f"trial {trial}, {made} kills"
        if made >= kills:
            break
    print(f"{made} kills in {trial + 1} preparations: the bytes of an undisturbed one")
