"""Proxies of values: the published code's, the values' own cosines, and what is kept on disk from start to start.

D hidden size, r rows of the proxy, L layers, N positions, G positions of the answer
"""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from oracles.golden import tiny_model
from unmask.cache import proxy
from unmask.cache.budget import counts
from unmask.cache.proxy import cache_directory, load_or_compute, proxies, proxy_file, singular_proxy
from unmask.errors import ConfigError
from unmask.models.attention import AttentionWeights, DenseContext
from unmask.models.quantization import quantize_
from unmask.models.transformer import Transformer
from unmask.ops import cosine_drift

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
MODELS = ("tiny-llada", "tiny-llada-gqa", "tiny-dream")
REFERENCES = ("tiny-llada", "tiny-dream")


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's cache of its own for each test."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


def value_weight(model: Transformer, layer: int) -> Tensor:
    """[kv_out, D], found by the heads' numbers from the front; the proxies count from the back."""
    c = model.config
    start = (c.num_heads + c.num_kv_heads) * c.head_dim
    return model.layers[layer].attn.qkv.weight[start : start + c.num_kv_heads * c.head_dim]


def gram(proxy_RD: Tensor) -> Tensor:
    """[D, D]: inner products of proxies of all rows, which signs do not change."""
    return proxy_RD.T @ proxy_RD


# --- the published code ---


class Normed(DenseContext):
    """A pass over all positions that keeps the normed rows of each layer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows_LND: list[Tensor] = []

    def project(self, layer: int, hidden: Any, weights: AttentionWeights) -> Tensor:
        self.rows_LND.append(hidden[0])
        return super().project(layer, hidden, weights)


def normed_rows(model: Transformer, token_ids: list[int]) -> list[Tensor]:
    ctx = Normed(torch.arange(len(token_ids)), rope=model.rope)
    model(torch.tensor([token_ids]), ctx)
    return ctx.rows_LND


def golden(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    stem = f"spa_proxy_{name.removeprefix('tiny-')}"
    (case,) = json.loads((GOLDEN / f"{stem}.json").read_text())["cases"]
    assert case["model"] == name
    return case, load_file(GOLDEN / f"{stem}.safetensors")


@pytest.mark.parametrize("name", REFERENCES)
def test_golden_weights(name: str) -> None:
    """Every layer, the first one too, up to signs."""
    case, want = golden(name)
    model = tiny_model(name)
    ours_LRD, all_LRD = proxies(model, case["proxy_rank"]), proxies(model, 1)
    assert ours_LRD.shape == (3, 8, 64)
    for layer in range(3):
        theirs_RD, single_R = want[f"layer{layer}.proxy_weight"], want[f"layer{layer}.singular_values"]
        torch.testing.assert_close(gram(ours_LRD[layer]), gram(theirs_RD), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(all_LRD[layer].norm(dim=1), single_R, atol=1e-5, rtol=1e-5)
        # Negative control: keys instead of values, and directions without their sizes.
        c = model.config
        keys = model.layers[layer].attn.qkv.weight[c.num_heads * c.head_dim :][: c.num_kv_heads * c.head_dim]
        assert (gram(singular_proxy(keys, 8)) - gram(theirs_RD)).abs().max() > 0.01
        flat_RD = ours_LRD[layer] / ours_LRD[layer].norm(dim=1, keepdim=True)
        assert (gram(flat_RD) - gram(theirs_RD)).abs().max() > 0.01


@pytest.mark.parametrize("name", REFERENCES)
def test_golden_proxies_of_real_rows(name: str) -> None:
    """The first layer is always dense, so that the second one's rows are those of a whole pass in both steps."""
    case, want = golden(name)
    model, start = tiny_model(name), len(case["prompt_ids"])
    proxy_LRD = proxies(model, case["proxy_rank"])
    full, partial = (normed_rows(model, case[f"{step}_step_ids"]) for step in ("full", "partial"))
    for layer in (1, 2):
        ours_GR = full[layer][start:] @ proxy_LRD[layer].T
        theirs_GR = want[f"layer{layer}.proxy_full_step"]
        torch.testing.assert_close(ours_GR @ ours_GR.T, theirs_GR @ theirs_GR.T, atol=1e-4, rtol=1e-4)
    old_GR, new_GR = full[1][start:] @ proxy_LRD[1].T, partial[1][start:] @ proxy_LRD[1].T
    drift_G = cosine_drift(new_GR, old_GR)
    torch.testing.assert_close(drift_G, 1 - want["layer1.cos"], atol=2e-5, rtol=0)
    assert selected(drift_G) == case["selected_partial_step"]["1"]["rows"]


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("name", REFERENCES)
def test_golden_drift_and_rows(name: str, layer: int) -> None:
    case, want = golden(name)
    drift_G = cosine_drift(want[f"layer{layer}.proxy_partial_step"], want[f"layer{layer}.proxy_full_step"])
    torch.testing.assert_close(drift_G, 1 - want[f"layer{layer}.cos"], atol=1e-6, rtol=0)
    assert selected(drift_G) == case["selected_partial_step"][str(layer)]["rows"]


