from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from unmask.cli import catalog, doctor, models, system
from unmask.cli.catalog import DREAM, LAYOUT_ONLY, LLADA, PUBLISHED, TESTED, known_models
from unmask.methods import METHODS

GPU = system.Gpu("NVIDIA H200", 140 * 2**30, "570.1", "9.0")


def test_sizes_give_the_published_counts():
    assert LLADA.num_parameters == 8_015_581_184
    assert DREAM.num_parameters == 7_615_616_512
    assert LLADA.kv_bytes_per_token("bfloat16") == 524_288
    assert DREAM.memory("bfloat16", 100) == 2 * 7_615_616_512 + 100 * 57_344


def test_default_methods_exist_and_are_the_engines():
    from unmask.engine.llm import FAMILY_METHOD

    assert catalog.DEFAULT_METHOD == FAMILY_METHOD
    assert set(catalog.DEFAULT_METHOD.values()) <= set(METHODS)


def test_only_the_shipped_model_is_said_to_be_tested():
    assert {model.status for model in PUBLISHED} == {LAYOUT_ONLY}
    assert catalog.shipped().status in (TESTED, catalog.NOT_HERE)


def test_the_shipped_model_states_its_own_sizes(monkeypatch, tmp_path):
    golden = Path(__file__).parents[1] / "data" / "golden" / "models" / "tiny-dream" / "config.json"
    (tmp_path / "unmask-mini").mkdir()
    (tmp_path / "unmask-mini" / "config.json").write_text(golden.read_text())
    monkeypatch.setattr(catalog, "ASSETS", tmp_path)
    assert catalog.shipped().sizes is None  # without weights it is not there
    (tmp_path / "unmask-mini" / "model.safetensors").touch()
    model = catalog.shipped()
    assert (model.layout, model.status, model.sizes.num_layers) == ("dream", TESTED, 3)
    assert model.sizes.num_parameters > 0


def test_models_as_json_and_as_a_table(unmask):
    rows = json.loads(unmask("models", "--json").stdout)
    assert [row["name"] for row in rows] == [model.name for model in known_models()]
    assert rows[1]["memory_bytes"] == LLADA.memory("bfloat16")
    table = unmask("models").stdout
    assert all(row["name"] in table for row in rows)
    assert re.search(r"GSAI-ML/LLaDA-8B-Base +8.02 B +16.0 GB +16.6 GB +MIT", table)


