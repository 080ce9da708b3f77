"""One batch, every request with parameters of its own, every answer the one that it would get alone."""

from unmask import LLM, SamplingParams
from unmask.problems import make_problems

SETTINGS = [
    SamplingParams(),  # what the model recommends
    SamplingParams(steps=128),  # a fixed schedule: 128 answer positions in 128 passes, one a pass
    SamplingParams(threshold=0.5, block_length=0),  # quick and risky, anywhere on the canvas
    SamplingParams(temperature=0.7, seed=1),
]


def main() -> None:
    llm = LLM()
    problems = list(make_problems(7, len(SETTINGS), split="test"))
    conversations = [[{"role": "user", "content": problem["question"]}] for problem in problems]
    for problem, result in zip(problems, llm.chat(conversations, SETTINGS)):
        print(problem["question"])
        print(f"  expected {problem['answer'].splitlines()[-1]}, got {result.outputs[0].text.splitlines()[-1]}")
        print(f"  {result.num_forward_passes} passes, {result.tokens_per_pass:.1f} tokens a pass")


if __name__ == "__main__":
    main()