def selected(drift_G: Tensor) -> list[int]:
    (num,) = counts(len(drift_G), [0.5])
    return sorted(drift_G.topk(num).indices.tolist())


# --- what a proxy is ---


def drifts(weight: Tensor, bias: Tensor | float = 0.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """1 - cosine of a weight's products with 64 pairs of rows, written out in fp64."""
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, 64, weight.shape[1], generator=generator, dtype=dtype)
    old, new = old @ weight.to(dtype).T + bias, (old + 0.3 * new) @ weight.to(dtype).T + bias
    return 1 - torch.nn.functional.cosine_similarity(new, old, dim=-1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MODELS)
def test_all_rows_rank_as_values_without_their_bias(name: str, seed: int) -> None:
    model = tiny_model(name)
    for layer, proxy_RD in enumerate(proxies(model, 1)):
        weight = value_weight(model, layer)
        assert proxy_RD.shape == weight.shape
        exact, ours = drifts(weight, seed=seed), drifts(proxy_RD, seed=seed)
        torch.testing.assert_close(ours, exact, atol=1e-6, rtol=0)
        gap = exact.sort().values.diff().min()
        assert gap > 4 * (ours - exact).abs().max()  # else the next line would say nothing
        assert torch.equal(ours.argsort(), exact.argsort())
        # Negative control: fewer rows rank otherwise, and a bias does.
        assert not torch.equal(drifts(proxy_RD[:4], seed=seed).argsort(), exact.argsort())
        assert not torch.equal(drifts(weight, bias=1.0, seed=seed).argsort(), exact.argsort())


def test_fewer_rows_are_the_nearest_of_their_number() -> None:
    """The error of the inner products is the first singular value left out, squared; no r rows have less."""
    weight = value_weight(tiny_model("tiny-llada"), 1)
    single = torch.linalg.svdvals(weight)
    for rank in (2, 5, 63):
        off = gram(singular_proxy(weight, rank)) - weight.T @ weight
        assert torch.linalg.matrix_norm(off, 2).item() == pytest.approx(single[rank].item() ** 2, rel=1e-3)


