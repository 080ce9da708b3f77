"""`unmask bench`: how near this machine's runs come to what the machine could do, and what each method costs.

Every time states its floor, from rates measured in the same run; whatever is measured is written to --out at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from unmask.bench.names import OPS, PARTS
from unmask.cli.options import DeviceOption, DtypeOption, JsonOption
from unmask.config import EngineConfig
from unmask.errors import ConfigError, nearest
from unmask.methods import method_named

if TYPE_CHECKING:
    from unmask.bench.results import Results

app = typer.Typer(
    name="bench",
    help="Measure kernels, a step and requests beside what the device could do at best, and methods beside each other.",
    add_completion=False,
    no_args_is_help=True,
)

SHAPES = ("llada-8b", "dream-7b", "mini", "tiny")
"""Names of `unmask.bench.shapes`, which needs torch; a test holds the two together."""
SETTINGS = ("short", "long")
"""Names of `unmask.bench.methods`."""
KERNELS = ("auto", "reference", "triton")
LARGE = ("llada-8b", "dream-7b")
MAX_SEATS = 1024

Words = Optional[list[str]]  # noqa: UP045
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", "-o", help="Directory of the result files; docs/results if it is here, else this directory."),
]
Seconds = Annotated[
    float, typer.Option("--seconds", min=1, help="After this long nothing new is begun; the rest is named.")
]
ShapeOption = Annotated[str, typer.Option("--shape", help=f"Sizes of the network: {', '.join(SHAPES)}.")]
SeatsOption = Annotated[str, typer.Option("--seats", help="Numbers of seats, with commas between.")]
PromptOption = Annotated[int, typer.Option("--prompt", min=1, help="Tokens of a prompt.")]
AnswerOption = Annotated[int, typer.Option("--answer", min=1, help="Positions of an answer.")]
KernelsOption = Annotated[str, typer.Option("--kernels", help=f"{', '.join(KERNELS)}.")]
MethodsOption = Annotated[Words, typer.Option("--method", help="A decoding method. May be repeated.")]
ModelPath = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--model", "-m", help="Real weights: a directory, a hub name or unmask-mini."),
]
PerPass = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option("--tokens-per-pass", help="Committed in every pass; 2.8 for random weights when left out."),
]
Quantization = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--quantization", help="fp8, or the weights as they are."),
]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="No captured steps.")]
Compile = Annotated[
    bool, typer.Option("--enable-torch-compile", help="Compile what surrounds the network in captured steps.")
]
Rows = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--max-num-batched-tokens", min=1, help="Rows of one pass; the engine's own limit when left out."),
]


@app.command()
def kernels(
    ops: Annotated[Words, typer.Option("--op", help=f"Only this operation. May be repeated. {', '.join(OPS)}.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer checks and sizes.")] = False,
    tiles: Annotated[bool, typer.Option("--tiles", help="Search for the attention kernel's tiles instead.")] = False,
    seconds: Seconds = 600,
    device: DeviceOption = "auto",
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Every operation: checked against fp64, then timed beside its floor and beside torch's own parts."""
    for op in ops or ():
        _known("operation", op, OPS)
    device = _device(device)
    if tiles and device == "cpu":
        raise ConfigError("--tiles searches on a GPU, and none is used; leave it out")
    from unmask.bench import kernels as bench

    results = _results("kernels_tiles" if tiles else "kernels", device, out)
    if tiles:
        bench.search_tiles(results, device, seconds=seconds, tell=_teller(as_json))
    else:
        only = tuple(ops or OPS)
        bench.run(results, device, quick=quick, seconds=seconds, only=only, tell=_teller(as_json))
    _end(results, as_json)


@app.command()
def step(
    shape: ShapeOption = "llada-8b",
    seats: SeatsOption = "1,2,4,8,16,32,64",
    parts: Annotated[Words, typer.Option("--part", help=f"{', '.join(PARTS)}. May be repeated.")] = None,
    tokens_per_pass: Annotated[float, typer.Option("--tokens-per-pass", help="Committed in every pass.")] = 2.8,
    prompt: PromptOption = 1024,
    answer: AnswerOption = 512,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="The first targets also with what surrounds the network compiled.")
    ] = False,
    kernels: KernelsOption = "auto",
    quantization: Quantization = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare captured with eager steps instead, tensor by tensor.")
    ] = False,
    seconds: Seconds = 600,
    device: DeviceOption = "auto",
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """The whole step as one captured program: seats by rows, and the steps of named methods."""
    _known("shape", shape, SHAPES)
    for part in parts or ():
        _known("part", part, PARTS)
    _known("choice of kernels", kernels, KERNELS)
    numbers = _numbers(seats)
    _check_rate(tokens_per_pass, answer)
    device = _device(device)
    _check_large(shape, device)
    if check:
        _check_step(device, out, as_json)
        return
    from unmask.bench import whole_step

    EngineConfig(quantization=quantization)
    compiled = compiled and device.startswith("cuda")
    variant = (quantization, None if kernels == "auto" else kernels, "compiled" if compiled else None)
    results = _results("step_times", device, out, shape, *variant)
    whole_step.run(
        results,
        device,
        shape=shape,
        seats=numbers,
        prompt=prompt,
        answer=answer,
        per_pass=tokens_per_pass,
        compiled=compiled,
        kernels=kernels,
        quantization=quantization,
        seconds=seconds,
        parts=tuple(parts or PARTS),
        tell=_teller(as_json),
    )
    _end(results, as_json)


