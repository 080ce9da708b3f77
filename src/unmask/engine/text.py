"""From settled tokens to text that is never taken back: stop strings, held-back ends, split characters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What this needs of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Match:
    """A stop string in the text."""

    stop: str
    start: int
    num_tokens: int
    """Tokens up to the one that completes it."""


class TextTracker:
    """Text of one answer as its tokens settle.

    `push` takes the settled tokens so far and returns what may be shown for good: never half of a character (a
    character can span several byte tokens), never the beginning of a stop string. Matches that end within the first
    ``min_tokens`` tokens do not count.
    """

    def __init__(
        self, decoder: Decoder, stop: Sequence[str] = (), *, skip_special_tokens: bool = True, min_tokens: int = 0
    ) -> None:
        self._decoder, self._stop, self._skip, self._min_tokens = decoder, tuple(stop), skip_special_tokens, min_tokens
        self._num_tokens = 0
        self.sent = ""
        self.match: Match | None = None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(list(ids), skip_special_tokens=self._skip)

    def push(self, ids: Sequence[int]) -> str:
        """New text after the settled tokens grew to ``ids``; sets `match` once a stop string is complete."""
        if self.match is not None or len(ids) <= self._num_tokens:
            return ""
        self.match = self._find(ids)
        self._num_tokens = len(ids)
        text = self._decode(ids)
        if self.match is not None:
            return self._send(text[: self.match.start])
        return self._send(text[: self._safe_length(text)])

    def finish(self, ids: Sequence[int]) -> str:
        """The rest, once no more tokens come."""
        return "" if self.match is not None else self._send(self._decode(ids))

    @property
    def text(self) -> str:
        """All that was returned so far."""
        return self.sent

    def _send(self, text: str) -> str:
        delta = text[len(self.sent) :]
        self.sent += delta
        return delta

    def _find(self, ids: Sequence[int]) -> Match | None:
        """The stop string that is complete after the fewest tokens; of several, the one that starts first."""
        if not self._stop or not any(stop in self._decode(ids) for stop in self._stop):
            return None
        for num_tokens in range(max(self._num_tokens, self._min_tokens) + 1, len(ids) + 1):
            text = self._decode(ids[:num_tokens])
            found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
            if found:
                start, stop = min(found)
                return Match(stop, start, num_tokens)
        return None

    def _safe_length(self, text: str) -> int:
        """Length of the text that cannot change any more: no half character, no beginning of a stop string."""
        whole = len(text.rstrip(REPLACEMENT))
        held = max((_overlap(text[:whole], stop) for stop in self._stop), default=0)
        return whole - held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of ``stop`` that ``text`` ends with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
