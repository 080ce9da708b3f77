"""Text to ids and back, from a checkpoint's own files, without remote code.

Built on the `tokenizers` library alone: `import transformers` costs more than a second, and is a fall-back for
checkpoints whose tokenizer has no fast form on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from unmask.errors import CheckpointError, RequestError, TokenizerError
from unmask.models.chat import ChatTemplate, HiddenTokens, check_messages
from unmask.models.config import read_json

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "spiece.model", "vocab.txt")
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Classes whose vocab.json and merges.txt are a Qwen2 byte-level BPE. Dream's own class is remote python code.
QWEN2_CLASSES = ("DreamTokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer.

    User text is never parsed for control tokens: "<|mdm_mask|>" typed by a user is a few characters of text.
    Control tokens are those that the checkpoint marks special, and any added one spelled <|...|>.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        self._backend = _harden(backend)
        self._template = template
        added = self._backend.get_added_tokens_decoder()
        self._control = {token.content: _Control(id, token) for id, token in added.items() if token.special}

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer | None:
        """The tokenizer in `directory`; None when there is none. TokenizerError when it is there and unusable."""
        directory = Path(directory)
        if not any((directory / name).exists() for name in VOCABULARY_FILES):
            return None
        try:
            settings = _optional_json(directory / "tokenizer_config.json")
            backend = _load_backend(directory, settings)
            _add_declared_tokens(backend, settings, directory)
            return cls(backend, _load_template(directory, settings))
        except CheckpointError as error:  # a file that is no JSON
            raise TokenizerError(str(error)) from error

    # --- text ---

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: no control token is parsed, and none is added."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"the text is no valid unicode string: {error}") from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are no UTF-8 become U+FFFD; ids that the tokenizer does not know are dropped."""
        text: str = self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)
        return text

    # --- ids ---

    @property
    def vocab_size(self) -> int:
        """Number of known ids, added tokens included; a model's vocabulary may be larger, and have gaps."""
        return len(self._known)

    @cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self._backend.get_vocab(with_added_tokens=True).values())

    def is_known(self, id: int) -> bool:
        return id in self._known

    def unknown_ids(self, model_vocab_size: int) -> list[int]:
        """Ids in [0, model_vocab_size) that stand for no text: a model must not produce them."""
        return [id for id in range(model_vocab_size) if id not in self._known]

    def token_to_id(self, token: str) -> int | None:
        """The id of one token by its exact spelling, control tokens included."""
        id: int | None = self._backend.token_to_id(token)
        return id

    # --- chat ---

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, `messages` = [{"role": .., "content": ..}, ..].

        The template's own control tokens are parsed; roles and contents never are. RequestError for a message that
        the template cannot take, TokenizerError when there is no template or it is broken.
        """
        if self._template is None:
            raise TokenizerError("this model has no chat template; give the prompt as text, or use an instruct model")
        check_messages(messages)
        hidden = HiddenTokens(self._control, messages)
        return self._encode_parsed(self._template.render(hidden.messages, add_generation_prompt), hidden)

    def _encode_parsed(self, text: str, hidden: HiddenTokens) -> list[int]:
        """Ids of rendered text: split at the template's control tokens; what lies between is plain text."""
        ids: list[int] = []
        end = 0
        for match in self._control_pattern.finditer(text):
            ids += self.encode(hidden.reveal(text[end : match.start()]))
            ids.append(self._control[_spelling(match)].id)
            end = match.end()
        return ids + self.encode(hidden.reveal(text[end:]))

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """Any control token, the longest first; with the white space that it swallows, if it is of that kind."""
        parts = []
        for spelling in sorted(self._control, key=len, reverse=True):
            token = self._control[spelling].token
            before, after = r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else ""
            parts.append(f"{before}({re.escape(spelling)}){after}")
        return re.compile("|".join(parts) or r"(?!)")


class _Control(NamedTuple):
    id: int
    token: tokenizers.AddedToken


def _spelling(match: re.Match[str]) -> str:
    """The control token of a match, without the white space that it swallows."""
    return next(group for group in match.groups() if group is not None)


# --- from files ---


def _load_backend(directory: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    if (directory / "tokenizer.json").exists():
        try:
            return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{directory / 'tokenizer.json'} is unusable: {error}; download it again") from error
    if settings.get("tokenizer_class") in QWEN2_CLASSES and (directory / "merges.txt").exists():
        return _qwen2(directory)
    return _through_transformers(directory)


def _qwen2(directory: Path) -> tokenizers.Tokenizer:
    """Qwen2's byte-level BPE (NFC, single digits) from vocab.json and merges.txt."""
    try:
        model = tokenizers.models.BPE.from_file(str(directory / "vocab.json"), str(directory / "merges.txt"))
    except Exception as error:
        raise TokenizerError(f"{directory}: vocab.json and merges.txt are unusable: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(QWEN2_WORDS), behavior="isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _through_transformers(directory: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer  # here: seconds to import, and rarely needed

    try:
        slow_or_fast = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
    except Exception as error:  # whatever the checkpoint's class raises
        raise TokenizerError(
            f"{directory} has no tokenizer.json, and transformers cannot build its tokenizer without remote code: "
            f"{error}; save a tokenizer.json with tokenizer.save_pretrained"
        ) from error
    backend = getattr(slow_or_fast, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise TokenizerError(f"{directory}: {type(slow_or_fast).__name__} has no fast form; save a tokenizer.json")
    return backend


def _add_declared_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: Path) -> None:
    """Added tokens that the other files declare and the vocabulary lacks; each must get the id it declares."""
    declared: dict[int, Any] = {}
    for spelling, id in _optional_json(directory / "added_tokens.json").items():
        declared[int(id)] = {"content": spelling, "special": True}
    for id, entry in (settings.get("added_tokens_decoder") or {}).items():
        declared[int(id)] = entry
    known = backend.get_added_tokens_decoder()
    for id, entry in sorted(declared.items()):
        if id not in known:
            _add_token(backend, id, entry, directory)


def _add_token(backend: tokenizers.Tokenizer, id: int, entry: Mapping[str, Any], directory: Path) -> None:
    options = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry}
    special = bool(entry.get("special"))
    token = tokenizers.AddedToken(entry["content"], special=special, **options)
    backend.add_special_tokens([token]) if special else backend.add_tokens([token])
    got = backend.token_to_id(entry["content"])
    if got != id:
        raise TokenizerError(
            f"{directory}: added token {entry['content']!r} is declared as id {id} and gets {got}: "
            "the vocabulary and tokenizer_config.json do not belong together"
        )


def _harden(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """No truncation, no padding, and no control token read out of text."""
    backend.no_truncation()
    backend.no_padding()
    for token in backend.get_added_tokens_decoder().values():
        if not token.special and re.fullmatch(r"<\|.*\|>", token.content):
            token.special = True
            backend.add_special_tokens([token])
    backend.encode_special_tokens = True
    return backend


def _load_template(directory: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """A file of its own wins over tokenizer_config.json, which has one template or a list of named ones."""
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    source = _optional_json(directory / "chat_template.json").get("chat_template", source)
    if (directory / "chat_template.jinja").exists():
        source = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    if source is None:
        return None
    return ChatTemplate(source, _named_tokens(directory, settings))


def _named_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like, as templates use them: their spelling."""
    merged = {**_optional_json(directory / "special_tokens_map.json"), **settings}
    values = {name: merged.get(name) for name in NAMED_TOKENS}
    spelled = {name: v.get("content") if isinstance(v, Mapping) else v for name, v in values.items()}
    return {name: value for name, value in spelled.items() if isinstance(value, str)}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
