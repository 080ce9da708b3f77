"""Fill holes in a given text: [[2]] is a hole of two tokens, everything else stays as it is."""

from unmask import LLM

QUESTION = (
    "Sam gets 57 grapes in the morning and 25 in the evening. He throws 37 bad grapes away. "
    "He packs the grapes in crates of 5. How many crates does he fill?"
)
# Every digit is a token.
DRAFT = "He has 57 + 25 = [[2]] grapes\nHe has 82 - 37 = [[2]] grapes\nHe fills 45 / 5 = [[1]] crates\n#### 9"


def main() -> None:
    llm = LLM()
    result = llm.infill(DRAFT, messages=[{"role": "user", "content": QUESTION}])
    print(result.outputs[0].text)
    print(f"{result.outputs[0].num_committed} tokens found in {result.num_forward_passes} passes")


if __name__ == "__main__":
    main()
