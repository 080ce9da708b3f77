"""What README.md and the pages of docs/ show is what happens: Python, commands, tables and links."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unmask.cli.main import app
from unmask.methods import METHODS

ROOT = Path(__file__).parents[1]
METHOD_PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *METHOD_PAGES]
PYTHON = re.compile(r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.M | re.S)
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
LINK_TO_HEADING = re.compile(r"\]\(([^)#\s:]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
NAMED = re.compile(r"<!-- begin method-(settings|costs|results) (.*?) -->")
PARTS = [
    "How to run it",
    "Options and defaults",
    "What a pass computes",
    "Where it differs on purpose",
    "Claimed and measured",
    "When to use it",
]
"""The headings of a method's page, in this order."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_python(text: str) -> list[tuple[str, str]]:
    """(printed, shown) of each Python block that shows output; the blocks of a page share their names."""
    names: dict[str, Any] = {}
    pairs = []
    for code, shown in PYTHON.findall(text):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<page>", "exec"), names)
        pairs.append((out.getvalue(), shown))
    return pairs


def commands(text: str) -> list[tuple[list[str], str]]:
    """(arguments, shown output) of each `$ unmask ...` in console blocks."""
    found = []
    for block in CONSOLE.findall(text):
        for part in block.split("$ ")[1:]:
            command, _, shown = part.partition("\n")
            found.append((shlex.split(command), shown))
    return found


@pytest.mark.parametrize("page", [p for p in PAGES if PYTHON.search(p.read_text())], ids=name_of)
def test_python_prints_what_is_shown(page: Path) -> None:
    for printed, shown in run_python(page.read_text(encoding="utf-8")):
        assert printed == shown


@pytest.mark.parametrize("page", [p for p in PAGES if CONSOLE.search(p.read_text())], ids=name_of)
def test_commands_print_what_is_shown(page: Path) -> None:
    for (program, *arguments), shown in commands(page.read_text(encoding="utf-8")):
        assert program == "unmask"
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout == shown


def test_options_of_commands_exist() -> None:
    """`unmask train ...` and its like in bash blocks are not run; their verbs and options must exist."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = re.findall(r"^unmask (\w+)([^\n]*)$", text, re.M)
    assert shown
    for verb, rest in shown:
        first = rest.split()[:1]  # of `unmask bench step` a verb, of others a prompt
        asked = [verb, *(first if verb == "bench" else []), "--help"]
        help_text = CliRunner().invoke(app, asked, env={"COLUMNS": "200"}).stdout
        assert all(option in help_text for option in re.findall(r"--[a-z][a-z-]*", rest)), (verb, rest)


def docs(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "docs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_tables_are_fresh() -> None:
    done = docs("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_seen_and_written(tmp_path: Path) -> None:
    for name in ("src/unmask", "scripts", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(text.replace("| [`vanilla`]", "| [`plain`]"), encoding="utf-8")
    page = tmp_path / "docs" / "methods" / "flash-cache.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| `track` | `64` |", "| `track` | `63` |"))
    told = docs("--check", root=tmp_path).stdout
    assert "README.md is stale" in told
    assert "docs/methods/flash-cache.md is stale" in told
    assert docs(root=tmp_path).returncode == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == text
    assert "| `track` | `64` |" in page.read_text(encoding="utf-8")


def test_python_that_prints_something_else_is_seen() -> None:
    page = "```python\nx = 2\nprint(x)\n```\n\n```text\n3\n```\n\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n"
    assert run_python(page) == [("2\n", "3\n"), ("3\n", "3\n")]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def headings(page: Path) -> set[str]:
    found = HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_a_heading_find_it(page: Path) -> None:
    for target, heading in LINK_TO_HEADING.findall(page.read_text(encoding="utf-8")):
        assert heading in headings(page.parent / target if target else page), (target, heading)


# --- a page for every method


def methods_of(page: Path) -> dict[str, list[str]]:
    """The methods that each generated part of a page is about."""
    return {part: names.split() for part, names in NAMED.findall(page.read_text(encoding="utf-8"))}


def test_every_method_has_one_page() -> None:
    named = [name for page in METHOD_PAGES for name in methods_of(page)["settings"]]
    assert sorted(named) == sorted(METHODS)


@pytest.mark.parametrize("where", ["README.md", "docs/methods.md"])
def test_the_tables_link_every_page(where: str) -> None:
    text = (ROOT / where).read_text(encoding="utf-8")
    folder = "docs/methods" if where == "README.md" else "methods"
    for page in METHOD_PAGES:
        assert all(f"| [`{name}`]({folder}/{page.name}) |" in text for name in methods_of(page)["settings"])


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_a_page_of_a_method_has_every_part(page: Path) -> None:
    text, parts = page.read_text(encoding="utf-8"), methods_of(page)
    assert list(parts) == ["settings", "costs", "results"]
    assert parts["settings"] == parts["costs"] == parts["results"]
    assert re.findall(r"^## (.*)$", text, re.M) == PARTS
    assert CONSOLE.search(text) is not None
    assert PYTHON.search(text) is not None


@pytest.mark.parametrize("page", METHOD_PAGES, ids=name_of)
def test_a_page_explains_every_option(page: Path) -> None:
    """The generated table has names and values; what they mean stands in the text."""
    words = re.sub(r"<!-- begin .*?<!-- end [\w-]+ -->", "", page.read_text(encoding="utf-8"), flags=re.S)
    options = {option for name in methods_of(page)["settings"] for option in METHODS[name].all_options}
    assert {option for option in options if f"`{option}" not in words} == set()


def test_the_test_command_is_found_by_ci() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- test command -->\s*```bash\n(.*?)```", text, re.S)
    assert found is not None
    assert found[1].splitlines() == ["pip install -e '.[dev]'", "scripts/test"]
    assert (ROOT / "scripts" / "test").exists()
