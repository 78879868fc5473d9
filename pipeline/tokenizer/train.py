"""The tokenizer of a run that is trained on its sources: once per text and settings, cached, and its compression
reported."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.process.commands import program
from pipeline.process.errors import DataError, RecipeError
from pipeline.process.progress import Bar, count_text, waiting
from pipeline.process.storage import cache_dir, file_lock, read_json, remove_folder, require_writable, write_json
from pipeline.recipe.schema import Tokenizer, TokenizerSettings
from pipeline.run_dir.checkpoints import problems, whole_folder
from pipeline.sources.formats import REASONING
from pipeline.tokenizer.chat import RESPONSE_TEMPLATE, built_in_template
from pipeline.tokenizer.encode import BOS, END, GPT2_PATTERN, PAD, SPECIALS, byte_lengths, escape, plain_backend
from pipeline.tokenizer.load import given_template, open_tokenizer, set_template

SAMPLES = {
    "prose": (
        "The harbour was still asleep when Marta walked down to the boats. A thin mist hung over the water, and the "
        "only sound was a rope knocking against a mast. She had promised her brother that she would check the engine "
        "before the others came, and she meant to keep that promise even though her hands were stiff with cold. By the "
        'time the sun touched the roofs, the engine was running. "You could have waited," he said. "I could have," she '
        'answered, "but then we would have lost the tide." Nobody spoke of it again; there was too much work to do.'
    ),
    "code": '''\
import heapq


class Router:
    """Shortest paths on a weighted graph."""

    def __init__(self, edges: list[tuple[str, str, float]]):
        self.neighbours = {}
        for left, right, cost in edges:
            self.neighbours.setdefault(left, []).append((right, cost))
            self.neighbours.setdefault(right, []).append((left, cost))

    def distance(self, start: str, goal: str) -> float | None:
        queue, seen = [(0.0, start)], set()
        while queue:
            cost, node = heapq.heappop(queue)
            if node == goal:
                return cost
            if node not in seen:
                seen.add(node)
                for other, step in self.neighbours.get(node, ()):
                    heapq.heappush(queue, (cost + step, other))
        return None


if __name__ == "__main__":
    print(Router([("a", "b", 1.5), ("b", "c", 2.0)]).distance("a", "c"))  # 3.5
''',
    "numbers": (
        "3.14159265 2.71828183 1,024 65,536 4,294,967,296 19:45:07 2024-02-29 1e-8 6.022e23 -40 +7 100% $1,299.99\n"
        "12 + 345 = 357; 6789 - 1011 = 5778; 24 * 365 = 8760; 1000000 / 128 = 7812.5; 17^2 = 289; 2^31 - 1 = "
        "2147483647\n"
        "Order 20240817-0042: 3 x 14.50 + 2 x 7.25 = 58.00; account 0049 221 5550 1734; version 5.23.0; page 1187\n"
    ),
    "non-English": (
        "Der Zug nach Norden f\u00e4hrt heute sp\u00e4ter, weil auf der Br\u00fccke gearbeitet wird; wer es eilig "
        "hat, nimmt den Bus.\n"
        "Ma grand-m\u00e8re pr\u00e9parait le d\u00eener pendant que nous \u00e9tions d\u00e9j\u00e0 \u00e0 table, et "
        "personne n'osait l'interrompre.\n"
        "El a\u00f1o pasado sembramos tomates, pero la lluvia lleg\u00f3 demasiado pronto y se perdi\u00f3 casi toda "
        "la cosecha.\n"
        "\u0417\u0430\u0432\u0442\u0440\u0430 \u0443\u0442\u0440\u043e\u043c \u043c\u044b "
        "\u043f\u043e\u0439\u0434\u0451\u043c \u043a \u0440\u0435\u043a\u0435, \u0435\u0441\u043b\u0438 \u043d\u0435 "
        "\u0431\u0443\u0434\u0435\u0442 \u0434\u043e\u0436\u0434\u044f.\n"
        "\u4eca\u5929\u7684\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u8d70\u8d70\u5427\u3002 "
        "\u660e\u65e5\u306f\u96e8\u304c\u964d\u308b\u304b\u3082\u3057\u308c\u307e\u305b\u3093\u3002 "
        "\uc624\ub298\uc740 \uc2dc\uac04\uc774 \uc5c6\uc5b4\uc694.\n"
        "\u0643\u062a\u0628 \u0627\u0644\u0648\u0644\u062f \u0631\u0633\u0627\u0644\u0629 "
        "\u0637\u0648\u064a\u0644\u0629 \u0625\u0644\u0649 \u0635\u062f\u064a\u0642\u0647. "
        "\u0928\u092e\u0938\u094d\u0924\u0947, \u0906\u092a \u0915\u0948\u0938\u0947 \u0939\u0948\u0902?\n"
    ),
}


def training_texts(sources: list, *, total_chars: int, document_chars: int) -> Iterator[str]:
    """Yield texts of the sources, each cut to document_chars, until total_chars are given or all sources end.

    Sources take turns block by block such that their shares of characters follow their weights (1 where none is
    given). The order depends on nothing but the sources: the same text comes in every process.
    """
    open_blocks = {number: source.read() for number, source in enumerate(sources)}
    taken = dict.fromkeys(open_blocks, 0.0)
    left = total_chars
    while open_blocks and left > 0:
        number = min(open_blocks, key=lambda n: (taken[n] / (sources[n].spec.weight or 1.0), n))
        block = next(open_blocks[number], None)
        if block is None:
            del open_blocks[number]
            continue
        for item in block.items:
            text = text_of(item)[: min(document_chars, left)]
            if text:
                yield text
            taken[number] += len(text)
            left -= len(text)
            if left <= 0:
                return


def text_of(item) -> str:
    """Return a document's text; of a conversation what its messages say, a line each."""
    if hasattr(item, "text"):
        return item.text
    contents = [message.get(key) for message in item.messages for key in (*REASONING, "content")]
    return "\n".join(content for content in contents if isinstance(content, str))


