"""Noise: what is masked, with which weight, and the switch for the end-of-text fill."""

import pytest
import torch

from unmask.train.config import NoiseConfig
from unmask.train.masks import (
    Rows,
    answer_region,
    apply_plan,
    block_plan,
    draw_blocks,
    noise,
    numbers_plan,
    reach,
    spread_kinds,
    spread_rates,
    uniform_plan,
)

MASK, EOS = 99, 0


def make_rows(num_rows=16, length=40, seed=0):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 8, (num_rows,), generator=g)
    end = prompt + torch.randint(2, 12, (num_rows,), generator=g)
    see = end + 1 + torch.randint(0, length - 20, (num_rows,), generator=g)
    token = torch.randint(1, 90, (num_rows, length), generator=g)
    token[torch.arange(length) >= end[:, None]] = EOS
    return Rows(token, prompt, end, see)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("masks", [{"uniform": 1.0}, {"block": 1.0}, {"numbers": 1.0}, {"block": 0.5, "numbers": 0.5}])
@pytest.mark.parametrize("fill", [True, False])
def test_prompt_and_invisible_positions_are_never_touched(masks, fill):
    rows = make_rows()
    for seed in range(20):
        digits = torch.arange(100) < 50
        noised = noise(rows, masks, NoiseConfig(loss_on_fill=fill), MASK, gen(seed), is_digit_V=digits)
        outside = ~answer_region(rows)
        assert not noised.masked_BN[outside].any()
        assert torch.equal(noised.token_BN[outside], rows.token_BN[outside])
        assert not noised.weight_BN[outside].any()
        assert torch.equal(noised.token_BN == MASK, noised.masked_BN)
        assert not noised.weight_BN[~noised.masked_BN].any()


def test_every_stratum_holds_one_rate():
    for u in (0.0, 0.3, 0.999):
        t = spread_rates(50, torch.tensor(u, dtype=torch.float64), 0.01)
        assert t.min() >= 0.01
        assert t.max() <= 1
        strata = ((t - 0.01) / 0.99 * 50 - (u * 50) % 1).round().long() % 50
        assert strata.sort().values.tolist() == list(range(50))


def test_kinds_have_their_share_at_all_rates():
    is_block, is_numbers = spread_kinds(1000, torch.tensor(0.123, dtype=torch.float64), 0.4, 0.25)
    assert not (is_block & is_numbers).any()
    for kind, share in ((is_block, 0.4), (is_numbers, 0.25)):
        assert abs(kind.double().mean() - share) < 0.01
        for part in kind.split(100):
            assert abs(part.double().mean() - share) < 0.03


def test_a_power_under_one_makes_high_rates_frequent():
    even, high = (spread_rates(1000, torch.tensor(0.5, dtype=torch.float64), 0.01, power) for power in (1.0, 0.5))
    assert even.median() == pytest.approx(0.505, abs=0.01)
    assert high.median() == pytest.approx(0.01 + 0.99 * 0.5**0.5, abs=0.01)
    assert high.min() >= 0.01
    assert high.max() <= 1


def test_uniform_masks_and_weights_are_as_documented():
    rows = make_rows(num_rows=400)
    t = torch.full((400,), 0.3)
    noised = apply_plan(rows, uniform_plan(rows, t), torch.rand(rows.token_BN.shape, generator=gen()), MASK, True)
    share = noised.masked_BN.sum() / answer_region(rows).sum()
    assert abs(share - 0.3) < 0.02
    assert torch.allclose(noised.weight_BN[noised.masked_BN], torch.tensor(1 / 0.3))


