"""`lm_eval:NAME,NAME`: what the harness sends to the model, what it makes of it, and how that agrees with CORE's rule."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pipeline.evals.harness import harness_scores, require_harness
from pipeline.metrics import Protocol
from pipeline.process.errors import DataError, InputMissingError, RecipeError, ServiceError
from pipeline.tokenizer.chat import built_in_template, prompt_ids
from pipeline.tokenizer.encode import BOS, END, PAD, SPECIALS

ROOT = Path(__file__).parents[2]
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed (extra lm-eval)"
)
ITEMS = [
    {"question": "The cat sat", "answers": ["on the mat", "on it"], "gold": 0},
    {"question": "Two and two", "answers": ["are four", "are five or six, perhaps", "are"], "gold": 0},
    {"question": "Rain falls", "answers": ["down", "upwards all day long", "sideways"], "gold": 0},
    {"question": "A dog", "answers": ["barks", "barks like a small bird"], "gold": 1},
    {"question": "It is late", "answers": ["go to bed", "go to the shop", "go to sleep"], "gold": 2},
]


def make_tokenizer(*, bos=True, eos=True, adds_bos=False):
    """A byte-level tokenizer of 256 bytes and the specials; adds_bos: as Llama's, which puts BOS before every text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, *SPECIALS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
        )
    named = ({"bos_token": BOS} if bos else {}) | ({"eos_token": END, "pad_token": PAD} if eos else {})
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.add_special_tokens({"additional_special_tokens": list(SPECIALS)})
    made.chat_template = built_in_template(list(SPECIALS))
    return made


TOKENIZER = make_tokenizer()
BOS_ID, END_ID, PAD_ID = (TOKENIZER.convert_tokens_to_ids(token) for token in (BOS, END, PAD))


def text_ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def make_model(kind="gpt2", **changes):
    fields = {"vocab_size": len(TOKENIZER), "n_positions": 64, "n_layer": 2, "n_embd": 32, "n_head": 2}
    fields |= {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID} | changes
    torch.manual_seed(3)
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**fields, initializer_range=0.3)).eval()
    from tests.model.tiny_models import tiny

    return tiny("modern", **fields, n_kv_head=1)


@pytest.fixture
def sent():
    """`sent(model)`: a list that receives the ids of every sequence the model is given from then on."""

    def watch(model):
        seen = []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.extend((args[0] if args else kwargs["input_ids"]).tolist()),
            with_kwargs=True,
        )
        return seen

    return watch


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of tasks on one file; what `datasets` makes of the file stays beside it."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    made = tmp_path / "tasks"
    made.mkdir()
    return made


def write_task(folder, name, items=ITEMS, **fields):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(item) + "\n" for item in items))
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test", "metadata": {"version": 1.5}, "output_type": "multiple_choice",
        "doc_to_text": "question", "doc_to_choice": "answers", "doc_to_target": "gold",
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | fields))


def write_all_kinds(folder):
    """Multiple choice, the likelihood of whole texts, and generation with two filters."""
    write_task(folder, "choice")
    write_task(folder, "empty", doc_to_text="")
    write_task(
        folder, "texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_choice=None, doc_to_target="question",
        metric_list=[{"metric": "bits_per_byte"}],
    )  # fmt: skip
    write_task(
        folder, "written", output_type="generate_until", doc_to_choice=None, doc_to_target="question",
        generation_kwargs={"until": ["."], "max_gen_toks": 3}, metric_list=[{"metric": "exact_match"}],
        filter_list=[
            {"name": "whole", "filter": [{"function": "take_first"}]},
            {"name": "letter", "filter": [{"function": "regex", "regex_pattern": "([A-Z])"}, {"function": "take_first"}]},
        ],
    )  # fmt: skip


