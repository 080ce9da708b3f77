"""The Triton kernels of `logit_stats` against the reference: interpreted on the CPU, compiled where there is a GPU.

Logits are chosen, not hidden rows: the product then has one term a logit and is exact, so that ties are ties.

C rows, D hidden size, V vocabulary, B banned ids of a row
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.conftest import DEVICE, DTYPES, compile_for_h200, load_kernels
from unmask.ops.reference import logit_stats as reference
from unmask.ops.reference.logit_stats import LogitStats, Sampling

kernels = load_kernels("logit_stats")
pytestmark = pytest.mark.usefixtures("interpreted", "poisoned")

INF = torch.inf
ONE = kernels.Bands(max_rows=64, max_bytes=1 << 20, step=256, programs=1, block=64, num_warps=1)
"""All of the vocabulary in one band, one program a row."""
PARTS = replace(ONE, programs=999, block=16)
"""One band in as many programs as there can be."""
MANY = kernels.Bands(max_rows=4, max_bytes=4 * 4 * 48, step=48, programs=8, block=16, num_warps=1)
"""4 rows at a time, bands of 48 (96 in half precision), 2 programs for each row, the last ones shorter."""
LONG = replace(MANY, max_rows=64, max_bytes=64 * 4 * 48, programs=1)
"""64 rows at a time, one program for each and a band of 48 (96)."""
ALL = {"margin": True, "entropy": True}


def product(logits_CV: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden rows and a head with these logits, exactly: 2 * (logit / 2), and 0 else. Half of -inf is the lowest
    number, twice which is beyond the dtype."""
    half_VC = (logits_CV.T / 2).clamp(min=torch.finfo(dtype).min).to(dtype).contiguous()
    return (2 * torch.eye(len(logits_CV), dtype=dtype)).to(DEVICE), half_VC.to(DEVICE)


def randn(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=DEVICE)


