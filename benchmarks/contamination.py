"""Preparing data while looking for evaluation items in it, against preparing it alone.

    python benchmarks/contamination.py --text 'train/*.parquet' --items eval_bundle.zip [--tokenizer FOLDER --vocab-size N] [--pairs 5]

items: a zip with .jsonl files, one task each; an item's text is all the strings of its row, so more than what is looked
for in a real run. Both ways write the same shards to an empty cache, in turns. cpu: the processor's seconds of this
process; wall: on an otherwise idle machine what the user waits. Reading the watch-list, once a run, is listed apart
(read_cpu_s) and not in the ratio. The goal is at most 1.05.
"""

import os

os.environ.setdefault("RAYON_NUM_THREADS", "1")  # before anything imports tokenizers

import json
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from common import ROOT, arguments, compared, show

from pipeline.contrib.decontamination import Matches, Watchlist
from pipeline.data.prepare import prepare_now
from pipeline.data.row_plan import plan_rows
from pipeline.recipe import read_recipe
from pipeline.recipe.dial import row_settings
from pipeline.sources.open import open_sources
from pipeline.tokenizer import load_or_train


def strings(value) -> list[str]:
    """All texts in a row of JSON."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in strings(one)]


def tasks_of(path: str) -> dict[str, list[str]]:
    with zipfile.ZipFile(path) as bundle:
        files = {name: bundle.read(name).decode() for name in sorted(bundle.namelist()) if name.endswith(".jsonl")}
    return {
        name: [" ".join(strings(json.loads(line))) for line in text.split("\n") if line]
        for name, text in files.items()
    }


def main() -> None:
    options = arguments(
        __doc__,
        text="",
        items="",
        tokenizer="",
        vocab_size=32768,
        packing="best_fit_crop",
        row_tokens=2048,
        pairs=5,
        threads=1,
    )
    if not (options.text and options.items):
        sys.exit("contamination.py needs --text and --items: see contamination.py --help.")
    with tempfile.TemporaryDirectory() as folder:
        recipe = read_recipe(
            [
                str(ROOT / "recipes" / "fineweb_d24.yaml"),
                "run.hardware=",
                "run.tokens_per_param=",
                "train.num_train_epochs=1",
                f"data.sources=[{{files: '{options.text}'}}]",
                f"data.cache_dir={folder}",
                f"data.row_tokens={options.row_tokens}",
                f"data.packing={options.packing}",
                "data.batch_tokens=65536",
                f"data.num_proc={options.threads}",
                "evals.bpb.tokens=2048",  # validation is not searched
                "evals.bpb.document_bytes=0",
                f"tokenizer.vocab_size={options.vocab_size}",
                *([f"tokenizer.path={options.tokenizer}"] if options.tokenizer else []),
            ],
            stage="pretrain",
        )
        sources = open_sources(recipe.source_settings())
        tokenizer = load_or_train(recipe.tokenizer_settings(), sources[0], validation=sources[1])
        tasks = tasks_of(options.items)
        started = time.process_time()
        watchlist = Watchlist.of(tasks)
        made_s = time.process_time() - started
        path = watchlist.save(Path(folder))

        def prepare(path: Path | None) -> tuple[float, float]:
            shutil.rmtree(Path(folder) / "shards", ignore_errors=True)
            if path:  # read once more, to take the time of it away again
                started = time.process_time(), time.perf_counter()
                Watchlist.load(path)
                read_s[:] = time.process_time() - started[0], time.perf_counter() - started[1]
            spared = read_s if path else (0.0, 0.0)
            began = time.process_time(), time.perf_counter()
            plans[path] = plan_rows(row_settings(recipe), tokenizer, sources=sources, watchlist=path)
            prepare_now(plans[path], tokenizer, sources=sources)
            return time.process_time() - began[0] - spared[0], time.perf_counter() - began[1] - spared[1]

        plans: dict[Path | None, dict] = {}
        read_s = [0.0, 0.0]
        times = []
        for pair in range(1 + options.pairs):  # the first warms up
            if pair % 2:
                alone, looking = prepare(None), prepare(path)
            else:
                looking, alone = prepare(path), prepare(None)
            times.append((looking, alone))
            print(f"pair {pair}: cpu {looking[0] / alone[0]:.4f}, wall {looking[1] / alone[1]:.4f}", file=sys.stderr)
        prepare(path)
        seen = Matches.by_run(plans[path], watchlist.id)
    rows = [
        {"clock": clock, **compared([(looking[i], alone[i]) for looking, alone in times[1:]])}
        for i, clock in enumerate(("cpu", "wall"))
    ]
    about = {"items": sum(map(len, tasks.values())), "ngrams": len(watchlist.ngrams.numbers)}
    about |= {"bytes": len(watchlist.content()), "made_cpu_s": made_s, "read_cpu_s": read_s[0]}
    print({**about, "shards": seen.shards, "unchecked": seen.unchecked, "found": len(seen.ngrams)})
    show(options, rows)


if __name__ == "__main__":
    main()
