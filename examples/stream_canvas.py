"""Watch the canvas: one line a pass, a dot for every position that is still a mask."""

from unmask import LLM
from unmask.engine.outputs import CanvasCell

QUESTION = (
    "Frank has 6 plates of 8 buns and 5 plates of 7 buns. He buys 18 more buns at the school. "
    "He needs 161 buns for a party. How many more buns must he get?"
)


def drawn(cells: list[CanvasCell]) -> str:
    """The answer as it stands, on one line."""
    return "".join("." if cell.token_id is None else cell.text.replace("\n", "|") for cell in cells)


def main() -> None:
    llm = LLM()
    for chunk in llm.stream({"messages": [{"role": "user", "content": QUESTION}]}, canvas=True):
        if chunk.canvas is not None:
            print(f"{chunk.num_passes:2} {drawn(chunk.canvas)}")
        if chunk.output is not None:
            print(chunk.output.outputs[0].text)


if __name__ == "__main__":
    main()
