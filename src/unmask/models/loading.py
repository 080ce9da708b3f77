"""Checkpoints in and out: safetensors only, every tensor checked, one copy of the model in memory."""

from __future__ import annotations

import importlib.resources
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.errors import CheckpointError, nearest
from unmask.models.config import ModelConfig, read_json
from unmask.models.families import FAMILIES, Piece
from unmask.models.quantization import Fp8Linear, check_device, make_room
from unmask.models.tokenizer import TOKENIZER_FILES
from unmask.models.transformer import Transformer

BUILT_IN = ("unmask-mini",)
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Code (*.py) and pickles (*.bin, *.pt) are never fetched.
DOWNLOADED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
STORED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
SMALL_MODEL = 10**9
STAGE_BYTES = 4 * 2**20
"""Of a tensor on its way into the model. LLaDA-8B's embedding as a whole would be 6.5% beside the 16 GB of its weights;
quantising takes about seven times a part, and opening the file for it 0.2 ms."""


def load_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    revision: str | None = None,
    quantization: str | None = None,
) -> Transformer:
    """The model of a checkpoint directory, a hub id, or a name that ships with the package.

    `dtype="auto"` is the checkpoint's own dtype, with one exception: a model of less than a billion parameters that
    is stored in bf16 or fp16 runs in fp32 on the CPU if it fits in memory, since there the short types are slower
    as well as less exact.

    Every tensor is checked (name, shape, dtype) before the first is copied, and copied straight into its place,
    part by part: memory never holds more than the model and a few MB. `quantization="fp8"` makes 8-bit weights of the
    layers' products on the way, and the 16-bit ones are never there. CheckpointError names what is wrong.
    """
    device = torch.device(device)
    if quantization is not None:
        check_device(quantization, device)
    directory = resolve_checkpoint(source, revision)
    config = ModelConfig.from_pretrained(directory)
    stored = _stored_tensors(directory)
    pieces = {piece.name: piece for piece in FAMILIES[config.family].pieces(config)}
    tied_head = _check_tensors(config, pieces, stored)

    chosen = _choose_dtype(dtype, directory, device, config, next(iter(stored.values())))
    model = Transformer(config, device="meta", dtype=chosen)
    if quantization is not None:
        make_room(model, quantization)
    model.to_empty(device=device)
    _fill(model, pieces, stored)
    if tied_head is not None:
        _check_tied(model, tied_head, stored[tied_head])
    return model.eval()


def weight_index(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a published checkpoint of this config: name in the family's spelling, and shape."""
    return {piece.name: piece.shape for piece in FAMILIES[config.family].pieces(config)}


# --- where it is ---


def resolve_checkpoint(source: str | Path, revision: str | None = None) -> Path:
    """The local directory of `source`: a directory as it is, a name that ships with the package, or a hub id, which
    is downloaded (or taken from the hub's cache: HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are honoured)."""
    if source in BUILT_IN:
        return _built_in(str(source))
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json and *.safetensors")
    if isinstance(source, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", source):
        return _download(source, revision)
    raise CheckpointError(
        f"{str(source)!r} does not exist: neither a directory, nor a hub id such as 'GSAI-ML/LLaDA-8B-Instruct', "
        f"nor a built-in model; {nearest(str(source), BUILT_IN)}"
    )


def _built_in(name: str) -> Path:
    path = Path(str(importlib.resources.files("unmask"))) / "assets" / name
    if not (path / "config.json").exists():
        raise CheckpointError(f"{name} is missing from this installation ({path}); reinstall unmask")
    return path


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # here: a local checkpoint must not pay for the import

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOADED)))
    except Exception as error:  # its HTTP library's own exceptions pass through, and they change with its version
        where = f"{repo!r} at revision {revision!r}" if revision else repr(repo)
        cause = next(iter(str(error).strip().splitlines()), "no message")
        raise CheckpointError(
            f"{where} is no local directory, and the hub did not give it: {type(error).__name__}: {cause}. "
            "Check the name; for a gated model set HF_TOKEN; without a network, copy the files and give their "
            "directory, or fetch them first and set HF_HUB_OFFLINE=1"
        ) from error


# --- what is in it ---


class _Stored:
    """One tensor of a safetensors file, not yet read."""

    def __init__(self, file: Path, name: str, shape: tuple[int, ...], dtype: str) -> None:
        self.file, self.name, self.shape, self.dtype = file, name, shape, dtype

    def read(self) -> Iterator[tuple[int, Tensor]]:
        """The rows in parts of `STAGE_BYTES`, each with its first row. The file is opened for each part: its pages are
        mapped into memory, where they count until it is closed."""
        row_bytes = math.prod(self.shape[1:]) * STORED[self.dtype].itemsize
        num_rows = max(1, STAGE_BYTES // row_bytes)
        for start in range(0, self.shape[0], num_rows):
            with _open(self.file) as file:
                yield start, file.get_slice(self.name)[start : start + num_rows]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file ({path.stat().st_size} bytes): {error}; download it again"
        ) from error


