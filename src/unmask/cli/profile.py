"""`unmask profile`: what a model's own decodes say about the caches it could have."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from unmask.bench.profile_plot import TOP, rule_name, select
from unmask.bench.profile_plot import draw as draw_picture
from unmask.cli.options import DeviceOption, DtypeOption, JsonOption, ModelOption, RevisionOption
from unmask.errors import ConfigError, MissingDependencyError, nearest

if TYPE_CHECKING:
    from unmask.bench.results import Results
    from unmask.engine.prompts import Prompt
    from unmask.models.tokenizer import Tokenizer
    from unmask.models.transformer import Transformer

RULES = ("one", "threshold")
"""Names of `unmask.bench.profile`, which needs torch; a test holds the two together."""
SHIPPED = "unmask-mini"
FEW = 8  # rank of the proxies that the short table shows beside the full one


def profile(
    model: ModelOption = None,
    problems: Annotated[int, typer.Option("--problems", "-n", min=1, help="Held-out word problems to answer.")] = 8,
    per_request: Annotated[int, typer.Option("--per-request", min=1, help="Problems in one request.")] = 1,
    prompts: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--prompts", help="Answer these instead: a prompt a line, or what `unmask problems` writes."),
    ] = None,
    rule: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--rule", help="one token a pass, or all above a threshold; both when left out. May be repeated."),
    ] = None,
    threshold: Annotated[float, typer.Option("--threshold", min=0, help="Of the rule with that name.")] = 0.95,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Positions of an answer.")] = 128,
    block_length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--block-length", min=0, help="Of the answers; what the checkpoint says when left out."),
    ] = None,
    above: Annotated[
        float, typer.Option("--above", help="A row that has drifted further since the last pass must be recomputed.")
    ] = 0.05,
    rank: Annotated[int, typer.Option("--rank", min=1, help="Of the proxies whose drift is counted.")] = 128,
    ratio: Annotated[
        float, typer.Option("--ratio", help="Share of an answer's rows that proxies and values both choose.")
    ] = 0.25,
    window: Annotated[
        int, typer.Option("--window", min=1, help="Leftmost undecided positions whose attention is added up.")
    ] = 16,
    seats: Annotated[int, typer.Option("--seats", min=1, help="Requests at a time.")] = 8,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    revision: RevisionOption = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", "-o", help="Directory of the files; docs/results if it is here, else this directory."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Decode without a cache and measure, layer by layer, how far rows drift, what is looked at, what proxies find."""
    for each in rule or ():
        if each not in RULES:
            raise ConfigError(f"rule {each!r} is unknown; {nearest(each, RULES)}")
    lines = None if prompts is None else read_prompts(prompts)
    from unmask.bench import profile as bench

    asked = bench.Asked(
        rules=tuple(dict.fromkeys(rule or RULES)),
        threshold=threshold,
        max_tokens=max_tokens,
        block_length=block_length,
        above=above,
        rank=rank,
        ratio=ratio,
        window=window,
        seats=seats,
    )
    network, tokenizer, directory = load(model or SHIPPED, revision, dtype, device)
    from unmask.eval.word_problems import held_out

    texts = lines or [each["question"] for each in held_out(problems, per_request=per_request)]
    name = Path(model or SHIPPED).name
    results = file_for(name, str(network.head.device), out)
    facts = {"model": name, "dtype": str(network.head.dtype).removeprefix("torch.")}
    facts["prompts"] = "own" if lines else "held-out problems"
    asking = as_prompts(texts, tokenizer), asked
    bench.run(results, network, tokenizer, *asking, checkpoint=directory, facts=facts, tell=_teller(as_json))
    drawn = draw(results)
    if as_json:
        print(json.dumps(results.data, indent=1))
        return
    show(results.data)
    print(f"written: {results.out}/{results.name}.json, .csv{', .svg' if drawn else ''}")


