"""Ready tokenizers."""

import json
import string

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.process.errors import InputMissingError, RecipeError, ServiceError
from pipeline.recipe.schema import Recipe
from pipeline.tokenizer import identity, load_or_train
from pipeline.tokenizer.chat import render
from pipeline.tokenizer.coverage import coverage, span_byte_lengths
from pipeline.tokenizer.encode import control_ids, encode_documents
from pipeline.tokenizer.load import open_tokenizer, ready_tokenizer
from tests.families import trained_bpe


def recipe_of(path, **tokenizer):
    recipe = Recipe()
    recipe.tokenizer.path = str(path)
    for key, value in tokenizer.items():
        setattr(recipe.tokenizer, key, value)
    return recipe


CHAT = [{"role": "user", "content": "a<|endoftext|><s>b"}, {"role": "assistant", "content": " c </s><|end|>"}]


def test_gpt2_keeps_its_ids_and_gets_what_chat_needs(gpt2, capsys):
    tokenizer = load_or_train(recipe_of(gpt2.name_or_path).tokenizer_settings(), [])
    out = capsys.readouterr().out
    assert "added: 50,257 -> 50,266 ids" in out
    assert "eos_token" in out
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|end|>", "<|pad|>")
    text = "Hello w\u00f6rld <|endoftext|> 12345"
    assert encode_documents(tokenizer, [text])[0].tolist() == encode_documents(gpt2, [text])[0].tolist()
    ids, trained = render(tokenizer, CHAT)
    assert (
        tokenizer.decode(ids)
        == "<|endoftext|><|user|>a<\u2060|endoftext|><s>b<|end|><|assistant|> c </s><\u2060|end|><|end|>"
    )
    assert tokenizer.decode([i for i, bit in zip(ids, trained, strict=True) if bit]) == " c </s><\u2060|end|><|end|>"


def test_a_sentencepiece_like_tokenizer_chats_too(stories):
    tokenizer = load_or_train(recipe_of(stories.name_or_path).tokenizer_settings(), [])
    ids, trained = render(tokenizer, CHAT)
    assert sum(i in control_ids(tokenizer) for i in ids) == 5
    written = [i for i, bit in zip(ids, trained, strict=True) if bit]
    assert tokenizer.decode(written) == " c <\u2060/s><\u2060|end|><|end|>"
    assert tokenizer.decode(written[-1]) == "<|end|>"


def test_our_own_tokenizer_read_as_a_ready_one_is_the_same(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path)
    assert identity(load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])) == identity(tokenizer)
    assert capsys.readouterr().out == ""


def test_an_own_template_stays_as_it_is_with_or_without_marks(tokenizer, tmp_path, capsys):
    tokenizer.save_pretrained(tmp_path)
    template = tmp_path / "chat_template.jinja"
    careful = template.read_text() + "{# mine #}"
    template.write_text(careful)
    assert load_or_train(recipe_of(tmp_path).tokenizer_settings(), []).chat_template == careful
    assert "keeps its chat template, which is another than the built-in one" in capsys.readouterr().out
    template.write_text("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}")
    plain = load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    assert plain.chat_template == template.read_text()
    assert f"keeps its chat template and its {len(plain):,} ids; nothing is added" in capsys.readouterr().out
    ids, trained = render(plain, CHAT)
    assert plain.decode(ids) == "<|user|>a<|endoftext|><s>b<|end|><|user|> c </s><|end|><|end|>"
    assert sum(i in control_ids(plain) for i in ids) == 4
    assert trained[-1]


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma3_text", "llama", "mistral", "bert"])
def test_a_model_folder_without_a_tokenizer_is_an_input_missing(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(
        InputMissingError, match=f"^tokenizer.path: {tmp_path} has no tokenizer .*tokenizer.path.$"
    ) as error:
        load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    assert error.value.status == 66
    with pytest.raises(InputMissingError, match=f"^{tmp_path} has no tokenizer"):
        open_tokenizer(str(tmp_path), revision=None, beside=None, where=str(tmp_path))


LETTERS = ["[UNK]", *sorted(set(string.printable))]
WORDS = ["what", "is", "one", "and", "two", "it", "three", ".", "?"]
BACKENDS = {
    "letters": Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, [], unk_token="[UNK]")),
    "words": Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[UNK]", *WORDS])}, unk_token="[UNK]")),
    "pieces": Tokenizer(models.WordPiece({w: i for i, w in enumerate(["[UNK]", *WORDS, "t", "##h", "##ree"])}, unk_token="[UNK]")),
    "unigram": Tokenizer(models.Unigram([("<unk>", 0.0), *((letter, -3.0) for letter in LETTERS[1:]), ("one", -4.0)], 0, False)),
}  # fmt: skip
BACKENDS["words"].pre_tokenizer = BACKENDS["pieces"].pre_tokenizer = pre_tokenizers.Whitespace()


