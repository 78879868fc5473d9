"""Model folders: configurations, weights, tokenizers and chat templates of a stranger."""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

from tests.hostile.case import MARKING, MODELING, Case
from tests.hostile.trial import SCRIPT, Thing

CHAT = "chat model -p hello --max-new-tokens 2"
START = "pretrain in/r.yaml model.start_from=model"
EVALS = "evals model samples --output out/scores.json"
EXPORT = "hub export model --to safetensors --output out/exported"
SIZES = "model.n_layer=1 model.n_embd=16 model.n_head=2"
TOKENIZER = f"data in/r.yaml tokenizer.path=model {SIZES}"
PREFLIGHT = "preflight in/r.yaml --probe 0 model.start_from=model"
SERVE = "serve model"
WEIGHTS = (CHAT, EVALS, START, EXPORT)
TEXT = (
    CHAT,
    "evals model bpb --text in/valid.jsonl --output out/scores.json",
    TOKENIZER,
    "tokenizer in/r.yaml tokenizer.path=model",
)


class _Touch:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def changed(change: Callable[[Case], object]) -> Callable[[Case], None]:
    def lay(case: Case) -> None:
        case.recipe(ready=True)
        change(case)

    return lay


def config(**keys: object) -> Callable[[Case], None]:
    return changed(lambda case: case.change("model/config.json", **keys))


def tokenizer_config(**keys: object) -> Callable[[Case], None]:
    return changed(lambda case: case.change("model/tokenizer_config.json", **keys))


def written(*files: tuple[str, bytes | str]) -> Callable[[Case], None]:
    return changed(lambda case: [case.put(f"model/{name}", content) for name, content in files])


def template(text: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        (case.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
        case.change("model/tokenizer_config.json", chat_template=text)

    return changed(change)


def tokenizer(change: Callable[[dict], object]) -> Callable[[Case], None]:
    def rewrite(case: Case) -> None:
        path = case.folder / "model" / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return changed(rewrite)


def header(facts: object, *, length: int | None = None, data: bytes = b"") -> bytes:
    """safetensors with any header. length: what its first 8 bytes say."""
    text = facts if isinstance(facts, bytes) else json.dumps(facts).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def weights(content: bytes) -> Callable[[Case], None]:
    return written(("model.safetensors", content))


def pickled(name: str, *, index: bool = False) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        (case.folder / "model" / "model.safetensors").unlink()
        case.put(f"model/{name}", pickle.dumps(_Touch(case.folder / "MARK")))
        if index:
            where = {"transformer.wte.weight": name}
            case.put("model/pytorch_model.bin.index.json", json.dumps({"metadata": {}, "weight_map": where}))

    return changed(change)


def zipped_pickle(case: Case) -> None:
    """As torch.save writes it, with a payload among the tensors."""
    import torch

    (case.folder / "model" / "model.safetensors").unlink()
    torch.save({"a": _Touch(case.folder / "MARK")}, case.folder / "model" / "pytorch_model.bin")


def index_above(case: Case) -> None:
    (case.folder / "model" / "model.safetensors").rename(case.folder / "elsewhere" / "m.safetensors")
    names = {"transformer.wte.weight": "../elsewhere/m.safetensors", "transformer.wpe.weight": "/etc/passwd"}
    case.put("model/model.safetensors.index.json", json.dumps({"metadata": {"total_size": -1}, "weight_map": names}))


def filled(value: float) -> Callable[[Case], None]:
    """Weights of one value, NaN or infinity."""

    def change(case: Case) -> None:
        from safetensors.numpy import load_file, save_file

        path = case.folder / "model" / "model.safetensors"
        tensors = load_file(path)
        for tensor in tensors.values():
            tensor.fill(value)
        save_file(tensors, path, metadata={"format": "pt"})

    return changed(change)


def of_code(model_type: object = "evil") -> Callable[[Case], None]:
    return changed(lambda case: case.auto_map(model_type))  # type: ignore[arg-type]


def special_file(name: str, make: Callable[[Path, Case], object]) -> Callable[[Case], None]:
    """A file of the model that is a link, a pipe or holds nothing but its length."""

    def change(case: Case) -> None:
        path = case.folder / "model" / name
        path.unlink(missing_ok=True)
        make(path, case)

    return changed(change)


def sparse(path: Path, case: Case) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def pipe(path: Path, case: Case) -> None:
    import os

    os.mkfifo(path)


DEEP = "[" * 100_000 + "]" * 100_000
TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
ADDED = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": False, "special": True}
LISTED = ["evil.EvilTokenizer", "evil.EvilTokenizer"]


def own_tokenizer(case: Case) -> None:
    case.put("model/evil.py", MODELING)
    case.change("model/tokenizer_config.json", auto_map={"AutoTokenizer": LISTED}, tokenizer_class="EvilTokenizer")


def catastrophic(content: dict) -> None:
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+|[a-z ]+)+$|(.*.*)*x"},
        "behavior": "Isolated",
        "invert": False,
    }


