"""What is installed: every module, the model and the typing marker, within a size that a package may have."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import unmask

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "unmask"
ASSETS = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
MB = 1_000_000

# Traces of the machine that something was made on, and of how it was made.
FORBIDDEN = (
    r"(?<![\w.])/(work|home|root|mnt)/\w",
    r"(?<![\w.])/tmp/\w",
    r"\bAKIA\w{8}|\bhf_[A-Za-z]{12}|BEGIN [A-Z ]*PRIVATE KEY",
    r"\bbreakpoint\(\)|\bpdb\.set_trace|<{7} |>{7} ",
)
TEXT_SUFFIXES = {"", ".csv", ".json", ".jsonl", ".md", ".py", ".svg", ".toml"}


def module_names() -> list[str]:
    return sorted(module.name for module in pkgutil.walk_packages([str(SOURCE)], "unmask."))


def test_modules_are_found() -> None:
    assert {"unmask.engine.llm", "unmask.cli.main", "unmask.train.trainer", "unmask.methods"} <= set(module_names())


@pytest.mark.parametrize("name", [name for name in module_names() if not name.endswith("__main__")])
def test_every_module_can_be_imported(name: str) -> None:
    if "triton" in name and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is an extra")
    importlib.import_module(name)


def test_every_package_has_its_init() -> None:
    folders = {path.parent for path in SOURCE.rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)


def test_assets_are_complete_and_small() -> None:
    for name in ASSETS:
        assert (SOURCE / "assets" / "unmask-mini" / name).exists(), name
    assert sum(path.stat().st_size for path in (SOURCE / "assets").rglob("*")) <= 36 * MB
    assert (SOURCE / "py.typed").exists()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("hatchling") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("building a wheel needs hatchling and pip")
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=200)
    (built,) = out.glob("unmask-*.whl")
    return built


def test_the_wheel_holds_what_it_needs(wheel: Path) -> None:
    assert wheel.stat().st_size < 40 * MB
    assert unmask.__version__ in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"unmask/assets/unmask-mini/{name}" for name in ASSETS} <= names
    assert {"unmask/py.typed", "unmask/train/configs/unmask-mini.toml"} <= names
    ours = {str(path.relative_to(SOURCE.parent)) for path in SOURCE.rglob("*.py")}
    assert ours <= names
    assert not [name for name in names if not name.startswith(("unmask/", "unmask-"))]


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith("dist-info/METADATA")]
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    assert 'Requires-Dist: tomli>=2; python_version < "3.11"' in text.replace("'", '"')
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    (entry,) = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
    assert "unmask = unmask.cli.main:main" in archive.read(entry).decode()


def files_of_ours() -> Iterator[Path]:
    """What git tracks or would track; without git, what is not hidden."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    listed = [ROOT / name for name in done.stdout.decode().split("\0") if name] if done.returncode == 0 else []
    hidden = re.compile(r"/(\.(?!ci/)[^/]+|__pycache__|build|dist)(/|$)")
    for path in listed or [p for p in ROOT.rglob("*") if not hidden.search("/" + str(p.relative_to(ROOT)))]:
        if path.is_file() and path.suffix in TEXT_SUFFIXES and path != Path(__file__):
            yield path


def traces(text: str) -> list[str]:
    return [match.group(0) for pattern in FORBIDDEN for match in re.finditer(pattern, text)]


def test_no_file_tells_where_it_was_made() -> None:
    found = {path: traces(path.read_text(encoding="utf-8", errors="replace")) for path in files_of_ours()}
    assert len(found) > 100
    assert {str(path.relative_to(ROOT)): seen for path, seen in found.items() if seen} == {}


@pytest.mark.parametrize("text", ["see /work/main/x", '"/home/me/model"', "breakpoint()", "<<<<<<< ours"])
def test_a_trace_is_seen(text: str) -> None:
    assert traces(text)
    assert not traces("a/work/of/art and home/page")


def test_the_changelog_knows_this_version() -> None:
    assert f"## {unmask.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
