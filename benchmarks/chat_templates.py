"""Whether chats are trained as they are written: published chat templates by kinds of conversation.

    python benchmarks/chat_templates.py FOLDER [--only TEMPLATE ...] [--json FILE]      # FOLDER: *.jinja, one template a file

Each template gets a small byte-level tokenizer that holds the control strings it writes. Each kind of conversation is written as
a JSON row, read as a source's row is, and rendered. A cell is `equal` where the ids are those of transformers' apply_chat_template
on messages written out by hand, and exactly the assistant's words are trained; else it holds the one reason given before step 1.
Status 1 where neither is so. Templates of other projects are read, never copied: TRL (trl/chat_templates) and axolotl
(src/axolotl/utils/chat_templates/templates) have one a file.
"""

import argparse
import json
import re
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Give the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "A city."}},
                "required": ["city"],
            },
        },
    }
]
# One word for each place, in no other place: what is trained is seen from them.
ASK, ANSWER, ASK2, ANSWER2, SYSTEM = "asksone", "saysone", "askstwo", "saystwo", "rulesall"
THINK, RESULT, CITY = "thinksone", "resultone", "cityone"
# Control strings as templates write them: in angle brackets, in square ones, in full-width bars.
CONTROL = re.compile(
    r"<\|[\w\-./]+\|>|<[\uff5c|][^<>\s]{1,40}[\uff5c|]>|</?[a-z_]+(?:_of_turn|_turn)>|<\|?/?(?:turn|channel)\|?>|\[/?[A-Z_]{3,}\]|<<?/?SYS>?>|</?s>|<(?:bos|eos|pad)>"
)
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|return|>", "<|end_of_role|>", "<|END_OF_TURN_TOKEN|>",
    "[|endofturn|]", "<|endofturn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|end|>", "<|end_of_text|>", "<|eom_id|>", "<|endoftext|>", "</s>",
)  # fmt: skip


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(arguments):
    return {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}


PLAIN = [user(ASK), assistant(ANSWER)]
TURNS = [*PLAIN, user(ASK2), assistant(ANSWER2)]
CALLED = [user(ASK), {"role": "assistant", "content": "", "tool_calls": [call({"city": CITY})]}]
RESULTS = [
    *CALLED,
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": RESULT},
    assistant(ANSWER),
]


def as_text(messages, **more):
    """Return the messages with arguments of calls as JSON text."""
    text = [call(json.dumps({"city": CITY}))]
    return [{**message, "tool_calls": text, **more} if message.get("tool_calls") else message for message in messages]


def with_text_calls(messages):
    """Return the messages as OpenAI's files have them: arguments as JSON text, and the content of calls null."""
    return as_text(messages, content=None)


# kind: (the row, the messages that it is, its tools, words that are trained, words that are not)
KINDS = {
    "plain": ({"messages": PLAIN}, PLAIN, None, [ANSWER], [ASK]),
    "system": ({"messages": [{"role": "system", "content": SYSTEM}, *PLAIN]}, [{"role": "system", "content": SYSTEM}, *PLAIN], None, [ANSWER], [ASK, SYSTEM]),
    "tools": ({"messages": PLAIN, "tools": TOOLS}, PLAIN, TOOLS, [ANSWER], [ASK, "Give the weather"]),
    "calls, mapping": ({"messages": CALLED, "tools": TOOLS}, CALLED, TOOLS, [CITY], [ASK]),
    "calls, text": ({"messages": with_text_calls(CALLED), "tools": json.dumps(TOOLS)}, CALLED, TOOLS, [CITY], [ASK]),
    "results": ({"messages": RESULTS, "tools": TOOLS}, RESULTS, TOOLS, [CITY, ANSWER], [ASK, RESULT]),
    "reasoning": ({"messages": [user(ASK), assistant(ANSWER, reasoning_content=THINK)]}, [user(ASK), assistant(ANSWER, reasoning_content=THINK)], None, [ANSWER, THINK], [ASK]),
    "weights": ({"messages": [TURNS[0], {**TURNS[1], "weight": 0}, TURNS[2], {**TURNS[3], "weight": 1}]}, TURNS, None, [ANSWER2], [ASK, ANSWER, ASK2]),
    "empty lists": ({"messages": [{**message, "tool_calls": []} for message in PLAIN], "tools": []}, PLAIN, None, [ANSWER], [ASK]),
    "null parts": ({"messages": [{**user([{"type": "text", "text": ASK}, {"type": "text", "text": None}]), "tool_calls": None, "name": None}, PLAIN[1]]}, PLAIN, None, [ANSWER], [ASK, "None"]),
    "multi-turn": ({"messages": TURNS}, TURNS, None, [ANSWER, ANSWER2], [ASK, ASK2]),
    "trailing user": ({"messages": [*PLAIN, user(ASK2)]}, [*PLAIN, user(ASK2)], None, [ANSWER], [ASK, ASK2]),
    "too long": ({"messages": [*PLAIN, user(f"{ASK2} " * 700), assistant(ANSWER2)]}, PLAIN, None, [ANSWER], [ASK, ASK2, ANSWER2]),
}  # fmt: skip


