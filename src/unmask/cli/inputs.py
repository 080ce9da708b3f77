"""Text from the command's arguments or from a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from unmask.errors import ConfigError


def decode(data: bytes, offset: int = 0) -> str:
    """Bytes of stdin as text.

    Raises:
        ConfigError: they are not UTF-8; the message holds the place, counted from ``offset``.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = offset + error.start
        raise ConfigError(
            f"stdin is not UTF-8: byte 0x{data[error.start]:02x} at offset {place}; convert it first (iconv -t utf-8)"
        ) from error


def stdin_lines() -> Iterator[str]:
    """The lines of a piped stdin, without their ends."""
    offset = 0
    for line in sys.stdin.buffer:
        yield decode(line, offset).rstrip("\r\n")
        offset += len(line)


def read_prompts(arguments: Sequence[str]) -> list[str]:
    """Each argument is a prompt; without any, all of stdin is one.

    Raises:
        ConfigError: there is no prompt, an empty one, or bytes that are no text.
    """
    if arguments:
        return [_checked(prompt, f"prompt {i}") for i, prompt in enumerate(arguments, 1)]
    if sys.stdin.isatty():
        raise ConfigError('no prompt: give one (unmask generate "...") or pipe one in')
    text = decode(sys.stdin.buffer.read())
    return [_checked(text.removesuffix("\n").removesuffix("\r"), "the prompt on stdin")]


def _checked(prompt: str, what: str) -> str:
    if not prompt.strip():
        raise ConfigError(f"{what} is empty; write what the model should answer")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8 at character {error.start}; check the terminal's encoding") from error
    return prompt
