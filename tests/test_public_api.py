"""What `from unmask import` gives: these names, each explained, and no torch before it is needed."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

import unmask
from unmask import errors

CONSTANTS = ("METHODS", "__version__")


def test_all_is_sorted_and_is_the_surface() -> None:
    assert unmask.__all__ == sorted(unmask.__all__, key=lambda name: (not name.isupper(), name))
    assert dir(unmask) == sorted(unmask.__all__)
    here = {name for name, value in vars(unmask).items() if is_ours(name, value)}
    assert here <= set(unmask.__all__)
    for name in unmask.__all__:
        assert getattr(unmask, name) is not None


def is_ours(name: str, value: object) -> bool:
    """Public in the sense that somebody might import it: no module, nothing private, nothing of Python's."""
    outside = getattr(value, "__module__", "unmask").split(".")[0] not in ("unmask", "builtins")
    return not (name.startswith("_") or inspect.ismodule(value) or outside or name in ("annotations", "TYPE_CHECKING"))


@pytest.mark.parametrize("name", [name for name in unmask.__all__ if name not in CONSTANTS])
def test_every_name_is_explained(name: str) -> None:
    value = getattr(unmask, name)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "a dataclass wrote this one"
    for method, function in inspect.getmembers(value, inspect.isfunction):
        if not method.startswith("_") and function.__module__.startswith("unmask"):
            assert function.__doc__, f"{name}.{method}"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Sampling"):
        unmask.Sampling  # noqa: B018


def test_importing_is_quick() -> None:
    check = (
        "import sys, unmask\n"
        "unmask.SamplingParams(threshold=0.9), unmask.METHODS['vanilla'], dir(unmask)\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'typer') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_tree_of_errors_is_the_one_drawn() -> None:
    assert drawn_tree(errors.__doc__ or "") == real_tree(errors.UnmaskError, 0)


def drawn_tree(doc: str) -> list[tuple[int, str, str]]:
    """(depth, name, builtin base) of each line of the drawing."""
    out = []
    for line in doc.splitlines():
        found = re.match(r"    ([│├└─ ]*)(\w+(?:Error))(?: \((\w+)\))?", line)
        if found:
            out.append((len(found[1]) // 4, found[2], found[3] or ""))
    return out


def real_tree(cls: type[Exception], depth: int) -> list[tuple[int, str, str]]:
    builtin = next((base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"), "")
    out = [(depth, cls.__name__, builtin if builtin != "Exception" else "")]
    for child in cls.__subclasses__():
        out += real_tree(child, depth + 1)
    return out


def test_every_error_is_public() -> None:
    assert {name for _, name, _ in real_tree(errors.UnmaskError, 0)} <= set(unmask.__all__)
