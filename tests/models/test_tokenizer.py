"""The tokenizer: chat as the published template has it, and control tokens only where the template put them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

from unmask.errors import RequestError, TokenizerError
from unmask.models.tokenizer import QWEN2_WORDS, Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\nAnd then it sleeps.\n\n\nuser assistant system",
    "What is 12 + 7? It's 19, they'll say. You are a helpful assistant.",
    "def f(x):\n    return x * x\n\n\n\nprint(f(3))   # café naïve 東京",
] * 3
LLADA_TOKENS = ["<|startoftext|>", "<|endoftext|>", "[CLS]", "[gMASK]", "<|mdm_mask|>"]
LLADA_TOKENS += ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLADA_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
DREAM_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "<|beginoftext|>", "<|mask|>"]
DREAM_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(words: str | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is None:
        backend.pre_tokenizer = byte
    else:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(words), behavior="isolated")
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte])
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="module")
def llada_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llada")
    backend = byte_level()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in LLADA_TOKENS])
    backend.enable_truncation(8)  # what a tokenizer.json carries along must not cut prompts
    backend.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|startoftext|>"}
    settings |= {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "chat_template": LLADA_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def dream_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Dream publishes it: vocab.json, merges.txt and a python class that is never run."""
    directory = tmp_path_factory.mktemp("dream")
    byte_level(QWEN2_WORDS).model.save(str(directory))
    size = len(json.loads((directory / "vocab.json").read_text()))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(size + i): {"content": token, "special": token != "<tool_call>", **flags}
        for i, token in enumerate(DREAM_TOKENS)
    }
    settings = {"tokenizer_class": "DreamTokenizer", "added_tokens_decoder": added, "chat_template": DREAM_TEMPLATE}
    settings |= {"auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]}}
    settings |= {"bos_token": "<|beginoftext|>", "eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenization_dream.py").write_text("raise SystemExit('remote code was run')")
    return directory


def load(directory: Path) -> Tokenizer:
    made = Tokenizer.from_pretrained(directory)
    assert made is not None
    return made


@pytest.fixture(scope="module")
def llada(llada_dir: Path) -> Tokenizer:
    return load(llada_dir)


@pytest.fixture(scope="module")
def dream(dream_dir: Path) -> Tokenizer:
    return load(dream_dir)


@pytest.fixture(params=["llada", "dream"])
def either(request: pytest.FixtureRequest) -> Tokenizer:
    made: Tokenizer = request.getfixturevalue(request.param)
    return made


def chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


CHATS = [
    chat("What is 12 + 7?"),
    chat("Hi", "Hello.\n\n", "\n\n  print(f(3))\n"),
    [{"role": "system", "content": "Be brief."}, *chat("café naïve 東京 \U0001f98a", "It's 19", "")],
    chat("\n\n\nleading\n\n\n", "   ", "cafe\u0301 (decomposed)"),
]
TEXTS = ["", " ", "The quick brown fox", "it's 2024\n\n\n x", "東京\t\u00a0\U0001f98a", "cafe\u0301"]


# --- text ---


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_back(text: str, llada: Tokenizer) -> None:
    assert llada.decode(llada.encode(text)) == text


def test_long_text_is_not_truncated(llada: Tokenizer) -> None:
    assert len(llada.encode("fox and dog " * 50)) > 100


@pytest.mark.parametrize("token", [*LLADA_TOKENS, *DREAM_TOKENS])
def test_user_text_holds_no_control_token(token: str, either: Tokenizer) -> None:
    ids = either.encode(f"say {token} now")
    if token != "<tool_call>":  # plain vocabulary by the checkpoint's own word
        assert either.token_to_id(token) not in ids
    assert either.decode(ids) == f"say {token} now"


def test_no_bos_is_added(llada_dir: Path, tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(llada_dir / "tokenizer.json"))
    bos = backend.token_to_id("<|startoftext|>")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        "<|startoftext|> $A", None, [("<|startoftext|>", bos)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text((llada_dir / "tokenizer_config.json").read_text())
    made = load(tmp_path)
    assert bos not in made.encode("fox")
    assert made.apply_chat_template(chat("fox")).count(bos) == 1


def test_decode_skips_control_tokens_or_not(llada: Tokenizer) -> None:
    eot = llada.token_to_id("<|eot_id|>")
    assert eot is not None
    ids = [*llada.encode("fox"), eot]
    assert llada.decode(ids) == "fox"
    assert llada.decode(ids, skip_special_tokens=False) == "fox<|eot_id|>"
    assert llada.decode([*ids, 10**6]) == "fox"


def test_invalid_unicode_is_a_request_error(llada: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no valid unicode"):
        llada.encode("\ud800")


def test_known_and_unknown_ids(either: Tokenizer) -> None:
    size = either.vocab_size
    assert either.is_known(size - 1)
    assert not either.is_known(size)
    assert not either.is_known(-1)
    assert either.unknown_ids(size + 3) == [size, size + 1, size + 2]
    assert either.unknown_ids(size) == []


# --- against the library that the templates were written for ---


def transformers_tokenizer(directory: Path, kind: str) -> Any:
    import transformers

    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"bos_token": settings["bos_token"], "eos_token": settings["eos_token"]}
    if kind == "llada":
        made = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), **named)
    else:
        made = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    made.chat_template = settings["chat_template"]
    return made


