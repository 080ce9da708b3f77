"""Members that a user writes: objects on a row, what the row makes of them, and the worked example.

S seats, N positions, W columns of the rule
"""

from __future__ import annotations

import math
import runpy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask import LLM, METHODS, Method, SamplingParams, methods
from unmask.cache.drift import Drift
from unmask.cache.policy import BlockCausal, CachePolicy, Dual, Limits, Recompute, SeatLimits
from unmask.config import FALLBACK
from unmask.core.canvas import Canvas
from unmask.decoding.drafter import Drafter, Nested, TwoPass
from unmask.decoding.frontier import Blocks, Frontier, FrontierView, Pipeline, Whole, Window
from unmask.decoding.params import DecodeParams, SeatParams
from unmask.errors import ConfigError, MethodError
from unmask.eval.continuous import Way, compare, network
from unmask.methods import DRAFTERS, FRONTIERS, POLICIES, check_prefix_caching, check_weights, leads, registered
from unmask.models.attention import DenseContext

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "add_a_method.py"
PAGE = ROOT / "docs" / "methods.md"


@dataclass
class Weights:
    family: str = "llada"
    attention: str = "full"
    logit_shift: int = 0


SHIFTED, CAUSAL = Weights("dream", logit_shift=1), Weights(attention="block_causal")


class Leftmost(Frontier):
    """One position, the leftmost."""

    reads = ("decode_window",)

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:  # noqa: ARG002
        undecided_SN = canvas.undecided_SN()
        first_SN = undecided_SN & (undecided_SN.cumsum(1) == 1)
        see_SN = canvas.end_S[:, None].expand(-1, canvas.capacity)
        return FrontierView(first_SN, torch.where(first_SN, 0, -1), see_SN)

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return 1


class Undecided(CachePolicy):
    """What is undecided or new; everything every `refresh_interval` passes."""

    reads = ("refresh_interval",)

    def rows(self, canvas: Canvas, candidate_SN: Tensor, limits: Limits) -> Tensor:
        wanted_SN = candidate_SN | ~canvas.final_SN | canvas.new_SN()
        return canvas.visible_SN() & (wanted_SN | self.due(canvas, limits)[:, None])

    def most_rows(self, prompt: int, answer: int, reach: int, limits: SeatLimits) -> int:  # noqa: ARG002
        return answer


class Scratched(Drafter):
    num_scratch = 4


class OwnPipeline(Pipeline):
    pass


class Causal(Leftmost):
    attention = "block_causal"


def row(**axes: Any) -> Method:
    return Method(name="mine", title="", **axes)


def complete(method: Method, **said: Any) -> SamplingParams:
    return method.complete(SamplingParams(**said), {}, FALLBACK)


PROMPTS = [[1, 5, 9], [2] * 20, list(range(40))]


def answers(method: str | Method, **said: Any) -> list[tuple[list[int], int, list[tuple[int, int]]]]:
    """Tokens, passes, and which pass decided each position."""
    llm = LLM(network("llada"), method=method, tokenizer=None, max_num_seqs=4)
    params = SamplingParams(max_tokens=24, trajectory=True, **said)
    outs = [out.outputs[0] for out in llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params)]
    return [
        (list(out.token_ids), out.num_forward_passes, [(e.position, e.num_pass) for e in out.trajectory or ()])
        for out in outs
    ]


# --- a row of objects


def test_objects_of_the_package_are_what_their_names_are() -> None:
    named = row(frontier="window", policy="recompute", sampling={"threshold": 0.4, "decode_window": 6})
    held = replace(named, frontier=Window(), policy=Recompute(), drafter=Drafter())
    assert (held.kinds, held.reads) == (named.kinds, named.reads)
    assert answers(held) == answers(named)


def test_a_schedule_counts_by_block_for_an_object_too() -> None:
    assert answers(row(frontier=Blocks()), steps=9, block_length=7) == answers("vanilla", steps=9, block_length=7)


