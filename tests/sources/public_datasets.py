"""Ten datasets that people train on, in miniature: file names, cards, columns and types are theirs, the texts are ours.

Looked up on 2026-11-23. Quoted from their cards and file lists: UltraChat 200k, C4, WikiText, FineWeb-Edu (card),
TinyStories (list), Alpaca, smol-smoltalk and OpenHermes 2.5 (names of files). From memory: that Alpaca's and Dolly's cards have
no `configs`.
"""

import gzip
import io
import json
from dataclasses import dataclass, field

import datasets
import yaml
from datasets import Value

STRING, INT, FLOAT, BOOL = (Value(name) for name in ("string", "int64", "float64", "bool"))
INT32 = Value("int32")
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Published:
    """stage: the natural one. expected: what its split holds, as texts or (role, content). key: what the error names, where
    `id` alone is refused. left_out: rows that are counted as empty. whole: of the split, that may be fetched."""

    files: dict[str, bytes]
    stage: str
    expected: list
    whole: list[str]
    key: dict = field(default_factory=dict)
    left_out: int = 0


def parquet(rows: list[dict], features: dict) -> bytes:
    made = io.BytesIO()
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(made)
    return made.getvalue()


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def card(**metadata) -> bytes:
    return f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n# A dataset\n".encode()


def config(name: str, **paths: str) -> dict:
    files = [{"split": split, "path": path} for split, path in paths.items()]
    return {"config_name": name, "data_files": files}


def infos(*names: str) -> list[dict]:
    return [{"config_name": name, "features": [{"name": "text", "dtype": "string"}]} for name in names]


def text(number: int) -> str:
    return f"Story {number}. Once upon a time there was a pond with {number} frogs, and each of them had a name.\nThe end."


def talk(number: int, *, system: str | None = None, turns: int = 1) -> Messages:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"How many frogs are in pond {number}, on day {turn}?"},
            {"role": "assistant", "content": f"There are {number + turn} frogs in it."},
        ]
    return messages


def exchange(number: int, context: str = "") -> Messages:
    question, answer = talk(number)
    return [{**question, "content": question["content"] + (f"\n\n{context}" if context else "")}, answer]


def ultrachat() -> Published:
    features = {"prompt": STRING, "prompt_id": STRING, "messages": [{"content": STRING, "role": STRING}]}

    def rows(first: int) -> list[dict]:
        talks = [talk(number, turns=2) for number in range(first, first + 12)]
        return [
            {"prompt": t[0]["content"], "prompt_id": f"{n:064x}", "messages": t} for n, t in enumerate(talks, first)
        ]

    hashes = {"train_sft": "a3ecf92756993583", "test_sft": "f7dfac4afe5b93f4", "train_gen": "a6c9fb894be3e50b", "test_gen": "3d4cd8309148a71f"}  # fmt: skip
    files = {f"data/{split}-00000-of-00001-{ending}.parquet": parquet(rows(100 * n), features) for n, (split, ending) in enumerate(hashes.items())}  # fmt: skip
    configs = [config("default", **{split: f"data/{split}-*" for split in hashes})]
    return Published(
        {"README.md": card(license="mit", pretty_name="UltraChat 200k", configs=configs), **files},
        "sft", [row["messages"] for row in rows(0)], [next(iter(files))], {"split": "train_sft"},
    )  # fmt: skip


def smol_smoltalk() -> Published:
    features = {"messages": [{"content": STRING, "role": STRING}], "source": STRING}
    talks = [talk(number, system="You rewrite texts." if number % 3 else None, turns=2) for number in range(24)]

    def rows(some: list) -> list[dict]:
        return [{"messages": messages, "source": "smol-magpie-ultra-short"} for messages in some]

    files = {f"data/train-{n:05d}-of-00004.parquet": parquet(rows(talks[n::4]), features) for n in range(4)}
    test = {"data/test-00000-of-00001.parquet": parquet(rows([talk(1000)]), features)}
    configs = [config("default", train="data/train-*", test="data/test-*")]
    return Published(
        {"README.md": card(license="apache-2.0", configs=configs), **files, **test}, "sft", talks, list(files)
    )