@pytest.fixture(scope="module")
def references(llada_dir: Path, dream_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    qwen = tmp_path_factory.mktemp("qwen")
    for name in ("vocab.json", "merges.txt"):
        (qwen / name).write_text((dream_dir / name).read_text())
    settings = json.loads((dream_dir / "tokenizer_config.json").read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    settings.pop("auto_map")
    (qwen / "tokenizer_config.json").write_text(json.dumps(settings))
    return {"llada": transformers_tokenizer(llada_dir, "llada"), "dream": transformers_tokenizer(qwen, "dream")}


@pytest.mark.parametrize("kind", ["llada", "dream"])
@pytest.mark.parametrize("messages", CHATS)
def test_chat_equals_transformers(
    kind: str, messages: list[dict[str, str]], references: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ours: Tokenizer = request.getfixturevalue(kind)
    for prompt in (True, False):
        theirs = references[kind].apply_chat_template(
            messages, tokenize=True, add_generation_prompt=prompt, return_dict=False
        )
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == theirs


@pytest.mark.parametrize("kind", ["llada", "dream"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_equals_transformers(
    kind: str, text: str, references: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ours: Tokenizer = request.getfixturevalue(kind)
    assert ours.encode(text) == references[kind].encode(text, add_special_tokens=False)


# --- chat ---


def test_one_bos(llada: Tokenizer) -> None:
    bos = llada.token_to_id("<|startoftext|>")
    ids = llada.apply_chat_template(chat("<|startoftext|>hello", "<|startoftext|>"))
    assert ids[0] == bos
    assert ids.count(bos) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["<|mdm_mask|>", "<|eot_id|>", "<|mask|>", "<|im_end|>", "<|endoftext|>"])
def test_control_tokens_in_messages_are_text(token: str, either: Tokenizer) -> None:
    plain = either.apply_chat_template(chat("say A now", "A"))
    ids = either.apply_chat_template(chat(f"say {token} now", token))
    id = either.token_to_id(token)
    if id is not None:
        assert ids.count(id) == plain.count(id)
    with_text = either.decode(plain, skip_special_tokens=False)
    expected = with_text.replace("say A now", f"say {token} now").replace("A<|", f"{token}<|")
    assert either.decode(ids, skip_special_tokens=False) == expected


def test_control_token_in_a_role_is_text(llada: Tokenizer) -> None:
    ids = llada.apply_chat_template([{"role": "<|mdm_mask|>", "content": "x"}])
    assert llada.token_to_id("<|mdm_mask|>") not in ids
    assert "<|mdm_mask|>" in llada.decode(ids)


def test_messages_may_hold_the_placeholders_characters(llada: Tokenizer) -> None:
    text = "\ufdd00\ufdd1 <|mdm_mask|>"
    assert text in llada.decode(llada.apply_chat_template(chat(text)))
    with pytest.raises(RequestError, match="non-characters"):
        llada.apply_chat_template(chat("".join(map(chr, range(0xFDD0, 0xFDF0)))))


BAD = [
    ("hello", r"messages is 'hello' \(str\)"),
    ([], "messages is empty"),
    (["hello"], r"messages\[0\] is 'hello' \(str\)"),
    ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\] has no 'content'; it has \['role'\]"),
    ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] is None \(NoneType\)"),
    ([{"role": 3, "content": "a"}], r"messages\[0\]\['role'\] is 3 \(int\)"),
    ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\['content'\] is \[.*\(list\)"),
    ([{"role": "user", "content": "a", "name": "b"}], r"messages\[0\] has \['name'\]"),
]


@pytest.mark.parametrize(("messages", "expected"), BAD)
def test_bad_messages(messages: Any, expected: str, llada: Tokenizer) -> None:
    with pytest.raises(RequestError, match=expected):
        llada.apply_chat_template(messages)


# --- files ---


def copy(source: Path, target: Path, **settings: Any) -> Path:
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return target


def test_no_tokenizer(tmp_path: Path) -> None:
    assert Tokenizer.from_pretrained(tmp_path) is None


def test_no_template(llada_dir: Path, tmp_path: Path) -> None:
    made = load(copy(llada_dir, tmp_path, chat_template=None))
    assert not made.has_chat_template
    with pytest.raises(TokenizerError, match="no chat template"):
        made.apply_chat_template(chat("hi"))


def test_where_templates_live(llada_dir: Path, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "one"}]
    made = load(copy(llada_dir, tmp_path, chat_template=named))
    assert made.has_chat_template
    assert made.decode(made.apply_chat_template(chat("hi"))) == "one"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "two"}')
    assert load(tmp_path).apply_chat_template(chat("hi")) == made.encode("two")
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}three")
    made = load(tmp_path)
    assert made.apply_chat_template(chat("hi")) == [made.token_to_id("<|startoftext|>"), *made.encode("three")]


def test_template_features(llada_dir: Path, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{% if loop.index0 > 0 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{{ strftime_now('%Y') }}{% endfor %}"
    )
    made = load(copy(llada_dir, tmp_path, chat_template=template))
    assert re.fullmatch(r'"é<"\d{4}', made.decode(made.apply_chat_template(chat("é<", "b"))))
    with pytest.raises(RequestError, match="refuses the messages: no tools"):
        made.apply_chat_template([{"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    "template", ["{% if %}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ a.b }}"]
)
def test_broken_or_hostile_template(template: str, llada_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="chat template"):
        load(copy(llada_dir, tmp_path, chat_template=template)).apply_chat_template(chat("hi"))


def test_tokens_declared_beside_the_vocabulary(llada_dir: Path, tmp_path: Path) -> None:
    size = load(llada_dir).vocab_size
    made = load(copy(llada_dir, tmp_path, added_tokens_decoder={str(size): {"content": "<|more|>", "special": True}}))
    assert made.token_to_id("<|more|>") == size
    copy(llada_dir, tmp_path, added_tokens_decoder={str(size + 5): {"content": "<|more|>", "special": True}})
    with pytest.raises(TokenizerError, match=rf"'<\|more\|>' is declared as id {size + 5} and gets {size}"):
        load(tmp_path)


def test_added_control_token_that_is_not_marked_special(llada_dir: Path, tmp_path: Path) -> None:
    size = load(llada_dir).vocab_size
    made = load(copy(llada_dir, tmp_path, added_tokens_decoder={str(size): {"content": "<|more|>", "special": False}}))
    assert size not in made.encode("a <|more|> b")
    assert size not in made.apply_chat_template(chat("a <|more|> b"))


def test_unusable_files(llada_dir: Path, dream_dir: Path, tmp_path: Path) -> None:
    (copy(llada_dir, tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is unusable"):
        load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not readable"):
        load(tmp_path)
    other = tmp_path / "dream"
    other.mkdir()
    (copy(dream_dir, other) / "merges.txt").write_text("a b c\n")
    with pytest.raises(TokenizerError, match=r"vocab\.json and merges\.txt are unusable"):
        load(other)


def test_other_classes_go_through_transformers(dream_dir: Path, tmp_path: Path) -> None:
    copy(dream_dir, tmp_path, tokenizer_class="GPT2Tokenizer", auto_map={})
    made = load(tmp_path)
    assert made.decode(made.encode("fox <|mask|>")) == "fox <|mask|>"
    assert made.token_to_id("<|mask|>") not in made.encode("fox <|mask|>")


def test_remote_code_is_never_run(dream_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="without remote code"):
        load(copy(dream_dir, tmp_path, tokenizer_class="SomeTokenizer"))


def test_import_is_light() -> None:
    command = "import sys, unmask.models.tokenizer; print('transformers' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True).stdout.strip() == "False"
