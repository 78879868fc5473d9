"""What several tests share: real English text from this Python's own documentation, and the offline switches."""

import ast
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stock import StockPython
from tests.warm_commands import WarmCommands

# No test talks to a service; one that stands in for the Hub sets its own address.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).parents[1]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark all cases of a test as full but those that its `full_except` names."""
    kept = item.get_closest_marker("full_except")
    if kept and item.name.partition("[")[2].removesuffix("]") not in kept.args:
        item.add_marker(pytest.mark.full)


def shared_data() -> Path | None:
    """The folder of real data that some tests use when it is there."""
    folder = Path(os.environ.get("TANDEM_SHARED_DATA", ROOT.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def docstrings(modules: int) -> list[str]:
    """Docstrings of the standard library, longest first within a module; real prose on every machine."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:modules]:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                texts.append(text)
    return [text for text in texts if len(text) > 40]


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> list[Path]:
    """Three jsonl files of documents, the last of which is held out by default."""
    folder = tmp_path_factory.mktemp("text")
    texts = docstrings(modules=60)
    files = []
    for number in range(3):
        path = folder / f"part-{number}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::3]))
        files.append(path)
    return files


@pytest.fixture(scope="session")
def cache(tmp_path_factory) -> Path:
    """One prepared-data cache for the whole session: what a test prepared, the next one finds."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def chat_files(tmp_path_factory) -> list[Path]:
    """Two jsonl files of conversations of uneven lengths, some with several turns; the last one is for holding out."""
    folder = tmp_path_factory.mktemp("chat")
    texts = docstrings(modules=30)
    files = []
    for number in range(2):
        path = folder / f"chat-{number}.jsonl"
        with open(path, "w") as file:
            for i in range(number, len(texts) - 2, 2):
                turns = 1 + i % 3
                messages = []
                for text in texts[i : i + turns]:
                    messages += [
                        {"role": "user", "content": "What does it do?"},
                        {"role": "assistant", "content": text[: 20 + 7 * (i % 40)]},
                    ]
                file.write(json.dumps({"messages": messages}) + "\n")
        files.append(path)
    return files


@pytest.fixture(scope="session")
def warm(tmp_path_factory) -> Iterator[WarmCommands]:
    """The interpreter that whole runs are forked from: a start of the entry's own imports for ten seconds."""
    runs = WarmCommands(tmp_path_factory.mktemp("warm"))
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def stock(tmp_path_factory) -> Iterator[StockPython]:
    """The interpreter without this package that the programs of somebody else are forked from."""
    programs = StockPython(tmp_path_factory.mktemp("stock"))
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A GPT-2 and a byte-level tokenizer, saved as a run's model/ is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(alphabet)} | {"<|bos|>": 256, "<|end|>": 257}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|end|>")
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    config = GPT2Config(
        vocab_size=258, n_positions=64, n_layer=1, n_embd=32, n_head=2, bos_token_id=256, eos_token_id=257
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