def save_tokenizer(template: str, folder: Path) -> None:
    """Write a byte-level tokenizer whose control tokens are the strings that the template writes."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = list(dict.fromkeys([*CONTROL.findall(template), "<|endoftext|>"]))
    ends = [end for end in ENDS if end in specials]
    starts = [
        start for start in ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[gMASK]") if start in specials
    ]
    begin = starts[0] if starts else "<|begin|>"
    specials = list(dict.fromkeys([*specials, begin]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        ["a b"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=begin, eos_token=ends[0], pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def conversations(folder: Path) -> dict:
    """Return each kind's conversation, read from a file as a source's rows are."""
    from pipeline.recipe.schema import Recipe, Source
    from pipeline.sources.open import open_sources

    read = {}
    for number, (kind, (row, *_)) in enumerate(KINDS.items()):
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        recipe = Recipe(stage="sft")
        recipe.data.sources, recipe.data.validation = [Source(files=str(path))], []
        (source,), _ = open_sources(recipe.source_settings())
        (read[kind],) = [item for block in source.once.read() for item in block.items]
    return read


def found_words(tokenizer, ids: list[int], trained: list[bool]) -> str:
    return tokenizer.decode([token for token, bit in zip(ids, trained, strict=True) if bit])


def cell(tokenizer, kind: str, talk, capacity: int) -> str:
    """Return `equal`, `left out: REASON`, `missing: WORDS` (which a warning names) or `WRONG: ...`."""
    from functools import partial

    from pipeline.data.losses import fit_conversation
    from pipeline.process.errors import DataError
    from pipeline.tokenizer.chat import render, rendered_talks
    from pipeline.tokenizer.custom_template import with_fixed_date

    _, messages, tools, wanted, unwanted = KINDS[kind]
    (whole,) = rendered_talks(tokenizer, [talk])
    # A template that writes the date writes that of the training rows.
    dated = with_fixed_date(tokenizer.chat_template) if "strftime_now" in tokenizer.chat_template else None
    settings = {"tools": tools, "chat_template": dated, "return_dict": True}
    try:
        stock = tokenizer.apply_chat_template(messages, **settings)["input_ids"]
    except Exception as error:
        try:  # some templates join arguments as text
            stock = tokenizer.apply_chat_template(as_text(messages), **settings)["input_ids"]
        except Exception:
            if isinstance(whole, DataError):
                return f"left out: {str(whole)[:100]}"
            return f"WRONG: transformers refuses it ({str(error)[:80]}) and it is trained"
    if isinstance(whole, DataError):
        return f"left out: {str(whole)[:140]}"
    rendering = partial(render, tokenizer, tools=talk.tools)
    ids, trained, outcome = fit_conversation(talk.messages, whole, rendering, capacity=capacity, overflow="cut")
    if kind != "too long" and list(whole[0]) != list(stock):
        return f"WRONG ids: {tokenizer.decode(whole[0])!r} for {tokenizer.decode(stock)!r}"
    if ids is None:
        return f"left out: {outcome}"
    if kind == "too long" and (outcome != "cut" or list(ids) != list(stock)):
        return f"WRONG cut ({outcome}): {tokenizer.decode(ids)!r} for {tokenizer.decode(stock)!r}"
    text = found_words(tokenizer, ids, trained)
    if surplus := [word for word in unwanted if word in text]:
        return f"WRONG: trains {surplus}"
    if missing := [word for word in wanted if word not in text]:
        shown = tokenizer.decode(stock)
        if all(word not in shown for word in missing):
            return f"missing in the template: {' '.join(missing)}"
        return f"WRONG: does not train {missing} of {shown!r}"
    return "equal"


def judge(path: Path, talks: dict, folder: Path) -> dict[str, str]:
    """Return a cell for each kind, or one reason for the whole template."""
    from pipeline.process.errors import TandemError
    from pipeline.recipe.schema import Recipe
    from pipeline.tokenizer.load import ready_tokenizer

    try:
        save_tokenizer(path.read_text(), folder)
        recipe = Recipe()
        recipe.tokenizer.path, recipe.stage = str(folder), "sft"
        tokenizer, _ = ready_tokenizer(recipe.tokenizer_settings())
    except TandemError as error:
        reason = re.sub(r"/tmp/\S+", "FOLDER", str(error))
        return dict.fromkeys(KINDS, f"refused: {reason[:200]}")
    tokenizer.chat_control_tokens = []
    return {kind: cell(tokenizer, kind, talk, 3000) for kind, talk in talks.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of templates, or parts of them")
    parser.add_argument("--json", type=Path, help="write all cells here")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    cells = {}
    with tempfile.TemporaryDirectory() as name:
        talks = conversations(Path(name))
        for number, path in enumerate(sorted(given.folder.glob("*.jinja"))):
            if given.only and not any(part in path.name for part in given.only):
                continue
            cells[path.stem] = judge(path, talks, Path(name) / f"tokenizer{number}")
            found = Counter(re.split("[:(]", text)[0] for text in cells[path.stem].values())
            print(f"{path.stem}: {', '.join(f'{n} {what}' for what, n in found.most_common())}", flush=True)
            for kind, text in cells[path.stem].items():
                if text.startswith("WRONG"):
                    print(f"    {kind}: {text[:400]}")
    if given.json:
        given.json.write_text(json.dumps(cells, indent=1))
    total = Counter(re.split("[:(]", text)[0] for row in cells.values() for text in row.values())
    print(f"\n{len(cells)} templates x {len(KINDS)} kinds: {dict(total.most_common())}")
    reasons = Counter(text[:90] for row in cells.values() for text in row.values() if text != "equal")
    for text, number in reasons.most_common(40):
        print(f"{number:5}  {text}")
    return int(any(text.startswith("WRONG") for row in cells.values() for text in row.values()))


if __name__ == "__main__":
    sys.exit(main())
