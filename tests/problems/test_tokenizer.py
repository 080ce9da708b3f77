from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import unmask
from unmask.problems import iter_problems, make_problems
from unmask.train.tokenizer import BYTES, ROLES, SPECIAL_TOKENS, build_mini_tokenizer, train_tokenizer

SHIPPED = Path(unmask.__path__[0]) / "assets" / "unmask-mini"
GSM8K = json.loads((Path(__file__).parent / "data" / "gsm8k_questions.json").read_text(encoding="utf-8"))
ODD = [
    "",
    " ",
    "  a  b ",
    "\n\n\t a\r\n",
    "▁ ▁▁",
    "<0x41>",
    "é中文🙂\U0001f469\u200d\U0001f680",
    "\x00\x1b\x7f",
    "5  + 3",
    "Ġ",
    "1\n#### 2",
]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.fixture(scope="module")
def auto() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(SHIPPED)


def round_trip(tok: Tokenizer, text: str) -> str:
    return tok.decode(tok.encode(text).ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", [*ODD, *SPECIAL_TOKENS, *GSM8K["questions"]])
def test_round_trip(tok: Tokenizer, auto: PreTrainedTokenizerBase, text: str) -> None:
    assert round_trip(tok, text) == text
    assert auto.decode(auto(text, add_special_tokens=False)["input_ids"]) == text


@given(st.text() | st.text(alphabet=" \n\t\u2581\u0120<>|0x9AaF5+%.,$-", max_size=40))
def test_round_trip_of_anything(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    assert round_trip(tokenizer, text) == text


def test_vocabulary(tok: Tokenizer) -> None:
    assert tok.get_vocab_size() == 1024
    assert [tok.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert all(tok.token_to_id(token) is not None for token in BYTES)
    assert (SHIPPED / "tokenizer.json").stat().st_size < 100_000


@pytest.mark.parametrize("role", ROLES)
def test_roles_are_single_tokens(tok: Tokenizer, role: str) -> None:
    assert len(tok.encode(role).ids) == 1


def test_digits_and_newlines_stand_alone(tok: Tokenizer) -> None:
    tokens = tok.encode("Tom has 123 + 4 = 127 pens.\nHow many?").tokens
    assert "".join(tokens) == "Tom has 123 + 4 = 127 pens.\nHow many?"
    assert all(t.isdigit() and len(t) == 1 for t in tokens if any(c.isdigit() for c in t))
    assert "\n" in tokens


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_only_where_wanted(tok: Tokenizer, auto: PreTrainedTokenizerBase, token: str) -> None:
    special = auto.convert_tokens_to_ids(token)
    assert auto(f"a{token}b", add_special_tokens=False)["input_ids"][1] == special
    assert special not in tok.encode(f"a{token}b").ids
    assert special not in auto(f"a{token}b", split_special_tokens=True)["input_ids"]


def test_config(auto: PreTrainedTokenizerBase) -> None:
    assert (auto.eos_token_id, auto.pad_token_id, auto.bos_token_id, auto.mask_token_id) == (0, 0, 1, 2)
    assert auto.model_max_length == 1024


def test_chat_template(auto: PreTrainedTokenizerBase) -> None:
    chat = [
        {"role": "user", "content": " What is 2 + 3? "},
        {"role": "assistant", "content": "#### 5"},
        {"role": "user", "content": "Sure?"},
    ]
    text = auto.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    head = "<|start_header_id|>{}<|end_header_id|>"
    assert text == (
        f"<|startoftext|>{head.format('user')}What is 2 + 3?<|eot_id|>{head.format('assistant')}#### 5<|eot_id|>"
        f"{head.format('user')}Sure?<|eot_id|>{head.format('assistant')}"
    )
    assert auto.decode(auto(text, add_special_tokens=False)["input_ids"]) == text


def num_positions(tok: Tokenizer, question: str, answer: str) -> int:
    """Prompt with its eight template tokens, answer, and four end tokens."""
    return len(tok.encode(question).ids) + len(tok.encode(answer).ids) + 12


@pytest.mark.parametrize("split", ["train", "test"])
def test_problems_fit(tok: Tokenizer, split: str) -> None:
    sizes = [num_positions(tok, p.question, p.answer) for p in iter_problems(31, 4_000, split=split)]
    assert max(sizes) <= 168
    assert sum(size <= 136 for size in sizes) >= 0.95 * len(sizes)


def test_four_problems_fit_512(tok: Tokenizer) -> None:
    requests = make_problems(31, 500, per_request=4)
    assert max(num_positions(tok, r["question"], r["answer"]) for r in requests) <= 512


def test_problems_need_no_bytes(tok: Tokenizer) -> None:
    ids = {i for p in iter_problems(41, 1_000, split="test") for i in tok.encode(p.question + p.answer).ids}
    assert min(ids) >= len(SPECIAL_TOKENS) + len(BYTES)


def test_shipped_files_are_what_the_builder_makes(tmp_path: Path) -> None:
    build_mini_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_too_small_a_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="use a larger one"):
        train_tokenizer(iter(["some text"]), vocab_size=270)