@app.command()
def latency(
    methods: MethodsOption = None,
    shape: ShapeOption = "llada-8b",
    model: ModelPath = None,
    requests: Annotated[int, typer.Option("--requests", "-n", min=1, help="Requests, one after the other.")] = 2,
    prompt: PromptOption = 1024,
    answer: AnswerOption = 512,
    tokens_per_pass: PerPass = None,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also the whole canvas in every pass, as yardsticks.")
    ] = True,
    quantization: Quantization = None,
    enforce_eager: Eager = False,
    enable_torch_compile: Compile = False,
    kernels: KernelsOption = "auto",
    max_num_batched_tokens: Rows = None,
    seconds: Seconds = 600,
    device: DeviceOption = "auto",
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """One request at a time, from end to end."""
    engine = _engine_options(quantization, enforce_eager, enable_torch_compile, kernels, max_num_batched_tokens)
    load, names, device = _load(methods, shape, model, prompt, answer, tokens_per_pass, engine, device)
    from unmask.bench import serve

    results = _results("latency", device, out, *_variant(shape, model, engine))
    asked = serve.Load(**load, requests=requests)
    serve.latency(results, device, asked, names, compare=compare, seconds=seconds, tell=_teller(as_json))
    _end(results, as_json)


@app.command()
def throughput(
    methods: MethodsOption = None,
    shape: ShapeOption = "llada-8b",
    model: ModelPath = None,
    seats: SeatsOption = "1,4,16,32,64",
    waves: Annotated[int, typer.Option("--waves", min=1, help="Requests for each seat.")] = 1,
    prompt: PromptOption = 1024,
    answer: AnswerOption = 512,
    tokens_per_pass: PerPass = None,
    quantization: Quantization = None,
    enforce_eager: Eager = False,
    enable_torch_compile: Compile = False,
    kernels: KernelsOption = "auto",
    max_num_batched_tokens: Rows = None,
    seconds: Seconds = 600,
    device: DeviceOption = "auto",
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Many requests at a time, over numbers of seats."""
    numbers = _numbers(seats)
    engine = _engine_options(quantization, enforce_eager, enable_torch_compile, kernels, max_num_batched_tokens)
    load, names, device = _load(methods, shape, model, prompt, answer, tokens_per_pass, engine, device)
    from unmask.bench import serve

    results = _results("throughput", device, out, *_variant(shape, model, engine))
    asked = serve.Load(**load)
    serve.throughput(results, device, asked, names, numbers, waves=waves, seconds=seconds, tell=_teller(as_json))
    _end(results, as_json)


@app.command()
def methods(
    setting: Annotated[str, typer.Option("--setting", help=f"Length of the answers: {', '.join(SETTINGS)}.")] = "short",
    problems: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--problems", "-n", min=1, help="Held-out problems; 2000 short ones or 500 when left out."),
    ] = None,
    method: MethodsOption = None,
    only: Annotated[
        Words, typer.Option("--only", help="Cells with this in their name, such as threshold=0.95, or a whole name.")
    ] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Also over thresholds, gammas, ratios, ranks and intervals.")
    ] = False,
    seats: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seats", min=1, max=MAX_SEATS, help="Requests at a time; 256 or 64 on a GPU, 16 elsewhere."),
    ] = None,
    dtype: DtypeOption = "float32",
    workers: Annotated[
        int, typer.Option("--workers", min=1, max=64, help="Processes that ask at a time; they share the GPU.")
    ] = 1,
    name: Annotated[str, typer.Option("--name", help="Of the result files; methods_SETTING when left out.")] = "",
    seconds: Seconds = 600,
    device: DeviceOption = "auto",
    out: Out = None,
    as_json: JsonOption = False,
) -> None:
    """Every method, rule and drafter on the shipped model: what is right, and how many passes and rows it took."""
    _known("setting", setting, SETTINGS)
    names = [method_named(each).name for each in method or ()]
    device = _device(device)
    from unmask.bench import methods as bench

    results = _results(name or f"methods_{setting}", device, out)
    asked = bench.Bench(bench.SETTINGS[setting], device, problems=problems, seats=seats, dtype=dtype)
    cells = bench.cells(asked.setting, curves=curves)
    if names:
        cells = bench.chosen(cells, names, asked.config, asked.setting.max_tokens)
    if only:
        cells = bench.only(cells, only, asked.config, asked.setting.max_tokens)
    bench.run(results, asked, cells, seconds=seconds, workers=workers, tell=_teller(as_json))
    _end(results, as_json)


# What the options mean


def _known(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{what} {value!r} is unknown; {nearest(value, known)}")


def _numbers(text: str) -> list[int]:
    """``1,4,16``."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MAX_SEATS for part in parts):
        raise ConfigError(f"--seats {text!r}: numbers from 1 to {MAX_SEATS} with commas between, such as 1,4,16")
    return list(dict.fromkeys(int(part) for part in parts))


def _check_rate(tokens_per_pass: float, answer: int) -> None:
    if not 0 < tokens_per_pass <= min(16, answer):
        raise ConfigError(f"--tokens-per-pass {tokens_per_pass:g}: more than 0, and at most the 16 of a decode window")


def _check_large(shape: str, device: str) -> None:
    if device == "cpu" and shape in LARGE:
        raise ConfigError(f"shape {shape!r} takes a GPU; on a CPU use --shape mini, or tiny")


def _device(name: str) -> str:
    """The device; "auto" is a GPU where there is one.

    Raises:
        ConfigError: it is a GPU and there is none.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: torch sees no CUDA GPU; `unmask doctor` says why")
    return name


def _engine_options(
    quantization: str | None,
    enforce_eager: bool,
    enable_torch_compile: bool,
    kernels: str,
    max_num_batched_tokens: int | None,
) -> dict[str, Any]:
    """Options of the engine, refused at once where they are wrong."""
    _known("choice of kernels", kernels, KERNELS)
    given: dict[str, Any] = {"quantization": quantization, "enforce_eager": enforce_eager, "kernels": kernels}
    given["enable_torch_compile"] = enable_torch_compile
    if max_num_batched_tokens is not None:
        given["max_num_batched_tokens"] = max_num_batched_tokens
    EngineConfig(**given)
    return given


def _load(
    methods: list[str] | None,
    shape: str,
    model: str | None,
    prompt: int,
    answer: int,
    tokens_per_pass: float | None,
    engine: Mapping[str, Any],
    device: str,
) -> tuple[dict[str, Any], list[str | None], str]:
    """Fields of a `unmask.bench.serve.Load`, the methods, and the device."""
    _known("shape", shape, SHAPES)
    names: list[str | None] = [method_named(name).name for name in methods or ()]
    if tokens_per_pass is not None:
        _check_rate(tokens_per_pass, answer)
    device = _device(device)
    if model is None:
        _check_large(shape, device)
        tokens_per_pass = tokens_per_pass or 2.8
        names = names or _suitable(shape)
    load = {"shape": shape, "model": model, "prompt": prompt, "answer": answer, "per_pass": tokens_per_pass}
    return load | {"engine": engine}, names or [None], device


def _suitable(shape: str) -> list[str | None]:
    """Cached methods for these sizes: no verification where a row scores its neighbour."""
    return ["flash-cache", "fast-dllm-dual"] if shape == "dream-7b" else ["flash-cache", "flash-dllm", "fast-dllm-dual"]


# What comes of it


def _results(name: str, device: str, out: Path | None, *variant: str | None) -> Results:
    """A file for each variant; the default one has the plain name."""
    from unmask.bench.results import Results

    here = Path("docs/results")
    parts = [name, *(each for each in variant if each and each != SHAPES[0])]
    return Results("_".join(parts), device, out or (here if here.is_dir() else Path()))


def _variant(shape: str, model: str | None, engine: Mapping[str, Any]) -> list[str | None]:
    """What tells a run from the default one: other sizes or weights, 8 bits, eager or compiled, other kernels."""
    ways = ("eager" if engine["enforce_eager"] else None, "compiled" if engine["enable_torch_compile"] else None)
    kernels = None if engine["kernels"] == "auto" else engine["kernels"]
    return [shape if model is None else Path(model).name, engine["quantization"], *ways, kernels]


def _teller(as_json: bool) -> Callable[[str], None]:
    """A line for each measurement: on stdout, or on stderr when stdout is JSON."""
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def _end(results: Results, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results.data, indent=1))
        return
    for each in results.data["left_out"]:
        print(f"left out: {each}")
    print(f"written: {results.out}/{results.name}.json, .csv")


def _check_step(device: str, out: Path | None, as_json: bool) -> None:
    """The comparison of captured and eager steps, and what surrounds the network by itself; one JSON file."""
    if device == "cpu":
        raise ConfigError("--check compares captured steps with eager ones and needs a GPU; leave it out")
    from unmask.bench.step import step_program

    results = _results("step", device, out)
    assert results.out is not None
    results.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for found in step_program():
        (results.out / "step.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    wrong = [f"{each['kind']} in {each['dtype']}" for each in found["checks"] if not each["equal"]]
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        print(f"{len(found['checks'])} comparisons; unequal: {', '.join(wrong) or 'none'}")
    if wrong:
        raise typer.Exit(1)
