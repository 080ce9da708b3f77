"""Train the byte-fallback BPE tokenizer that `unmask-mini` reads.

Text is never rewritten: no normalizer, no added or stripped space, and a character outside the vocabulary is
spelled in bytes, so `decode(encode(s)) == s` for every string.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from unmask.problems import make_problems

EOS, BOS, MASK = "<|endoftext|>", "<|startoftext|>", "<|mdm_mask|>"
HEADER_START, HEADER_END, EOT = "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"
SPECIAL_TOKENS = (EOS, BOS, MASK, HEADER_START, HEADER_END, EOT)
"""Ids 0 to 5; the end of text is also the padding."""
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
ROLES = ("user", "assistant", "system")

# A word keeps the space before it. It also keeps the space after it when a digit follows, and an operator keeps
# both, because digits stand alone: "has 5 + 3" is then " has ", "5", " + ", "3" rather than two tokens more.
PIECES = r"\n| [-+*/=] (?=\d)| ?\p{L}+(?: (?=\d))?|\d| ?[^\s\p{L}\d]+(?: (?=\d))?|\s"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)

DEFAULT_SEED, DEFAULT_PROBLEMS = 1, 20_000


def train_tokenizer(texts: Iterator[str], vocab_size: int = 1024) -> Tokenizer:
    """Learn merges from `texts`; ids are the special tokens, the 256 bytes, the characters, then the merges.

    The role names are single tokens whatever the texts are. ValueError when `vocab_size` has no room for them.
    """
    vocab, merges = _learn(texts, vocab_size - len(SPECIAL_TOKENS) - len(BYTES))
    fixed = [*SPECIAL_TOKENS, *BYTES]
    tokenizer = _pieces_of(models.BPE())
    ids = {token: i for i, token in enumerate([*fixed, *vocab])}
    tokenizer.model = models.BPE(vocab=ids, merges=merges, byte_fallback=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    missing = [role for role in ROLES if role not in ids]
    if missing:
        raise ValueError(f"a vocabulary of {vocab_size} leaves no room for {missing}; use a larger one")
    return tokenizer


def _pieces_of(model: models.Model) -> Tokenizer:
    """A tokenizer that cuts text into pieces, each digit on its own, and leaves every character as it is."""
    tokenizer = Tokenizer(model)
    cut = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Digits(individual_digits=True)])
    return tokenizer


def _learn(texts: Iterable[str], size: int) -> tuple[list[str], list[tuple[str, str]]]:
    """The learned tokens in order of their ids, and the merges that make them."""
    tokenizer = _pieces_of(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=max(size, 0), show_progress=False, initial_alphabet=["\n"])
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [(left, right) for left, right in model["merges"]]


def _with_roles(texts: Iterable[str]) -> Iterator[str]:
    """The texts, and the role names often enough that they are among the first merges."""
    yield from texts
    for _ in range(5_000):
        yield "\n".join(ROLES)


def problem_texts(seed: int, num_problems: int) -> Iterator[str]:
    """Questions and answers of the training split, a few requests of several problems among them.

    They are of the first stock: a phrase that came later is spelled in the pieces that there are.
    """
    for request in make_problems(seed, num_problems, wide=False):
        yield request["question"]
        yield request["answer"]
    for request in make_problems(seed + 1, num_problems // 50, per_request=4, wide=False):
        yield request["question"]
        yield request["answer"]


def tokenizer_config() -> dict[str, Any]:
    """What transformers' AutoTokenizer reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "mask_token": MASK,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }


def build_mini_tokenizer(directory: str | Path, seed: int = DEFAULT_SEED, num_problems: int = DEFAULT_PROBLEMS) -> None:
    """Train on problems of the training split and write tokenizer.json and tokenizer_config.json."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(problem_texts(seed, num_problems))
    files = {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": tokenizer_config()}
    for name, content in files.items():
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
