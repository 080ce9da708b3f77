"""The training loop: stages in order, each a schedule over steps or seconds, with saved states and exports.

B rows, N positions
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unmask.errors import ConfigError, MissingDependencyError, nearest
from unmask.ops import kernels
from unmask.train import logs
from unmask.train.config import StageConfig, TrainConfig
from unmask.train.data import Batches, MakeEncoder, default_workers, open_batches
from unmask.train.ema import Ema
from unmask.train.encode import VALIDATION_SEED, BatchMaker, Group, StagePlan, digit_ids, load_encoder, special_ids
from unmask.train.loss import forward_logits, forward_loss
from unmask.train.masks import Rows, noise, reach
from unmask.train.modelling import export, initial_model, model_config, new_model
from unmask.train.optim import Optimizer
from unmask.train.schedule import lr_factor, progress
from unmask.train.state import has_state, load_state, save_state
from unmask.train.validation import Record, mean_ce, validate

Clock = Callable[[], float]
Seconds = Mapping[str, float] | float | None


def train(
    config: TrainConfig,
    out: str | Path,
    *,
    device: str = "auto",
    resume: bool = False,
    init: str | Path | None = None,
    stages: Sequence[str] | None = None,
    max_seconds: Seconds = None,
    num_workers: int | None = None,
    clock: Clock = time.monotonic,
) -> Path:
    """Train, and return the directory of the last stage's model.

    ``out`` gets `<stage>/` (the exported model), `state/` (to resume from), train_log.csv, validation.csv, loss.png
    and run.json.

    Args:
        resume: go on from `out/state`; stages that are complete are skipped.
        init: a model directory to start from instead of random weights.
        stages: names of the stages to run, in the config's order; None runs all.
        max_seconds: a time limit per stage by name, or one for all of this call's stages together, shared among them
            in proportion to their tokens. It covers training; validation and export at a stage's end come on top.
        num_workers: data processes; None chooses by the number of cores, 0 makes the data in this process.

    Raises:
        ConfigError: options that contradict each other, or `out` holds a run and ``resume`` is not given.
        EngineError: a loss that is no number, or a data worker that died.
    """
    out = Path(out)
    chosen = _choose(config, stages, max_seconds)
    _check_out(out, resume, init)
    make_encoder = functools.partial(load_encoder, config.tokenizer, special_ids(config.tokenizer)["eos_token_ids"][0])
    workers = default_workers() if num_workers is None else num_workers
    batches = open_batches(make_encoder, workers)  # before CUDA is touched: see WorkerBatches
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _settings(_device(device)) as where:
            run = _Run(config, out, where, batches, make_encoder, clock)
            run.prepare(resume, Path(init) if init is not None else None)
            return run.stages(chosen, max_seconds)
    finally:
        batches.close()


def _choose(config: TrainConfig, names: Sequence[str] | None, max_seconds: Seconds) -> list[StageConfig]:
    known = [stage.name for stage in config.stages]
    limits = list(max_seconds) if isinstance(max_seconds, Mapping) else []
    for name in [*(names or ()), *limits]:
        if name not in known:
            raise ConfigError(f"there is no stage {name!r}; {nearest(name, known)}")
    return [stage for stage in config.stages if not names or stage.name in names]


def _check_out(out: Path, resume: bool, init: str | Path | None) -> None:
    if resume and init is not None:
        raise ConfigError("resume and init both say where the weights come from; keep one")
    if resume and not has_state(out / "state"):
        raise ConfigError(f"{out} holds no training state to resume from; start without resume")
    if not resume and has_state(out / "state"):
        raise ConfigError(f"{out} holds a run already; resume it, or train into another directory")


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is asked for, and torch {torch.__version__} finds no GPU; use device='cpu'")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())  # tables and generators are kept by full name
    return device


@contextmanager
def _settings(device: torch.device) -> Iterator[torch.device]:
    """Process-wide switches of torch while a run lasts."""
    if device.type != "cuda":
        yield device
        return
    cudnn, precision = torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision()
    # cuDNN's attention plans anew for each shape and refuses some masks; the memory-efficient kernel takes them all.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    try:
        # Validation has no gradients, and our kernels would take its fp32 weights past autocast.
        with kernels("reference"):
            yield device
    finally:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        torch.set_float32_matmul_precision(precision)


class _Run:
    """The objects of one call of `train`, and what a saved state holds of them."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        device: torch.device,
        batches: Batches,
        make_encoder: MakeEncoder,
        clock: Clock,
    ) -> None:
        self.config, self.out, self.device = config, out, device
        self.batches, self.make_encoder, self.clock = batches, make_encoder, clock
        self.step = self.stage_step = self.next_index = 0
        self.stage_name, self.stage_seconds = "", 0.0
        self.done: list[str] = []
        self.seconds: dict[str, float] = {}
        self.began = clock()
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.generator = torch.Generator(device=device)
        on_gpu = device.type == "cuda"
        self.bf16 = on_gpu if config.run.bf16 is None else config.run.bf16
        compiles = on_gpu if config.run.compile is None else config.run.compile
        self.loss_fn: Callable[..., Tensor] = forward_loss
        if compiles:
            self.loss_fn = torch.compile(forward_loss, dynamic=False)
        self.proven: set[tuple[int, ...]] = set()

    # --- start ---

    def prepare(self, resume: bool, init: Path | None) -> None:
        """Model, optimizer and average: new, from a directory, or as they were."""
        if init is not None:
            self.model = initial_model(init, self.config, self.device)
        else:
            self.model = new_model(model_config(self.config), self.config.run.seed, self.device)
        self._reserve_positions()
        self.optimizer = Optimizer(self.model, self.model.config, self.config.optimizer)
        self.params = dict(self.model.named_parameters())
        if any("numbers" in stage.masks for stage in self.config.stages):
            self.is_digit_V = torch.zeros(self.model.config.vocab_size, dtype=torch.bool)
            self.is_digit_V[digit_ids(self.config.tokenizer)] = True
            self.is_digit_V = self.is_digit_V.to(self.device)
        if resume:
            self._load()
        else:
            self.ema = Ema(list(self.params.values()), self.config.optimizer.ema_decay)
            for name in ("train_log.csv", "validation.csv"):
                (self.out / name).unlink(missing_ok=True)

    def _reserve_positions(self) -> None:
        longest = max(stage.length for stage in self.config.stages)
        if longest > self.model.config.max_positions:
            raise ConfigError(f"a stage has length {longest}, above max_positions {self.model.config.max_positions}")
        self.model.rope.reserve(self.model.config.max_positions, self.device)

    # --- the saved state ---

    def save(self) -> None:
        """Write the state of this moment."""
        self._flush()
        tensors: dict[str, Tensor] = {f"model.{name}": param for name, param in self.params.items()}
        tensors |= {f"ema.{name}": value for name, value in zip(self.params, self.ema.average)}
        tensors |= self.optimizer.state()
        facts = {
            "step": self.step,
            "stage": self.stage_name,
            "stage_step": self.stage_step,
            "stage_seconds": self.stage_seconds,
            "done": self.done,
            "seconds": self.seconds,
            "next_index": self.next_index,
            "ema_updates": self.ema.num_updates,
            "seed": self.config.run.seed,
            "model": self.model.config.to_dict(),
        }
        save_state(self.out / "state", tensors, facts)
        self.saved_at, self.saved_step = self.clock(), self.step

    @torch.no_grad()
    def _load(self) -> None:
        tensors, facts = load_state(self.out / "state")
        self._check_same_model(facts["model"])
        for name, param in self.params.items():
            param.copy_(tensors[f"model.{name}"])
        self.ema = Ema(list(self.params.values()), self.config.optimizer.ema_decay)
        for name, average in zip(self.params, self.ema.average):
            average.copy_(tensors[f"ema.{name}"])
        self.ema.num_updates = facts["ema_updates"]
        self.optimizer.load(tensors)
        for name in ("step", "stage_step", "stage_seconds", "done", "seconds", "next_index"):
            setattr(self, name, facts[name])
        self.stage_name = facts["stage"]
        for name in ("train_log.csv", "validation.csv"):
            logs.trim_csv(self.out / name, self.step)

    def _check_same_model(self, saved: Mapping[str, Any]) -> None:
        mine = json.loads(json.dumps(self.model.config.to_dict()))
        for key in sorted({*mine, *saved}):
            a, b = saved.get(key), mine.get(key)
            if a != b:
                raise ConfigError(f"the saved run has a model with {key} = {a!r}, this config has {b!r}")

    # --- stages ---

    def stages(self, chosen: Sequence[StageConfig], max_seconds: Seconds) -> Path:
        """Run what is not complete yet; the last model's directory."""
        self.progress = logs.Progress()
        self.call_began = self.saved_at = self.clock()
        self.saved_step = self.step
        size = sum(p.numel() for p in self.params.values())
        compiled = "compiled" if self.loss_fn is not forward_loss else "not compiled"
        self.progress.say(f"{size / 1e6:.2f} M parameters on {self.device}, {compiled}")
        try:
            left = [stage for stage in chosen if stage.name not in self.done]
            for i, stage in enumerate(left):
                self._stage(stage, self._limit(left[i:], max_seconds))
        finally:
            self.progress.close()
            self._write_run()
        self._plot()
        return self.out / chosen[-1].name

    def _limit(self, left: Sequence[StageConfig], max_seconds: Seconds) -> float | None:
        """Seconds of the first of the stages left, those already spent on it included."""
        stage = left[0]
        if isinstance(max_seconds, Mapping):
            return max_seconds.get(stage.name, stage.max_seconds)
        if max_seconds is None:
            return stage.max_seconds
        spent = self.stage_seconds if self.stage_name == stage.name else 0.0
        todo = [s.steps * s.tokens_per_step for s in left]
        share = todo[0] / sum(todo)
        remaining = max_seconds - (self.clock() - self.call_began)
        return spent + max(1.0, remaining * share)

    def _stage(self, stage: StageConfig, limit: float | None) -> None:
        if self.stage_name != stage.name:
            self.stage_name, self.stage_step, self.stage_seconds = stage.name, 0, 0.0
        self.progress.stage(stage.name)
        self.validation = self._validation_rows(stage)
        plan = StagePlan(stage=stage, data=self.config.data, noise=self.config.noise, first=self.next_index)
        self.batches.start(plan)
        self._train(stage, limit)
        self.save()
        self._export(stage, self._validate(stage))
        self.done.append(stage.name)
        self.seconds[stage.name] = self.stage_seconds
        self.save()

    def _train(self, stage: StageConfig, limit: float | None) -> None:
        origin = self.clock() - self.stage_seconds
        self.logged_at, self.waited = self.clock(), 0.0
        while (done := progress(self.stage_step, stage.steps, self.clock() - origin, limit)) < 1:
            self.factor, self.portion = lr_factor(stage, self.stage_step, done), done
            self._step(stage, self._next_groups())
            self.stage_seconds = self.clock() - origin
            if self.stage_step % self.config.run.log_every == 0:
                self._flush()
            if self._due(self.config.run.validate_every):
                self._validate(stage)
            self._save_when_due()
        self._flush()

    def _due(self, every: int) -> bool:
        return every > 0 and self.stage_step % every == 0

    def _save_when_due(self) -> None:
        run = self.config.run
        if self._due(run.save_every_steps) or self.clock() - self.saved_at >= run.save_every_seconds:
            self.save()

    # --- one step ---

    def _next_groups(self) -> list[Group]:
        began = self.clock()
        groups = self.batches.next()
        self.waited += self.clock() - began
        return groups

    def _step(self, stage: StageConfig, groups: Sequence[Group]) -> None:
        """One update. The noise depends on seed and step alone, so a resumed run draws the same."""
        fill = self.config.noise.loss_on_fill
        denominator = sum(group.num_loss(fill) for group in groups)
        self.generator.manual_seed(self.config.run.seed * 1_000_003 + self.step)
        losses = [self._backward(stage, self._rows(group), denominator) for group in groups]
        norm = self.optimizer.clip()
        self.optimizer.step(self.factor)
        self.ema.update()
        self.pending.append((torch.stack(losses).sum(), norm))
        self.step, self.stage_step = self.step + 1, self.stage_step + 1
        self.next_index += stage.batch_size

    def _rows(self, group: Group) -> Rows:
        """The group on the device; from pinned memory the copy does not wait for the steps before."""
        tensors = [torch.from_numpy(array) for array in group]
        if self.device.type == "cuda":
            tensors = [t.pin_memory().to(self.device, non_blocking=True) for t in tensors]
        return Rows(*(t.long() for t in tensors))

    def _backward(self, stage: StageConfig, rows: Rows, denominator: int) -> Tensor:
        """Add the gradients of one group; its part of the loss."""
        mask_id, is_digit_V = self.model.config.mask_token_id, self._is_digit(stage)
        drawn = functools.partial(noise, power=stage.rate_power, is_digit_V=is_digit_V)
        noised = drawn(rows, stage.masks, self.config.noise, mask_id, self.generator)
        inputs = (noised.token_BN, reach(rows, stage.masks), rows.token_BN, noised.weight_BN / denominator)
        shape = tuple(rows.token_BN.shape)
        if self.loss_fn is forward_loss or shape in self.proven:
            return self._forward_backward(inputs)
        return self._try_compiled(inputs, shape)

    def _forward_backward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss_fn(self.model, *inputs)
        loss.backward()
        return loss.detach().clone()

    def _try_compiled(self, inputs: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
        """The first pass of a shape compiles; when that fails the run goes on uncompiled, and says so."""
        began = time.monotonic()
        before = {name: None if p.grad is None else p.grad.clone() for name, p in self.params.items()}
        try:
            loss = self._forward_backward(inputs)
            float(loss)
        except Exception as error:
            self.progress.say(f"torch.compile failed, going on without it: {type(error).__name__}: {error}"[:2000])
            self.loss_fn = forward_loss
            for name, param in self.params.items():
                param.grad = before[name]
            return self._forward_backward(inputs)
        self.proven.add(shape)
        self.progress.say(f"compiled for {shape[0]} rows of {shape[1]} in {time.monotonic() - began:.1f} s")
        return loss

    # --- validation, logs, export ---

    def _validation_rows(self, stage: StageConfig) -> list[Rows]:
        data = self.config.data
        held_out = dataclasses.replace(data, seed=data.seed + VALIDATION_SEED, split=data.validation_split)
        small = dataclasses.replace(stage, batch_size=self.config.run.validation_rows)
        plan = StagePlan(stage=small, data=held_out, noise=self.config.noise)
        return [self._rows(group) for group in BatchMaker(self.make_encoder(), plan).make(0)]

    def _predict(self, token_BN: Tensor, see_B: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return forward_logits(self.model, token_BN, see_B)

    def _validate(self, stage: StageConfig) -> dict[str, float]:
        """Validation of the averaged and the raw weights, logged; their mean CE."""
        self._flush()
        with self.ema.applied():
            ema = self._records(stage)
        by_weights = {"ema": ema, "raw": self._records(stage)}
        for weights, records in by_weights.items():
            about = {"stage": stage.name, "step": self.step, "weights": weights}
            rows = [{**about, **logs.as_row(record)} for record in records]
            logs.append_csv(self.out / "validation.csv", list(rows[0]), rows)
        means = {weights: mean_ce(records) for weights, records in by_weights.items()}
        values = f"{means['ema']:.4f} (averaged), {means['raw']:.4f} (raw)"
        self.progress.say(f"{stage.name} step {self.stage_step}: validation CE {values}")
        return means

    def _records(self, stage: StageConfig) -> list[Record]:
        model = self.model.config
        kinds = list(stage.masks)
        eos = model.eos_token_ids[0]
        noise, mask, digits = self.config.noise, model.mask_token_id, self._is_digit(stage)
        return validate(self._predict, self.validation, kinds, noise, mask, eos, digits)

    def _is_digit(self, stage: StageConfig) -> Tensor | None:
        return self.is_digit_V if "numbers" in stage.masks else None

    def _flush(self) -> None:
        """Read the pending losses from the device, check them, log their mean."""
        if not self.pending:
            return
        losses, norms = torch.stack([torch.stack(pair) for pair in self.pending]).float().t().tolist()
        num, self.pending = len(losses), []
        logs.check_finite(self.step, losses, norms)
        now, stage = self.clock(), self._current
        row = {
            "stage": self.stage_name,
            "step": self.step,
            "seconds": self.stage_seconds,
            "loss": sum(losses) / num,
            "grad_norm": sum(norms) / num,
            "lr": self.config.optimizer.muon_lr * self.factor,
            "tokens_per_second": num * stage.tokens_per_step / max(now - self.logged_at, 1e-9),
            "data_wait": self.waited,
            "progress": self.portion,
        }
        self.logged_at, self.waited = now, 0.0
        logs.append_csv(self.out / "train_log.csv", logs.TRAIN_FIELDS, [row])
        self.progress.update(row)

    @property
    def _current(self) -> StageConfig:
        return next(stage for stage in self.config.stages if stage.name == self.stage_name)

    def _export(self, stage: StageConfig, means: Mapping[str, float]) -> None:
        kind = self.config.run.export
        if kind == "best":
            kind = min(means, key=lambda weights: means[weights])
        values = self.ema.average if kind == "ema" else self.params.values()
        weights = dict(zip(self.params, values))
        to = self.out / stage.name
        export(weights, self.model.config, to, self.config.tokenizer, self.config.run.max_shard_bytes)
        self.progress.say(f"{stage.name}: {kind} weights exported to {to}")

    def _write_run(self) -> None:
        facts = {
            "config": self.config.to_dict(),
            "model": self.model.config.to_dict(),
            "parameters": sum(p.numel() for p in self.params.values()),
            "steps": self.step,
            "requests": self.next_index,
            "done": self.done,
            "stage_seconds": self.seconds,
            "seconds": self.clock() - self.began,
        }
        logs.write_run(self.out / "run.json", facts, self.device)

    def _plot(self) -> None:
        log = self.out / "train_log.csv"
        if not log.exists():
            return
        try:
            logs.plot_loss(log, self.out / "loss.png")
        except MissingDependencyError as error:
            self.progress.say(str(error))
