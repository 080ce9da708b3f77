"""Short stand-ins for values: rows of r numbers whose cosines are those of the values, as nearly as r numbers can.

A layer's value weight without its bias is W = V S U^T. The proxy of a normed row n is A n, A the first r rows of
S U^T: V turns all values alike and leaves every inner product as it is, so that with r = kv_out proxies have exactly
the cosines of the values, and with fewer the least error in the inner products.

D hidden size, kv_out (V) width of all value heads of a layer, r (R) rows of the proxy, L layers
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmask.errors import ConfigError
from unmask.models.transformer import Transformer
from unmask.ops import Fp8Weight

FOLDER = "unmask"
"""Below a checkpoint, and below the user's cache. Beside config.json itself files are not safe: other engines take
every *.safetensors there for weights of the model."""
TENSOR = "proxy"
FORMAT = "unmask singular proxy 1"
"""Part of the digest: another number makes files of an earlier definition stale."""


@torch.no_grad()
def singular_proxy(value_weight: Tensor, rank: float) -> Tensor:
    """A, fp32 [r, D], of the value weight [kv_out, D]: the left singular vectors of its transpose, each times its
    singular value, the largest first.

    ``rank`` above 1 is r; up to 1 it is a fraction of kv_out, so that 1 is all of it. Each row's largest number is
    positive: cosines do not see signs, but equal weights shall give equal files.

    Raises:
        ConfigError: a rank out of its range.
    """
    num_rows = _num_rows(rank, value_weight.shape)
    proxy_RD = _leading(value_weight.detach().double(), num_rows).float()
    largest_R1 = proxy_RD.gather(1, proxy_RD.abs().argmax(1, keepdim=True))
    return torch.where(largest_R1 < 0, -proxy_RD, proxy_RD)


def _leading(weight_VD: Tensor, num_rows: int) -> Tensor:
    """S U^T of the weight V S U^T, its first rows, from the eigenvectors of the smaller of its two Gram matrices.

    In fp64 these are more exact than singular vectors in fp32 wherever a singular value is over 1e-8 of the largest:
    squaring costs a factor of half their ratio, and the type gives 5e8. Signs are arbitrary.
    """
    if weight_VD.shape[0] <= weight_VD.shape[1]:
        _, v_VV = torch.linalg.eigh(weight_VD @ weight_VD.T)  # ascending
        v_VR: Tensor = v_VV.flip(1)[:, :num_rows]
        return v_VR.T @ weight_VD
    _, u_DD = torch.linalg.eigh(weight_VD.T @ weight_VD)
    u_DR: Tensor = u_DD.flip(1)[:, :num_rows]
    proxy_RD: Tensor = ((weight_VD @ u_DR).norm(dim=0) * u_DR).T
    return proxy_RD


def _num_rows(rank: float, shape: torch.Size) -> int:
    """r, for a value weight of this shape. It has no more singular values than its smaller side."""
    most = min(shape)
    if 0 < rank <= 1:
        return max(1, int(rank * most))
    if not 1 < rank <= most or rank != int(rank):
        raise ConfigError(f"proxy rank is {rank}; it is a whole number in [2, {most}], or a fraction in (0, 1]")
    return int(rank)


def proxies(model: Transformer, rank: float) -> Tensor:
    """A of every layer, fp32 [L, r, D], on the model's device, one decomposition after the other."""
    out_LRD: Tensor | None = None
    for layer, weight in enumerate(_value_weights(model)):
        # 8-bit weights are what the values are made with: their proxies are those of the rounded weights.
        dense = weight.dequantize() if isinstance(weight, Fp8Weight) else weight
        proxy_RD = singular_proxy(dense, rank)
        if out_LRD is None:
            out_LRD = proxy_RD.new_empty(model.config.num_layers, *proxy_RD.shape)
        out_LRD[layer] = proxy_RD
    assert out_LRD is not None, "a model without layers"
    return out_LRD


def _value_weights(model: Transformer) -> Iterator[Tensor | Fp8Weight]:
    """The last rows of each layer's fused weight: queries, keys, values."""
    num_rows = model.config.num_kv_heads * model.config.head_dim
    for layer in model.layers:
        weight = cast("Tensor | Fp8Weight", layer.get_submodule("attn.qkv").weight)
        if isinstance(weight, Fp8Weight):
            yield Fp8Weight(weight.value_ND[-num_rows:], weight.scale_N[-num_rows:])
        else:
            yield weight.detach()[-num_rows:]


# --- kept beside the checkpoint ---


