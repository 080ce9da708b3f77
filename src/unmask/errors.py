"""Everything that unmask raises on purpose.

    UnmaskError
    ├── ConfigError (ValueError)        an option, a field or a combination of them is wrong
    │   └── MethodError                 a method row, or a row that these weights cannot run
    ├── RequestError (ValueError)       one prompt or its parameters cannot be served; others are unaffected
    ├── CheckpointError (ValueError)    a directory, file, tensor or config that is no usable model
    ├── TokenizerError (ValueError)     text is needed and the model has no tokenizer, or it is unusable
    ├── MissingDependencyError (ImportError)   an optional extra is not installed
    └── EngineError (RuntimeError)      a broken invariant of ours; please report it

A message says what is wrong, how much, and what to do next.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnmaskError(Exception):
    """Base of every exception that unmask raises on purpose."""


class ConfigError(UnmaskError, ValueError):
    """An option, a field or a combination of them is wrong."""


class MethodError(ConfigError):
    """A method does not exist, or the loaded weights cannot run it."""


class RequestError(UnmaskError, ValueError):
    """One request cannot be served; the engine and its other requests are unaffected."""


class CheckpointError(UnmaskError, ValueError):
    """A directory, file, tensor or config is not a usable model."""


class TokenizerError(UnmaskError, ValueError):
    """Text is needed and the model has no tokenizer, or the tokenizer cannot do it."""


class MissingDependencyError(UnmaskError, ImportError):
    """An optional extra is not installed."""


class EngineError(UnmaskError, RuntimeError):
    """An invariant of the engine broke."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause that helps after an unknown name: the nearest known one, or all of them.

    >>> nearest("treshold", ["threshold", "steps"])
    "did you mean 'threshold'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known)}"
