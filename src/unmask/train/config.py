"""What a training run is: a TOML file, read into frozen dataclasses. Unknown keys are errors."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from unmask.errors import ConfigError, nearest

T = TypeVar("T")

PACKAGED = Path(__file__).parent / "configs"
ASSETS = Path(__file__).parent.parent / "assets"
MASK_KINDS = ("uniform", "block", "numbers", "causal")
EXPORTS = ("ema", "raw", "best")
DECAYS = ("linear", "none")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Muon for the matrices inside the layers, AdamW for embedding, head, gains and biases."""

    muon_lr: float = 0.02
    muon_momentum: float = 0.95
    adam_lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    """Decoupled, times the learning rate; on Muon's matrices only."""
    grad_clip: float = 1.0
    """Largest global gradient norm; larger gradients are scaled down to it. 0 switches clipping off."""
    ema_decay: float = 0.999
    """The averaged weights follow by 1 - decay a step; the decay itself warms up, see `ema.decay_at`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        _check(self.muon_lr > 0 and self.adam_lr > 0, "muon_lr and adam_lr must be above 0")
        _check(0 <= self.muon_momentum < 1, f"muon_momentum must lie in [0, 1), got {self.muon_momentum}")
        _check(0 <= self.ema_decay < 1, f"ema_decay must lie in [0, 1), got {self.ema_decay}")
        _check(self.grad_clip >= 0, f"grad_clip must be at least 0, got {self.grad_clip}")
        _check(len(self.betas) == 2, f"betas must be two numbers, got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class NoiseConfig:
    """What is masked, and what counts in the loss."""

    loss_on_fill: bool = True
    """Does the end-of-text fill behind an answer's first end-of-text count in the loss? The fill is masked either
    way, since a canvas starts as all mask. True: the model learns to fill the rest of a canvas with end-of-text.
    False: weight 0 there and the denominator leaves it out; the first end-of-text counts always."""
    min_rate: float = 0.005
    """Smallest mask rate t; bounds the weight 1/t."""
    block_lengths: tuple[int, ...] = (8, 16, 32, 64)
    """Block masks draw their block length from these."""
    tail_weight: float = 1.0
    """Weight of the all-masked positions behind a block mask's noisy block."""
    full_length_share: float = 0.05
    """Share of canvases whose visible end is the full length; the others end anywhere behind their answer."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_lengths", tuple(self.block_lengths))
        _check(0 < self.min_rate < 1, f"min_rate must lie in (0, 1), got {self.min_rate}")
        _check(bool(self.block_lengths) and min(self.block_lengths) > 0, "block_lengths must be positive")
        _check(0 <= self.full_length_share <= 1, "full_length_share must lie in [0, 1]")
        _check(self.tail_weight >= 0, f"tail_weight must be at least 0, got {self.tail_weight}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which problems. Problem i depends on seed, split and i only; no index is used twice in a run."""

    seed: int = 0
    min_steps: int = 1
    """Fewest steps of a problem's worked answer."""
    max_steps: int = 5
    split: str = "train"
    validation_split: str = "train"
    """Validation problems have a seed of their own, so they are never trained on, whatever the split."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Bookkeeping of the run."""

    seed: int = 0
    log_every: int = 10
    """Steps between lines of train_log.csv; losses are read from the device, and checked, only then."""
    validate_every: int = 500
    """Steps; 0: at the end of a stage only."""
    validation_rows: int = 512
    save_every_steps: int = 0
    """Steps between saved states; 0: by time and at the end of a stage only."""
    save_every_seconds: float = 120.0
    compile: bool | None = None
    """torch.compile of forward and loss; None: on a GPU only."""
    bf16: bool | None = None
    """bf16 autocast over fp32 weights; None: on a GPU only."""
    export: str = "ema"
    """Weights of the exported model: ema, raw, or best (of the two, by validation loss)."""
    max_shard_bytes: int = 12_000_000

    def __post_init__(self) -> None:
        _check(self.log_every > 0, f"log_every must be at least 1, got {self.log_every}")
        _check(self.validation_rows > 0, f"validation_rows must be at least 1, got {self.validation_rows}")
        _check(self.export in EXPORTS, f"export {self.export!r} is unknown; {nearest(self.export, EXPORTS)}")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One stage: its data, its masks and its learning-rate schedule."""

    name: str
    steps: int
    batch_size: int
    """Rows of a step, short ones included."""
    length: int
    """Positions of a row; static, so that one compiled program serves the stage."""
    short_length: int | None = None
    """Rows of one problem may go in a second, shorter shape; they cost less there than as padding."""
    short_share: float = 0.0
    """Share of the rows with one problem and `short_length`; the others draw from `requests`."""
    lr_scale: float = 1.0
    warmup: int = 100
    """Steps over which the learning rate rises from 0, at the start of every stage."""
    decay: str = "linear"
    decay_fraction: float = 0.4
    """Last part of the stage's progress, over which the learning rate falls to 0."""
    max_seconds: float | None = None
    """Time limit: progress is the larger of step/steps and elapsed/max_seconds, so the decay always completes."""
    masks: Mapping[str, float] = field(default_factory=lambda: {"uniform": 1.0}, hash=False)
    """Share of rows per mask kind: uniform, block and numbers; or causal alone, which masks nothing and learns every
    next token."""
    rate_power: float = 1.0
    """Mask rates are even draws to this power; under 1, high rates are more frequent."""
    wide: bool = True
    """Problems in all phrases; or in the first stock only, from which the tokenizer was made."""
    requests: Mapping[int, float] = field(default_factory=lambda: {1: 1.0}, hash=False)
    """Share of rows (short ones apart) with that many problems in one request."""

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}: "
        object.__setattr__(self, "masks", _shares(self.masks, where + "masks"))
        counts = {_count(k, where): v for k, v in self.requests.items()}
        object.__setattr__(self, "requests", _shares(counts, where + "requests"))
        for kind in self.masks:
            _check(kind in MASK_KINDS, f"{where}mask kind {kind!r} is unknown; {nearest(kind, MASK_KINDS)}")
        _check("causal" not in self.masks or len(self.masks) == 1, f"{where}causal masks go with no others")
        _check(self.rate_power > 0, f"{where}rate_power must be above 0, got {self.rate_power}")
        for name in ("steps", "batch_size", "length"):
            _check(getattr(self, name) >= 1, f"{where}{name} must be at least 1, got {getattr(self, name)}")
        _check(self.decay in DECAYS, f"{where}decay {self.decay!r} is unknown; {nearest(self.decay, DECAYS)}")
        _check(0 <= self.decay_fraction <= 1, f"{where}decay_fraction must lie in [0, 1]")
        _check(0 <= self.short_share <= 1, f"{where}short_share must lie in [0, 1]")
        _check(not self.short_share or self.short_length is not None, f"{where}short_share needs short_length")
        _check(self.max_seconds is None or self.max_seconds > 0, f"{where}max_seconds must be above 0")

    @property
    def num_short(self) -> int:
        """Rows of a step in the short shape."""
        return round(self.batch_size * self.short_share)

    @property
    def tokens_per_step(self) -> int:
        """Positions of a step, padding included."""
        short = self.num_short
        return short * (self.short_length or 0) + (self.batch_size - short) * self.length