def _stored_tensors(directory: Path) -> dict[str, _Stored]:
    """Every tensor of the checkpoint, from the headers of its files."""
    found: dict[str, _Stored] = {}
    for path in _shards(directory):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in found:
                    raise CheckpointError(f"tensor {name!r} is in {found[name].file.name} and in {path.name}")
                header = file.get_slice(name)
                found[name] = _Stored(path, name, tuple(header.get_shape()), header.get_dtype())
    if not found:
        raise CheckpointError(f"{directory}: its safetensors files hold no tensor; download them again")
    _check_index(directory, found)
    return found


def _shards(directory: Path) -> list[Path]:
    """The files that hold the weights."""
    if (directory / INDEX).exists():
        names = sorted({Path(name).name for name in _weight_map(directory).values()})
        for name in names:
            if not (directory / name).exists():
                raise CheckpointError(f"{directory / INDEX} names {name}, which is not there; download it again")
        return [directory / name for name in names]
    if (directory / SINGLE).exists():
        return [directory / SINGLE]
    raise _no_weights(directory)


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{directory / INDEX} has no weight_map of tensor names to file names")
    return weight_map


def _check_index(directory: Path, found: Mapping[str, _Stored]) -> None:
    if not (directory / INDEX).exists():
        return
    for name, shard in _weight_map(directory).items():
        if name not in found:
            raise CheckpointError(
                f"{directory / INDEX} places tensor {name!r} in {shard}, which does not hold it; download both again"
            )


def _no_weights(directory: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{directory} holds {', '.join(pickles)} but no safetensors; such files are pickles, which run code "
            "when they are read, so unmask never opens them: convert them in an environment that you trust "
            "(safetensors.torch.save_file), or download the safetensors version"
        )
    there = sorted(path.name for path in directory.glob("*.safetensors")) or ["no safetensors file at all"]
    return CheckpointError(f"{directory} has neither {SINGLE} nor {INDEX}, but {', '.join(there)}")


# --- is it this model ---


def _check_tensors(config: ModelConfig, pieces: Mapping[str, Piece], stored: Mapping[str, _Stored]) -> str | None:
    """Names, shapes and dtypes agree with the config. Returns the name of a head that is stored though it is tied."""
    family = FAMILIES[config.family]
    head = f"{family.weights['lm_head']}.weight"
    for name, piece in pieces.items():
        if name not in stored:
            raise _missing_tensor(name, name == head, stored)
        _check_tensor(stored[name], piece.shape)
    for name in stored:
        if name not in pieces and not (name == head and config.tie_embeddings):
            raise CheckpointError(
                f"{stored[name].file}: unexpected tensor {name!r} {list(stored[name].shape)}; a {family.model_type} "
                f"model of this config has {len(pieces)} tensors and not this one: "
                "the weights and config.json do not belong together"
            )
    if not (config.tie_embeddings and head in stored):
        return None
    _check_tensor(stored[head], (config.vocab_size, config.hidden_size))
    return head


def _missing_tensor(name: str, is_head: bool, stored: Mapping[str, _Stored]) -> CheckpointError:
    files = ", ".join(sorted({tensor.file.name for tensor in stored.values()}))
    hint = "if the head is the embedding, config.json must say so" if is_head else "download them again"
    return CheckpointError(f"tensor {name!r} is missing: none of {files} holds it; {hint}")


def _check_tensor(tensor: _Stored, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} has shape {list(tensor.shape)}, and config.json makes it "
            f"{list(shape)}: the weights and config.json do not belong together"
        )
    if tensor.dtype not in STORED:
        raise CheckpointError(
            f"{tensor.file}: tensor {tensor.name!r} is stored as {tensor.dtype}, expected one of "
            f"{', '.join(STORED)}; quantised weights are not supported"
        )


# --- into memory ---


def _choose_dtype(
    dtype: torch.dtype | str, directory: Path, device: torch.device, config: ModelConfig, sample: _Stored
) -> torch.dtype:
    if dtype != "auto":
        return _parse_dtype(dtype, "dtype")
    raw = read_json(directory / "config.json")
    named = raw.get("dtype") or raw.get("torch_dtype")
    stored = STORED[sample.dtype] if named is None else _parse_dtype(named, f"{directory}/config.json: torch_dtype")
    num_parameters = sum(math.prod(shape) for shape in weight_index(config).values())
    if device.type == "cpu" and stored.itemsize < 4 and num_parameters < SMALL_MODEL:
        return torch.float32 if _fits(4 * num_parameters) else stored
    return stored


def _parse_dtype(dtype: torch.dtype | str, what: str) -> torch.dtype:
    parsed = DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if parsed not in DTYPES.values():
        raise CheckpointError(f"{what} is {dtype!r}; known: auto, {', '.join(DTYPES)}")
    assert parsed is not None
    return parsed