def openhermes() -> Published:
    names = {"human": "user", "gpt": "assistant", "system": "system"}
    from_role = {role: name for name, role in names.items()}
    empty = ("custom_instruction", "topic", "model_name", "model", "views", "language", "id", "title", "idx", "hash", "avatarUrl")  # fmt: skip
    talks = [talk(number, system="You count." if number % 4 == 1 else None) for number in range(24)]
    rows = [
        {
            **dict.fromkeys(empty),
            "skip_prompt_formatting": False,
            "category": "orca" if number % 2 else None,
            "system_prompt": "You count." if number % 8 == 1 else None,
            "source": "airoboros2.2",
            "conversations": [
                {"from": from_role[m["role"]], "value": m["content"]} | ({"weight": None} if number % 5 else {})
                for m in messages
            ],
        }
        for number, messages in enumerate(talks)
    ]
    rows.append({**rows[0], "conversations": [{"from": "gpt", "value": "I speak first."}, *rows[0]["conversations"]]})
    content = json.dumps(rows, indent=2).encode()
    readme = card(language=["eng"], pretty_name="OpenHermes 2.5", tags=["synthetic"])
    return Published({"README.md": readme, "openhermes2_5.json": content}, "sft", talks, ["openhermes2_5.json"], left_out=1)  # fmt: skip


def alpaca_rows() -> list[dict]:
    rows = []
    for number in range(24):
        question, answer = (message["content"] for message in talk(number))
        context = "The pond is green." if number % 2 else ""
        prompt = (
            f"Below is an instruction.\n\n### Instruction:\n{question}\n\n### Input:\n{context}\n\n### Response:\n"
        )
        rows.append({"instruction": question, "input": context, "output": answer, "text": prompt + answer})
    return [*rows, {**rows[0], "output": ""}]


def alpaca() -> Published:
    path = "data/train-00000-of-00001-a09b74b3ef9c3b56.parquet"
    content = parquet(alpaca_rows(), dict.fromkeys(("instruction", "input", "output", "text"), STRING))
    readme = card(license="cc-by-nc-4.0", pretty_name="Alpaca", tags=["instruction-finetuning"])
    expected = [exchange(number, "The pond is green." if number % 2 else "") for number in range(24)]
    return Published({"README.md": readme, path: content}, "sft", expected, [path], left_out=1)


def dolly() -> Published:
    rows = []
    for number in range(24):
        question, answer = (message["content"] for message in talk(number))
        context = "The pond is green." if number % 3 == 0 else ""
        rows.append({"instruction": question, "context": context, "response": answer, "category": "closed_qa"})
    expected = [exchange(number, "" if number % 3 else "The pond is green.") for number in range(24)]
    readme = card(license="cc-by-sa-3.0", size_categories=["10K<n<100K"])
    path = "databricks-dolly-15k.jsonl"
    return Published({"README.md": readme, path: lines(rows)}, "sft", expected, [path])


def fineweb_edu() -> Published:
    features = {
        "text": STRING, "id": STRING, "dump": STRING, "url": STRING, "file_path": STRING, "language": STRING,
        "language_score": FLOAT, "token_count": INT, "score": FLOAT, "int_score": INT,
    }  # fmt: skip

    def content(first: int) -> bytes:
        some = {"dump": "CC-MAIN-2013-20", "url": "http://a.b/c", "file_path": "s3://a/b", "language": "en", "language_score": 0.9}  # fmt: skip
        rows = [{"text": text(n), "id": f"<urn:uuid:{n}>", **some, "token_count": 24, "score": 2.6, "int_score": 3} for n in range(first, first + 6)]  # fmt: skip
        return parquet(rows, features)

    dumps = ("CC-MAIN-2013-20", "CC-MAIN-2024-10")
    paths = [f"data/{dump}/train-{n:05d}-of-00002.parquet" for dump in dumps for n in range(2)]
    samples = {f"sample/{size}/{n:03d}_00000.parquet": content(600 + 6 * n) for size in ("10BT", "100BT", "350BT") for n in range(2)}  # fmt: skip
    configs = [
        config("default", train="data/*/*"),
        *(config(f"sample-{size}", train=f"sample/{size}/*") for size in ("10BT", "100BT", "350BT")),
        *(config(dump, train=f"data/{dump}/*") for dump in dumps),
    ]
    files = {path: content(6 * n) for n, path in enumerate(paths)}
    return Published(
        {"README.md": card(license="odc-by", configs=configs), **files, **samples},
        "pretrain", [text(n) for n in range(24)], paths,
    )  # fmt: skip


