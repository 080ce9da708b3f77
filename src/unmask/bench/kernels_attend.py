"""The attention kernels: right, how near to their floor, and which tiles are best.

S seats, R rows of a seat, N positions, L layers, E entries, M rows, H query heads, Hkv key heads, hd head size
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.bench.checking import BOUNDS, error, errors_of, poisoned, within, worst_error
from unmask.bench.floor import Cost, attend_cost
from unmask.bench.timing import capture, seconds_a_call
from unmask.bench.trial import Case, Trial
from unmask.ops.reference import attend as reference

PAGE_SIZE = 16
MIN_POOL_BYTES = 600e6
"""K and V of all layers that a measurement goes through: ten times the cache, so every layer's come from memory."""
MAX_LAYERS = 160
LARGE = 30.0
"""Of some queries: exponentials of their logits, up to 130, leave the range of fp32."""
MASS_BOUND = 5e-4
"""Of both masses, in every type: fp32 sums of exact products. Tensor cores add them with a few bits less."""


class ReferenceKernels:
    """The reference under the names of the kernels, for devices without them."""

    attend = staticmethod(reference.attend)
    tracking_mass = staticmethod(reference.tracking_mass)

    @dataclass(frozen=True)
    class Tile:
        num_splits: int = 1

    @classmethod
    def choose_tile(cls, q_M: Tensor, k_E: Tensor, sight: reference.Sight) -> Tile:  # noqa: ARG003
        return cls.Tile()

    @staticmethod
    def attend_in_tiles(q_M: Tensor, k_E: Tensor, v_E: Tensor, sight: reference.Sight, tile: Any) -> Tensor:  # noqa: ARG004
        return reference.attend(q_M, k_E, v_E, sight)

    @staticmethod
    def attend_and_mass(
        q_M: Tensor,
        k_E: Tensor,
        v_E: Tensor,
        sight: reference.Sight,
        counts_M: Tensor,
        tile: Any = None,  # noqa: ARG004
    ) -> tuple[Tensor, Tensor]:
        return reference.attend(q_M, k_E, v_E, sight), reference.tracking_mass(q_M, k_E, sight, counts_M)


@dataclass(frozen=True)
class Shape:
    """A pass in which every row sees its whole canvas."""

    seats: int
    rows: int
    keys: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"{self.seats} x {self.rows} rows x {self.keys} keys, {self.heads}/{self.kv_heads} heads"

    @property
    def sizes(self) -> dict[str, int]:
        """What tables say of it."""
        return {
            "seats": self.seats,
            "rows": self.rows,
            "keys": self.keys,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
        }

    @property
    def cost(self) -> Cost:
        return attend_cost(self.seats, self.rows, self.keys, self.heads, self.kv_heads, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        return 2 * (self.seats * self.keys + PAGE_SIZE) * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True)
class Call:
    """The arguments of one attention and of its mass."""

    q_M: Tensor
    k_E: Tensor
    v_E: Tensor
    sight: reference.Sight
    counts_M: Tensor


# Is it right?