def load_or_compute(model: Transformer, rank: float, directory: str | Path | None = None) -> Tensor:
    """`proxies(model, rank)`, kept from one start to the next: below the checkpoint's ``directory``, or where that
    cannot be written (it is shared, or read-only) in the user's cache (`cache_directory`).

    A file holds the largest rank asked so far; a smaller one is its first rows. It is read if it belongs to these
    value weights, digit by digit; if none does, a warning says so, and it is replaced. A ``directory`` of None keeps
    nothing.

    Raises:
        ConfigError: a rank out of its range.
    """
    shape = torch.Size((model.config.num_kv_heads * model.config.head_dim, model.config.hidden_size))
    num_rows = _num_rows(rank, shape)
    if directory is None:
        return proxies(model, rank)
    digest = _digest(model)
    paths = [proxy_file(model, directory)]
    if (cache := cache_directory()) is not None:
        paths.append(cache / f"{TENSOR}-{digest[:32]}.safetensors")
    wanted, unfit = (model.config.num_layers, num_rows, model.config.hidden_size), list[str]()
    for path in paths:
        try:
            kept = _read(path, digest, wanted)
        except _UnfitError as error:
            unfit.append(f"{path} {error}")
        else:
            if kept is not None:
                return kept.to(model.head.device)
    for why in unfit:
        warnings.warn(f"{why}: its proxies are computed again", stacklevel=2)
    made = proxies(model, rank)
    any(_write(path, digest, made) for path in paths)  # up to the first that can be written
    return made


def proxy_file(model: Transformer, directory: str | Path) -> Path:
    """Where a model's proxies are kept: one file for each type its value weights may have, since each type has its
    own and they would replace each other."""
    weight = next(_value_weights(model))
    dtype = weight.value_ND.dtype if isinstance(weight, Fp8Weight) else weight.dtype
    return Path(directory) / FOLDER / f"{TENSOR}-{str(dtype).removeprefix('torch.')}.safetensors"


def cache_directory() -> Path | None:
    """The user's cache: below XDG_CACHE_HOME if that is an absolute path, as its specification has it, else below
    ~/.cache; None for a user without a home. Files there are named by the digest of their weights: all checkpoints
    share the folder."""
    said = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (said if said.is_absolute() else Path.home() / ".cache") / FOLDER
    except RuntimeError:
        return None


class _UnfitError(Exception):
    """Why a file that is there cannot be used."""


def _digest(model: Transformer) -> str:
    """Of all value weights: bits, shapes and types."""
    sha = hashlib.sha256(FORMAT.encode())
    for weight in _value_weights(model):
        parts = (weight.value_ND, weight.scale_N) if isinstance(weight, Fp8Weight) else (weight,)
        for part in parts:
            sha.update(f"{part.dtype} {list(part.shape)}".encode())
            sha.update(part.contiguous().view(torch.uint8).cpu().numpy().data)
    return sha.hexdigest()


def _read(path: Path, digest: str, shape: tuple[int, int, int]) -> Tensor | None:
    """The first rows of the stored proxies, [L, r, D]; None without a file, or if it holds fewer.

    Raises:
        _UnfitError: the file is damaged, or belongs to other weights.
    """
    num_layers, num_rows, width = shape
    try:
        if not path.exists():
            return None
        with safe_open(path, framework="pt", device="cpu") as file:
            found = (file.metadata() or {}).get("digest")
            if found != digest:
                raise _UnfitError(f"belongs to other value weights (digest {str(found)[:12]}, here {digest[:12]})")
            rows = file.get_slice(TENSOR)
            stored = rows.get_shape()
            if [*stored[:1], *stored[2:]] != [num_layers, width] or rows.get_dtype() != "F32":
                raise _UnfitError(f"holds {rows.get_dtype()} {stored}, not F32 [{num_layers}, r, {width}]")
            return cast(Tensor, rows[:, :num_rows]) if stored[1] >= num_rows else None
    except (SafetensorError, OSError) as error:
        raise _UnfitError(f"cannot be read ({error})") from error


def _write(path: Path, digest: str, proxy_LRD: Tensor) -> bool:
    """Whether it was written. Under another name first: a crash, or another process at it, must not leave half a file.
    The folder above ours must be there, but for the user's cache, whose folders may never have been made."""
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(exist_ok=True, parents=path.parent == cache_directory())
        try:
            save_file({TENSOR: proxy_LRD.cpu().contiguous()}, partial, metadata={"format": "pt", "digest": digest})
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except (SafetensorError, OSError):
        return False  # what is not kept is computed again at the next start
    return True
