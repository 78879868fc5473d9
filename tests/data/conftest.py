"""Small real sources, a small real tokenizer and recipes over them."""

import json
from pathlib import Path

import pytest

from pipeline.data.preparation import start_preparation
from pipeline.data.prepare import prepare_now
from pipeline.data.row_plan import plan_rows
from pipeline.recipe.dial import row_settings
from pipeline.recipe.schema import Recipe, Source
from pipeline.sources.open import open_sources
from pipeline.tokenizer.train import train_bpe


@pytest.fixture(scope="session")
def tokenizer(text_files):
    texts = [json.loads(line)["text"] for line in text_files[0].read_text().splitlines()]
    return train_bpe(texts[:400], vocab_size=600, split_pattern="nanochat")


def conversation(number: int, turns: int = 2) -> list[dict]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"What is {number} plus {turn}?"})
        messages.append({"role": "assistant", "content": f"It is {number + turn}."})
    return messages


@pytest.fixture(scope="session")
def chat_files(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("chat")
    files = []
    for name, first, count in (("talks", 0, 300), ("more", 1000, 60), ("held", 5000, 40)):
        rows = [{"messages": conversation(i, turns=1 + i % 4)} for i in range(first, first + count)]
        files.append(folder / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return files


class Bench:
    """Makes recipes over the text files, in a cache of its own."""

    def __init__(self, folder: Path, text_files, chat_files, tokenizer):
        self.folder, self.text_files, self.chat_files, self.tokenizer = folder, text_files, chat_files, tokenizer

    def recipe(self, *, sources=None, stage="pretrain", cache="cache", train=None, **data) -> Recipe:
        recipe = Recipe()
        recipe.stage = stage
        files = self.chat_files if stage == "sft" else self.text_files
        recipe.data.sources = sources or [Source(files=[str(path) for path in files[:2]])]
        recipe.data.validation = [Source(files=str(files[2]))]
        recipe.data.row_tokens, recipe.data.batch_tokens, recipe.data.shard_rows = 64, 8 * 64, 32
        recipe.data.packing_documents = 64
        recipe.data.cache_dir = str(self.folder / cache)
        for name, value in data.items():
            setattr(recipe.data, name, value)
        recipe.train = {"max_steps": 30, "seed": 7} if train is None else train
        recipe.evals.bpb.tokens, recipe.evals.bpb.document_bytes = 2048, 4000
        return recipe

    def sources(self, recipe):
        return open_sources(recipe.source_settings())

    def plan(self, recipe, *, sources=None, watchlist=None):
        return plan_rows(
            row_settings(recipe), self.tokenizer, sources=sources or self.sources(recipe), watchlist=watchlist
        )

    def prepared(self, recipe, *, sources=None, watchlist=None, verify=False):
        sources = sources or self.sources(recipe)
        plan = self.plan(recipe, sources=sources, watchlist=watchlist)
        return prepare_now(plan, self.tokenizer, sources=sources, verify=verify)

    def started(self, recipe, *, sources=None, watchlist=None, run=None):
        sources = sources or self.sources(recipe)
        plan = self.plan(recipe, sources=sources, watchlist=watchlist)
        return start_preparation(plan, self.tokenizer, sources=sources, run=run)


@pytest.fixture
def bench(tmp_path, text_files, chat_files, tokenizer) -> Bench:
    return Bench(tmp_path, text_files, chat_files, tokenizer)