def test_what_a_row_says_of_its_objects() -> None:
    method = row(frontier=Leftmost(), policy=Undecided(), sampling={"threshold": 0.9})
    assert method.members == ("Leftmost", "Undecided", "none")
    assert method.kinds == ("own", "own", "none")
    assert method.describe == "Leftmost / Undecided / none / threshold=0.9"
    assert method.reads == {"decode_window", "refresh_interval"}
    assert method.attention == "full"
    assert dict(method.all_options) == {}
    assert row(frontier=OwnPipeline()).reads == set(FRONTIERS["pipeline"])
    assert row(frontier=OwnPipeline()).attention == "block_causal"
    assert row(frontier=Causal()).attention == "block_causal"
    assert row(drafter=Scratched()).kinds[2] == "own"
    assert row(drafter=TwoPass()).kinds[2] == "two-pass"


def test_a_field_is_refused_where_no_member_reads_it() -> None:
    method = row(frontier=Leftmost(), sampling={"threshold": 0.9})
    assert complete(method, decode_window=4).decode_window == 4
    with pytest.raises(ConfigError, match="'mine' does not read tau_add; methods that do: d2f"):
        complete(method, tau_add=0.5)
    with pytest.raises(MethodError, match=r"recommends gamma=0.5, which its members \(Leftmost, recompute, none\)"):
        row(frontier=Leftmost(), sampling={"gamma": 0.5})


def test_an_object_has_no_options() -> None:
    with pytest.raises(MethodError, match="belongs to 'two-pass'; its members are 'recompute' and 'TwoPass'"):
        row(frontier="window", drafter=TwoPass(), options={"max_search": 4})


def test_it_decides_where_it_says() -> None:
    for _, num_passes, events in answers(row(frontier=Leftmost(), sampling={"threshold": 0.1}), ignore_eos=True):
        assert num_passes == 24
        assert events == [(at, at + 1) for at in range(24)]


def test_a_cache_of_ones_own_is_exact_where_it_refreshes_always() -> None:
    rule = {"threshold": 0.3, "refresh_interval": 1}
    method = row(policy=Undecided(), sampling=rule)
    assert answers(method) == answers("confidence", threshold=0.3)
    assert answers(method, refresh_interval=30) != answers("confidence", threshold=0.3)  # and is one otherwise


# --- what is refused


class Bare:
    """No member of anything."""


class NoReach(Frontier):
    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        return Whole().advance(canvas, params)


class OneText(Leftmost):
    reads = "decode_window"  # type: ignore[assignment]


class Misspelt(Leftmost):
    reads = ("decode_windw",)