@pytest.mark.parametrize("shape", [(48, 96), (96, 48), (64, 64)])
def test_as_exact_as_singular_vectors(shape: tuple[int, int]) -> None:
    """Singular values over six decades: against LAPACK's own decomposition in fp64. In fp32 Gram matrices lose what
    is small: the control."""
    generator = torch.Generator().manual_seed(0)
    v, _, u = torch.linalg.svd(torch.randn(*shape, generator=generator, dtype=torch.float64), full_matrices=False)
    single = torch.logspace(0, -6, min(shape), dtype=torch.float64)
    weight = (v * single) @ u
    exact = single[:, None] * u
    exact = torch.where(exact.gather(1, exact.abs().argmax(1, keepdim=True)) < 0, -exact, exact)
    ours = proxy._leading(weight, min(shape))
    ours = torch.where(ours.gather(1, ours.abs().argmax(1, keepdim=True)) < 0, -ours, ours)
    worst = (ours - exact).norm(dim=1) / single
    assert worst.max() < 1e-3  # the smallest, 1e-6 of the largest; fp32 is 6e-8 of that
    assert worst[: len(worst) // 2].max() < 1e-8
    short = proxy._leading(weight.float(), min(shape)).double()
    short = torch.where(short.gather(1, short.abs().argmax(1, keepdim=True)) < 0, -short, short)
    assert ((short - exact).norm(dim=1) / single).max() > 0.1


def test_signs_are_fixed() -> None:
    """The decomposition's own signs are arbitrary, and these changes of the weight leave the rest of A as it is."""
    weight = value_weight(tiny_model("tiny-llada"), 1)
    ours = singular_proxy(weight, 8)
    assert torch.equal(ours, singular_proxy(weight, 8))
    for other in (-weight, weight.flip(0), weight.roll(7, 0)):
        torch.testing.assert_close(singular_proxy(other, 8), ours, atol=1e-3, rtol=0)
    assert ours.abs().max() > 0.1
    assert (ours.gather(1, ours.abs().argmax(1, keepdim=True)) > 0).all()


@pytest.mark.parametrize(
    ("rank", "num_rows"), [(2, 2), (32, 32), (1, 32), (1.0, 32), (0.5, 16), (0.99, 31), (0.001, 1), (7.0, 7)]
)
def test_ranks(rank: float, num_rows: int) -> None:
    model = tiny_model("tiny-dream")
    assert proxies(model, rank).shape == (3, num_rows, 64)
    assert torch.equal(proxies(model, rank), proxies(model, 1)[:, :num_rows])


@pytest.mark.parametrize("rank", [0, -1, 33, 2.5, float("nan"), float("inf")])
def test_a_rank_out_of_range(rank: float, tmp_path: Path) -> None:
    says = rf"proxy rank is {rank}; it is a whole number in \[2, 32\], or a fraction in \(0, 1\]"
    with pytest.raises(ConfigError, match=says):
        proxies(tiny_model("tiny-dream"), rank)
    with pytest.raises(ConfigError, match=says):
        load_or_compute(tiny_model("tiny-dream"), rank, tmp_path)
    assert not list(tmp_path.iterdir())


def test_more_values_than_hidden_numbers() -> None:
    """No model of ours is so; a weight of that shape has D directions at most."""
    weight = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    assert singular_proxy(weight, 1).shape == (5, 5)
    torch.testing.assert_close(gram(singular_proxy(weight, 5)), weight.T @ weight, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"in \[2, 5\]"):
        singular_proxy(weight, 6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_decomposed_in_fp32(dtype: torch.dtype) -> None:
    weight = value_weight(tiny_model("tiny-dream"), 2).to(dtype)
    ours = singular_proxy(weight, 8)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, singular_proxy(weight.float(), 8))


def test_weights_in_8_bits() -> None:
    """Proxies of the rounded weights, which the values are made with."""
    model = quantize_(copy.deepcopy(tiny_model("tiny-dream")), "fp8")
    c = model.config
    for layer, ours in enumerate(proxies(model, 8)):
        dense = model.layers[layer].attn.qkv.weight.dequantize()[(c.num_heads + c.num_kv_heads) * c.head_dim :]
        assert torch.equal(ours, singular_proxy(dense, 8))
        assert not torch.equal(ours, proxies(tiny_model("tiny-dream"), 8)[layer])


# --- drift ---

vectors = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=3).map(torch.tensor)


