"""Command-line options made from the fields of a dataclass, so that the two cannot drift apart."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Optional

import typer

from unmask.config import SamplingParams, resolve_names
from unmask.errors import ConfigError

Function = Callable[..., Any]


def _check_device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", name):
        raise ConfigError(f"device {name!r} is unknown; known: auto, cpu, mps, cuda, cuda:N")
    return name


ModelOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", "-m", help="A directory or a hub name; the model that ships when left out."),
]
MethodOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--method", help="A decoding method (see `unmask methods`); the model's own when left out."),
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option("--device", callback=_check_device, help="auto, cpu, mps, cuda or cuda:N.")]
RevisionOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--revision", help="Branch, tag or commit of a hub model."),
]
TokenizerOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--tokenizer", help="Another directory or hub name to take the tokenizer from."),
]
DiffusionOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--diffusion-config",
        metavar="JSON",
        help="Sampling fields as one JSON object, other projects' names included; single options win.",
        rich_help_panel="Sampling",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="JSON on stdout, and nothing else there.")]


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a class, read from its source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, doc in zip(body.body, body.body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(doc.value.value).split())
    return docs


def option_name(field: dataclasses.Field[Any]) -> str:
    """``--like-this``; an option that is repeated has its singular name (``--stop-token-id``)."""
    name = field.name.removesuffix("s") if field.name.endswith("_ids") else field.name
    return "--" + name.replace("_", "-")


def option_type(hint: Any) -> Any:
    """What typer should parse for a field of this type; every option may be left out."""
    if typing.get_origin(hint) is tuple:
        return list[typing.get_args(hint)[0]] | None  # type: ignore[misc]
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return hint if union else hint | None


def _declaration(field: dataclasses.Field[Any], hint: Any) -> str:
    """A switch that is on already has only an option that puts it off; one that is neither has both."""
    on, off = option_name(field), f"--no-{option_name(field)[2:]}"
    if field.default is True:
        return f" /{off}"
    return f"{on}/{off}" if field.default is None and bool in typing.get_args(hint) else on


def _help(cls: type, field: dataclasses.Field[Any]) -> str:
    text = field_docs(cls).get(field.name, "")
    if field.default == ():
        return f"{text} May be repeated."
    tell = field.default is not None and not isinstance(field.default, bool)
    return f"{text} Default: {field.default}." if tell else text


def option_parameters(cls: type, panel: str, skip: Sequence[str] = ()) -> list[inspect.Parameter]:
    """One keyword parameter per field; None is "not given"."""
    hints = typing.get_type_hints(cls)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None, _declaration(field, hints[field.name]), help=_help(cls, field), rich_help_panel=panel
            ),
            annotation=option_type(hints[field.name]),
        )
        for field in dataclasses.fields(cls)
        if field.name not in skip
    ]


def with_options(cls: type, into: str, panel: str, skip: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Decorator: the parameter ``into`` becomes a dict of those fields of ``cls`` that were given as options."""

    def wrap(function: Function) -> Function:
        fresh = option_parameters(cls, panel, skip)

        @functools.wraps(function)
        def call(**given: Any) -> Any:
            fields = {p.name: given.pop(p.name) for p in fresh}
            return function(**given, **{into: {k: v for k, v in fields.items() if v is not None and v != []}})

        parameters = [*_keyword_parameters(function, without=into), *fresh]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return wrap


def _keyword_parameters(function: Function, without: str) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    return [
        p.replace(annotation=hints.get(p.name, p.annotation), kind=inspect.Parameter.KEYWORD_ONLY)
        for p in inspect.signature(function).parameters.values()
        if p.name != without
    ]


def make_params(given: dict[str, Any], diffusion_config: str | None) -> SamplingParams:
    """The request's parameters: the JSON object, overridden by single options.

    Raises:
        ConfigError: JSON that is no object, an unknown field, or values that SamplingParams refuses.
    """
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**resolve_names(parse_json(diffusion_config), known, "sampling") | given)


def parse_json(text: str | None) -> dict[str, Any]:
    """The object that ``--diffusion-config`` holds; nothing is an empty one."""
    try:
        value = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"--diffusion-config is not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--diffusion-config must be a JSON object, got {text}")
    return value
