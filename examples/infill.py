"""Fill holes in a given text: [[3]] is a hole of three tokens, everything else stays as it is."""

from unmask import LLM

QUESTION = (
    "Sam gets 57 grapes in the morning and 25 in the evening. He throws 37 bad grapes away. "
    "He packs the grapes in crates of 5. How many crates does he fill?"
)
# A hole begins where a token does: here " = ", "8", "2" are three.
DRAFT = "He has 57 + 25[[3]] grapes\nHe has 82 - 37[[3]] grapes\nHe fills 45 / 5[[2]] crates\n#### 9"


def main() -> None:
    llm = LLM()
    result = llm.infill(DRAFT, messages=[{"role": "user", "content": QUESTION}])
    print(result.outputs[0].text)
    print(f"{result.outputs[0].num_committed} tokens found in {result.num_forward_passes} passes")


if __name__ == "__main__":
    main()