def read_prompts(path: Path) -> list[str]:
    """A prompt a line. A line that is a JSON object has it as "question" or "prompt"; empty lines are none.

    Raises:
        ConfigError: no such file, no text, or an object without a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {error}") from error
    found = [_prompt(line, f"--prompts {path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"--prompts {path} holds no prompt; write one a line")
    return found


def _prompt(line: str, where: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} at character {error.pos}") from error
    text = value.get("question", value.get("prompt"))
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f'{where} has no text as "question" or "prompt"')
    return text


def load(name: str, revision: str | None, dtype: str, device: str) -> tuple[Transformer, Tokenizer, Path]:
    """The network, its tokenizer and where they lie; torch is imported here.

    Raises:
        ConfigError: a device that is not there.
        CheckpointError: the model cannot be loaded.
    """
    import torch

    from unmask.models.loading import load_model, resolve_checkpoint
    from unmask.models.tokenizer import Tokenizer

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: torch sees no CUDA GPU; `unmask doctor` says why")
    if device == "mps":
        raise ConfigError("device 'mps' has no 64-bit floats, in which drifts are summed; use cpu")
    directory = resolve_checkpoint(name, revision)
    tokenizer = Tokenizer.from_pretrained(directory)
    if tokenizer is None:
        raise ConfigError(f"{name} has no tokenizer, and prompts are text; put its tokenizer files beside the weights")
    return load_model(directory, dtype=dtype, device=device), tokenizer, directory


def as_prompts(texts: Sequence[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Conversations, where the model has a template for them."""
    if not tokenizer.has_chat_template:
        return list(texts)
    return [{"messages": [{"role": "user", "content": text}]} for text in texts]


def file_for(name: str, device: str, out: Path | None) -> Results:
    """The shipped model's has the plain name."""
    from unmask.bench.results import Results

    here = Path("docs/results")
    stem = "profile" if name == SHIPPED else f"profile_{name}"
    return Results(stem, device, out or (here if here.is_dir() else Path()))


def _teller(as_json: bool) -> Any:
    return lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True)


def draw(results: Results) -> bool:
    """The picture, where matplotlib is there; a line on stderr where it is not."""
    assert results.out is not None
    try:
        draw_picture(results.data, results.out / f"{results.name}.svg")
    except MissingDependencyError as error:
        print(error, file=sys.stderr)
        return False
    return True


def show(data: dict[str, Any]) -> None:
    """The short of it: a table by layer for each rule, and the budgets."""
    from unmask.cli.models import narrow_table, wide_console

    console = wide_console()
    for rule in data["rules"]:
        table = narrow_table("layer", *HEAD)
        for line in summary(data, rule):
            table.add_row(*line)
        console.print(f"{rule_name(data, rule)}, {data[f'passes_{rule}']} passes of {data['num_requests']} requests")
        console.print(table)
        for fitted in data["fits"]:
            if (fitted["rule"], fitted["identifier"]) == (rule, "value"):
                of = "mean of the passes" if fitted["of"] == "mean" else "9 passes in 10"
                off = f"{fitted['residual']:.2f} off, {fitted['residual_flat']:.2f} if flat"
                print(f"budget for the {of} ({off}): {fitted['paste']}")


HEAD = ("drifted", "9 in 10", f"to {TOP}", "tracked", "random", f"rank {FEW}", "full rank", "chance")


def summary(data: dict[str, Any], rule: str) -> list[list[str]]:
    """Per layer: answer rows whose values drifted too far, on average and in most passes; attention to few decided
    positions; rows found by proxies."""
    above, full = f"{data['above']:g}", max(data["ranks"])
    drift = {row["layer"]: row for row in select(data, rule, part="drift", identifier="value", group="answer")}
    looks = {row["layer"]: row for row in select(data, rule, part="attention", top=TOP)}
    found = {(row["layer"], row["rank"]): row for row in select(data, rule, part="agreement")}
    lines = []
    for layer in range(data["network"]["num_layers"]):
        moved, look = drift.get(layer, {}), looks.get(layer, {})
        few, most = (found.get((layer, rank), {}) for rank in (min(FEW, full), full))
        cells = [moved.get("above", {}).get(above), moved.get("most_above")]
        cells += [look.get(name) for name in ("own", "tracked", "random")]
        cells += [few.get("overlap"), most.get("overlap"), most.get("chance")]
        lines.append([str(layer), *("-" if each is None else f"{each:.1%}" for each in cells)])
    return lines
