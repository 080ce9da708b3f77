"""Add a published method from outside the package, and compare it with two that are there.

The decoder of d3LLM (arXiv 2601.07568), from its description and from what its authors have released:
- several blocks are decided at once: the next one is opened as soon as a share of the one before is decided;
- in all of them a token becomes final when the entropy of its distribution is below a threshold;
- where the leftmost unfinished block would get none in a pass, its surest token becomes final.
Left out: the distilled weights that it was made for, and its cache (it keeps a block some passes after it is complete,
and renews everything at intervals). As with every method here, what lies behind an end of text is dropped at once.

S seats, N canvas positions, K blocks, W scored positions.
"""

import argparse
import math
from dataclasses import replace

import torch
from torch import Tensor

from unmask import LLM, Method, SamplingParams
from unmask.core.canvas import Canvas
from unmask.core.scores import Scores
from unmask.decoding.drafter import Drafter, commit
from unmask.decoding.frontier import Frontier, FrontierView
from unmask.decoding.params import ENTROPY, DecodeParams, SeatParams
from unmask.decoding.rule import choose
from unmask.eval.word_problems import held_out, score


class OpenBlocks(Frontier):
    """In every block up to the first whose predecessor is not decided to `tau_add`."""

    reads = ("block_length", "tau_add")

    def advance(self, canvas: Canvas, params: DecodeParams) -> FrontierView:
        open_SN, block_SN = canvas.undecided_SN(), canvas.block_SN.long()
        zeros_SK = torch.zeros_like(canvas.block_state_SK, dtype=torch.int32)
        size_SK = zeros_SK.scatter_add(1, block_SN, canvas.visible_SN().int())
        num_open_SK = zeros_SK.scatter_add(1, block_SN, open_SN.int())
        ready_SK = size_SK - num_open_SK >= params.tau_add_S[:, None] * size_SK
        ready_SK[:, 0] = True  # the prompt
        waits_SK = (~ready_SK).int()
        all_before_SK = waits_SK.cumsum(1) == waits_SK  # none of the blocks before
        candidate_SN = open_SN & all_before_SK.gather(1, block_SN)
        # The leftmost block is promised a commit in every pass: without a promise a request could stand still for ever.
        first_SN = candidate_SN & (block_SN == canvas.current_block_S()[:, None])
        see_SN = canvas.end_S[:, None].expand(-1, canvas.capacity)  # every row sees the whole canvas
        return FrontierView(candidate_SN, torch.where(first_SN, 0, -1), see_SN)

    def reach(self, answer: int, block_length: int, params: SeatParams) -> int:  # noqa: ARG002
        return answer  # all blocks may be open


class ByEntropy(Drafter):
    """Tries nothing ahead; with `alg="entropy"` the threshold is for exp(-entropy) instead of the probability."""

    def rule(self, canvas: Canvas, params: DecodeParams, view: FrontierView, scores: Scores) -> Tensor:
        by_entropy_S1 = params.score_kind_S[:, None] == ENTROPY
        sure_SW = torch.where(by_entropy_S1, scores.neg_entropy_SN.exp(), scores.prob_SN)
        chosen_SW = choose(canvas, view, replace(scores, prob_SN=sure_SW, neg_doubt_SN=sure_SW - 1), params)
        commit(canvas, params, scores.pos_SW, chosen_SW, scores.token_SN, scores.prob_SN)
        return chosen_SW


D3LLM = Method(
    name="d3llm",
    title="Several blocks at once, what is below an entropy",
    paper="arXiv 2601.07568",
    frontier=OpenBlocks(),
    drafter=ByEntropy(),
    sampling={
        "alg": "entropy",
        "threshold": math.exp(-0.5),  # 0.5 nats, as for its LLaDA
        "strict_threshold": True,
        "block_length": 32,
        "tau_add": 0.1,
    },
)
CAREFUL = replace(D3LLM, name="d3llm-careful", sampling={**D3LLM.sampling, "threshold": math.exp(-0.1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=20, help="problems")
    problems = held_out(parser.parse_args().n)
    for method in ("confidence", "entropy-bound", D3LLM, CAREFUL):
        llm = LLM(method=method)
        result = score(llm, problems, SamplingParams())
        name = llm.method.name
        print(f"{name:14} {result.num_correct}/{result.num_problems} right, {result.tokens_per_pass:.1f} tokens a pass")


if __name__ == "__main__":
    main()