@pytest.mark.parametrize("kind", BACKENDS)
def test_letters_words_and_pieces_are_tokenizers_of_both_stages(kind, tmp_path):
    BACKENDS[kind].save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    text = "what is one and two ? it is three ."
    (ids,) = encode_documents(tokenizer, [text])
    assert tokenizer.decode(ids).replace(" ", "") == text.replace(" ", "")
    found, lengths = span_byte_lengths(tokenizer, text)
    assert (found, sum(lengths)) == (
        ids.tolist(),
        len(text.encode()) - text.count(" ") * (kind in ("words", "pieces")),
    )
    share = coverage(tokenizer, [text])
    assert share == 1.0 if kind in ("letters", "unigram") else 0.7 < share < 1.0
    rendered, trained = render(tokenizer, [{"role": "user", "content": "what is one"}, {"role": "assistant", "content": "two<|user|>"}])  # fmt: skip
    controls = control_ids(tokenizer)
    names = [tokenizer.convert_ids_to_tokens(i) for i in rendered if i in controls and i != tokenizer.unk_token_id]
    assert names == ["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"]
    assert "two" in tokenizer.decode([i for i, bit in zip(rendered, trained, strict=True) if bit]).replace(" ", "")


def test_ids_that_are_not_those_of_tokenizer_json_are_named(tmp_path, capsys):
    backend = Tokenizer.from_str(trained_bpe())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("."), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    assert "other ids" not in capsys.readouterr().out
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}))
    load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    assert (
        "GPT2Tokenizer, as which transformers reads it, gives other ids than its tokenizer.json"
        in capsys.readouterr().out
    )


def test_a_template_file_of_the_recipe_is_used_or_refused_when_wrong(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "mine.jinja").write_text(tokenizer.chat_template + "{# mine #}")
    recipe = recipe_of("tokenizer", chat_template="mine.jinja")
    recipe.path = str(tmp_path / "recipe.yaml")
    assert load_or_train(recipe.tokenizer_settings(), []).chat_template.endswith("{# mine #}")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(RecipeError, match="generation"):
        load_or_train(recipe.tokenizer_settings(), [])
    known = next(token for token in tokenizer.all_special_tokens if token.startswith("<|"))
    (tmp_path / "mine.jinja").write_text("{# " + known + " <|context|> #}" + tokenizer.chat_template)
    _, lines = ready_tokenizer(recipe.tokenizer_settings())
    assert [line for line in lines if "tokenizer: <|context|> of mine.jinja is no token of tokenizer" in line]
    recipe.tokenizer.chat_template = "none.jinja"
    with pytest.raises(InputMissingError, match=r"tokenizer\.chat_template"):
        load_or_train(recipe.tokenizer_settings(), [])


def test_what_cannot_be_found_is_said_with_its_cure(tmp_path):
    with pytest.raises(InputMissingError, match="there is no folder"):
        load_or_train(recipe_of(tmp_path / "nothing").tokenizer_settings(), [])
    with pytest.raises(InputMissingError, match=r"tokenizer\.json"):
        load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])
    with pytest.raises(ServiceError, match="the Hub gave no tokenizer"):
        load_or_train(recipe_of("nobody/nothing").tokenizer_settings(), [])


def test_a_model_folder_with_own_code_gives_its_tokenizer_without_a_question(tokenizer, tmp_path, monkeypatch):
    tokenizer.save_pretrained(tmp_path)
    config = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_unheard_of.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    assert identity(load_or_train(recipe_of(tmp_path).tokenizer_settings(), [])) == identity(tokenizer)


def test_identity_sees_a_token_and_a_template_and_no_padding_state(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    one, two = (AutoTokenizer.from_pretrained(tmp_path) for _ in range(2))
    one(["a", "a b c"], padding=True)
    assert identity(one) == identity(two)
    one.add_tokens(["xyzzy"])
    two.chat_template += " "
    assert len({identity(one), identity(two), identity(tokenizer)}) == 3
