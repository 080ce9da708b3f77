"""Whole runs: they learn, resume, stop in time, and export what they say."""

import csv
import itertools
import json

import pytest
import torch

from unmask.errors import ConfigError, EngineError, MissingDependencyError
from unmask.models.attention import DenseContext
from unmask.models.loading import load_model
from unmask.train import load_config, logs, trainer
from unmask.train.data import LocalBatches
from unmask.train.loss import forward_logits
from unmask.train.modelling import model_config
from unmask.train.state import load_state
from unmask.train.trainer import train

from .helpers import small_ar_config, small_config


def run(config, out, **options):
    return train(config, out, **{"device": "cpu", "num_workers": 0} | options)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def equal_states(a, b):
    (tensors, facts), (others, _) = load_state(a / "state"), load_state(b / "state")
    assert tensors.keys() == others.keys()
    return all(torch.equal(tensors[k], others[k]) for k in tensors), facts


def test_the_packaged_model_has_the_size_it_should():
    config = model_config(load_config("unmask-mini"))
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    assert 2 * (config.num_layers * layer + 2 * config.vocab_size * config.hidden_size) < 33.5e6


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.muon_lrr=1", "did you mean 'muon_lr'"),
        ("optimiser.muon_lr=1", "did you mean 'optimizer'"),
        ("stage.uniform.step=1", "did you mean 'steps'"),
        ("stage.unifrom.steps=1", "did you mean 'uniform'"),
        ("model.hidden=1", "unknown .model. key 'hidden'"),
        ("stage.uniform.masks.blok=1", "mask kind 'blok'"),
        ("run", "must read"),
        ("stage.uniform.masks.causal=1", "go with no others"),
        ("stage.uniform.masks={causal=1}", "'block_causal' go together"),
        ("model.logit_shift=1", "cannot be trained"),
    ],
)
def test_unknown_keys_are_errors(override, message):
    with pytest.raises(ConfigError, match=message):
        model_config(small_config(override))


def test_overrides_take_toml_and_python_spelling():
    config = load_config("unmask-mini", ["optimizer.muon_lr=.01", "stage.uniform.steps=10", "run.export=raw"])
    assert (config.optimizer.muon_lr, config.stages[0].steps, config.run.export) == (0.01, 10, "raw")
    with pytest.raises(ConfigError, match="unmask-mini"):
        load_config("nothing")


def test_a_run_stopped_and_resumed_equals_one_that_was_not(tmp_path, monkeypatch):
    # masks of all kinds, two shapes, and a stage boundary in between
    config = small_config("run.save_every_steps=1", "stage.longer.batch_size=2", "stage.longer.steps=4")
    names = ["blocks", "longer"]
    run(config, tmp_path / "whole", stages=names)
    real, made = LocalBatches.next, itertools.count()

    def interrupted(self):
        if next(made) == 5:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(LocalBatches, "next", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "parts", stages=names)
    monkeypatch.undo()
    last = run(config, tmp_path / "parts", stages=names, resume=True)
    same, facts = equal_states(tmp_path / "whole", tmp_path / "parts")
    assert same
    assert facts["done"] == names
    assert facts["next_index"] == 3 * 4 + 4 * 2
    losses = [[r["loss"] for r in rows(tmp_path / name / "train_log.csv")] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert last == tmp_path / "parts" / "longer"


def test_a_run_in_the_way_is_refused_and_complete_stages_are_skipped(tmp_path):
    run(small_config(), tmp_path, stages=["uniform"])
    with pytest.raises(ConfigError, match="holds a run already"):
        run(small_config(), tmp_path)
    run(small_config(), tmp_path, stages=["uniform"], resume=True)
    assert len(rows(tmp_path / "train_log.csv")) == 3
    with pytest.raises(ConfigError, match="d_model = 32, this config has 64"):
        run(small_config("model.hidden_size=64"), tmp_path, resume=True)
    with pytest.raises(ConfigError, match="no training state"):
        run(small_config(), tmp_path / "other", resume=True)


def test_exports_hold_the_averaged_weights(tmp_path):
    config = small_config("run.max_shard_bytes=40_000", 'run.export="ema"')
    out = run(config, tmp_path, stages=["uniform"])
    model = load_model(out, dtype=torch.bfloat16)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert (out / "tokenizer.json").exists()
    tensors, _ = load_state(tmp_path / "state")
    exact = load_model(out, dtype=torch.float32)
    for name, param in exact.named_parameters():
        param.data.copy_(tensors[f"ema.{name}"].bfloat16())
    token, see = torch.randint(6, 1000, (2, 9)), torch.tensor([9, 5])
    with torch.no_grad():
        again = forward_logits(load_model(out, dtype=torch.float32), token, see)
        assert torch.equal(forward_logits(exact, token, see), again)
    assert model.head.dtype == torch.bfloat16
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["steps"] == 3
    assert about["config"]["optimizer"]["muon_lr"] == 0.02


def test_init_starts_from_a_model_directory(tmp_path):
    out = run(small_config(), tmp_path / "a", stages=["uniform"])
    config = small_config("optimizer.muon_lr=1e-9", "optimizer.adam_lr=1e-9", 'run.export="raw"')
    again = run(config, tmp_path / "b", stages=["blocks"], init=out)
    for a, b in zip(load_model(out).parameters(), load_model(again).parameters()):
        assert torch.allclose(a, b, atol=1e-6)


def test_the_last_stage_has_masks_of_numbers_and_every_phrase(tmp_path):
    config = small_config("stage.longer.masks={numbers=1}")
    out = run(config, tmp_path, stages=["longer"])
    assert {r["masks"] for r in rows(tmp_path / "validation.csv")} == {"numbers"}
    assert (out / "config.json").exists()
    assert [stage.wide for stage in config.stages] == [False, False, False, True]


def test_an_autoregressive_model_learns_next_tokens_and_exports_what_it_is(tmp_path):
    config = small_ar_config("stage.single.steps=30", "stage.single.warmup=3", "optimizer.adam_lr=.01")
    out = run(config, tmp_path, stages=["single"])
    losses = [float(r["loss"]) for r in rows(tmp_path / "train_log.csv")]
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])
    model = load_model(out, dtype=torch.float32)
    assert (model.config.attention, model.config.logit_shift) == ("block_causal", 1)
    token, prompt = torch.randint(6, 1000, (2, 12)), torch.tensor([4, 6])
    other = token.clone()
    other[:, 9] = 7
    with torch.no_grad():
        a, b = (forward_logits(model, ids, prompt) for ids in (token, other))
    assert torch.equal(a[:, :10], b[:, :10])  # position 9 is scored without having seen itself
    assert not torch.allclose(a[:, 10], b[:, 10])
    with torch.no_grad():
        whole = model.logits(model(token[:1, :4], DenseContext(torch.arange(4), rope=model.rope)))
    assert torch.allclose(a[0, 4], whole[0, 3], atol=1e-5)  # the prompt sees itself whole