@given(vectors, vectors)
def test_drift_is_one_minus_cosine(new: Tensor, old: Tensor) -> None:
    drift = cosine_drift(new, old)
    assert drift.dtype == torch.float32
    assert drift.shape == ()
    assert 0 <= drift <= 2
    assert torch.equal(drift, cosine_drift(old, new))
    assert cosine_drift(new, new) == 0
    if new.any() != old.any():
        assert drift == 1
    elif new.any():
        a, b = new.double(), old.double()
        a, b = a / a.abs().max(), b / b.abs().max()
        assert drift.item() == pytest.approx(1 - float(a @ b / (a.norm() * b.norm())), abs=1e-6)
        assert cosine_drift(new, -new).item() == pytest.approx(2)


def test_zero_vectors() -> None:
    some, none = torch.tensor([0.0, 2.0]), torch.zeros(2)
    new, old = torch.stack([none, none, some, some]), torch.stack([none, some, none, 3 * some])
    assert cosine_drift(new, old).tolist() == [0, 1, 1, 0]


def test_drifts_of_many_rows_in_16_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 4, 5, 32, generator=generator).bfloat16()
    drift = cosine_drift(new, old)
    assert drift.shape == (4, 5)
    assert drift.dtype == torch.float32
    want = 1 - torch.nn.functional.cosine_similarity(new.double(), old.double(), dim=-1)
    torch.testing.assert_close(drift.double(), want, atol=1e-6, rtol=0)


def test_small_drifts_keep_their_digits() -> None:
    """Half the square of an angle of 1e-4: in fp32, 1 - cos says 0 or 6e-8."""
    new, old = torch.tensor([1.0, 1e-4]), torch.tensor([1.0, 0.0])
    assert cosine_drift(new, old).item() == pytest.approx(5e-9, rel=1e-3)
    plain = 1 - torch.nn.functional.cosine_similarity(new, old, dim=-1)
    assert plain.item() != pytest.approx(5e-9, rel=1e-3)  # negative control


# --- kept beside the checkpoint ---


