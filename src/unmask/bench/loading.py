"""The most memory that loading a checkpoint takes, beside the bytes of its weights. Linux only: it reads /proc."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from unmask.models.config import ModelConfig
from unmask.models.families import FAMILIES
from unmask.models.loading import INDEX, STAGE_BYTES, weight_index

BOUND = 1.05
"""Of the weights' bytes: the most that a whole process may have resident, interpreter and libraries included."""
LLADA_8B = ModelConfig(
    family="llada",
    vocab_size=126_464,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=12_288,
    rope_theta=500_000.0,
    norm_eps=1e-5,
    qkv_bias=False,
    tie_embeddings=False,
    max_positions=4096,
    logit_shift=0,
    mask_token_id=126_336,
    eos_token_ids=(126_081,),
    pad_token_id=126_081,
    bos_token_id=None,
)
POLL_SECONDS = 0.01

CHILD = """
import json, sys, time
from unmask.bench.loading import resident
from unmask.models import loading
from unmask.models.quantization import num_weight_bytes
directory, first, dtype, quantization, stage_bytes = sys.argv[1:]
loading.STAGE_BYTES = int(stage_bytes)
if first:
    loading.load_model(first, dtype=dtype, quantization=quantization or None)
before, start = resident("self"), time.perf_counter()
model = loading.load_model(directory, dtype=dtype, quantization=quantization or None)
seconds, after = time.perf_counter() - start, resident("self")
print(json.dumps({
    "weight_bytes": num_weight_bytes(model),
    "bytes_before": before["VmRSS"],
    "peak_bytes": after["VmHWM"],
    "anonymous_bytes": after["RssAnon"],
    "seconds": seconds,
}))
"""


@dataclass(frozen=True)
class Loading:
    """What loading one checkpoint took."""

    dtype: str
    quantization: str | None
    stage_bytes: int
    """Of a tensor that are read at a time; `loading.STAGE_BYTES` is the loader's own."""
    file_bytes: int
    """Of the tensors in the files."""
    num_shards: int
    weight_bytes: int
    """Of the model's parameters and buffers."""
    bytes_before: int
    """Resident before the load: interpreter and libraries."""
    peak_bytes: int
    """VmHWM of the process: everything that was ever resident at one time, mapped files included."""
    peak_anonymous_bytes: int
    """Most RssAnon that was seen: without mapped files, of which the system may take the pages back."""
    seconds: float

    @property
    def ratio(self) -> float:
        """The peak over the weights' bytes."""
        return self.peak_bytes / self.weight_bytes

    def to_dict(self) -> dict[str, Any]:
        anonymous = self.peak_anonymous_bytes / self.weight_bytes
        return asdict(self) | {"ratio": self.ratio, "anonymous_ratio": anonymous}


def of_layers(num_layers: int, config: ModelConfig = LLADA_8B, **changes: Any) -> ModelConfig:
    """The same shapes with another number of layers."""
    return replace(config, num_layers=num_layers, **changes)


def num_file_bytes(config: ModelConfig) -> int:
    """Of a bf16 checkpoint's tensors."""
    return sum(2 * torch.Size(shape).numel() for shape in weight_index(config).values())


def write_checkpoint(config: ModelConfig, directory: Path, shard_bytes: int = 10**9) -> int:
    """A bf16 checkpoint of repeated random values, written shard by shard; returns the number of shards."""
    directory.mkdir(parents=True, exist_ok=True)
    values = (0.02 * torch.randn(2**20, generator=torch.Generator().manual_seed(0))).to(torch.bfloat16)
    shards = list(_split(weight_index(config), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file({tensor: _repeated(values, shape) for tensor, shape in shapes.items()}, directory / name)
        weight_map |= dict.fromkeys(shapes, name)
    text = {INDEX: {"metadata": {"total_size": num_file_bytes(config)}, "weight_map": weight_map}}
    text |= {"config.json": FAMILIES[config.family].to_json(config) | {"torch_dtype": "bfloat16"}}
    for name, content in text.items():
        (directory / name).write_text(json.dumps(content))
    return len(shards)


def _split(index: dict[str, tuple[int, ...]], most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    group: dict[str, tuple[int, ...]] = {}
    for name, shape in index.items():
        if group and 2 * sum(torch.Size(each).numel() for each in (*group.values(), shape)) > most:
            yield group
            group = {}
        group[name] = shape
    yield group


def _repeated(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    count = torch.Size(shape).numel()
    return values.repeat(-(-count // len(values)))[:count].reshape(shape).clone()


def resident(pid: int | str) -> dict[str, int]:
    """VmHWM, VmRSS, RssAnon and RssFile of a process in bytes; nothing once it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {name: 1024 * int(kib) for name, kib in re.findall(r"(VmHWM|VmRSS|RssAnon|RssFile):\s+(\d+) kB", text)}


def measure(
    directory: Path,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    *,
    first: Path | None = None,
    stage_bytes: int = STAGE_BYTES,
) -> Loading:
    """Load a checkpoint in a fresh process and watch it. What is imported late counts, unless ``first``, a small
    checkpoint, is loaded before."""
    options = (directory, first or "", dtype, quantization or "", stage_bytes)
    process = subprocess.Popen([sys.executable, "-c", CHILD, *map(str, options)], stdout=subprocess.PIPE, text=True)
    most = 0
    while process.poll() is None:
        most = max(most, resident(process.pid).get("RssAnon", 0))
        time.sleep(POLL_SECONDS)
    out, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"loading {directory} failed with exit status {process.returncode}")
    told = json.loads(out)
    return Loading(
        dtype=dtype,
        quantization=quantization,
        stage_bytes=stage_bytes,
        file_bytes=num_file_bytes(ModelConfig.from_pretrained(directory)),
        num_shards=len(list(directory.glob("*.safetensors"))),
        peak_anonymous_bytes=max(most, told.pop("anonymous_bytes")),
        **told,
    )
