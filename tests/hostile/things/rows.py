"""Data of a stranger: rows, compressed files, parquet, arrow, csv, and what lies beside them."""

import gzip
import io
import json
import struct
import zlib
from collections.abc import Callable

from tests.hostile.case import MARKING, Case
from tests.hostile.trial import SCRIPT, Thing

DATA = "data in/r.yaml --show 1"
PREVIEW = "data {}"
PRETRAIN = "pretrain in/r.yaml"
BPB = "evals model bpb --text {} --output out/scores.json"
TASK = "evals model chat:mine --own-task mine={} --output out/scores.json"
GIB = 1 << 30


def file(name: str, make: bytes | Callable[[], bytes], **more: object) -> Callable[[Case], str]:
    """A recipe whose source is this file; gives its path."""

    def lay(case: Case) -> str:
        case.put(f"in/hostile/{name}", make() if callable(make) else make)
        case.recipe(data={"sources": [{"files": str(case.folder / "in" / "hostile" / name), **more}]})
        return f"in/hostile/{name}"

    return lay


def rows(*given: object, times: int = 1) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in given * times).encode()


def gzip_bomb(byte: bytes = b"\0") -> Callable[[], bytes]:
    def make() -> bytes:
        packed = io.BytesIO()
        with gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=9) as stream:
            for _ in range(GIB >> 24):
                stream.write(byte * (1 << 24))
        return packed.getvalue()

    return make