@pytest.fixture
def num_computed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A rank for each time that all layers are decomposed."""
    ranks: list[float] = []

    def counted(model: Transformer, rank: float) -> Tensor:
        ranks.append(rank)
        return proxies(model, rank)

    monkeypatch.setattr(proxy, "proxies", counted)
    return ranks


def stored_shape(path: Path) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return list(file.get_slice("proxy").get_shape())


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_the_largest_rank_so_far_is_kept(tmp_path: Path, num_computed: list[float]) -> None:
    model = tiny_model("tiny-dream")
    for rank, computed in ((8, 1), (8, 1), (2, 1), (0.25, 1), (16, 2), (9, 2), (1, 3), (31, 3), (1, 3)):
        assert torch.equal(load_or_compute(model, rank, tmp_path), proxies(model, rank))
        assert len(num_computed) == computed, rank
    assert files(tmp_path) == ["unmask/proxy-float32.safetensors"]
    assert stored_shape(proxy_file(model, tmp_path)) == [3, 32, 64]


def test_without_a_directory_nothing_is_kept(num_computed: list[float]) -> None:
    model = tiny_model("tiny-dream")
    for computed in (1, 2):
        assert torch.equal(load_or_compute(model, 8), proxies(model, 8))
        assert len(num_computed) == computed


def test_other_value_weights_make_a_file_stale(tmp_path: Path, num_computed: list[float]) -> None:
    """One number of one layer is enough; other weights of the model do not matter."""
    load_or_compute(tiny_model("tiny-dream"), 8, tmp_path)
    model = copy.deepcopy(tiny_model("tiny-dream"))
    model.layers[1].attn.qkv.weight[0] += 1
    model.layers[1].attn.qkv.bias += 1
    load_or_compute(model, 8, tmp_path)
    assert len(num_computed) == 1
    value_weight(model, 2)[-1, -1] += 0.5
    with pytest.warns(UserWarning, match="belongs to other value weights .* its proxies are computed again"):
        ours = load_or_compute(model, 8, tmp_path)
    assert torch.equal(ours, proxies(model, 8))
    assert not torch.equal(ours, proxies(tiny_model("tiny-dream"), 8))
    load_or_compute(model, 8, tmp_path)  # replaced: no warning
    assert len(num_computed) == 2


def test_each_type_of_weights_has_its_file(tmp_path: Path, num_computed: list[float]) -> None:
    base = tiny_model("tiny-dream")
    models = [base, copy.deepcopy(base).bfloat16(), quantize_(copy.deepcopy(base), "fp8")]
    for _ in range(2):
        for model in models:
            assert torch.equal(load_or_compute(model, 4, tmp_path), proxies(model, 4))
    assert len(num_computed) == 3
    assert files(tmp_path) == [
        f"unmask/proxy-{dtype}.safetensors" for dtype in ("bfloat16", "float32", "float8_e4m3fn")
    ]
    # The scales are part of a weight in 8 bits.
    models[2].layers[0].attn.qkv.scale[-1] *= 2
    with pytest.warns(UserWarning, match="other value weights"):
        load_or_compute(models[2], 4, tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "shape", "type", "name", "no digest", "folder"])
def test_a_damaged_file_is_replaced(tmp_path: Path, damage: str) -> None:
    model = tiny_model("tiny-dream")
    want = load_or_compute(model, 8, tmp_path)
    path = proxy_file(model, tmp_path)
    with safe_open(path, framework="pt") as file:
        digest = file.metadata()
    made = {
        "shape": ({"proxy": want[:2].clone()}, digest),
        "type": ({"proxy": want.half()}, digest),
        "name": ({"proxies": want}, digest),
        "no digest": ({"proxy": want}, None),
    }
    if damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage in made:
        save_file(made[damage][0], path, metadata=made[damage][1])
    else:
        path.write_bytes({"cut": path.read_bytes()[:-100], "empty": b"", "text": b"no tensors here"}[damage])
    with pytest.warns(UserWarning, match="its proxies are computed again"):
        assert torch.equal(load_or_compute(model, 8, tmp_path), want)
    if damage != "folder":
        assert torch.equal(load_or_compute(model, 8, tmp_path), want)  # sound again: no warning
        assert files(tmp_path) == ["unmask/proxy-float32.safetensors"]


def unwritable(tmp_path: Path) -> list[Path]:
    """No such directory; a file in its place; a file where ours would have its folder. Not even root may write."""
    (tmp_path / "file").touch()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "unmask").touch()
    return [tmp_path / name for name in ("missing", "file", "taken")]


def test_beside_a_checkpoint_that_cannot_be_written_the_users_cache_is_used(
    tmp_path: Path, cache_home: Path, num_computed: list[float]
) -> None:
    """One file for the same weights, wherever they lie; other weights and types have their own."""
    base, directories = tiny_model("tiny-dream"), unwritable(tmp_path)
    other = copy.deepcopy(base)
    value_weight(other, 2)[-1, -1] += 0.5
    for model in (base, other, copy.deepcopy(base).bfloat16(), quantize_(copy.deepcopy(base), "fp8")):
        before = len(num_computed)
        for directory in directories:
            assert torch.equal(load_or_compute(model, 8, directory), proxies(model, 8))
        assert len(num_computed) == before + 1
    assert len(files(cache_home)) == 4
    assert all(name.startswith("unmask/proxy-") for name in files(cache_home))


def test_what_is_kept_beside_the_checkpoint_goes_first(tmp_path: Path, cache_home: Path) -> None:
    """Also for a larger rank, once it can be written there."""
    model = tiny_model("tiny-dream")
    load_or_compute(model, 4, tmp_path)
    assert files(cache_home) == []
    load_or_compute(model, 8, tmp_path)
    assert stored_shape(proxy_file(model, tmp_path)) == [3, 8, 64]
    assert files(cache_home) == []


def test_a_foreign_file_beside_the_checkpoint_is_no_news_where_the_users_cache_has_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_computed: list[float]
) -> None:
    model, other = tiny_model("tiny-dream"), copy.deepcopy(tiny_model("tiny-dream"))
    value_weight(other, 0)[0, 0] += 0.5
    load_or_compute(other, 8, tmp_path)
    # As a checkpoint that somebody else filled and we may not write to.
    write = proxy._write
    monkeypatch.setattr(proxy, "_write", lambda path, *rest: tmp_path not in path.parents and write(path, *rest))
    with pytest.warns(UserWarning, match="other value weights"):
        load_or_compute(model, 8, tmp_path)
    assert torch.equal(load_or_compute(model, 8, tmp_path), proxies(model, 8))  # found: no warning
    assert len(num_computed) == 2


def test_a_damaged_file_in_the_users_cache_is_replaced(tmp_path: Path, cache_home: Path) -> None:
    model, directory = tiny_model("tiny-dream"), unwritable(tmp_path)[0]
    want = load_or_compute(model, 8, directory)
    (name,) = files(cache_home)
    (cache_home / name).write_bytes(b"no tensors here")
    with pytest.warns(UserWarning, match="cannot be read .* its proxies are computed again"):
        assert torch.equal(load_or_compute(model, 8, directory), want)
    assert torch.equal(load_or_compute(model, 8, directory), want)
    assert files(cache_home) == [name]


@pytest.mark.parametrize("said", ["", "relative/path", None])
def test_the_users_cache(said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_CACHE_HOME is ignored, as its specification wants."""
    monkeypatch.setenv("HOME", str(tmp_path))
    if said is None:
        monkeypatch.delenv("XDG_CACHE_HOME")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", said)
    assert cache_directory() == tmp_path / ".cache" / "unmask"
    load_or_compute(tiny_model("tiny-dream"), 4, tmp_path / "missing")
    (name,) = files(tmp_path)
    assert name.startswith(".cache/unmask/proxy-")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_directory() == Path("/elsewhere/unmask")