def test_methods_as_json_and_as_a_table(unmask):
    rows = json.loads(unmask("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    lines = unmask("methods").stdout.splitlines()
    assert all(any(line.startswith(f" {name} ") for line in lines) for name in METHODS)
    assert all(any(row["axes"].split(" / ")[1] in line for line in lines) for row in rows)


def test_methods_keep_their_names_on_a_narrow_terminal(unmask, monkeypatch):
    monkeypatch.setattr(models, "wide_console", lambda: Console(width=80))
    table = unmask("methods").stdout
    assert all(re.search(f"^ {name} ", table, re.M) for name in METHODS)
    assert "…" not in table
    assert set(re.findall(r"\d{4}\.\d{5}", table)) == {row.paper.split()[-1] for row in METHODS.values() if row.paper}
    assert "strict_threshold=True" in table
    assert max(map(len, table.splitlines())) <= 80


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine to order: attributes of `system` by name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def build(gpus=(), packages=None, ram=64 * 10**9):
        packages = {"triton": "3.6.0"} | (packages or {})
        monkeypatch.setattr(system, "gpus", lambda: list(gpus))
        monkeypatch.setattr(system, "ram_bytes", lambda: ram)
        monkeypatch.setattr(system, "version_of", lambda name: packages.get(name, "1.0"))
        return doctor.examine()

    return build


def found(report, word):
    return next(finding for finding in report.findings if word in finding.what)


def fits(report):
    return {row["model"]: row["dtype"] for row in report.fits}


def test_a_missing_package_is_essential(machine, unmask):
    report = machine(packages={"torch": None})
    assert not report.usable
    assert found(report, "torch").fix == "pip install torch"
    result = unmask("doctor", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["usable"] is False
    assert "not usable" in unmask("doctor").stdout


def test_a_cpu_machine_is_usable(machine, unmask):
    report = machine(packages={"torch": "2.9.0+cpu", "lm-eval": None})
    assert report.usable
    assert found(report, "lm-eval").fix == "pip install 'unmask[eval]'"
    assert fits(report)["GSAI-ML/LLaDA-8B-Base"] == "float32"
    result = unmask("doctor")
    assert result.exit_code == 0
    assert "usable" in result.stdout


@pytest.mark.parametrize(("ram", "dtype"), [(20 * 10**9, "bfloat16"), (10**9, None), (None, None)])
def test_what_fits_follows_from_memory(machine, ram, dtype):
    assert fits(machine(ram=ram))["GSAI-ML/LLaDA-8B-Base"] == dtype


def test_a_gpu_decides_what_fits(machine):
    report = machine(gpus=[GPU], ram=10**9, packages={"torch": "2.9.0+cu128"})
    assert fits(report)["Dream-org/Dream-v0-Base-7B"] == "bfloat16"
    assert found(report, "suits NVIDIA H200").level == "ok"


@pytest.mark.parametrize(
    ("torch", "fix"), [("2.9.0+cpu", "pip install --force-reinstall torch"), ("2.9.0+cu130", "install driver 580")]
)
def test_a_build_that_does_not_suit_the_gpu(machine, torch, fix):
    report = machine(gpus=[GPU], packages={"torch": torch})
    assert any(finding.fix.startswith(fix) for finding in report.findings)
    assert report.usable


@pytest.mark.parametrize(
    ("capability", "level", "what", "fix"),
    [
        ("9.0", "ok", "kernels and fp8", ""),
        ("8.9", "ok", "kernels and fp8", ""),
        ("12.0", "ok", "kernels and fp8", ""),
        ("8.6", "note", "capability 8.6, and fp8 needs 8.9", "leave --quantization out"),
        ("8.0", "note", "capability 8.0, and fp8 needs 8.9", "leave --quantization out"),
        ("7.5", "note", "capability 7.5, and the GPU kernels need 8.0", "use an Ampere GPU"),
        (None, "note", "the driver does not say the compute capability", "install a newer driver"),
    ],
)
def test_a_gpu_that_is_too_old(machine, capability, level, what, fix):
    report = machine(gpus=[dataclasses.replace(GPU, compute_cap=capability)])
    finding = found(report, what)
    assert (finding.level, finding.fix.startswith(fix)) == (level, True)
    assert report.usable


def test_every_kind_of_gpu_is_told_once(machine):
    old = dataclasses.replace(GPU, name="Tesla T4", compute_cap="7.5")
    told = [finding.what for finding in machine(gpus=[GPU, GPU, old]).findings if "compute capability" in finding.what]
    assert [what.split(" has")[0] for what in told] == ["NVIDIA H200", "Tesla T4"]


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("3.1.0", "triton 3.1.0 is too old"),
        ("2.3.1", "triton 2.3.1 is too old"),
        ("3.8.0", "triton 3.8.0 is too new"),
        ("4.0.0+git1", "triton 4.0.0+git1 is too new"),
        ("nightly", "triton nightly is of unknown version"),
    ],
)
def test_a_triton_that_the_kernels_are_not_tried_with(machine, version, what):
    report = machine(gpus=[GPU], packages={"triton": version})
    finding = found(report, what)
    assert (finding.level, finding.fix) == ("note", "pip install 'triton>=3.2,<3.8'")
    assert report.usable
    assert not any("triton" in each.what for each in machine(packages={"triton": version}).findings)


@pytest.mark.parametrize("version", ["3.2.0", "3.6.0", "3.7.1.post1"])
def test_a_triton_that_suits(machine, version):
    assert found(machine(gpus=[GPU], packages={"triton": version}), f"triton {version}").level == "ok"


def test_a_gpu_without_triton(machine):
    report = machine(gpus=[GPU], packages={"triton": None})
    assert found(report, "triton not installed").fix == "pip install 'unmask[gpu]'"
    assert [finding.what for finding in report.findings if "triton" in finding.what] == [
        "extra gpu: triton not installed"
    ]


def test_cached_weights_and_tokens_are_seen_but_never_shown(machine, tmp_path, monkeypatch, unmask):
    snapshot = tmp_path / "models--GSAI-ML--LLaDA-1.5" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").touch()
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    report = machine()
    assert {row["model"] for row in report.fits if row["on_disk"]} >= {"GSAI-ML/LLaDA-1.5"}
    assert report.facts["HF_TOKEN"] == "set"
    assert found(report, "HF_HUB_OFFLINE").fix == "unset HF_HUB_OFFLINE"
    assert "secret-value" not in unmask("doctor").stdout + unmask("doctor", "--json").stdout


def test_the_hub_is_asked_only_on_request(machine, monkeypatch, unmask):
    asked = []
    monkeypatch.setattr(system, "hub_reachable", lambda: asked.append(1) or "no route")
    machine()
    unmask("doctor")
    assert asked == []
    assert "hub unreachable: no route" in unmask("doctor", "--online").stdout


def test_an_unreachable_hub_says_why(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "127.0.0.1:9" in system.hub_reachable(timeout=1)


def test_lines_of_nvidia_smi():
    h200 = system.Gpu("NVIDIA H200", 143771 * 2**20, "570.1", "9.0")
    assert system.parse_gpu("NVIDIA H200, 143771, 570.1, 9.0") == h200
    assert system.parse_gpu("NVIDIA H200, 143771, 570.1, [N/A]") == dataclasses.replace(h200, compute_cap=None)
    assert system.parse_gpu("NVIDIA H200, 143771, 570.1", 2) == dataclasses.replace(h200, compute_cap=None)
    assert system.parse_gpu("No devices were found") is None
    assert system.parse_gpu("NVIDIA GB10, [N/A], 580.1, 12.1") is None


def test_a_driver_that_does_not_know_the_question(monkeypatch):
    asked = []

    def run(query, **kwargs):  # noqa: ARG001
        asked.append(query[1])
        if "compute_cap" in query[1]:
            raise subprocess.CalledProcessError(2, query)
        return subprocess.CompletedProcess(query, 0, "Tesla T4, 15360, 450.80.02\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert system.gpus() == [system.Gpu("Tesla T4", 15360 * 2**20, "450.80.02")]
    assert len(asked) == 2


def test_where_the_hub_cache_is(monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", "/somewhere")
    assert system.hub_cache() == Path("/somewhere/hub")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert system.hub_cache() == Path("/cache/huggingface/hub")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_the_packages_are_those_of_the_project():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    def names(lines):
        return tuple(re.split(r"[>=<; ]", line)[0] for line in lines)

    everywhere = [line for line in project["dependencies"] if ";" not in line]  # the others are for some Pythons only
    assert names(everywhere) == system.REQUIRED
    first, too_new = (".".join(map(str, each)) for each in system.TRITON_RANGE)
    assert project["optional-dependencies"]["gpu"][0].startswith(f"triton>={first},<{too_new};")
    extras = {name: names(lines) for name, lines in project["optional-dependencies"].items() if name != "dev"}
    assert extras == dict(system.EXTRAS)


def test_the_doctor_and_the_loader_agree_on_fp8():
    from unmask.models.quantization import FP8_CAPABILITY

    assert system.MIN_FP8 == FP8_CAPABILITY