class Sideways(Leftmost):
    attention = "causal"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"frontier": Bare()}, r"frontier 'Bare' is without advance, retire, reach; extend unmask.decoding.frontier"),
        ({"frontier": NoReach()}, "frontier 'NoReach' is without reach; extend"),
        ({"frontier": None}, "frontier 'NoneType' is without advance"),
        ({"frontier": Leftmost}, r"Leftmost is a class and a row takes an object; use Leftmost\(\)"),
        ({"frontier": Drafter()}, "frontier 'Drafter' is without advance, retire, reach"),
        ({"policy": CachePolicy()}, "policy 'CachePolicy' is without rows, most_rows; extend unmask.cache.policy"),
        ({"policy": Leftmost()}, "policy 'Leftmost' is without due, rows"),
        ({"drafter": Bare()}, "drafter 'Bare' is without scratch, settle, num_scratch"),
        ({"frontier": OneText()}, r"reads of frontier 'OneText' is a text; use a tuple, \('decode_window',\)"),
        ({"frontier": Misspelt()}, "'Misspelt' reads 'decode_windw', .* did you mean 'decode_window'.* constructor"),
        ({"frontier": Sideways()}, "attention of frontier 'Sideways' is 'causal'; use 'full' or 'block_causal'"),
    ],
)
def test_a_member_that_is_none(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(MethodError, match=f"method 'mine': .*{message}"):
        row(**axes)


@pytest.mark.parametrize(
    "axes",
    [
        {"frontier": Leftmost(), "policy": "dual"},
        {"frontier": Leftmost(), "policy": Dual()},
        {"frontier": Leftmost(), "policy": "block-causal"},
        {"frontier": Leftmost(), "policy": BlockCausal()},
        {"frontier": OwnPipeline(), "policy": "tracked"},
        {"frontier": OwnPipeline(), "policy": Undecided()},
        {"frontier": "pipeline", "policy": Undecided()},
        {"frontier": Causal(), "policy": Undecided()},
        {"frontier": "pipeline", "drafter": Scratched()},
        {"frontier": "pipeline", "drafter": TwoPass()},
        {"policy": "drift", "drafter": Scratched()},
        {"policy": Drift([0.25]), "drafter": "two-pass"},
        {"policy": Undecided(), "drafter": Nested(2, 8)},
    ],
)
def test_members_that_exclude_each_other(axes: dict[str, Any]) -> None:
    with pytest.raises(MethodError, match=r"method 'mine': .*; use "):
        row(**axes)


def test_members_that_go_together() -> None:
    row(frontier=OwnPipeline(), policy="block-causal")
    row(frontier="pipeline", policy=BlockCausal())
    row(frontier=Blocks(), policy=Dual(), drafter=Nested(2, 8))
    row(frontier=Leftmost(), policy="tracked", drafter="two-pass")
    row(policy="drift", drafter=type("Quiet", (Drafter,), {})())


def test_a_drafter_without_rows_of_its_own_does_what_none_does() -> None:
    quiet, drafting = row(drafter=type("Quiet", (Drafter,), {})()), row(drafter=Scratched())
    assert complete(quiet, threshold=0.9, cfg_scale=0.5).cfg_scale == 0.5
    check_weights(quiet, SHIFTED, allow=False)
    with pytest.raises(ConfigError, match="mixes two canvases"):
        complete(drafting, threshold=0.9, cfg_scale=0.5)
    with pytest.raises(MethodError, match="verifies each position by its own row"):
        check_weights(drafting, SHIFTED, allow=False)


def test_a_fixed_schedule_counts_on_candidates() -> None:
    with pytest.raises(ConfigError, match=r"\(steps=4\) counts on candidates that frontier 'Leftmost' need not have"):
        complete(row(frontier=Leftmost()), steps=4)
    wide = type("Wide", (Window,), {})()
    assert complete(row(frontier=wide), steps=4).steps == 4


def test_nested_drafts_are_held_to_what_they_prove() -> None:
    method = row(frontier=Blocks(), policy=Dual(), drafter=Nested(2, 8), sampling={"threshold": 2.0, "block_length": 8})
    complete(method, max_tokens=16)
    with pytest.raises(ConfigError, match="a block of 12 positions is over the 8"):
        complete(method, max_tokens=16, block_length=12)
    with pytest.raises(ConfigError, match="commits by another rule"):
        complete(method, max_tokens=16, factor=0.5)


def test_attention_and_prompts_that_are_shared() -> None:
    check_weights(row(frontier=OwnPipeline()), CAUSAL, allow=False)
    with pytest.raises(MethodError, match="'mine' has block-causal attention"):
        check_weights(row(frontier=OwnPipeline()), Weights(), allow=False)
    own = row(frontier=OwnPipeline(), policy="block-causal")
    assert check_prefix_caching(own, None) is False  # what an own frontier lets a row see is not known
    with pytest.raises(MethodError, match="enable_prefix_caching=True"):
        check_prefix_caching(own, True)


def test_a_leading_position_under_shifted_logits() -> None:
    leading, plain = row(frontier=Blocks(lead=True), policy="dual"), row(frontier=Blocks(), policy="dual")
    assert (leads(leading, 1), leads(plain, 1), leads(row(policy=Dual()), 1)) == (True, False, True)
    check_weights(leading, SHIFTED, allow=False)
    check_weights(plain, Weights(), allow=False)
    with pytest.raises(MethodError, match="make frontier 'Blocks' with lead=True"):
        check_weights(plain, SHIFTED, allow=False)


def test_every_name_has_a_class() -> None:
    names = {name for classes in methods._CLASSES.values() for name in classes.values()}
    assert names == {*FRONTIERS, *POLICIES, *DRAFTERS}
    for module, classes in methods._CLASSES.items():
        for name in classes:
            assert isinstance(getattr(import_module(module), name), type)
    for base, asked in methods._PROTOCOL.values():
        module, name = base.rsplit(".", 1)
        assert [each for each in asked if not hasattr(getattr(import_module(module), name), each)] == []


# --- a row in the table


def test_rows_are_in_the_table_for_a_while() -> None:
    mine, before = row(), list(METHODS)
    with registered(mine):
        assert METHODS["mine"] is mine
        assert LLM(network("llada"), method="mine", tokenizer=None).method is mine
        with pytest.raises(MethodError, match="'mine' is in the table already"), registered(mine):
            pass
        assert METHODS["mine"] is mine
    with pytest.raises(RuntimeError, match="as it may"), registered(mine):
        raise RuntimeError("as it may")
    assert list(METHODS) == before
    with pytest.raises(MethodError, match="'d2f' is in the table already"), registered(replace(mine, name="d2f")):
        pass


# --- the worked example


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE), run_name="example")