def test_block_masks_against_a_plain_loop():
    rows = make_rows()
    length = torch.tensor([4, 8] * 8)
    block = torch.tensor([0, 1, 2, 0] * 4)
    t = torch.linspace(0.1, 1, 16)
    draw = torch.rand(rows.token_BN.shape, generator=gen(3))
    noised = apply_plan(rows, block_plan(rows, t, length, block, 0.5), draw, MASK, True)
    for b in range(16):
        prompt, see = int(rows.prompt_B[b]), int(rows.see_B[b])
        for p in range(rows.token_BN.shape[1]):
            place = (p - prompt) // int(length[b])
            if not prompt <= p < see or place < block[b]:
                masked, weight = False, 0.0
            elif place == block[b]:
                masked = bool(draw[b, p] < t[b])
                weight = float(1 / t[b]) if masked else 0.0
            else:
                masked, weight = True, 0.5
            assert bool(noised.masked_BN[b, p]) == masked
            assert float(noised.weight_BN[b, p]) == pytest.approx(weight)
            assert bool(noised.tail_BN[b, p]) == (masked and place > block[b])


def test_masks_of_numbers_against_a_plain_loop():
    rows = make_rows()
    is_digit = torch.zeros(100, dtype=torch.bool)
    is_digit[10:50] = True
    t, draw, cut = torch.linspace(0.1, 1, 16), torch.rand(rows.token_BN.shape, generator=gen(3)), torch.rand(16)
    noised = apply_plan(rows, numbers_plan(rows, t, cut, is_digit), draw, MASK, True)
    for b in range(16):
        prompt, end, see = int(rows.prompt_B[b]), int(rows.end_B[b]), int(rows.see_B[b])
        first = prompt + int(cut[b] * (end + 1 - prompt))
        assert prompt <= first <= end
        for p in range(rows.token_BN.shape[1]):
            rate = 1.0 if is_digit[rows.token_BN[b, p]] else float(t[b])
            masked = first <= p < see and float(draw[b, p]) < rate
            assert bool(noised.masked_BN[b, p]) == masked
            assert float(noised.weight_BN[b, p]) == pytest.approx(1 / rate if masked else 0.0)
    assert not noised.tail_BN.any()


def test_causal_masks_mask_nothing_and_ask_for_the_answer_and_one_end():
    rows = make_rows()
    noised = noise(rows, {"causal": 1.0}, NoiseConfig(loss_on_fill=False), MASK, gen())
    assert torch.equal(noised.token_BN, rows.token_BN)
    pos = torch.arange(40)
    asked = (pos >= rows.prompt_B[:, None]) & (pos <= rows.end_B[:, None])
    assert torch.equal(noised.masked_BN, asked)
    assert torch.equal(noised.weight_BN, asked.float())
    assert torch.equal(reach(rows, {"causal": 1.0}), rows.prompt_B)
    assert torch.equal(reach(rows, {"block": 1.0}), rows.see_B)


def test_drawn_blocks_reach_the_first_end_of_text_and_not_beyond():
    rows = make_rows(num_rows=3000)
    length, block = draw_blocks(rows, (2, 4), torch.rand(3000, 2, generator=gen()))
    last = (rows.end_B - rows.prompt_B) // length
    assert (block >= 0).all()
    assert (block <= last).all()
    assert (block == last).any()
    assert set(length.tolist()) == {2, 4}


def test_the_fill_switch_is_applied_to_the_loss_and_not_to_the_canvas():
    rows = make_rows()
    on = noise(rows, {"uniform": 1.0}, NoiseConfig(loss_on_fill=True), MASK, gen())
    off = noise(rows, {"uniform": 1.0}, NoiseConfig(loss_on_fill=False), MASK, gen())
    fill = torch.arange(40) > rows.end_B[:, None]
    assert torch.equal(on.token_BN, off.token_BN)
    assert on.weight_BN[fill].any()
    assert not off.weight_BN[fill].any()
    assert torch.equal(on.weight_BN[~fill], off.weight_BN[~fill])


def test_noise_depends_on_the_seed_only():
    rows = make_rows()
    first, same, other = (noise(rows, {"block": 1.0}, NoiseConfig(), MASK, gen(s)).token_BN for s in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