def _fits(num_bytes: int) -> bool:
    """Into half of the machine's memory, as far as it says how much it has."""
    try:
        return 2 * num_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return True


@torch.no_grad()
def _fill(model: Transformer, pieces: Mapping[str, Piece], stored: Mapping[str, _Stored]) -> None:
    places = dict(model.named_parameters()) | dict(model.named_buffers())
    quantised = {f"{name}.weight": made for name, made in model.named_modules() if isinstance(made, Fp8Linear)}
    for name, piece in pieces.items():
        for row, part in stored[name].read():
            if piece.parameter in quantised:
                rows = part.to(model.head.device, model.head.dtype)
                quantised[piece.parameter].fill(piece.start + row, rows)
            else:
                places[piece.parameter].narrow(0, piece.start + row, len(part)).copy_(part)


@torch.no_grad()
def _check_tied(model: Transformer, name: str, head: _Stored) -> None:
    """A stored copy of a tied head must be the embedding; otherwise one of the two is the wrong one."""
    with _open(head.file) as file:
        rows = file.get_slice(name)
        for start in range(0, head.shape[0], 4096):
            ours = model.head[start : start + 4096]
            if not torch.equal(rows[start : start + 4096].to(ours.dtype), ours.cpu()):
                raise CheckpointError(
                    f"{head.file}: config.json ties the head to the embedding, but the stored {name!r} differs from "
                    "it; either the config is wrong (untied) or the tensor should not be there"
                )


# --- out ---


def save_model(
    model: Transformer,
    directory: str | Path,
    *,
    max_shard_bytes: int = 4 * 10**9,
    tokenizer_dir: str | Path | None = None,
) -> None:
    """Write a checkpoint that `load_model` reads back bit for bit, in the family's own names and fields.

    Weights go to one safetensors file, or to several with an index when they take more than `max_shard_bytes`.
    Files of an earlier save in `directory` are replaced. `tokenizer_dir`: copy the tokenizer from there.
    CheckpointError for a quantised model: 8-bit weights are made while loading, never stored.
    """
    if any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise CheckpointError("a quantised model cannot be saved; save the one that it was made from")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = _write_weights(model, directory, max_shard_bytes)
    _remove_others(directory, written)
    dtype = str(model.head.dtype).removeprefix("torch.")
    _write_json(directory / "config.json", model.config.to_dict() | {"torch_dtype": dtype})
    _write_json(directory / "generation_config.json", model.config.generation_dict())
    if tokenizer_dir is not None:
        _copy_tokenizer(Path(tokenizer_dir), directory)


def _write_weights(model: Transformer, directory: Path, max_shard_bytes: int) -> set[str]:
    shards = list(_split(model, max_shard_bytes))
    names = [_shard_name(i, len(shards)) for i in range(len(shards))]
    for name, pieces in zip(names, shards):
        _write_shard(model, pieces, directory / name)
    if len(shards) == 1:
        return {SINGLE}
    itemsize = model.head.element_size()
    total = sum(math.prod(piece.shape) * itemsize for pieces in shards for piece in pieces)
    weight_map = {piece.name: name for name, pieces in zip(names, shards) for piece in pieces}
    _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {INDEX, *names}


def _shard_name(index: int, num_shards: int) -> str:
    return SINGLE if num_shards == 1 else f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"


def _split(model: Transformer, max_bytes: int) -> Iterator[list[Piece]]:
    """The tensors in order, in groups of at most `max_bytes`, or of one tensor that is larger."""
    itemsize, group, size = model.head.element_size(), list[Piece](), 0
    for piece in FAMILIES[model.config.family].pieces(model.config):
        num_bytes = math.prod(piece.shape) * itemsize
        if group and size + num_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(piece)
        size += num_bytes
    yield group


def _write_shard(model: Transformer, pieces: list[Piece], path: Path) -> None:
    parameters = dict(model.named_parameters())
    tensors = {
        piece.name: parameters[piece.parameter].detach().narrow(0, piece.start, piece.shape[0]).cpu().clone()
        for piece in pieces
    }
    # Under another name first: a crash must not leave half a file that looks like a whole one.
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(path)


def _remove_others(directory: Path, written: set[str]) -> None:
    """Weights of an earlier save with another number of shards would shadow the new ones."""
    for path in [directory / INDEX, directory / SINGLE, *directory.glob("model-*-of-*.safetensors")]:
        if path.name not in written:
            path.unlink(missing_ok=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, directory: Path) -> None:
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not names:
        raise CheckpointError(f"{source} holds no tokenizer file ({', '.join(TOKENIZER_FILES)})")
    for name in names:
        if source.resolve() != directory.resolve():
            shutil.copyfile(source / name, directory / name)
