"""Imports go one way: users of the engine, engine and trainer, decoding and cache, models, ops, foundations."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "unmask"

FOUNDATIONS = {"errors", "_version", "config", "methods", "core"}
USERS = {"cli", "server", "eval", "bench"}
# What each room may import, besides itself. A room that is not named here is an error: give it a place.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "_version": set(),
    "config": {"errors"},
    "methods": {"errors", "config"},
    "core": {"errors", "config"},
    "ops": {"errors", "config", "core"},
    "models": {"errors", "config", "core", "ops"},
    "cache": {*FOUNDATIONS, "ops", "models"},
    "decoding": {*FOUNDATIONS, "ops", "models"},
    "engine": {*FOUNDATIONS, "ops", "models", "cache", "decoding"},
    "problems": {"errors"},
    "train": {*FOUNDATIONS, "ops", "models", "problems"},
    "eval": {*FOUNDATIONS, "", "engine", "models", "problems"},
    "bench": {*FOUNDATIONS, "", "engine", "models", "ops", "cache", "decoding", "problems", "eval"},
    "server": {*FOUNDATIONS, "", "engine", "models"},
    "cli": {*FOUNDATIONS, "", "engine", "models", "train", "problems", "eval", "bench", "server"},
    "": {*FOUNDATIONS, "engine"},
    "__main__": {"cli"},
}
HEAVY = {"triton", "transformers"}
LIGHT_ROOMS = FOUNDATIONS | {"problems"}


def room(path: Path, source: Path) -> str:
    """The room that a file lies in; "" is the package's own __init__."""
    name = path.relative_to(source).parts[0].removesuffix(".py")
    return "" if name == "__init__" else name


def modules(source: Path) -> list[Path]:
    return sorted(source.rglob("*.py"))


def imports(nodes: Sequence[ast.stmt] | Iterator[ast.AST]) -> Iterator[str]:
    """Full names that the statements import: `from a import b` may be a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the package's name in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms_of(names: Iterator[str], source: Path) -> set[str]:
    """The rooms of ours that are imported; "" for a name of the package's own __init__."""
    ours = {name.split(".")[1] for name in names if name.startswith("unmask.")}
    return {name if name in known_rooms(source) else "" for name in ours}


def known_rooms(source: Path) -> set[str]:
    return {room(path, source) for path in modules(source)}


def breaches(source: Path) -> list[str]:
    """Every import against the direction, and every room without a place."""
    out = []
    for path in modules(source):
        here, tree = room(path, source), ast.parse(path.read_text(encoding="utf-8"))
        if here not in ALLOWED:
            out.append(f"{here} has no place")
            continue
        wrong = rooms_of(imports(ast.walk(tree)), source) - ALLOWED[here] - {here}
        out += [f"{path.relative_to(source)} imports {name or 'unmask itself'}" for name in sorted(wrong)]
    return sorted(set(out))


def heavy_at_import(source: Path) -> list[str]:
    """Modules that need triton (or, in the light rooms, torch's slow friends) as soon as they are imported."""
    out = []
    for path in modules(source):
        names = {name.split(".")[0] for name in imports(at_import(ast.parse(path.read_text(encoding="utf-8"))))}
        banned = {"transformers"} if is_kernel(path, source) else HEAVY
        if room(path, source) in LIGHT_ROOMS | {"ops", "models", "cache", "decoding", "engine"}:
            out += [f"{path.relative_to(source)} needs {name}" for name in sorted(names & banned)]
    return out


def is_kernel(path: Path, source: Path) -> bool:
    return path.relative_to(source).parts[:2] == ("ops", "triton")


def triton_elsewhere(source: Path) -> list[str]:
    """Whatever imports triton outside its room, however late; and whatever needs that room at its own import."""
    out = []
    for path in modules(source):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if is_kernel(path, source):
            continue
        here = path.relative_to(source)
        if any(name.split(".")[0] == "triton" for name in imports(ast.walk(tree))):
            out.append(f"{here} imports triton")
        if any(name.startswith("unmask.ops.triton") for name in imports(at_import(tree))):
            out.append(f"{here} needs ops.triton")
        if room(path, source) not in {"ops", "bench"} and "ops.triton" in path.read_text(encoding="utf-8"):
            out.append(f"{here} goes past unmask.ops")
    return out


def at_import(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported: not those in functions, nor under TYPE_CHECKING."""
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def test_imports_go_one_way() -> None:
    assert breaches(SOURCE) == []


def test_nothing_heavy_is_imported_below() -> None:
    assert heavy_at_import(SOURCE) == []


def test_triton_stays_in_its_room() -> None:
    assert triton_elsewhere(SOURCE) == []


def test_importing_the_package_imports_no_triton() -> None:
    """Ours; torch may look for it."""
    code = (
        "import sys, unmask, unmask.ops; print([name for name in sys.modules if name.startswith('unmask.ops.triton')])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE.parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("file", "text", "complaint"),
    [
        ("train/a.py", "from unmask.engine import llm", "train/a.py imports engine"),
        ("engine/a.py", "def f():\n    from unmask.train import x", "engine/a.py imports train"),
        ("cache/a.py", "import unmask.decoding.rule", "cache/a.py imports decoding"),
        ("decoding/a.py", "from unmask import cache", "decoding/a.py imports cache"),
        ("engine/a.py", "from unmask.cli import main", "engine/a.py imports cli"),
        ("problems/a.py", "from unmask.config import SamplingParams", "problems/a.py imports config"),
        ("core/a.py", "from unmask import LLM", "core/a.py imports unmask itself"),
        ("attic/a.py", "", "attic has no place"),
    ],
)
def test_a_wrong_import_is_seen(tmp_path: Path, file: str, text: str, complaint: str) -> None:
    for name in ("cli/main", "engine/llm", "train/x", "cache/b", "decoding/rule", "config", "problems/b"):
        write(tmp_path / f"{name}.py", "")
    assert breaches(tmp_path) == []
    write(tmp_path / file, text)
    assert breaches(tmp_path) == [complaint]


def test_a_heavy_import_is_seen(tmp_path: Path) -> None:
    write(tmp_path / "core/a.py", "try:\n    import triton\nexcept ImportError:\n    triton = None")
    write(tmp_path / "models/b.py", "def late():\n    import transformers")
    write(tmp_path / "ops/triton/c.py", "import triton")
    assert heavy_at_import(tmp_path) == ["core/a.py needs triton"]


@pytest.mark.parametrize(
    ("file", "text", "complaints"),
    [
        ("ops/triton/a.py", "import triton\nfrom unmask.ops.triton import b", []),
        ("ops/a.py", "def late():\n    from unmask.ops.triton import b", []),
        ("ops/a.py", "def late():\n    import triton.language as tl", ["ops/a.py imports triton"]),
        ("ops/a.py", "from unmask.ops import triton", ["ops/a.py needs ops.triton"]),
        ("ops/a.py", "import unmask.ops.triton.b", ["ops/a.py needs ops.triton"]),
        ("core/triton/a.py", "def late():\n    import triton", ["core/triton/a.py imports triton"]),
        ("bench/a.py", "def late():\n    from unmask.ops.triton import b", []),
        ("models/a.py", "def late():\n    from unmask.ops.triton import b", ["models/a.py goes past unmask.ops"]),
        ("engine/a.py", "load('unmask.ops.triton.b')", ["engine/a.py goes past unmask.ops"]),
    ],
)
def test_triton_elsewhere_is_seen(tmp_path: Path, file: str, text: str, complaints: list[str]) -> None:
    write(tmp_path / file, text)
    assert triton_elsewhere(tmp_path) == complaints


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
