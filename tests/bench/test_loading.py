"""The memory peak of loading, small: 140 MB, of which the two largest tensors are nearly all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from unmask.bench.loading import LLADA_8B, measure, num_file_bytes, of_layers, write_checkpoint
from unmask.models.config import ModelConfig

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")

NARROW = {"hidden_size": 256, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 512}
STAGES = 40 * 2**20
"""Two parts of 4 MB, as one goes when the next has come, in several copies when quantised, and what the allocator
keeps."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    large, small = (tmp_path_factory.mktemp(name) for name in ("large", "small"))
    assert write_checkpoint(of_layers(3, **NARROW), large, shard_bytes=5 * 10**7) > 2
    write_checkpoint(of_layers(1, **NARROW | {"hidden_size": 8, "head_dim": 4}), small)
    return large, small


def test_the_shapes_are_llada_8bs() -> None:
    published = json.loads((Path(__file__).parents[1] / "models" / "configs" / "llada-8b.json").read_text())
    config = ModelConfig.from_dict(published)
    changes = {name: getattr(LLADA_8B, name) for name in ("eos_token_ids", "pad_token_id", "bos_token_id")}
    assert replace(config, **changes) == LLADA_8B
    assert num_file_bytes(LLADA_8B) == 16_031_162_368


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_peak_is_the_model_and_a_few_parts(checkpoints: tuple[Path, Path], quantization: str | None) -> None:
    large, small = checkpoints
    found = measure(large, quantization=quantization, first=small)
    assert found.file_bytes == num_file_bytes(of_layers(3, **NARROW)) > 10**8
    assert found.num_shards > 2
    assert found.weight_bytes == found.file_bytes if quantization is None else found.weight_bytes < found.file_bytes
    assert found.bytes_before < found.peak_bytes <= found.bytes_before + found.weight_bytes + STAGES
    assert found.peak_anonymous_bytes <= found.peak_bytes


def test_whole_tensors_are_seen(checkpoints: tuple[Path, Path]) -> None:
    large, small = checkpoints
    found = measure(large, first=small, stage_bytes=10**9)
    assert found.peak_bytes > found.bytes_before + found.weight_bytes + STAGES


def test_a_failure_is_told(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints[1], tmp_path / "broken")
    next((tmp_path / "broken").glob("*.safetensors")).unlink()
    with pytest.raises(RuntimeError, match="exit status 1"):
        measure(tmp_path / "broken")
