"""Chat templates: messages to text, with the checkpoint's own Jinja template in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unmask.errors import RequestError, TokenizerError

Message = Mapping[str, str]


def check_messages(messages: object) -> None:
    """A non-empty list of {"role": str, "content": str}; RequestError says where it is not, and what was found."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        raise RequestError(f"messages is {_kind(messages)}, expected a list of {{'role', 'content'}}")
    if not messages:
        raise RequestError("messages is empty; give at least one {'role': 'user', 'content': ...}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] is {_kind(message)}, expected {{'role', 'content'}}")
        for key in ("role", "content"):
            if key not in message:
                raise RequestError(f"messages[{index}] has no {key!r}; it has {sorted(map(str, message))}")
            if not isinstance(message[key], str):
                raise RequestError(f"messages[{index}][{key!r}] is {_kind(message[key])}, expected a string")
        extra = sorted(str(k) for k, v in message.items() if k not in ("role", "content") and v is not None)
        if extra:
            raise RequestError(f"messages[{index}] has {extra}; only 'role' and 'content' are supported")


def _kind(value: object) -> str:
    return f"{value!r:.60} ({type(value).__name__})"


class HiddenTokens:
    """Messages in which every spelling of a control token is a placeholder, until the rendered text has been split.

    The placeholders are Unicode non-characters around a number: text that no one writes, that templates pass on, and
    that `strip` leaves alone.
    """

    def __init__(self, control: Iterable[str], messages: Sequence[Message]) -> None:
        everything = "".join(message[key] for message in messages for key in ("role", "content"))
        free = [mark for mark in map(chr, range(0xFDD0, 0xFDF0)) if mark not in everything]
        if len(free) < 2:
            raise RequestError("the messages use all 32 Unicode non-characters U+FDD0 to U+FDEF; remove some")
        self._open, self._close = free[:2]
        self._spellings = sorted(control, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._spellings)) or r"(?!)")
        self._number = {spelling: number for number, spelling in enumerate(self._spellings)}
        self.messages = [{key: self._hide(m[key]) for key in ("role", "content")} for m in messages]

    def _hide(self, text: str) -> str:
        return self._pattern.sub(lambda match: f"{self._open}{self._number[match[0]]}{self._close}", text)

    def reveal(self, text: str) -> str:
        """The text as the user wrote it."""
        placeholder = f"{self._open}([0-9]+){self._close}"
        return re.sub(placeholder, lambda match: self._spellings[int(match[1])], text)


class ChatTemplate:
    """A compiled template, with the tokens (bos_token, ..) that it may use by name."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._tokens = dict(tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template is no valid Jinja: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The conversation as text. RequestError if the template itself refuses the messages."""
        try:
            text: str = self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._tokens,
            )
        except _Refused as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from None
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template fails: {error}") from error
        return text


class _Refused(Exception):
    """`raise_exception` was called in a template."""


class _Generation(Extension):
    """{% generation %} marks the assistant's text for training tools; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The environment that published templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now()
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise _Refused(message)


def _now() -> Callable[[str], str]:
    return lambda pattern: datetime.now().strftime(pattern)