def _count(key: Any, where: str) -> int:
    _check(str(key).isdigit() and int(key) > 0, f"{where}requests has the key {key!r}, expected a number of problems")
    return int(key)


def _shares(table: Mapping[Any, float], what: str) -> dict[Any, float]:
    """The positive shares of ``table``, scaled to sum to 1."""
    total = sum(table.values())
    _check(total > 0 and min(table.values()) >= 0, f"{what} must hold shares that are at least 0, one above")
    return {key: share / total for key, share in table.items() if share > 0}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    model: Mapping[str, Any] = field(hash=False)
    """Fields of `ModelConfig`; sizes of vocabulary and special ids come from the tokenizer."""
    tokenizer: Path = ASSETS / "unmask-mini"
    optimizer: OptimizerConfig = OptimizerConfig()
    noise: NoiseConfig = NoiseConfig()
    data: DataConfig = DataConfig()
    run: RunConfig = RunConfig()
    stages: tuple[StageConfig, ...]

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        _check(bool(names), "a run needs at least one [[stage]]")
        _check(len(set(names)) == len(names), f"stage names must differ, got {', '.join(names)}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for run.json."""
        out = dataclasses.asdict(self)
        # The packaged tokenizer goes by its name: where the package lies says nothing about the run.
        packaged = self.tokenizer.parent == Path(__file__).parents[1] / "assets"
        tokenizer = self.tokenizer.name if packaged else str(self.tokenizer)
        return {**out, "tokenizer": tokenizer, "stages": list(out["stages"])}


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> TrainConfig:
    """The run that the TOML file at ``path`` describes; the name of a packaged file ("unmask-mini") will do.

    ``overrides`` are "optimizer.muon_lr=.01" or, for a stage by name, "stage.uniform.steps=10".

    Raises:
        ConfigError: the file does not exist or parse, a key is unknown, or a value is out of range.
    """
    path = _find(path)
    table = _parse(path)
    for override in overrides:
        _override(table, override)
    return _assemble(table, path.parent)


def _find(path: str | Path) -> Path:
    packaged = PACKAGED / f"{path}.toml"
    if Path(path).is_file():
        return Path(path)
    if packaged.is_file():
        return packaged
    known = ", ".join(sorted(p.stem for p in PACKAGED.glob("*.toml")))
    raise ConfigError(f"there is no training config {str(path)!r}; give a TOML file or a packaged name: {known}")


def _toml() -> Any:
    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def _parse(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = _toml().loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from error
    return table


def _override(table: dict[str, Any], text: str) -> None:
    """Set one value of ``table`` in place."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    _check(bool(equals) and len(names) >= 2, f"override {text!r} must read table.key=value")
    target: Any = table
    if names[0] == "stage":
        _check(len(names) >= 3, f"override {text!r} must read stage.NAME.key=value")
        target, names = _stage_table(table, names[1]), names[2:]
    for name in names[:-1]:
        target = target.setdefault(name, {})
        _check(isinstance(target, dict), f"override {text!r}: {name} is no table")
    target[names[-1]] = _value(value.strip())


def _stage_table(table: dict[str, Any], name: str) -> dict[str, Any]:
    stages: dict[str, dict[str, Any]] = {str(s.get("name")): s for s in table.get("stage", ())}
    _check(name in stages, f"there is no stage {name!r}; {nearest(name, stages)}")
    return stages[name]


def _value(text: str) -> Any:
    """A TOML value; a number in Python's spelling (.01); else the text itself."""
    try:
        return _toml().loads(f"value = {text}")["value"]
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return text


_TABLES: Mapping[str, Callable[..., Any]] = {
    "optimizer": OptimizerConfig,
    "noise": NoiseConfig,
    "data": DataConfig,
    "run": RunConfig,
}


def _assemble(table: Mapping[str, Any], base: Path) -> TrainConfig:
    _known(table, {"model", "tokenizer", "stage", *_TABLES}, "table")
    parts = {name: _build(cls, table.get(name, {}), f"[{name}]") for name, cls in _TABLES.items()}
    stages = tuple(_build(StageConfig, stage, "[[stage]]") for stage in table.get("stage", ()))
    tokenizer = table.get("tokenizer", {})
    _known(tokenizer, {"path"}, "[tokenizer] key")
    path = _tokenizer_path(tokenizer.get("path", "unmask-mini"), base)
    return TrainConfig(model=dict(table.get("model", {})), tokenizer=path, stages=stages, **parts)


def _tokenizer_path(path: str, base: Path) -> Path:
    """A directory, relative to the config file, or the name of one that ships."""
    for candidate in (base / path, Path(path), ASSETS / path):
        if candidate.is_dir():
            return candidate.resolve()
    return ASSETS / path


def _build(cls: Callable[..., T], table: Mapping[str, Any], where: str) -> T:
    fields: set[str] = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    _known(table, fields, f"{where} key")
    try:
        return cls(**table)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def _known(table: Mapping[str, Any], known: set[str], what: str) -> None:
    for name in table:
        _check(name in known, f"unknown {what} {name!r}; {nearest(name, known)}")