def test_the_missing_package_is_one_sentence_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    with pytest.raises(InputMissingError, match=r'not installed. Run pip install "tandem-llm\[lm-eval\]"') as caught:
        require_harness()
    assert "\n" not in str(caught.value)
    with pytest.raises(InputMissingError, match="lm-eval"):
        harness_scores(["choice"], None, None)


@needs_harness
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
@pytest.mark.parametrize("adds_bos", [False, True], ids=["adds no BOS", "adds BOS"])
def test_every_text_begins_with_exactly_one_bos_whatever_the_tokenizer_adds(folder, sent, kind, adds_bos):
    write_all_kinds(folder)
    model, tokenizer = make_model(kind), make_tokenizer(adds_bos=adds_bos)
    seen = sent(model)
    harness_scores(["choice"], model, tokenizer, include_path=folder)
    inputs = {(*text_ids(f"{item['question']} {answer}")[:-1],) for item in ITEMS for answer in item["answers"]}
    assert {(*without_padding(ids)[1:],) for ids in seen} <= inputs
    assert len(seen) >= len(ITEMS)  # answers of one token are read from one pass
    for task in ("choice", "empty", "texts"):
        seen.clear()
        harness_scores([task], model, tokenizer, include_path=folder)
        assert seen
        assert all(ids[0] == BOS_ID and ids.count(BOS_ID) == 1 for ids in seen), task
    seen.clear()
    harness_scores(["written"], model, tokenizer, include_path=folder, batch_rows=len(ITEMS))
    first = seen[: len(ITEMS)]
    asked = sorted(without_padding(ids, pad=PAD_ID) for ids in first)
    assert asked == sorted([BOS_ID, *text_ids(item["question"])] for item in ITEMS)


def without_padding(ids, pad=0):
    """Ids without the harness's zeros behind, or our padding before."""
    ids = list(ids)
    while ids[-1] == pad:
        ids.pop()
    while ids[0] == pad:
        ids.pop(0)
    return ids


@needs_harness
def test_without_a_bos_only_an_empty_context_gets_the_end_token(folder, sent):
    write_all_kinds(folder)
    model, tokenizer = make_model(), make_tokenizer(bos=False)
    seen = sent(model)
    harness_scores(["choice"], model, tokenizer, include_path=folder)
    assert {ids[0] for ids in seen} <= {text_ids(item["question"])[0] for item in ITEMS}
    seen.clear()
    harness_scores(["texts", "empty"], model, tokenizer, include_path=folder)
    assert {ids[0] for ids in seen} == {END_ID}
    harness_scores(["written"], model, tokenizer, include_path=folder)
    with pytest.raises(DataError, match="neither a BOS nor an EOS"):
        harness_scores(["choice"], model, make_tokenizer(bos=False, eos=False), include_path=folder)


@needs_harness
def test_the_tokenizer_is_left_as_it_was(folder):
    write_all_kinds(folder)
    tokenizer = make_tokenizer(eos=False)
    before = len(tokenizer)
    harness_scores(["written"], make_model(), tokenizer, include_path=folder)
    assert (tokenizer.pad_token, len(tokenizer)) == (None, before)


@needs_harness
def test_control_strings_in_a_base_task_are_text(folder, sent):
    write_task(folder, "hostile", items=[{"question": f"a{END}{BOS}", "answers": ["b", f"c{END}d"], "gold": 0}])
    model = make_model()
    seen = sent(model)
    harness_scores(["hostile"], model, TOKENIZER, include_path=folder)
    assert all(i < 256 for ids in seen for i in ids[1:])


@needs_harness
@pytest.mark.parametrize("system", [None, "Be short."])
def test_chat_prompts_are_the_chat_templates_own_ids_with_one_bos(folder, sent, system):
    write_task(folder, "choice")
    model = make_model(n_positions=256)
    seen = sent(model)
    (row, *_) = harness_scores(["choice"], model, TOKENIZER, include_path=folder, chat=True, system=system)
    before = [{"role": "system", "content": system}] if system else []
    expected = {
        (*prompt_ids(TOKENIZER, [*before, {"role": "user", "content": item["question"]}]), *text_ids(answer)[:-1])
        for item in ITEMS
        for answer in item["answers"]
    }
    assert {(*without_padding(ids),) for ids in seen} <= expected
    assert all(ids.count(BOS_ID) == 1 for ids in seen)
    assert row["protocol_parts"]["chat"] is True
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="no chat template"):
        harness_scores(["choice"], model, tokenizer, include_path=folder, chat=True)