def test_where_nothing_can_be_written_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_computed: list[float]
) -> None:
    """Nor without a home."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    model = tiny_model("tiny-dream")
    directories = unwritable(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for directory in directories:
        assert torch.equal(load_or_compute(model, 8, directory), proxies(model, 8))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert torch.equal(load_or_compute(model, 8, directories[0]), proxies(model, 8))
    assert len(num_computed) == 4
    assert files(tmp_path) == ["file", "taken/unmask"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_checkpoint(tmp_path: Path, cache_home: Path) -> None:
    model = tiny_model("tiny-dream")
    tmp_path.chmod(0o555)
    assert torch.equal(load_or_compute(model, 8, tmp_path), proxies(model, 8))
    assert files(tmp_path) == []
    assert len(files(cache_home)) == 1


def test_many_writers_at_once(tmp_path: Path) -> None:
    """Of several ranks: whoever comes last, the file is whole, and nothing lies beside it."""
    model, ranks = tiny_model("tiny-dream"), (2, 4, 8, 16)
    want = {rank: proxies(model, rank) for rank in ranks}
    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        got = pool.map(lambda rank: (rank, load_or_compute(model, rank, tmp_path)), ranks * 10)
        assert all(torch.equal(made, want[rank]) for rank, made in got)
    assert files(tmp_path) == ["unmask/proxy-float32.safetensors"]
    assert stored_shape(proxy_file(model, tmp_path))[1] in ranks


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file never has the name, and is not left under another."""
    model = tiny_model("tiny-dream")
    load_or_compute(model, 4, tmp_path)

    def full_disk(_: Any, path: Path, **__: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(proxy, "save_file", full_disk)
    assert torch.equal(load_or_compute(model, 8, tmp_path), proxies(model, 8))
    assert files(tmp_path) == ["unmask/proxy-float32.safetensors"]
    assert stored_shape(proxy_file(model, tmp_path)) == [3, 4, 64]
