"""Write a method of your own and compare it with two that are there: how many right, and how fast."""

import argparse

from unmask import LLM, Method, SamplingParams
from unmask.eval.word_problems import held_out, score

# A row of choices: where tokens may be decided, and which predictions become final.
CAREFUL = Method(
    name="careful",
    title="Among the 24 leftmost undecided positions, those that are nearly certain",
    frontier="window",
    sampling={"decode_window": 24, "threshold": 0.97},
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=20, help="problems")
    problems = held_out(parser.parse_args().n)
    for method in ("confidence", "entropy-bound", CAREFUL):
        llm = LLM(method=method)
        result = score(llm, problems, SamplingParams())
        name = llm.method.name
        print(f"{name:14} {result.num_correct}/{result.num_problems} right, {result.tokens_per_pass:.1f} tokens a pass")


if __name__ == "__main__":
    main()