def many_merges(content: dict) -> None:
    content["model"]["merges"] = [["a", "b"], ["ab", "a"]] * 500_000


def overlapping(content: dict) -> None:
    content["added_tokens"] = [{"id": n % 3, "content": "a" * (n % 7), **ADDED} for n in range(2000)]


def huge_ids(content: dict) -> None:
    content["added_tokens"] = [
        {"id": 2**32 - 1, "content": "<big>", **ADDED},
        {"id": 10**6, "content": "\x1b[2J", **ADDED},
    ]


CONFIGS: dict[str, dict] = {
    "of a vocabulary of 2**40": {"vocab_size": 2**40},
    "of 10**9 layers": {"n_layer": 10**9},
    "of 10**6 heads of nothing": {"n_head": 10**6, "n_embd": 0},
    "of negative sizes": {"n_positions": -1, "n_embd": -16},
    "of sizes that are text": {"n_embd": "16", "n_layer": "one", "vocab_size": [258]},
    "of sizes that are no number": {"n_positions": float("nan"), "n_embd": float("inf")},
    "of 2**62 positions": {"n_positions": 2**62},
    "of a type that nobody knows": {"model_type": "hostile", "architectures": ["../../evil"]},
    "of a type that is a path": {"model_type": "../../elsewhere/evil"},
    "of a dtype that is code": {"dtype": "__import__('os').system('touch $MARK')"},
    "of a quantization by code": {"quantization_config": {"quant_method": "evil", "modules_to_not_convert": 7}},
    "of an attention of the Hub": {"attn_implementation": "evil/kernel", "_attn_implementation": "evil/kernel"},
    "of tokens that are out of reach": {"eos_token_id": 10**9, "bos_token_id": -5, "pad_token_id": "x"},
    "of labels without end": {"num_labels": 10**7, "id2label": {"0": "\x1b[31m"}},
}  # fmt: skip
HEADERS: dict[str, bytes] = {
    "an overlong header": header({}, length=2**63),
    "a header longer than the file": header({}, length=10**9),
    "a header that is no JSON": header(b"{" * 5000),
    "a header nested 100,000 deep": header(b'{"a":' + DEEP.encode() + b"}"),
    "tensors that overlap": header({"a": TENSOR, "b": TENSOR}, data=b"\0" * 8),
    "offsets beyond the file": header({"a": {**TENSOR, "shape": [2**40], "data_offsets": [0, 2**42]}}),
    "offsets that run backwards": header({"a": {**TENSOR, "data_offsets": [8, 0]}}, data=b"\0" * 8),
    "a shape whose product overflows": header({"a": {**TENSOR, "shape": [2**32, 2**32], "data_offsets": [0, 0]}}),
    "other shapes": header({"transformer.wte.weight": TENSOR, "transformer.h.0.ln_1.weight": {**TENSOR, "data_offsets": [8, 16]}}, data=b"\0" * 16),
    "no byte": b"",
}  # fmt: skip
TOKENIZERS: dict[str, Callable[[Case], None]] = {
    "of 10**6 merges": tokenizer(many_merges),
    "of a pattern that tries all ways": tokenizer(catastrophic),
    "of 2,000 tokens that overlap": tokenizer(overlapping),
    "of ids without model": tokenizer(huge_ids),
    "of an unknown model": tokenizer(lambda content: content["model"].update(type="Evil")),
    "of no model": tokenizer(lambda content: content.pop("model")),
    "nested 100,000 deep": written(("tokenizer.json", DEEP)),
    "that is no JSON": written(("tokenizer.json", b"\x80\x04\x95pickle")),
    "of its own code": changed(own_tokenizer),
    "of a class of another kind": tokenizer_config(tokenizer_class="PreTrainedModel"),
    "of a class that is a path": tokenizer_config(tokenizer_class="os.system", auto_map={"AutoTokenizer": "../evil.T"}),
    "of special tokens of wrong types": tokenizer_config(bos_token=7, eos_token=["x"], additional_special_tokens={"a": 1}, extra_special_tokens="x"),
    "of a length of 10**30": tokenizer_config(model_max_length=10**30, padding_side="above", split_special_tokens="yes"),
    "of special tokens of ESC": tokenizer_config(eos_token="\x1b]52;c;aGk=\x07"),
}  # fmt: skip
TEMPLATES: dict[str, str] = {
    "walks to os": "{{ cycler.__init__.__globals__.os.system('touch $MARK') }}",
    "walks over subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "walks by format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "walks by map and attr": "{{ messages|map(attribute='__class__.__mro__')|list }}",
    "includes a file": "{% include '/etc/passwd' %}",
    "changes what it is given": "{% set _ = messages.append(1) %}{{ messages.clear() }}",
    "writes ESC": "\x1b]52;c;aGk=\x07{{ '\x1b[2J' }}{% for m in messages %}{{ m.content }}{% endfor %}",
    "raises what it is asked to": "{{ raise_exception('\x1b[31m' ~ messages) }}",
    "does not end its block": "{% for m in messages %}",
    "is nested 3,000 deep": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "loops without end": "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
    "writes 10**9 letters": "{{ 'a' * 100000 * 10000 }}",
    "calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "asks for what is not there": "{{ nothing.of.this }}{{ messages[10**9] }}{{ 1 // 0 }}",
}

THINGS: dict[str, Thing] = {}
for name, keys in CONFIGS.items():
    THINGS[f"a config {name}"] = Thing(lay=config(**keys), commands=(CHAT, START))
for name, content in HEADERS.items():
    THINGS[f"weights with {name}"] = Thing(lay=weights(content), commands=(CHAT, EXPORT))
for name, lay in TOKENIZERS.items():
    THINGS[f"a tokenizer {name}"] = Thing(lay=lay, commands=TEXT)
for name, text in TEMPLATES.items():
    THINGS[f"a template that {name}"] = Thing(lay=template(text), commands=(CHAT, TOKENIZER))
THINGS |= {
    "a config that is a list": Thing(lay=written(("config.json", "[]")), commands=WEIGHTS),
    "a config nested 100,000 deep": Thing(lay=written(("config.json", DEEP)), commands=WEIGHTS),
    "a config that is a pipe": Thing(lay=special_file("config.json", pipe), commands=(CHAT, START)),
    "a config that is a link to a device": Thing(lay=special_file("config.json", lambda path, case: path.symlink_to("/dev/zero")), commands=(CHAT, START)),
    "a config of code of its own": Thing(lay=of_code(), commands=(*WEIGHTS, PREFLIGHT, SERVE)),
    "code for a type that transformers has": Thing(lay=of_code("gpt2"), commands=(*WEIGHTS, PREFLIGHT, SERVE)),
    "weights that are a pickle": Thing(lay=pickled("pytorch_model.bin"), commands=(*WEIGHTS, SERVE)),
    "weights that torch saved with a payload": Thing(lay=changed(zipped_pickle), commands=(*WEIGHTS, SERVE)),
    "weights that are pickles by an index": Thing(lay=pickled("pytorch_model-1.bin", index=True), commands=WEIGHTS),
    "weights of other frameworks": Thing(lay=pickled("flax_model.msgpack"), commands=(CHAT, START)),
    "weights that an index names above": Thing(lay=changed(index_above), commands=WEIGHTS),
    "weights of NaN": Thing(lay=filled(float("nan")), commands=WEIGHTS),
    "weights of infinity": Thing(lay=filled(float("inf")), commands=WEIGHTS),
    "weights of 1 TiB of nothing": Thing(lay=special_file("model.safetensors", sparse), commands=(CHAT, START)),
    "weights that are a link to a device": Thing(lay=special_file("model.safetensors", lambda path, case: path.symlink_to("/dev/zero")), commands=(CHAT, START)),
    "a generate of its own": Thing(lay=written(("custom_generate/generate.py", MARKING), ("generation_config.json", '{"custom_generate": "model"}')), commands=(CHAT, EVALS, SERVE)),
    "a generation config of wrong types": Thing(lay=written(("generation_config.json", '{"max_new_tokens": "all", "eos_token_id": ["a"], "num_beams": 1e9, "do_sample": "no"}')), commands=(CHAT, EVALS)),
    "an adapter that names a base": Thing(lay=written(("adapter_config.json", json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../elsewhere", "auto_mapping": {"parent_library": "evil_installed"}}))), commands=WEIGHTS),
    "modules named as libraries": Thing(lay=written(*((f"{name}.py", MARKING) for name in ("torch", "json", "conftest", "sitecustomize", "modeling_tandem"))), commands=(*WEIGHTS, SERVE)),
    "a card with a script": Thing(lay=written(("README.md", f"---\nlicense: [[[\n---\n<script>{SCRIPT}</script>")), commands=(CHAT, EXPORT)),
    "a processor of its own code": Thing(lay=written(("preprocessor_config.json", json.dumps({"auto_map": {"AutoProcessor": "evil.P"}})), ("processor_config.json", "[]"), ("evil.py", MARKING)), commands=(CHAT, TOKENIZER, SERVE)),
}  # fmt: skip
