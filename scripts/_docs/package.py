"""What the package itself tells: fields of its configuration, their other names, errors, models."""

from __future__ import annotations

import dataclasses

from _docs.text import code_words, markdown, table
from unmask import config
from unmask import errors as all_errors
from unmask.cli.catalog import TESTED, known_models
from unmask.cli.models import count, gigabytes, plain
from unmask.cli.options import field_docs


def fields(name: str) -> str:
    """The fields of a dataclass of `unmask.config`, with the docstring under each."""
    cls = getattr(config, name)
    docs = field_docs(cls)
    rows = [[f"`{field.name}`", f"`{field.default!r}`", docs[field.name]] for field in dataclasses.fields(cls)]
    return markdown(["field", "default", "what it does"], rows)


def aliases() -> str:
    """Other projects' names of our fields."""
    ours = sorted(set(config.ALIASES.values()))
    others = {name: [other for other in config.ALIASES if config.ALIASES[other] == name] for name in ours}
    return markdown(["field", "also understood"], [[f"`{name}`", code_words(others[name])] for name in ours])


def errors() -> str:
    """The tree that `unmask.errors` draws."""
    tree = [line.rstrip() for line in (all_errors.__doc__ or "").splitlines() if line.startswith("    ")]
    return "\n".join(["```text", *(line[4:] for line in tree), "```"])


def models() -> str:
    """The models whose layout is known."""
    return table(
        map(plain, known_models()),
        {
            "model": "`{name}`",
            "parameters": lambda row: count(row["num_parameters"]),
            "weights in bf16": lambda row: gigabytes(row["weight_bytes"]),
            "licence": lambda row: row["licence"] or "see its page",
            "method": "`{method}`",
            "run here": lambda row: "yes" if row["status"] == TESTED else "no: layout only",
        },
    )