def test_the_example_is_short() -> None:
    code = EXAMPLE.read_text(encoding="utf-8").split('"""', 2)[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 70


def test_the_page_shows_the_example() -> None:
    code = EXAMPLE.read_text(encoding="utf-8")
    shown = code[code.index("class OpenBlocks") : code.index("\nCAREFUL")]
    assert shown in PAGE.read_text(encoding="utf-8")


def open_blocks(masks: Sequence[int], sizes: Sequence[int], tau: float) -> list[bool]:
    """d3LLM's frontier for one request, as a loop: the first block, and each one whose predecessors are all ready."""
    out = [True]
    for masks_before, size_before in zip(masks, sizes):
        out.append(out[-1] and size_before - masks_before >= tau * size_before)
    return out[: len(masks)]


def test_its_frontier_is_the_plain_loop(example: dict[str, Any]) -> None:
    frontier, generator = example["OpenBlocks"](), torch.Generator().manual_seed(0)
    prompt, block, num_blocks, mask = 5, 6, 4, 99
    length = prompt + block * num_blocks
    canvas, params = Canvas.empty(8, length + 3, mask, "cpu", num_blocks + 1), DecodeParams(8, 1, "cpu")
    block_N = torch.cat((torch.zeros(prompt), torch.arange(block * num_blocks) // block + 1)).int()
    for seat in range(8):
        token_N = torch.where(torch.rand(length, generator=generator) < 0.12 * seat, 7, mask)
        token_N[:prompt] = 7
        canvas.place(seat, token_N, prompt=prompt, block_N=block_N)
        params.tau_add_S[seat] = (0.0, 0.1, 0.5, 1.0)[seat % 4]
    canvas.end_S[3] = prompt + block + 2
    view = frontier.advance(canvas, params)
    for seat in range(8):
        end = int(canvas.end_S[seat])
        open_N = [at < end and not bool(canvas.final_SN[seat, at]) for at in range(length + 3)]
        spans = [range(prompt + k * block, min(prompt + (k + 1) * block, end)) for k in range(num_blocks)]
        spans = [span for span in spans if len(span)]
        masks = [sum(open_N[at] for at in span) for span in spans]
        are_open = open_blocks(masks, [len(span) for span in spans], float(params.tau_add_S[seat]))
        want = {at for span, is_open in zip(spans, are_open) if is_open for at in span if open_N[at]}
        assert set(view.candidate_SN[seat].nonzero()[:, 0].tolist()) == want
        first = next((span for span, left in zip(spans, masks) if left), range(0))
        promised = {at for at in first if open_N[at]}
        assert set((view.rescue_group_SN[seat] >= 0).nonzero()[:, 0].tolist()) == promised & want


@pytest.mark.parametrize(
    ("own", "plain"),
    [
        ({"tau_add": 1.0, "block_length": 6}, {"frontier": "blocks", "block_length": 6}),  # one after the other
        ({"tau_add": 0.1, "block_length": 0}, {"frontier": "whole"}),  # there is only one
    ],
)
def test_where_its_frontier_is_one_that_is_there(
    example: dict[str, Any], own: dict[str, Any], plain: dict[str, Any]
) -> None:
    mine = row(frontier=example["OpenBlocks"](), sampling={"threshold": 0.3})
    theirs = row(frontier=plain.pop("frontier"), sampling={"threshold": 0.3})
    assert answers(mine, **own) == answers(theirs, **plain)
    assert answers(mine, tau_add=0.1, block_length=6) != answers(theirs, **plain)


@torch.inference_mode()
def d3llm(prompt: Sequence[int], length: int, block: int, nats: float, tau: float) -> tuple[list[int], int]:
    """The decoder on one request, in plain loops, without a cache: the canvas, and its passes. Ends do not count."""
    model = network("llada")
    mask = model.config.mask_token_id
    canvas, num_passes = [*prompt, *[mask] * length], 0
    spans = [range(at, min(at + block, len(canvas))) for at in range(len(prompt), len(canvas), block)]
    while mask in canvas[len(prompt) :]:
        hidden_ND = model(torch.tensor([canvas]), DenseContext(torch.arange(len(canvas)), rope=model.rope))[0]
        logits_NV = (hidden_ND @ model.head.T).float()
        probs_NV = logits_NV.softmax(-1)
        logits_NV[:, mask] = -torch.inf  # never predicted, and yet in the softmax
        token_N, entropy_N = logits_NV.argmax(-1).tolist(), (-probs_NV * probs_NV.log()).sum(-1).tolist()
        masks = [[at for at in span if canvas[at] == mask] for span in spans]
        are_open = open_blocks([len(left) for left in masks], [len(span) for span in spans], tau)
        sure = {at for left, is_open in zip(masks, are_open) if is_open for at in left if entropy_N[at] < nats}
        first = next(left for left in masks if left)
        if not sure & set(first):
            sure.add(min(first, key=lambda at: (entropy_N[at], at)))
        for at in sure:
            canvas[at] = token_N[at]
        num_passes += 1
    return canvas[len(prompt) :], num_passes


@pytest.mark.parametrize(("nats", "tau"), [(0.5, 0.1), (1.5, 0.1), (1.5, 0.5), (3.0, 0.3)])
def test_it_is_the_plain_decoder(example: dict[str, Any], nats: float, tau: float) -> None:
    said = {"threshold": math.exp(-nats), "tau_add": tau, "block_length": 6}
    found = answers(example["D3LLM"], ignore_eos=True, **said)
    assert [(ids, num_passes) for ids, num_passes, _ in found] == [d3llm(ids, 24, 6, nats, tau) for ids in PROMPTS]


def test_its_rule_is_for_entropies_where_it_is_asked_to_be(example: dict[str, Any]) -> None:
    own, plain = row(drafter=example["ByEntropy"]()), row()
    assert answers(own, threshold=0.3) == answers(plain, threshold=0.3)
    assert answers(own, threshold=0.3, alg="entropy") != answers(plain, threshold=0.3, alg="entropy")


def _methods(example: dict[str, Any]) -> list[Method]:
    return [example["D3LLM"], row(frontier=Leftmost(), policy=Undecided(), sampling={"threshold": 0.9})]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("way", [Way(), Way(fixed=True)], ids=["ragged", "fixed"])
def test_alone_is_batched(example: dict[str, Any], which: int, way: Way) -> None:
    method = _methods(example)[which]
    with registered(method):
        outcome = compare(method.name, "llada", 12, way=way)
    assert (outcome.different, outcome.lost_pages) == ([], 0)
    assert outcome.most_seats > 3


class OfSeatZero(Leftmost):
    """What no member may do: it decides for all seats by the first one."""

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        view = Whole().advance(canvas, params)
        return replace(
            view,
            candidate_SN=view.candidate_SN & (canvas.pass_S[0] % 2 == 0) | super().advance(canvas, params).candidate_SN,
        )

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return answer


def test_a_member_that_looks_at_other_seats_is_found_out() -> None:
    method = row(frontier=OfSeatZero(), sampling={"threshold": 0.3})
    with registered(method):
        assert compare(method.name, "llada", 12).different != []