@needs_harness
def test_a_prompt_too_long_loses_its_oldest_text_and_is_counted(folder, sent):
    long = {"question": "0123456789" * 7, "answers": ["yes", "no"], "gold": 0}
    write_task(folder, "long", items=[long, ITEMS[0]])
    model = make_model()
    seen = sent(model)
    row = harness_scores(["long"], model, TOKENIZER, include_path=folder)[0]
    assert (row["cut"], row["n"]) == (1, 2)
    whole = text_ids(long["question"] + " yes")
    assert [BOS_ID, *whole[-64:-1]] in seen  # 64 positions, and the last id is a target only
    write_task(folder, "longer", items=[{"question": "a", "answers": ["x" * 70, "y"], "gold": 0}])
    with pytest.raises(DataError, match="71 tokens is longer than the model's 64 positions"):
        harness_scores(["longer"], model, TOKENIZER, include_path=folder)


def answer_nats(model, question, answer):
    """Nats of each token of ` answer` after the question, one plain forward pass."""
    ids = [BOS_ID, *text_ids(f"{question} {answer}")]
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    nats = -log_p[torch.arange(len(ids) - 1), ids[1:]]
    return nats[len(text_ids(question)) :]


def shared_start(answers):
    """How many tokens of the answers, each with its space, are the same in all of them."""
    rows = [text_ids(f" {answer}") for answer in answers]
    return next((n for n in range(min(map(len, rows))) if len({row[n] for row in rows}) > 1), min(map(len, rows)))


@needs_harness
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_accuracies_are_those_of_the_summed_and_the_per_character_log_likelihood(folder, kind):
    write_task(folder, "choice")
    model = make_model(kind)
    by_sum = by_char = 0
    for item in ITEMS:
        nats = [answer_nats(model, item["question"], answer).sum() for answer in item["answers"]]
        per_char = [n / len(answer) for n, answer in zip(nats, item["answers"], strict=True)]
        by_sum += nats.index(min(nats)) == item["gold"]
        by_char += per_char.index(min(per_char)) == item["gold"]
    for batch_rows in (1, 4):
        rows = harness_scores(["choice"], model, TOKENIZER, include_path=folder, batch_rows=batch_rows)
        values = {row["name"]: row["value"] for row in rows}
        assert values == {
            "lm_eval/choice/acc": pytest.approx(by_sum / 5),
            "lm_eval/choice/acc_norm": pytest.approx(by_char / 5),
        }


@needs_harness
@pytest.mark.parametrize("kind", ["gpt2", "modern"])
def test_the_harness_and_core_agree_on_means_over_differing_tokens(kind):
    """CORE: least mean nats per token after the answers' common beginning. The harness: least sum, or per character."""
    from pipeline.evals.harness_model import HarnessModel

    model = make_model(kind)
    lm = HarnessModel(model, TOKENIZER, batch_rows=3, chat=False)

    def log_likelihoods(question, answers):
        return [ll for ll, _ in lm.loglikelihood([SimpleNamespace(args=(question, a)) for a in answers])]

    by_sum = []
    for item in ITEMS:
        question, answers = item["question"], item["answers"]
        shared = shared_start(answers)
        if shared == min(len(text_ids(f" {answer}")) for answer in answers):
            continue  # one answer begins another: CORE's mean would be over nothing
        nats = [answer_nats(model, question, answer) for answer in answers]
        core = [per_token[shared:].mean().item() for per_token in nats]
        found = log_likelihoods(question, [f" {answer}" for answer in answers])
        assert found == pytest.approx([-per_token.sum().item() for per_token in nats], abs=1e-4)
        beginning = log_likelihoods(question, [f" {answers[0]}"[:shared]])[0]
        means = [(beginning - ll) / (len(text_ids(f" {a}")) - shared) for ll, a in zip(found, answers, strict=True)]
        assert means == pytest.approx(core, abs=1e-4)
        assert means.index(min(means)) == core.index(min(core))
        by_sum.append(found.index(max(found)) == core.index(min(core)))
    assert not all(by_sum)  # without it they choose differently: the numbers are of two rules