def test_the_clock_ends_a_stage_with_its_decay_complete(tmp_path):
    ticks = itertools.count()
    config = small_config("stage.uniform.steps=100000")
    run(config, tmp_path, stages=["uniform"], max_seconds={"uniform": 60.0}, clock=lambda: float(next(ticks)))
    log = rows(tmp_path / "train_log.csv")
    assert 3 < len(log) < 60
    lr = [float(r["lr"]) for r in log]
    assert max(lr) == pytest.approx(0.02)
    assert lr[-1] < 0.2 * max(lr)
    assert (tmp_path / "uniform" / "config.json").exists()


def test_one_limit_is_shared_among_stages(tmp_path):
    ticks = itertools.count()
    config = small_config(*(f"stage.{name}.steps=100000" for name in ("uniform", "blocks")))
    run(config, tmp_path, stages=["uniform", "blocks"], max_seconds=100.0, clock=lambda: float(next(ticks)))
    assert {r["stage"] for r in rows(tmp_path / "train_log.csv")} == {"uniform", "blocks"}


def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_state(tmp_path, monkeypatch):
    config = small_config("run.save_every_steps=1", "run.log_every=3", "stage.uniform.steps=6")
    real, calls = trainer.forward_loss, itertools.count()
    monkeypatch.setattr(trainer, "forward_loss", lambda *a: real(*a) * (float("nan") if next(calls) == 2 else 1))
    with pytest.raises(EngineError, match="diverged at step 3: loss nan"):
        run(config, tmp_path, stages=["uniform"])
    tensors, facts = load_state(tmp_path / "state")
    assert facts["step"] == 2
    assert all(torch.isfinite(t).all() for t in tensors.values())


def test_the_loss_falls_on_problems_seen_again_and_again(tmp_path, monkeypatch):
    real = LocalBatches.next

    def same(self):
        self.batch = 0
        return real(self)

    monkeypatch.setattr(LocalBatches, "next", same)
    config = small_config("stage.uniform.steps=40", "stage.uniform.warmup=3", "optimizer.adam_lr=.01")
    run(config, tmp_path, stages=["uniform"])
    losses = [float(r["loss"]) for r in rows(tmp_path / "train_log.csv")]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])


def test_validation_measures_every_kind_and_rate(tmp_path):
    run(small_config(), tmp_path, stages=["blocks"])
    records = rows(tmp_path / "validation.csv")
    assert len(records) == 2 * 3 * 6
    for record in records:
        if int(record["positions"]):
            assert 0 <= float(record["eos_probability"]) <= 1
            assert float(record["eos_frequency"]) > 0
    assert all(float(r["eos_frequency"]) >= 0.5 for r in records if r["masks"] == "tail")


def test_a_failed_compilation_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    run(small_config("run.compile=true"), tmp_path / "a", stages=["long"])
    assert "no compiler" in capsys.readouterr().out
    monkeypatch.undo()
    run(small_config(), tmp_path / "b", stages=["long"])
    assert equal_states(tmp_path / "a", tmp_path / "b")[0]


def test_without_matplotlib_the_numbers_are_there(tmp_path, monkeypatch):
    run(small_config(), tmp_path, stages=["uniform"])
    assert (tmp_path / "loss.png").stat().st_size > 1000
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"unmask\[train\]"):
        logs.plot_loss(tmp_path / "train_log.csv", tmp_path / "other.png")


def test_bf16_autocast_keeps_fp32_weights_and_learns(tmp_path):
    run(small_config("run.bf16=true"), tmp_path, stages=["blocks"])
    tensors, _ = load_state(tmp_path / "state")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    assert len(rows(tmp_path / "train_log.csv")) == 3