# How text is cut before merging; no token ever crosses a cut.
LIKE_GPT4 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT_PATTERNS = {
    # GPT-4's, with numbers cut to two digits instead of three: better for small vocabularies. Source: nanochat.
    "nanochat": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",  # noqa: E501
    # The three that llama.cpp has too, as it writes them: exports to GGUF need one of these.
    "gpt2": GPT2_PATTERN,
    "qwen2": LIKE_GPT4.replace("NUMBERS", r"\p{N}"),
    "llama3": LIKE_GPT4.replace("NUMBERS", r"\p{N}{1,3}"),
}


def train_bpe(texts: Iterable[str], *, vocab_size: int, split_pattern: str) -> Any:
    """Return a PreTrainedTokenizerFast of at most vocab_size ids: 256 bytes, then merges by frequency, then the
    specials.

    The same texts give the same tokenizer. There are fewer ids when the texts hold too few different pieces.
    `tokenizer(text)` begins with BOS, as every document in training does. split_pattern: a name of SPLIT_PATTERNS or a
    regular expression; RecipeError when it is none.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    pattern = SPLIT_PATTERNS.get(split_pattern, split_pattern)
    try:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # the tokenizers library raises plain Exception
        names = ", ".join(SPLIT_PATTERNS)
        raise RecipeError(
            f"tokenizer.split_pattern: {pattern!r} is neither {names} nor a regular expression ({error}). Correct it."
        ) from None
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        min_frequency=0,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Escaped: under a pattern that does not cut there, a text full of "<|bos|>" would grow a merge of that name, and
    # the control token added below would share its id with plain text.
    backend.train_from_iterator((escape(text) for text in texts), trainer)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.chat_template = built_in_template(list(SPECIALS))
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


# How well a tokenizer compresses text: bytes per token, on the run's own text and on kinds it may have seen little
# of.

JUDGED_CHARS = 500_000  # Of the train and of the validation text.
COMPARED = "openai-community/gpt2"


def judge(tokenizer, *, train: list, validation: list, beside: str | None = None) -> dict[str, Any]:
    """Return bytes, tokens and bytes per token of each kind of text, and GPT-2's tokens where its files are at hand.

    beside: folder or Hub id of another tokenizer to compare with; default GPT-2 when the local Hub cache has it.
    """
    other, name = _other(beside)
    texts = {"train": _some(train), "validation": _some(validation)} | {kind: [text] for kind, text in SAMPLES.items()}
    rows = {}
    for kind, parts in texts.items():
        if parts:
            row: dict[str, float] = {"bytes": sum(len(t.encode()) for t in parts), "tokens": _tokens(tokenizer, parts)}
            row["bytes_per_token"] = row["bytes"] / row["tokens"]
            if other is not None:
                row["other_tokens"] = _tokens(other, parts)
                row["other_bytes_per_token"] = row["bytes"] / row["other_tokens"]
            rows[kind] = row
    other_ids = None if other is None else len(other)
    return {"ids": len(tokenizer), "other": name, "other_ids": other_ids, "texts": rows}


def table(judgement: dict[str, Any]) -> str:
    """Return the judgement as lines for the console."""
    other = judgement["other"]
    head = f"{'bytes per token':<16}{'bytes':>10}{'tokens':>10}{'ours':>8}"
    if other:
        head += f"{other[:20]:>22}{'difference':>12}"
    lines = [head]
    for kind, row in judgement["texts"].items():
        line = f"{kind:<16}{row['bytes']:>10,}{row['tokens']:>10,}{row['bytes_per_token']:>8.3f}"
        if other:
            gain = row["bytes_per_token"] / row["other_bytes_per_token"] - 1
            line += f"{row['other_bytes_per_token']:>22.3f}{gain:>+12.1%}"
        lines.append(line)
    if not other:
        lines.append(f"beside GPT-2's, which is not on this machine: {program('tokenizer')} RECIPE --beside FOLDER")
    return "\n".join(lines)


def _some(sources: list) -> list[str]:
    return list(training_texts(sources, total_chars=JUDGED_CHARS, document_chars=10_000))


def _tokens(tokenizer, texts: list[str]) -> int:
    encodings = plain_backend(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return sum(len(encoding.ids) for encoding in encodings)


def _other(beside: str | None) -> tuple[Any, str | None]:
    from transformers import AutoTokenizer

    if beside is not None:
        return open_tokenizer(beside, revision=None, beside=None, where="--beside"), Path(beside).name
    try:
        return AutoTokenizer.from_pretrained(COMPARED, local_files_only=True, trust_remote_code=False), "gpt2"
    except (OSError, ValueError):
        return None, None  # Not in the local cache; nobody asked for it, so nothing is fetched.


# Part of the cache's key: raised when training would give something else for the same text and settings.
TRAINING_VERSION = 1


def trained_tokenizer(
    settings: TokenizerSettings, sources: list, *, validation: list | None = None, beside: str | None = None
) -> Any:
    """Return the tokenizer of the run's sources, from the cache or trained now. Arguments as load_or_train has
    them."""
    sources = [source.once for source in sources]
    folder = cached_folder(settings, sources)
    with file_lock(folder.with_name(folder.name + ".lock")):
        if found := _damage(folder):
            print(f"tokenizer: {folder}: {'; '.join(found)}, so it is trained again on the same text", flush=True)
            remove_folder(folder)
        if not folder.is_dir():
            require_writable(folder.parent, lacks="this recipe's tokenizer is")
            _train(settings.tokenizer, sources, folder, validation=validation or [], beside=beside)
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    set_template(tokenizer, given_template(settings))
    return tokenizer


def cached_folder(settings: TokenizerSettings, sources: list) -> Path:
    """Return where the trained tokenizer of these sources and settings is or will be."""
    section = settings.tokenizer
    key = {
        "version": TRAINING_VERSION,
        "sources": [[source.once.fingerprint, source.spec.weight or 1.0] for source in sources],
        "vocab_size": section.vocab_size,
        "split_pattern": section.split_pattern,
        "train_chars": section.train_chars,
        "document_chars": section.document_chars,
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir(settings.cache_dir) / "tokenizers" / name


def _train(settings: Tokenizer, sources: list, folder: Path, *, validation: list, beside: str | None) -> None:
    assert settings.vocab_size is not None
    names = ", ".join(source.name for source in sources)
    print(
        f"tokenizer: learning {settings.vocab_size:,} tokens (pieces of text) from {names}, at most "
        f"{count_text(settings.train_chars)} characters of it",
        flush=True,
    )
    texts = training_texts(sources, total_chars=settings.train_chars, document_chars=settings.document_chars)
    read = _Counted(texts)
    with read.merging:
        tokenizer = train_bpe(read, vocab_size=settings.vocab_size, split_pattern=settings.split_pattern)
    if read.chars == 0:
        raise DataError(f"{names}: no text to train a tokenizer on. Name sources with text, or set tokenizer.path.")
    if len(tokenizer) < settings.vocab_size:
        print(
            f"tokenizer: the text has only {len(tokenizer):,} different pieces; the vocabulary is that small, "
            f"not tokenizer.vocab_size = {settings.vocab_size:,}"
        )
    report: dict[str, Any] = {"texts": read.texts, "chars": read.chars, "ids": len(tokenizer)}
    report["judgement"] = judge(tokenizer, train=sources, validation=validation, beside=beside)
    with whole_folder(folder) as temporary:
        from safetensors.numpy import save_file

        tokenizer.save_pretrained(temporary)
        save_file({"byte_lengths": byte_lengths(tokenizer)}, temporary / "byte_lengths.safetensors")
        write_json(temporary / "report.json", report)
    own = report["judgement"]["texts"]["train"]["bytes_per_token"]
    print(
        f"tokenizer: {len(tokenizer):,} tokens learned, {own:.2f} bytes per token of this text; kept in {folder}",
        flush=True,
    )


def _damage(folder: Path) -> list[str]:
    """Return what keeps a cached tokenizer from being used; nothing where none is cached."""
    if not folder.is_dir():
        return []
    if found := problems(folder):
        return found
    added = [token["content"] for token in read_json(folder / "tokenizer.json")["added_tokens"]]
    return [] if added == list(SPECIALS) else ["has other control tokens than tokenizer/encode.py"]


class _Counted:
    """Texts on their way through, counted. The bar has no end: nobody knows how many characters files hold before they
    are read."""

    def __init__(self, texts):
        self._texts, self.texts, self.chars = texts, 0, 0
        self.merging = ExitStack()  # shows the time from the last text on

    def __iter__(self):
        with Bar("tokenizer: reading text", unit="characters") as bar:
            for text in self._texts:
                self.texts += 1
                self.chars += len(text)
                yield text
                bar.update(len(text))
        self.merging.enter_context(waiting("tokenizer: merging what stands together often", after_s=1.0))