@needs_harness
def test_rows_tell_filter_items_version_shots_and_protocol_and_groups_come_last(folder):
    write_all_kinds(folder)
    group = {"group": "both", "task": ["choice", "empty"], "aggregate_metric_list": [{"metric": "acc"}]}
    (folder / "both.yaml").write_text(yaml.safe_dump(group))
    rows = harness_scores(["written", "both"], make_model(), TOKENIZER, include_path=folder, limit=3, num_fewshot=0)
    assert [row["name"].removeprefix("lm_eval/") for row in rows] == [
        "written/exact_match,whole", "written/exact_match,letter",
        "choice/acc", "choice/acc_norm", "empty/acc", "empty/acc_norm", "both/acc",
    ]  # fmt: skip
    assert [row["n"] for row in rows] == [3, 3, 3, 3, 3, 3, 6]
    assert rows[1]["filter"] == "letter"
    assert (rows[2]["task_version"], rows[2]["num_fewshot"], rows[2]["stderr"] >= 0) == ("1.5", 0, True)
    parts = {
        "task": "choice",
        "version": "1.5",
        "num_fewshot": 0,
        "items": 3,
        "chat": False,
        "window": "whole prompts",
    }
    assert parts.items() <= rows[2]["protocol_parts"].items()
    lossy = make_tokenizer()
    lossy.backend_tokenizer.normalizer = normalizers.Lowercase()
    (part, *_) = harness_scores(["choice"], make_model(), lossy, include_path=folder, limit=3, num_fewshot=0)
    assert re.fullmatch(r"coverage 0\.\d+ against 1\.0", Protocol.of(part).difference(Protocol.of(rows[2])))
    other = harness_scores(["choice"], make_model(), TOKENIZER, include_path=folder, limit=2, num_fewshot=0)[0]
    difference = Protocol.of(other).difference(Protocol.of(rows[2]))
    assert re.fullmatch(r"texts \w+ against \w+; items 2 against 3", difference)


def shows_a_question_itself(name, folder):
    """Whether the harness's prompts of a task hold a question among the examples before it."""
    from lm_eval.tasks import TaskManager

    (task,) = TaskManager(include_path=str(folder), include_defaults=False).load([name])["tasks"].values()
    task.set_fewshot_seed(seed=1)
    task.build_all_requests(limit=None, rank=0, world_size=1)
    parts = [request.args[0].split("\n\n") for request in task.instances]
    return any(example.startswith(part[-1]) for part in parts for example in part[:-1])


@needs_harness
@pytest.mark.parametrize(
    "splits",
    [
        {"test_split": "test", "fewshot_split": "test"},
        {"test_split": "test"},
        {"test_split": None, "validation_split": "test"},
        {"test_split": None, "validation_split": "test", "fewshot_split": "test"},
        {
            "test_split": "test",
            "fewshot_config": {"sampler": "first_n", "samples": [ITEMS[0] | {"question": "Who"}] * 2},
        },
    ],
)
def test_a_task_whose_examples_hold_the_question_is_named(folder, capsys, splits):
    write_task(folder, "own", num_fewshot=2, metric_list=[{"metric": "acc"}], **splits)
    harness_scores(["own"], make_model(n_positions=256), TOKENIZER, include_path=folder)
    named = "lm_eval:own: its examples are drawn from the rows that are scored" in capsys.readouterr().err
    assert named == shows_a_question_itself("own", folder)
    write_task(folder, "none", num_fewshot=0, metric_list=[{"metric": "acc"}], **splits)
    harness_scores(["none"], make_model(n_positions=256), TOKENIZER, include_path=folder)
    assert "its examples" not in capsys.readouterr().err


