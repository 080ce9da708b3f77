"""The shortest way to an answer: the model that ships, one question."""

from unmask import LLM

QUESTION = (
    "Sam gets 57 grapes in the morning and 25 in the evening. He throws 37 bad grapes away. "
    "He packs the grapes in crates of 5. How many crates does he fill?"
)


def main() -> None:
    llm = LLM()
    answer = llm.chat([{"role": "user", "content": QUESTION}])[0].outputs[0]
    print(answer.text)
    print(f"{answer.num_committed} tokens in {answer.num_forward_passes} passes, {answer.tokens_per_pass:.1f} a pass")


if __name__ == "__main__":
    main()
