#!/usr/bin/env bash
# Title: With truncation_side left, an assistant mask is all zeros as soon as one assistant turn was cut off.
# Packages: transformers==5.23.0 torch==2.13.0 tokenizers==0.23.3
# Guess: apply_chat_template(return_assistant_tokens_mask=True, truncation=True) with truncation_side='left' marks
#   the assistant tokens that are left, as it does with 'right'.
# Seen: a conversation of 3 answers (48 ids, 19 of them the assistant's): cut by some ids on the right the mask is
#   the whole one's beginning; cut on the left by as many as touch the first answer, it is all 0, although two whole
#   answers are there. As long as only the first question is cut, it is right. The loop over the turns ends at the
#   first one whose start is gone. No warning. 2026-11-27, Python 3.11, Linux, CPU.
# Costs: rows of long conversations, which are cut on the left to keep the last answer, train nothing, or with a
#   loss over an empty mask give NaN; the shorter ones hide it in the mean.
# Tandem: does not use truncation in apply_chat_template (pipeline/tokenizer/chat.py).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0 tokenizers==0.23.3 \
    2>"$folder/pip" || { cat "$folder/pip" >&2; exit 3; }
cd "$folder"
HF_HUB_OFFLINE=1 HF_HOME="$folder/hf" venv/bin/python - <<'PROGRAM'
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# A byte-level tokenizer of 256 bytes and three control tokens: one id for each letter.
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
backend.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
tokenizer.chat_template = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}<end>{% endgeneration %}"
    "{% else %}Q:{{ m.content }}<end>{% endif %}{% endfor %}"
)
conversation = []
for question, answer in (("one?", "first"), ("two?", "second"), ("three?", "third")):
    conversation.append({"role": "user", "content": question})
    conversation.append({"role": "assistant", "content": answer})


def ids_and_mask(**kwargs):
    out = tokenizer.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True, **kwargs)
    return out["input_ids"], out["assistant_masks"]


ids, mask = ids_and_mask()
print("whole conversation, ids:", len(ids), "of the assistant:", sum(mask))
first_answer = mask.index(1)
results = {}
for side in ("right", "left"):
    for cut in (first_answer - 1, first_answer + 2, first_answer + 12):
        tokenizer.truncation_side = side
        kept = len(ids) - cut
        wanted = mask[-kept:] if side == "left" else mask[:kept]
        wanted_ids = ids[-kept:] if side == "left" else ids[:kept]
        got_ids, got = ids_and_mask(truncation=True, max_length=kept)
        assert got_ids == wanted_ids, "the ids themselves are cut otherwise"
        results[side, cut] = sum(got), sum(wanted)
        print(f"cut {cut} ids on the {side}: assistant ids left {sum(wanted)}, marked {sum(got)}")
        text = tokenizer.decode([token for token, bit in zip(got_ids, got) if bit])
        print("    marked text:", repr(text))

for (side, cut), (got, wanted) in results.items():
    if side == "right" or cut < first_answer:
        assert got == wanted, "a control is off"
    else:
        assert wanted > 10 and got == 0, "no longer holds: what is left of the answers is marked"
PROGRAM