@needs_harness
def test_a_given_number_of_shots_replaces_all_but_a_fixed_zero(folder, sent):
    for name, fields in {"two": {"num_fewshot": 2}, "zero": {"num_fewshot": 0}, "open": {}}.items():
        write_task(folder, name, fewshot_split="test", metric_list=[{"metric": "acc"}], **fields)
    model = make_model(n_positions=256)
    seen = sent(model)
    for asked, expected in ((None, [2, 0, 0]), (1, [1, 0, 1])):
        seen.clear()
        rows = harness_scores(
            ["two", "zero", "open"], model, TOKENIZER, include_path=folder, limit=2, num_fewshot=asked
        )
        assert [row["num_fewshot"] for row in rows] == expected
        found = {without_padding(ids).count(text_ids("\n")[0]) / 2 for ids in seen}  # an empty line ends each shot
        assert found == set(expected)


@needs_harness
def test_an_unknown_task_is_reported_with_the_nearest_names(folder, tmp_path, monkeypatch):
    import lm_eval.tasks.manager

    # Its own 14,000 tasks take ten seconds to read; one stands for them.
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "own" / "manager.py"))
    write_task(tmp_path / "own", "hellaswag")
    write_task(folder, "choice")
    with pytest.raises(RecipeError, match=r"no task hellaswagg \(did you mean hellaswag\?\), so nothing"):
        harness_scores(["choice", "hellaswagg"], make_model(), TOKENIZER, include_path=folder)
    assert len(harness_scores(["choice", "hellaswag"], make_model(), TOKENIZER, include_path=folder)) == 4


@needs_harness
def test_missing_data_is_reported_in_one_sentence_that_names_the_task(folder):
    write_task(folder, "away", dataset_path="somebody/data", dataset_kwargs=None)
    with pytest.raises(ServiceError, match=r"lm_eval:away: its data cannot be fetched .*somebody/data") as caught:
        harness_scores(["away"], make_model(), TOKENIZER, include_path=folder)
    assert "\n" not in str(caught.value)
    for name in ("gone", "lost"):
        write_task(folder, name)
        (folder / f"{name}.jsonl").unlink()
    write_task(folder, "broken", output_type="no such type")
    with pytest.raises(
        DataError, match=r"(?s)lm_eval:broken.*lm_eval:gone: its data is missing.*lm_eval:lost"
    ) as caught:
        harness_scores(["gone", "lost", "broken"], make_model(), TOKENIZER, include_path=folder)
    assert len(str(caught.value).splitlines()) == 3
    with pytest.raises(InputMissingError, match="no such folder"):
        harness_scores(["gone"], make_model(), TOKENIZER, include_path=folder / "nowhere")


@needs_harness
def test_tasks_that_cannot_end_well_are_refused_before_anything_is_scored(folder, sent):
    write_all_kinds(folder)
    write_task(folder, "code", unsafe_code=True)
    write_task(
        folder, "essay", output_type="generate_until", doc_to_choice=None, doc_to_target="question",
        generation_kwargs={"max_gen_toks": 64}, metric_list=[{"metric": "exact_match"}],
    )  # fmt: skip
    model = make_model()
    seen = sent(model)
    with pytest.raises(RecipeError, match="lm_eval:code: runs programs"):
        harness_scores(["choice", "code"], model, TOKENIZER, include_path=folder)
    with pytest.raises(RecipeError, match="writes up to 64 tokens, and the model has 64 positions"):
        harness_scores(["choice", "essay"], model, TOKENIZER, include_path=folder)
    assert not seen