def make_call(
    num_rows: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    num_positions: int,
    dtype: torch.dtype,
    *,
    num_live: int | None = None,
    per_seat: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cuda",
    fill: float = float("nan"),
) -> Call:
    """Random pages and reaches, some rows blind, some of large logits; what no row sees holds ``fill``."""
    torch.manual_seed(seed)
    num_seats, num_pages = len(num_rows), num_positions // PAGE_SIZE
    pages_SP = (1 + torch.randperm(num_seats * num_pages)).view(num_seats, num_pages)
    num_canvas = (1 + num_seats * num_pages) * PAGE_SIZE
    num_scratch = max(64, num_live or 0)
    num_entries = num_canvas + num_scratch * num_seats
    counts_S = torch.tensor(num_rows)
    if per_seat is None:
        seat_M = torch.arange(num_seats).repeat_interleave(counts_S)
        real_M = torch.ones(len(seat_M), dtype=torch.bool)
    else:
        seat_M = torch.arange(num_seats).repeat_interleave(per_seat)
        real_M = (torch.arange(per_seat) < counts_S[:, None]).flatten()
    longest_S = torch.randint(num_positions // 2, num_positions, (num_seats,))
    short_M = torch.randint(0, num_positions // 2, seat_M.shape)
    see_M = torch.where(torch.rand(len(seat_M)) < 0.5, longest_S[seat_M], short_M)
    see_M[5::9] = 0
    see_M = (see_M * real_M).int()
    entry_SN = (pages_SP[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)
    seen_SN = torch.zeros(num_seats, num_positions, dtype=torch.bool)
    for seat in range(num_seats):
        own_M = see_M[seat_M == seat]
        seen_SN[seat, : int(own_M.max()) if len(own_M) else 0] = True
    live: dict[str, Any] = {}
    seen_E = torch.zeros(num_entries, dtype=torch.bool)
    if num_live is not None:
        pos_SJ = torch.stack([torch.randperm(num_positions)[:num_live] for _ in range(num_seats)])
        scratch_SJ = num_canvas + num_scratch * torch.arange(num_seats)[:, None] + torch.arange(num_live)
        live_SJ = torch.where(torch.rand(num_seats, num_live) < 0.5, entry_SN.gather(1, pos_SJ), scratch_SJ)
        bits_MJ = (torch.rand(len(seat_M), num_live) < 0.5) & real_M[:, None]
        bits_MJ[:, -1] &= num_live == 1  # one that nobody sees
        shadow_SN = torch.zeros(num_seats, num_positions, dtype=torch.bool).scatter_(1, pos_SJ, True)
        seen_SN &= ~shadow_SN
        for seat in range(num_seats):
            seen_E[live_SJ[seat][bits_MJ[seat_M == seat].any(0)]] = True
        live = {"live_SJ": live_SJ, "live_bits_MJ": bits_MJ, "shadow_SN": shadow_SN}
    seen_E[entry_SN[seen_SN]] = True
    sight = reference.Sight(
        seat_M=seat_M,
        see_M=see_M,
        num_rows_S=counts_S,
        page_table_SP=pages_SP.int(),
        page_size=PAGE_SIZE,
        num_keys=num_positions if per_seat is not None or not len(see_M) else int(see_M.max()),
        per_seat=per_seat,
        **live,
    )
    k_LE, v_LE = (torch.randn(2, num_entries, heads[1], head_dim, device=device) for _ in range(2))
    for pool in (k_LE, v_LE):
        pool[:, ~seen_E.to(device)] = fill
    q_M = torch.randn(len(seat_M), heads[0], head_dim, device=device)
    if dtype != torch.float32:  # whose bound is less than what logits of 100 are rounded by
        q_M[3::7] *= LARGE
    counts_M = (torch.rand(len(seat_M)) < 0.3) & real_M & (see_M > 0)
    return Call(q_M.to(dtype), k_LE.to(dtype)[1], v_LE.to(dtype)[1], _moved(sight, device), counts_M.to(device))


def _moved(sight: reference.Sight, device: torch.device | str) -> reference.Sight:
    tensors = {name: value for name, value in vars(sight).items() if isinstance(value, Tensor)}
    return replace(sight, **{name: value.to(device) for name, value in tensors.items()})  # type: ignore[arg-type]


def exact(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """The reference in fp64: attention, raw mass, softmax mass. It must not meet the fill."""
    q_M, k_E, v_E = call.q_M.double(), call.k_E.double().nan_to_num(0), call.v_E.double().nan_to_num(0)
    raw_SN = reference.tracking_mass(q_M, k_E, call.sight, call.counts_M)
    soft_SN = reference.tracking_mass(q_M, k_E, call.sight, call.counts_M, softmax=True)
    return reference.attend(q_M, k_E, v_E, call.sight), raw_SN, soft_SN


def check(kernels: Any, call: Call, *, num_splits: int | None = None) -> dict[str, Any]:
    """Attention, both masses, and the sweep that gives attention and mass together."""
    right_M, raw_SN, soft_SN = exact(call)
    q_M, k_E, v_E, sight, counts_M = call.q_M, call.k_E, call.v_E, call.sight, call.counts_M
    tile = kernels.choose_tile(q_M, k_E, sight)
    tile = tile if num_splits is None else replace(tile, num_splits=num_splits)
    with poisoned():
        out_M = kernels.attend_in_tiles(q_M, k_E, v_E, sight, tile)
        again_M = kernels.attend_in_tiles(q_M, k_E, v_E, replace(sight), tile)
        outputs = {
            "attend": (out_M, right_M),
            "raw": (kernels.tracking_mass(q_M, k_E, sight, counts_M), raw_SN),
            "softmax": (kernels.tracking_mass(q_M, k_E, sight, counts_M, softmax=True), soft_SN),
        }
        both_M, both_SN = kernels.attend_and_mass(q_M, k_E, v_E, sight, counts_M, tile)
        outputs |= {"attend with mass": (both_M, right_M), "mass with attend": (both_SN, raw_SN)}
    found = errors_of(**outputs)
    plain_M = reference.attend(q_M, k_E.nan_to_num(0), v_E.nan_to_num(0), sight)
    same, blind = torch.equal(out_M, again_M), not out_M[right_M.abs().sum((1, 2)) == 0].any()
    bound, masses = BOUNDS[q_M.dtype], ("raw", "softmax", "mass with attend")
    bounds = {name: MASS_BOUND if name in masses else bound for name in outputs}
    ok = same and blind and within(found, bounds)
    return {**found, "reference": error(plain_M, right_M), "same again": same, "blind are zero": blind, "ok": ok}


def check_capture(kernels: Any) -> dict[str, Any]:
    """A captured call, its tables included, follows what changes in its tensors: pages, reaches, counts, bits."""
    calls = [
        make_call((128, 100, 0, 7), (8, 8), 64, 512, torch.bfloat16, num_live=5, per_seat=128, seed=seed, fill=3.0)
        for seed in range(3)
    ]
    still = calls[0]

    def step() -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = kernels.attend_and_mass(
            still.q_M, still.k_E, still.v_E, replace(still.sight), still.counts_M
        )
        return both

    graph = capture(step)
    worst: dict[str, float] = {}
    right = True
    for call in calls[1:]:
        for into, new in ((still.q_M, call.q_M), (still.k_E, call.k_E), (still.v_E, call.v_E)):
            into.copy_(new)
        for name in ("see_M", "num_rows_S", "page_table_SP", "live_SJ", "live_bits_MJ", "shadow_SN"):
            getattr(still.sight, name).copy_(getattr(call.sight, name))
        still.counts_M.copy_(call.counts_M)
        graph.graph.replay()
        right_M, raw_SN, _ = exact(call)
        found = errors_of(attend=(graph.result[0], right_M), mass=(graph.result[1], raw_SN))
        right = right and within(found, {"attend": BOUNDS[torch.bfloat16], "mass": MASS_BOUND})
        worst = {name: max(value, worst.get(name, 0.0)) for name, value in found.items()}
    return {**worst, "ok": right}


QUICK = ("GQA, ragged, 4 splits", "fixed, 23 live", "GQA, fixed, 9 live", "few rows", "fp16, GQA, 33 live", "capture")


def checks(
    kernels: Any, device: torch.device | str = "cuda", *, quick: bool = False
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Rows that follow each other and fixed shapes, live lists, grouped heads, every type; ``quick`` runs six."""
    odd, many = (1, 127, 0, 129, 16), (1, 128, 129, 0, 3)
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases: list[tuple[str, dict[str, Any], int | None]] = [
        ("ragged", {"num_rows": odd}, None),
        ("GQA, ragged, 4 splits", {"num_rows": odd, "heads": (28, 4)}, 4),
        ("fixed, 16 splits", {"num_rows": many, "per_seat": 160}, 16),
        ("fixed, 1 live", {"num_rows": many, "per_seat": 160, "num_live": 1}, None),
        ("fixed, 23 live", {"num_rows": many, "per_seat": 160, "num_live": 23}, 3),
        ("ragged, 64 live", {"num_rows": odd, "num_live": 64}, None),
        ("ragged, 201 live", {"num_rows": odd, "num_live": 201}, 2),
        ("GQA, fixed, 9 live", {"num_rows": many, "heads": (28, 4), "per_seat": 129, "num_live": 9}, None),
        ("head size 64, 5 heads, fixed", {"num_rows": many, "head_dim": 64, "heads": (5, 5), "per_seat": 130}, None),
        ("canvas of 4096", {"num_rows": (16, 128, 1), "num_positions": 4096, "per_seat": 128}, None),
        ("few rows", {"num_rows": (16, 5, 0), "per_seat": 16, "num_live": 2}, None),
        ("fp16, GQA, 33 live", {"num_rows": many, "heads": (28, 4), "per_seat": 130, "num_live": 33, "dtype": fp16}, 2),
        ("fp32, GQA, 17 live", {"num_rows": many, "heads": (28, 4), "per_seat": 130, "num_live": 17, "dtype": fp32}, 2),
    ]
    usual: dict[str, Any] = {"heads": (32, 32), "head_dim": 128, "num_positions": 1040, "dtype": bf16, "device": device}
    for name, changes, num_splits in cases:
        if not quick or name in QUICK:
            yield name, lambda c=changes, z=num_splits: check(kernels, make_call(**usual | c), num_splits=z)  # type: ignore[misc]
    yield "capture", lambda: check_capture(kernels)
    if not quick:
        yield "beyond 32 bits", lambda: check_wide(kernels, device)


def check_wide(kernels: Any, device: torch.device | str) -> dict[str, Any]:
    """A layer of more than 2^31 elements, whose last pages are the ones in use."""
    call = make_call((20, 3), (32, 32), 128, 512, torch.bfloat16, per_seat=32, device=device)
    num_entries = 2**31 // (32 * 128) + 4096
    shift = num_entries // PAGE_SIZE * PAGE_SIZE - len(call.k_E) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE
    wide = []
    for each in (call.k_E, call.v_E):
        pool = torch.full((num_entries, 32, 128), float("nan"), dtype=torch.bfloat16, device=device)
        pool[shift : shift + len(each)] = each[: num_entries - shift]
        wide.append(pool)
    sight = replace(call.sight, page_table_SP=call.sight.page_table_SP + shift // PAGE_SIZE)
    with poisoned():
        out_M = kernels.attend(call.q_M, wide[0], wide[1], sight)
    found = errors_of(attend=(out_M, exact(call)[0]))
    return {**found, "ok": within(found, BOUNDS[torch.bfloat16])}


# How fast?


@dataclass(frozen=True)
class Layers:
    """A pool of so many layers, and a pass over it."""

    shape: Shape
    q_M: Tensor
    k_LE: Tensor
    v_LE: Tensor
    sight: reference.Sight
    counts_M: Tensor

    def __len__(self) -> int:
        return len(self.k_LE)

    @classmethod
    def of(cls, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Layers:
        on_gpu = torch.device(device).type == "cuda"
        num_layers = min(MAX_LAYERS, max(2, -(-int(MIN_POOL_BYTES) // shape.layer_bytes))) if on_gpu else 2
        num_pages = shape.keys // PAGE_SIZE
        num_entries = (1 + shape.seats * num_pages) * PAGE_SIZE
        pages_SP = 1 + torch.randperm(shape.seats * num_pages, device=device).view(shape.seats, num_pages).int()
        seat_M = torch.arange(shape.seats, device=device).repeat_interleave(shape.rows)
        sight = reference.Sight(
            seat_M=seat_M,
            see_M=torch.full_like(seat_M, shape.keys, dtype=torch.int32),
            num_rows_S=torch.full((shape.seats,), shape.rows, device=device),
            page_table_SP=pages_SP,
            page_size=PAGE_SIZE,
            num_keys=shape.keys,
            per_seat=shape.rows,
        )

        def randn(*size: int) -> Tensor:
            return torch.randn(*size, device=device, dtype=dtype)

        pool = (num_layers, num_entries, shape.kv_heads, shape.head_dim)
        counts_M = torch.arange(len(seat_M), device=device) % shape.rows < 16
        q_M = randn(len(seat_M), shape.heads, shape.head_dim)
        return cls(shape, q_M, randn(*pool), randn(*pool), sight, counts_M)

    def over(self, layer: Callable[[Tensor, Tensor], Any]) -> Callable[[int], Any]:
        """``layer`` of a layer's K and V, by the layer's number."""
        return lambda number: layer(self.k_LE[number % len(self)], self.v_LE[number % len(self)])

    def seconds(self, layer: Callable[[Tensor, Tensor], Any]) -> float:
        """Of one layer."""
        return seconds_a_call(self.over(layer), len(self), self.q_M.device)

    def dense(self) -> Callable[[int], Any]:
        """torch's attention over K and V that lie gathered already; query heads of a key head are more rows."""
        s, entry_SN = self.shape, self.sight.entries()[:, : self.shape.keys]
        group = s.heads // s.kv_heads
        q = self.q_M.view(s.seats, s.rows, s.kv_heads, group, s.head_dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(s.seats, s.kv_heads, group * s.rows, s.head_dim)
        k_L, v_L = ([pool[entry_SN].transpose(1, 2) for pool in planes] for planes in (self.k_LE, self.v_LE))
        return lambda number: F.scaled_dot_product_attention(q, k_L[number], v_L[number])


def _right(layers: Layers) -> Tensor:
    """The first layer's attention in fp64, seat by seat: all of it at once is gigabytes."""
    out = []
    for q_R, entry_N in zip(layers.q_M.split(layers.shape.rows), layers.sight.entries()[:, : layers.shape.keys]):
        seat = (q_R, layers.k_LE[0, entry_N], layers.v_LE[0, entry_N])
        out.append(reference.attention(*(each[None].double() for each in seat))[0])
    return torch.cat(out)


def trial(kernels: Any, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Trial:
    """The kernel, the reference (which gathers), and as a part torch's attention over K and V gathered already."""
    layers = Layers.of(shape, device, dtype)
    q_M, sight = layers.q_M, layers.sight
    tile = kernels.choose_tile(q_M, layers.k_LE[0], sight)

    def errors() -> dict[str, float]:
        with poisoned():
            out_M = kernels.attend(q_M, layers.k_LE[0], layers.v_LE[0], sight)
        return errors_of(attend=(out_M, _right(layers)))

    return Trial(
        errors=errors,
        bound=BOUNDS[dtype],
        cost=shape.cost,
        ours=layers.over(lambda k_E, v_E: kernels.attend(q_M, k_E, v_E, sight)),
        others={"gather + attention": layers.over(lambda k_E, v_E: reference.attend(q_M, k_E, v_E, sight))},
        parts={"attention alone": layers.dense()},
        num_calls=len(layers),
        facts={"tile": list(asdict(tile).values())},
    )


def mass_trial(kernels: Any, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> Trial:
    """Attention with the raw mass of 16 rows a seat, against one after the other, and what its parts cost."""
    layers = Layers.of(shape, device, dtype)
    q_M, sight, counts_M = layers.q_M, layers.sight, layers.counts_M

    def errors() -> dict[str, float]:
        """As it is timed: two layers that add to one mass."""
        mass = reference.MassSum(counts_M)
        with poisoned():
            out_M, _ = (kernels.attend(q_M, layers.k_LE[at], layers.v_LE[at], sight, mass) for at in range(2))
            mass_SN = mass.total_SN()
        assert mass_SN is not None
        right_SN = sum(reference.tracking_mass(q_M.double(), k_E.double(), sight, counts_M) for k_E in layers.k_LE[:2])
        assert isinstance(right_SN, Tensor)
        return errors_of(attend=(out_M, _right(layers)), mass=(mass_SN, right_SN))

    sums: list[reference.MassSum] = []

    def together(attend: Any) -> Callable[[int], Any]:
        """All layers add to one mass, as in a pass."""

        def layer(number: int) -> Any:
            if number == 0:
                sums[:] = [reference.MassSum(counts_M)]
            out_M = attend(q_M, layers.k_LE[number], layers.v_LE[number], sight, sums[0])
            return out_M if number + 1 < len(layers) else (out_M, sums[0].total_SN())

        return layer

    def apart(attend: Any, mass: Any) -> Callable[[int], Any]:
        return layers.over(lambda k, v: (attend(q_M, k, v, sight), mass(q_M, k, sight, counts_M)))

    return Trial(
        errors=errors,
        bound={"attend": BOUNDS[dtype], "mass": MASS_BOUND},
        cost=shape.cost,
        ours=together(kernels.attend),
        others={
            "gather + attention, then mass": together(reference.attend),
            "two sweeps": apart(kernels.attend, kernels.tracking_mass),
        },
        parts={
            "attend": layers.over(lambda k, v: kernels.attend(q_M, k, v, sight)),
            "raw mass": layers.over(lambda k, _: kernels.tracking_mass(q_M, k, sight, counts_M)),
            "softmax mass": layers.over(lambda k, _: kernels.tracking_mass(q_M, k, sight, counts_M, softmax=True)),
        },
        num_calls=len(layers),
    )


def padded(kernels: Any, shape: Shape, device: torch.device | str) -> Trial:
    """A fifth of the rows are padding, and canvases end 1 to 16 positions early: no slower than full ones."""
    layers = Layers.of(shape, device)
    rows_M = torch.arange(len(layers.q_M), device=device)
    see_M = layers.sight.see_M - rows_M.int() // shape.rows % 16 - 1
    see_M = torch.where(rows_M % shape.rows < shape.rows * 4 // 5, see_M, 0).int()
    return _only_ours(kernels, layers, replace(layers.sight, see_M=see_M))


def ragged(kernels: Any, shape: Shape, device: torch.device | str) -> Trial:
    """All rows of every canvas, seat by seat: what admission and refresh run."""
    layers = Layers.of(shape, device)
    return _only_ours(kernels, layers, replace(layers.sight, per_seat=None))


def _only_ours(kernels: Any, layers: Layers, sight: reference.Sight) -> Trial:
    q_M, first = layers.q_M, (layers.k_LE[0], layers.v_LE[0])

    def errors() -> dict[str, float]:
        with poisoned():
            out_M = kernels.attend(q_M, *first, sight)
        k_E, v_E = (each.double() for each in first)
        return errors_of(attend=(out_M, reference.attend(q_M.double(), k_E, v_E, sight)))

    return Trial(
        errors=errors,
        bound=BOUNDS[q_M.dtype],
        cost=layers.shape.cost,
        ours=layers.over(lambda k, v: kernels.attend(q_M, k, v, sight)),
        num_calls=len(layers),
    )


SHAPES = tuple(
    Shape(*sizes)
    for sizes in (
        (32, 128, 1536),
        (1, 128, 1536),
        (32, 16, 1536),
        (8, 128, 1536),
        (1, 16, 1536),
        (32, 160, 1536),
        (1, 160, 1536),
        (32, 64, 1536),
        (32, 128, 512),
        (32, 128, 1536, 28, 4),
        (1, 128, 1536, 28, 4),
        (32, 16, 1536, 28, 4),
    )
)
MASS_SHAPES = (Shape(32, 128, 1536), Shape(1, 128, 1536), Shape(32, 128, 1536, 28, 4))


def cases(kernels: Any, device: torch.device | str, *, quick: bool = False) -> Iterator[Case]:
    """The sizes that steps have, the most important first; ``quick`` takes five of them."""
    for shape in SHAPES[:4] if quick else SHAPES:
        yield Case("attend", shape.sizes, lambda s=shape: trial(kernels, s, device))  # type: ignore[misc]
    for shape in MASS_SHAPES[:1] if quick else MASS_SHAPES:
        yield Case("attend with mass", shape.sizes, lambda s=shape: mass_trial(kernels, s, device))  # type: ignore[misc]
    if not quick:
        main, whole = SHAPES[0], Shape(8, 1536, 1536)
        yield Case("attend", main.sizes | {"rows are": "4/5 real"}, lambda: padded(kernels, main, device))
        yield Case("attend", whole.sizes | {"rows are": "ragged"}, lambda: ragged(kernels, whole, device))


# Which tiles?


def time_tile(kernels: Any, layers: Layers, tile: Any) -> dict[str, Any]:
    q_M, sight = layers.q_M, layers.sight
    seconds = layers.seconds(lambda k, v: kernels.attend_in_tiles(q_M, k, v, sight, tile))
    with poisoned():
        out_M = kernels.attend_in_tiles(q_M, layers.k_LE[0], layers.v_LE[0], sight, tile)
    right_M = _right(layers)
    errors = {"error": round(error(out_M, right_M), 5), "worst": round(worst_error(out_M, right_M), 5)}
    return {"us": round(1e6 * seconds, 2), **errors}


def best_of(kernels: Any, shape: Shape, tile_list: list[Any], device: torch.device | str) -> dict[str, Any]:
    """Every tile's time, the fastest first."""
    layers = Layers.of(shape, device)
    found: list[dict[str, Any]] = []
    for tile in tile_list:
        name = list(asdict(tile).values())
        try:
            found.append({"tile": name, **time_tile(kernels, layers, tile)})
        except Exception as failure:
            found.append({"tile": name, "us": float("inf"), "failed": f"{type(failure).__name__}: {failure}"[:120]})
    return {"op": "attend", **shape.sizes, "found": sorted(found, key=lambda each: float(each["us"]))}


def tiles(kernels: Any, device: torch.device | str = "cuda") -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """block_m, block_n, splits, warps, stages, most registers."""
    many = [
        (128, 32, 1, 8, 4, 128),
        (128, 32, 1, 8, 3, 128),
        (128, 32, 1, 8, 5, 128),
        (128, 32, 1, 8, 5, None),
        (128, 64, 1, 8, 3, None),
        (128, 64, 1, 8, 2, None),
        (128, 64, 1, 8, 4, None),
        (128, 128, 1, 8, 3, None),
        (128, 128, 1, 8, 2, None),
        (128, 32, 1, 4, 4, None),
        (128, 32, 1, 4, 3, None),
        (64, 64, 1, 4, 3, None),
        (64, 64, 1, 4, 2, 168),
        (64, 32, 1, 4, 4, 168),
        (64, 128, 1, 4, 2, None),
        (256, 32, 1, 8, 3, None),
    ]
    few = [
        (16, 64, 1, 4, 3, None),
        (16, 64, 1, 4, 4, None),
        (16, 128, 1, 4, 3, None),
        (16, 32, 1, 2, 4, None),
        (32, 64, 1, 4, 3, None),
        (64, 32, 1, 4, 4, 168),
        (64, 64, 1, 4, 3, None),
        (64, 64, 1, 4, 4, None),
        (64, 128, 1, 4, 2, None),
    ]
    bases = [(128, 32, 8, 4, 128), (128, 64, 8, 3, None), (64, 64, 4, 3, None), (64, 32, 4, 4, 168)]
    split = [(m, n, z, w, s, r) for m, n, w, s, r in bases for z in (1, 2, 4, 6, 8, 12)]
    narrow = [(16, 64, z, 4, 3, None) for z in (2, 4, 8, 12)] + [(64, 64, z, 4, 3, None) for z in (2, 4, 8, 12)]
    for shape, found in (
        (Shape(32, 128, 1536), many),
        (Shape(1, 128, 1536), split),
        (Shape(32, 16, 1536), few),
        (Shape(32, 160, 1536), many[:10]),
        (Shape(32, 128, 1536, 28, 4), many[:12]),
        (Shape(1, 16, 1536), narrow),
        (Shape(8, 128, 1536), [*many[:6], *((m, n, 2, w, s, r) for m, n, _, w, s, r in many[:6])]),
        (Shape(1, 128, 1536, 28, 4), [(m, n, z, w, s, r) for m, n, z, w, s, r in split if z > 2]),
    ):
        yield shape.name, lambda s=shape, t=found: best_of(kernels, s, [kernels.Tile(*each) for each in t], device)  # type: ignore[misc]