def zst(*, window_log: int, size: int) -> bytes:
    """A frame of a window of so many bytes, whose blocks of 4 bytes each say "128 KiB of a"."""
    block = 1 << 17
    blocks = [struct.pack("<I", (block << 3 | 1 << 1 | last))[:3] + b"a" for last in [0] * (size // block - 1) + [1]]
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + b"".join(blocks)


def parquet_bomb() -> bytes:
    """Thirty values of 64 MiB each, which dictionary and compression make small."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    packed = io.BytesIO()
    column = pa.array(["a" * (1 << 26)] * 30).dictionary_encode()
    pq.write_table(pa.table({"text": column}), packed, compression="zstd")
    return packed.getvalue()


def parquet(**columns: list) -> Callable[[], bytes]:
    def make() -> bytes:
        import pyarrow as pa
        import pyarrow.parquet as pq

        packed = io.BytesIO()
        pq.write_table(pa.table(columns), packed)
        return packed.getvalue()

    return make


def footer(content: bytes, length: int | None = None) -> bytes:
    return b"PAR1" + content + struct.pack("<I", len(content) if length is None else length & 0xFFFFFFFF) + b"PAR1"


def nested_arrow() -> bytes:
    import pyarrow as pa

    kind: pa.DataType = pa.int8()
    for _ in range(60):
        kind = pa.list_(kind)
    out = io.BytesIO()
    with pa.ipc.new_file(out, pa.schema([("text", kind)])):
        pass
    return out.getvalue()


def pickled_extension() -> bytes:
    """Arrow metadata of an extension type whose reader would unpickle it."""
    import pickle

    import pyarrow as pa

    field = pa.field("text", pa.string(), metadata={"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(_Touch())})  # fmt: skip
    out = io.BytesIO()
    table = pa.table([pa.array(["some words of text"] * 60)], schema=pa.schema([field]))
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


class _Touch:
    def __reduce__(self):
        import os

        return (os.system, ("touch $MARK",))


def loading_script(case: Case) -> str:
    """A dataset as those of old: a script of its name, and a card that asks for it."""
    case.put("in/hostile/hostile.py", MARKING)
    case.put(
        "in/hostile/README.md",
        f"---\nconfigs: [{{config_name: x, data_files: ../../elsewhere/*}}]\n---\n<script>{SCRIPT}</script>",
    )
    case.put("in/hostile/dataset_infos.json", '{"x": {"builder_name": "hostile", "features": {"_type": "os.system"}}}')
    case.put("in/hostile/train.jsonl", rows({"text": "some words"}, times=60))
    case.recipe(data={"sources": [{"id": str(case.folder / "in" / "hostile")}]})
    return "in/hostile"


def card_above(case: Case) -> str:
    case.put("elsewhere/secret.jsonl", rows({"text": "a secret of the user's"}, times=60))
    case.put(
        "in/hostile/README.md", "---\nconfigs:\n- config_name: default\n  data_files: ../../elsewhere/*.jsonl\n---\n"
    )
    case.recipe(data={"sources": [{"id": str(case.folder / "in" / "hostile")}]})
    return "in/hostile"


def saved_state(case: Case) -> str:
    """A folder as save_to_disk leaves it, whose state names files above."""
    case.put(
        "in/hostile/state.json",
        json.dumps(
            {
                "_data_files": [{"filename": "../../elsewhere/x.arrow"}, {"filename": "/dev/zero"}],
                "_format_type": "os.system",
            }
        ),
    )
    case.put("in/hostile/dataset_info.json", '{"features": {"text": {"_type": "hostile"}}}')
    case.recipe(data={"sources": [{"id": str(case.folder / "in" / "hostile")}]})
    return "in/hostile"


def program(case: Case) -> str:
    """Rows whose columns are the words of a command, for a format that would start it."""
    case.recipe(file="popen.jsonl", form="subprocess:check_output")
    return "in/popen.jsonl"


MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ESC = "\x1b]52;c;aGk=\x07\x1b[2J\u202e<script>" + SCRIPT + "</script>"
ODD = [7, None, [], {}, True, [[["a"]]], {"a": {"b": 1}}, "", " ", "\0", "\ud800", "a" * 10_000, -0.0]
LARGE = 1 << 27

MADE: dict[str, tuple[str, bytes | Callable[[], bytes]]] = {
    "rows of wrong types": ("a.jsonl", rows(*({"text": value} for value in ODD), times=5)),
    "rows nested 100,000 deep": ("a.jsonl", rows('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", {"text": "a"})),
    "a row with a number of 5,000 digits": ("a.jsonl", rows('{"text": "a", "n": ' + "9" * 5000 + "}", times=60)),
    "one row of 128 MiB": ("a.jsonl", lambda: b'{"text": "' + b"a" * LARGE + b'"}\n'),
    "a line of 128 MiB that is no JSON": ("a.jsonl", lambda: b"[" * LARGE),
    "zero bytes": ("a.jsonl", b"\0" * 1_000_000),
    "text of control characters": ("a.jsonl", rows({"text": ESC * 10}, times=100)),
    "columns of ESC": ("a.jsonl", rows({ESC: "a", "text\x1b[31m": "b"}, times=60)),
    "10,000 columns": ("a.jsonl", rows({f"c{n}": n for n in range(10_000)}, times=20)),
    "half of a surrogate": ("a.jsonl", rows('{"text": "\\ud800\\udc00\\ud800"}', times=60)),
    "control tokens as text": ("a.jsonl", rows({"text": "<|endoftext|><|bos|><b><e><|im_start|>system"}, times=200)),
    "messages of wrong types": ("a.jsonl", rows(*({"messages": value} for value in ODD), *({"messages": [{"role": value, "content": value}]} for value in ODD), times=5)),
    "messages with roles of ESC": ("a.jsonl", rows({"messages": [{"role": ESC, "content": ESC}, *MESSAGES]}, times=60)),
    "10**5 messages in a row": ("a.jsonl", rows({"messages": MESSAGES * 50_000})),
    "a gz bomb of zeros": ("a.jsonl.gz", gzip_bomb()),
    "a gz bomb of lines": ("a.jsonl.gz", gzip_bomb(b'{"text": "a"}  \n')),
    "a gz bomb of text": ("a.txt.gz", gzip_bomb(b"a")),
    "a gz in a gz": ("a.jsonl.gz", lambda: gzip.compress(gzip.compress(rows({"text": "a"}, times=60)))),
    "a gz that is cut": ("a.jsonl.gz", gzip.compress(rows({"text": "a b c"}, times=600))[:-20]),
    "a gz of zlib": ("a.jsonl.gz", zlib.compress(b"{}")),
    "a zst bomb": ("a.jsonl.zst", zst(window_log=27, size=GIB)),
    "a zst of a window of 2 GiB": ("a.jsonl.zst", zst(window_log=31, size=1 << 25)),
    "a zst that says 2**60 bytes": ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\xc0" + b"\xff" * 30),
    "a parquet bomb": ("a.parquet", parquet_bomb),
    "a parquet of an overlong footer": ("a.parquet", footer(b"x" * 100, length=2**31)),
    "a parquet of a negative footer": ("a.parquet", footer(b"", length=-1)),
    "a parquet of noise": ("a.parquet", footer(bytes(range(256)) * 40)),
    "a parquet of columns of ESC": ("a.parquet", parquet(**{ESC: ["a"] * 60, "text\x1b": ["b"] * 60})),
    "a parquet that is jsonl": ("a.parquet", rows({"text": "a"}, times=60)),
    "an arrow of 60 lists in lists": ("a.arrow", nested_arrow),
    "an arrow with a pickle in its type": ("a.arrow", pickled_extension),
    "an arrow of noise": ("a.arrow", b"ARROW1\0\0" + b"\xff" * 4000),
    "a csv of one line of 128 MiB": ("a.csv", lambda: b'text\n"' + b"a" * LARGE),
    "a csv of formulas and ESC": ("a.csv", b"text\n" + b"=cmd|'/c calc'!A1,\x1b[31m\n" * 60),
    "a JSON array that does not end": ("a.json", lambda: b"[" + b'{"text": "a"},' * 1_000_000),
    "a JSON nested 100,000 deep": ("a.json", b"[" * 100_000),
    "a pickle named jsonl": ("a.jsonl", b"\x80\x04\x95" + b"cos\nsystem\n(S'touch $MARK'\ntR."),
    "a text of one word of 128 MiB": ("a.txt", lambda: b"a" * LARGE),
    "a text of no bytes": ("a.txt", b""),
}  # fmt: skip

# Each is read by `data`, and by one of the others.
THINGS: dict[str, Thing] = {
    name: Thing(lay=file(*made), commands=(DATA, (PREVIEW, PRETRAIN, BPB)[number % 3]))
    for number, (name, made) in enumerate(MADE.items())
}
THINGS |= {
    "a format that is a program, columns its words": Thing(lay=program, commands=(DATA, "preflight in/r.yaml --probe 0", PRETRAIN, PREVIEW, TASK)),
    "columns that are expressions": Thing(lay=file("a.jsonl", rows({"text": "a"}, times=60), columns={"text": "__class__.__mro__", "prompt": "{0.__globals__}"}), commands=(DATA, PRETRAIN)),
    "a folder with a script and a card": Thing(lay=loading_script, commands=(DATA, PREVIEW, PRETRAIN)),
    "a card that names files above": Thing(lay=card_above, commands=(DATA, PREVIEW)),
    "a saved dataset that names files above": Thing(lay=saved_state, commands=(DATA, PREVIEW, PRETRAIN)),
    "an own task of wrong types": Thing(lay=file("a.jsonl", rows(*({"question": value, "answer": value, "choices": value, "test": value} for value in ODD), times=3)), commands=(TASK, PREVIEW)),
    "an own task with programs": Thing(lay=file("a.jsonl", rows({"question": "q", "answer": "import os; os.system('touch $MARK')", "test": "import os; os.system('touch $MARK')", "entry_point": "os.system"}, times=5)), commands=(TASK, TASK + " --execute")),
}  # fmt: skip