def near(ours: LogitStats, exact: LogitStats) -> None:
    assert torch.equal(ours.token_C, exact.token_C), "another token"
    for name in ("prob_C", "neg_doubt_C", "neg_lag_C", "neg_entropy_C", "asked_prob_C"):
        have, wanted = getattr(ours, name), getattr(exact, name)
        assert (have.dtype, have.shape) == (torch.float32, wanted.shape)
        torch.testing.assert_close(
            have, wanted, rtol=1e-5, atol=1e-6, equal_nan=False, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(
    logits_CV: Tensor, bands: Sequence[Any] = (), dtype: torch.dtype = torch.float32, **said: Any
) -> tuple[LogitStats, Tensor]:
    """The stats, equal to the reference's in every cut, of the last one; and the probabilities."""
    hidden_CD, head_VD = product(logits_CV, dtype)
    exact = reference.logit_stats(hidden_CD, head_VD, **said)
    for cut in bands or (ONE, MANY):
        ours = kernels.logit_stats(hidden_CD, head_VD, bands=cut, **said)
        near(ours, exact)
    return ours, (hidden_CD @ head_VD.T).float().softmax(1)


# Cuts


def test_the_cuts_of_these_tests() -> None:
    assert (ONE.columns(5, 4, 110), ONE.part(5, 110)) == (110, 128)
    assert (PARTS.columns(5, 4, 110), PARTS.part(5, 110)) == (110, 16)
    assert (MANY.columns(4, 4, 110), MANY.part(4, 48)) == (48, 32)
    assert (MANY.columns(4, 2, 110), MANY.part(4, 96)) == (96, 48)


def test_the_cut_of_the_models() -> None:
    """Bands are multiples of the step, alike, and fit the buffer; 2,048 rows of LLaDA's vocabulary take 15."""
    for vocab_size, num_rows in ((126464, 1), (126464, 160), (126464, 2048), (152064, 2048), (97, 2048), (8449, 2048)):
        columns = kernels.BANDS.columns(num_rows, 2, vocab_size)
        assert columns == vocab_size or columns % kernels.BANDS.step == 0
        assert columns * num_rows * 2 <= kernels.BANDS.max_bytes or columns == kernels.BANDS.step
        assert columns <= vocab_size
        assert kernels.BANDS.part(num_rows, columns) % kernels.BANDS.block == 0
    assert -(-126464 // kernels.BANDS.columns(2048, 2, 126464)) == 15
    assert kernels.BANDS.columns(1, 2, 126464) == 126464


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "vocab_size"), [(1, 110), (1, 2), (1, 48), (5, 110), (9, 97), (127, 33), (129, 49)]
)
def test_it_is_the_reference(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    """Vocabularies below, at and beyond a band; more rows than a product takes."""
    logits_CV = randn(num_rows, vocab_size)
    said: dict[str, Any] = ALL | {"ask_C": torch.arange(num_rows, device=DEVICE) % vocab_size}
    check(logits_CV, (LONG,) if num_rows > 100 else (ONE, PARTS, MANY), dtype, **said)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_hidden_rows_of_any_kind(dtype: torch.dtype) -> None:
    """A real product; rows that are no neighbours. Numbers have few bits, so that any order of its sum is exact."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randint(-3, 4, (18, 80), generator=generator).to(DEVICE, dtype)
    head_VD = (torch.randint(-3, 4, (110, 40), generator=generator) / 8).to(DEVICE, dtype)
    for hidden_CD in (
        hidden[:9, :40],
        hidden[::2, 40:],
        hidden[:9, ::2],
        hidden.view(36, 40)[:9],
        hidden[:, :9].T[:, :18],
    ):
        head = head_VD[:, : hidden_CD.shape[1]].contiguous()
        exact = reference.logit_stats(hidden_CD, head, **ALL)
        near(kernels.logit_stats(hidden_CD, head, bands=replace(LONG, max_rows=4), **ALL), exact)


@pytest.mark.parametrize("said", [{}, {"margin": True}, {"entropy": True}])
def test_what_is_not_asked_for_is_zero(said: dict[str, Any]) -> None:
    ours, _ = check(randn(5, 110), (MANY,), **said)
    assert bool(ours.neg_lag_C.any()) == ("margin" in said)
    assert bool(ours.neg_entropy_C.any()) == ("entropy" in said)
    assert not ours.asked_prob_C.any()


# Ties and extremes


def test_ties_go_to_the_lowest_id() -> None:
    """Within a lane, between lanes, programs and bands."""
    for first, second in ((3, 19), (4, 18), (20, 40), (30, 70), (47, 48)):
        logits_CV = randn(2, 110)
        logits_CV[0, [first, second]] = 20.0
        ours, p_CV = check(logits_CV, **ALL)
        assert int(ours.token_C[0]) == first
        assert float(ours.neg_lag_C[0]) == -1
        torch.testing.assert_close(ours.prob_C[0], p_CV[0, second])


def test_few_values_make_many_ties() -> None:
    logits_CV = torch.randint(0, 4, (9, 110), generator=torch.Generator().manual_seed(1)).float()
    check(logits_CV, **ALL)
    ours, _ = check(torch.zeros(3, 110), (MANY,), **ALL)
    assert ours.token_C.tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_minus_infinity(dtype: torch.dtype) -> None:
    """Some, a whole program's, a whole band's, all but one."""
    logits_CV = randn(5, 110)
    logits_CV[0, ::3] = -INF
    logits_CV[1, :32] = -INF
    logits_CV[2, 40:100] = -INF
    logits_CV[3] = -INF
    logits_CV[3, 100] = -2.0
    ours, _ = check(logits_CV, dtype=dtype, ask_C=torch.tensor([0, 5, 60, 100, 7], device=DEVICE), **ALL)
    assert (int(ours.token_C[3]), float(ours.prob_C[3]), float(ours.neg_lag_C[3])) == (100, 1, 0)
    assert ours.asked_prob_C[:4].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_logits_of_any_size(shift: float) -> None:
    """Only distances to the best one count; 1e4 between two is an exponential of 0."""
    logits_CV = (randn(3, 110) * 8).round() / 8
    logits_CV[1, 50] += 1e4
    exact = reference.logit_stats(*product(logits_CV), **ALL)  # moved, its own sum would lose 11 bits
    for cut in (ONE, MANY):
        near(kernels.logit_stats(*product(logits_CV + shift), bands=cut, **ALL), exact)
    assert float(exact.prob_C[1]) == 1


def test_what_sure_tokens_lack() -> None:
    """Between them a probability has one value left, 1; their doubts differ, as those in fp64 do, in every cut."""
    logits_CV = randn(6, 110)
    logits_CV[range(6), [3, 40, 47, 48, 96, 109]] = torch.tensor([21.0, 23.0, 25.0, 27.0, 29.0, 31.0]) + 3
    p_CV = logits_CV.double().softmax(1)
    best_C2 = p_CV.topk(2).values
    rest_C = p_CV.sort(descending=True).values[:, 1:].sum(1)
    neg_entropy_C = (p_CV * logits_CV.double().log_softmax(1)).sum(1)
    hidden_CD, head_VD = product(logits_CV)
    every = [kernels.logit_stats(hidden_CD, head_VD, bands=cut, **ALL) for cut in (ONE, PARTS, MANY)]
    for found in (reference.logit_stats(hidden_CD, head_VD, **ALL), *every):
        assert (found.prob_C[2:] == 1).all(), "the negative control: nothing is left to rank by"
        assert torch.equal(found.neg_doubt_C.cpu().argsort(), (-rest_C).argsort())
        wanted = {"neg_doubt_C": -rest_C, "neg_lag_C": -(rest_C + best_C2[:, 1]), "neg_entropy_C": neg_entropy_C}
        for name, exact_C in wanted.items():
            have_C = getattr(found, name).cpu().double()
            torch.testing.assert_close(have_C, exact_C, rtol=2e-5, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_rising_and_falling_logits() -> None:
    """A new maximum at every step of a lane, and none after the first."""
    rising_V = torch.arange(110) / 8
    check(torch.stack((rising_V, rising_V.flip(0), rising_V * 8, -rising_V * 8)), **ALL)


# Bans


def test_ids_that_no_row_may_predict() -> None:
    """They stay in the softmax."""
    logits_CV = randn(6, 110)
    best_C = logits_CV.argmax(1).tolist()
    for banned in ([best_C[0]], best_C, [*range(40), 96, 97, 109]):
        ours, p_CV = check(logits_CV, banned_b=ids(banned)[0], **ALL)
        assert not set(ours.token_C.tolist()) & set(banned)
        torch.testing.assert_close(ours.prob_C, p_CV.gather(1, ours.token_C[:, None])[:, 0])


@pytest.mark.parametrize("left", [0, 15, 16, 52])
def test_all_ids_but_one_are_banned(left: int) -> None:
    logits_CV, others = randn(2, 53), [i for i in range(53) if i != left]
    for said in ({"banned_b": ids(others)[0]}, {"ban_argmax_CB": ids(others, others)}):
        ours, _ = check(logits_CV, (MANY,), **said, **ALL)
        assert ours.token_C.tolist() == [left] * 2
        torch.testing.assert_close(ours.neg_lag_C, ours.prob_C - 1, rtol=1e-5, atol=1e-7)
    ours, _ = check(logits_CV, (MANY,), ban_softmax_CB=ids(others, others), banned_b=ids(others)[0], **ALL)
    assert ours.prob_C.tolist() == [1, 1]


def test_a_ban_in_a_band_without_others() -> None:
    """The best of each row is banned, alone in its band; the programs of the other bands look at no list."""
    logits_CV = randn(4, 110)
    at_C = [10, 60, 100, 109]
    logits_CV[range(4), at_C] = 15.0
    per_row = ids(*([i, -1] for i in at_C))
    for said in ({"banned_b": ids(at_C)[0]}, {"ban_argmax_CB": per_row}):
        ours, _ = check(logits_CV, **said, **ALL)
        assert all(have != banned for have, banned in zip(ours.token_C.tolist(), at_C))
    ours, _ = check(logits_CV, ban_softmax_CB=per_row, **ALL)
    assert (ours.token_C.tolist(), ours.prob_C.tolist()) == (at_C, [0] * 4)
    assert (ours.neg_lag_C > -1).all()


def test_ids_that_a_row_may_not_predict() -> None:
    """Of several columns, some unused; rows without any, and rows that name an id twice."""
    logits_CV = randn(5, 110)
    best_C5 = logits_CV.topk(5).indices.tolist()
    rows = [best_C5[0], [-1] * 5, [-1, best_C5[2][0], -1, 109, -1], [best_C5[3][0]] * 5, [-1, -1, -1, -1, 0]]
    ours, _ = check(logits_CV, ban_argmax_CB=ids(*rows), **ALL)
    assert [int(ours.token_C[c]) == best_C5[c][0] for c in range(4)] == [False, True, False, False]
    assert int(ours.token_C[1]) == best_C5[1][0]
    none, _ = check(logits_CV, ban_argmax_CB=ids(*([-1] * 5 for _ in range(5))), **ALL)
    assert torch.equal(none.token_C, logits_CV.argmax(1).to(DEVICE))


def test_ids_without_probability() -> None:
    """The predicted one among them, and the one that is asked for; -1 bans nothing, and not id 0 either."""
    logits_CV = randn(6, 110)
    best_C = logits_CV.argmax(1).tolist()
    ask_C = torch.tensor([5, 60, 109, best_C[3], 0, 7], device=DEVICE)
    rows = [[best_C[0], -1], [60, 61], [109, best_C[2]], [-1, -1], [-1, 1], [7, 7]]
    ours, _ = check(logits_CV, ban_softmax_CB=ids(*rows), ask_C=ask_C, **ALL)
    assert ours.token_C.tolist() == best_C
    assert [p == 0 for p in ours.prob_C.tolist()] == [True, False, True, False, False, False]
    assert [p == 0 for p in ours.asked_prob_C.tolist()] == [False, True, True, False, False, True]
    both = {"ban_softmax_CB": ids(*rows), "ban_argmax_CB": ids(*rows), "ask_C": ask_C}
    ours, _ = check(logits_CV, **both, **ALL)
    assert (ours.prob_C > 0).all()


def test_empty_lists_are_none() -> None:
    nobody = ids(*([] for _ in range(5)))
    check(randn(5, 110), (MANY,), banned_b=nobody[0], ban_argmax_CB=nobody, ban_softmax_CB=nobody, **ALL)


def test_the_asked_token_lies_in_every_part() -> None:
    logits_CV = randn(11, 110)
    for first in (0, 99):
        asked = [first + 2 * c % 11 for c in range(11)]
        ours, p_CV = check(logits_CV, (PARTS,), ask_C=torch.tensor(asked, device=DEVICE))
        torch.testing.assert_close(ours.asked_prob_C, p_CV[range(11), asked])


@pytest.mark.parametrize("seed", range(6))
def test_everything_at_once(seed: int) -> None:
    """Drawn rows, vocabularies, lists, cuts and ties."""
    r, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    num_rows, vocab_size = r.randint(1, 13), r.choice([33, 96, 131])
    logits_CV = (randn(num_rows, vocab_size, seed) * 2).round() / 2
    logits_CV[torch.rand(logits_CV.shape, generator=generator) < 0.1] = -INF

    def some(width: int) -> Tensor:
        return torch.randint(-1, vocab_size, (num_rows, width), generator=generator).to(DEVICE)

    said: dict[str, Any] = {
        "banned_b": some(r.randint(1, 9))[0].clamp(min=0),
        "ban_argmax_CB": some(r.randint(1, 6)),
        "ban_softmax_CB": some(r.randint(1, 6)),
        "ask_C": some(1)[:, 0].clamp(min=0),
    }
    said = {name: value for name, value in said.items() if r.random() < 0.7}
    dtype = r.choice([torch.float32, torch.float16])
    bands = kernels.Bands(
        r.choice([1, 3, 5, 64]), r.choice([200, 1000, 9999]), r.choice([16, 48, 80]), r.randint(1, 30), 16, 1
    )
    check(logits_CV, (bands,), dtype, margin=r.random() < 0.5, entropy=r.random() < 0.5, **said)


# Calls


def test_no_rows() -> None:
    ours = kernels.logit_stats(torch.zeros(0, 4, device=DEVICE), torch.zeros(9, 4, device=DEVICE), **ALL)
    assert [len(value) for value in vars(ours).values()] == [0] * 6
    assert ours.token_C.dtype == torch.int64


def test_tokens_that_are_drawn_are_the_references() -> None:
    hidden_CD, head_VD = product(randn(5, 110))
    real = [torch.full((5,), value, device=DEVICE) for value in (1.0, 0.9, 0.0)]
    drawn = Sampling(
        real[0], real[1], torch.zeros(5, dtype=torch.int64, device=DEVICE), real[2], real[0] > 2, real[0] / 3
    )
    said: dict[str, Any] = {"sampling": drawn, "banned_b": ids([0, 1])[0], "ask_C": ids([1, 2, 3, 4, 5])[0], **ALL}
    near(kernels.logit_stats(hidden_CD, head_VD, **said), reference.logit_stats(hidden_CD, head_VD, **said))


def test_lists_may_lie_anywhere() -> None:
    logits_CV = randn(5, 110)
    wide = ids(*([c, 109, c + 50, -1, int(logits_CV[c].argmax()), 3] for c in range(5)))
    lists = {"ban_argmax_CB": wide[:, ::2], "ban_softmax_CB": wide[:, 1:3], "ask_C": wide[:, 2], "banned_b": wide[:, 0]}
    check(logits_CV, (MANY,), **lists, **ALL)


CHANGES: dict[str, dict[str, Any]] = {
    "banned_b": {"banned_b": None},
    "ban_argmax_CB": {"ban_argmax_CB": None},
    "ban_softmax_CB": {"ban_softmax_CB": None},
    "ask_C": {"ask_C": torch.tensor([5, 4, 3, 2, 1], device=DEVICE)},
    "margin": {"margin": False},
    "entropy": {"entropy": False},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_kernels_read_every_argument(change: str) -> None:
    """Negative control: with one of them changed it is not the reference's result of the call as it was."""
    logits_CV = randn(5, 110)
    best_C3 = logits_CV.topk(3).indices.to(DEVICE)
    said = {"banned_b": best_C3[0, :1], "ban_argmax_CB": best_C3[:, :1], "ban_softmax_CB": best_C3[:, 2:]}
    said |= {"ask_C": torch.tensor([1, 2, 3, 4, 5], device=DEVICE)} | ALL
    if change == "banned_b":  # the others ban the same id
        said["ban_argmax_CB"] = None
    hidden_CD, head_VD = product(logits_CV)
    exact = reference.logit_stats(hidden_CD, head_VD, **said)
    near(kernels.logit_stats(hidden_CD, head_VD, bands=MANY, **said), exact)
    with pytest.raises(AssertionError, match=r"another token|_C: "):
        near(kernels.logit_stats(hidden_CD, head_VD, bands=MANY, **said | CHANGES[change]), exact)


def test_an_unwritten_record_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the poison: the last programs of a band are left out."""
    hidden_CD, head_VD = product(randn(3, 110))
    launch = type(kernels._stats_kernel).__getitem__

    def fewer(kernel: Any, grid: Any) -> Any:
        return launch(kernel, (grid[0], grid[1] - 1) if kernel is kernels._stats_kernel else grid)

    monkeypatch.setattr(type(kernels._stats_kernel), "__getitem__", fewer)
    with pytest.raises(AssertionError):
        near(kernels.logit_stats(hidden_CD, head_VD, bands=PARTS), reference.logit_stats(hidden_CD, head_VD))


def test_what_the_kernels_take() -> None:
    hidden_CD, head_VD = torch.zeros(3, 8), torch.zeros(9, 8)
    assert kernels.supported(hidden_CD, head_VD)
    assert kernels.supported(hidden_CD.bfloat16(), head_VD.bfloat16())
    assert not kernels.supported(hidden_CD.double(), head_VD.double())
    assert not kernels.supported(hidden_CD.half(), head_VD)
    assert not kernels.supported(hidden_CD, head_VD.bfloat16())
    assert not kernels.supported(hidden_CD, torch.zeros(8, 9).T)
    assert not kernels.supported(hidden_CD, head_VD[:0])
    for tensors in ((hidden_CD.clone().requires_grad_(), head_VD), (hidden_CD, head_VD.clone().requires_grad_())):
        assert not kernels.supported(*tensors)
        with torch.no_grad():
            assert kernels.supported(*tensors)


CALLS = """
from unmask.ops.triton import logit_stats
many = logit_stats.Bands(max_rows=64, max_bytes=1 << 20, step=8448)
for rows in (1, 128):
    hidden = torch.zeros(rows, 16, dtype=torch.bfloat16)
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    for vocab, bands in ((9, logit_stats.BANDS), (20000, logit_stats.BANDS), (20000, many)):
        head = torch.zeros(vocab, 16, dtype=torch.bfloat16)
        for margin in (False, True):
            logit_stats.logit_stats(hidden, head, margin=margin, bands=bands)
            logit_stats.logit_stats(
                hidden, head, margin=margin, entropy=True, bands=bands,
                banned_b=ids[0, :rows // 32], ban_argmax_CB=ids, ban_softmax_CB=ids[:, :1], ask_C=ids[:, 0],
            )
    logit_stats.logit_stats(hidden, head, banned_b=ids[0, :1], entropy=True, ask_C=ids[:, 0])
"""


def test_every_kernel_compiles_for_an_h200() -> None:
    """Also for one row, one record and one banned id, constants to the compiler unless it is told otherwise.

    All but a vocabulary of 9, which no 16 bytes divide, is read 16 bytes at a time."""
    found = compile_for_h200(CALLS)
    written = {name for name in vars(kernels) if name.endswith("_kernel")}
    assert {name for name, *_ in found} == written
    stats = [ptx for name, _, ptx in found if name == "_stats_kernel"]
    assert [at for at, ptx in enumerate(stats) if "ld.global.v4.b32" not in ptx] == [0, 1, 2, 3, 13, 14, 15, 16]