def c4() -> Published:
    def content(first: int) -> bytes:
        rows = [{"text": text(n), "timestamp": "2019-04-25T12:57:54Z", "url": "https://a.b/c"} for n in range(first, first + 8)]  # fmt: skip
        return gzip.compress(lines(rows))

    english = ("en", "en.noblocklist", "en.noclean", "realnewslike")
    languages = ("af", "am", "ar", "az", "be", "bg", "bg-Latn", "zu")
    files = {f"{name}/c4-train.{n:05d}-of-01024.json.gz": content(1000 * k + 8 * n) for k, name in enumerate(english) for n in range(3)}  # fmt: skip
    files |= {f"{name}/c4-validation.00000-of-00008.json.gz": content(9000) for name in english}
    files |= {f"multilingual/c4-{name}.tfrecord-00000-of-00064.json.gz": content(8000) for name in languages}
    files |= {
        f"multilingual/c4-{name}-validation.tfrecord-00000-of-00001.json.gz": content(9000) for name in languages
    }
    many = config("multilingual")
    many["data_files"] = [
        {"split": split, "path": [f"multilingual/c4-{name}{ending}.*.json.gz" for name in languages]}
        for split, ending in (("train", ""), ("validation", "-validation"))
    ]
    configs = [
        *(config(name, train=f"{name}/c4-train.*.json.gz", validation=f"{name}/c4-validation.*.json.gz") for name in english),
        many,
        *(config(name, train=f"multilingual/c4-{name}.*.json.gz", validation=f"multilingual/c4-{name}-validation.*.json.gz") for name in languages),
    ]  # fmt: skip
    readme = card(license=["odc-by"], pretty_name="C4", dataset_info=infos(*english), configs=configs)
    whole = [path for path in files if path.startswith("en/c4-train")]
    return Published({"README.md": readme, **files}, "pretrain", [text(n) for n in range(24)], whole, {"config": "en"})


def tinystories() -> Published:
    endings = ("2d5a1467fff1081b", "5852b56a2bd28fd9", "a26307300439e943", "d243063613e5a057")
    parts = {f"data/train-{n:05d}-of-00004-{ending}.parquet": parquet([{"text": text(k)} for k in range(6 * n, 6 * n + 6)], {"text": STRING}) for n, ending in enumerate(endings)}  # fmt: skip
    flat = f"{text(500)}\n<|endoftext|>\n{text(501)}\n<|endoftext|>\n".encode()
    files = {
        "README.md": card(license="cdla-sharing-1.0", dataset_info=infos("default")[0]),
        "Evaluation prompts.yaml": b"- Once upon a time\n",
        "MLP_input_output.npy": b"\x93NUMPY",
        "TinyStories_all_data.tar.gz": gzip.compress(b"a tar"),
        **dict.fromkeys(("TinyStories-train.txt", "TinyStories-valid.txt", "TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"), flat),
        **parts,
        "data/validation-00000-of-00001-869c898b519ad725.parquet": parquet([{"text": text(900)}], {"text": STRING}),
    }  # fmt: skip
    return Published(files, "pretrain", [text(n) for n in range(24)], list(parts))


def wikitext() -> Published:
    names = ("wikitext-103-raw-v1", "wikitext-103-v1", "wikitext-2-raw-v1", "wikitext-2-v1")

    def content(first: int) -> bytes:
        rows = [one for n in range(first, first + 12) for one in ("", f" = Pond {n} = \n", "", f" {text(n)} \n")]
        return parquet([{"text": one} for one in rows], {"text": STRING})

    files = {}
    for k, name in enumerate(names):
        shards = 2 if "103" in name else 1
        files |= {f"{name}/{split}-00000-of-00001.parquet": content(9000) for split in ("test", "validation")}
        files |= {f"{name}/train-{n:05d}-of-{shards:05d}.parquet": content(100 * k + 12 * n) for n in range(shards)}
    configs = [config(name, **{split: f"{name}/{split}-*" for split in ("test", "train", "validation")}) for name in names]  # fmt: skip
    readme = card(pretty_name="WikiText", dataset_info=infos(*names), configs=configs)
    expected = [one for n in range(24) for one in (f" = Pond {n} = \n", f" {text(n)} \n")]
    whole = [path for path in files if path.startswith("wikitext-103-raw-v1/train")]
    return Published({"README.md": readme, **files}, "pretrain", expected, whole, {"config": names[0]}, left_out=48)


DATASETS = {
    "HuggingFaceH4/ultrachat_200k": ultrachat(),
    "HuggingFaceTB/smol-smoltalk": smol_smoltalk(),
    "teknium/OpenHermes-2.5": openhermes(),
    "tatsu-lab/alpaca": alpaca(),
    "databricks/databricks-dolly-15k": dolly(),
    "HuggingFaceFW/fineweb-edu": fineweb_edu(),
    "allenai/c4": c4(),
    "roneneldan/TinyStories": tinystories(),
    "Salesforce/wikitext": wikitext(),
}
