"""An engine that writes a fixed answer onto a canvas, two tokens a pass from the right, and records its calls."""

from __future__ import annotations

import time
from types import SimpleNamespace

from unmask.engine.outputs import CanvasCell, CompletionOutput, RequestOutput, StreamChunk
from unmask.methods import METHODS

END_ID = 9
UNDECIDED = CanvasCell(None, "", None, None)
WORDS = ("Two", " and", " two", " make", " 四", ".\n", "Done", "")
TEXT = "".join(WORDS)


def decided(text, token_id=1, probability=0.95, num_pass=1):
    return CanvasCell(token_id, text, probability, num_pass)


def final_cells():
    cells = [decided(word, i % END_ID, 0.2 + 0.1 * i, 4 - i // 2) for i, word in enumerate(WORDS, 1)]
    return [*cells, decided("<|end|>", END_ID)]


class FakeLLM:
    def __init__(self, template=True, delay=0.0, interrupt_after=None, error=None, method="confidence"):
        self.tokenizer = SimpleNamespace(has_chat_template=template)
        self.model = SimpleNamespace(config=SimpleNamespace(eos_token_ids=(END_ID,)))
        self.method = METHODS[method]
        self.delay, self.interrupt_after, self.error = delay, interrupt_after, error
        self.calls = []
        self.closed = 0

    def output(self, prompt, params):
        answers = [
            CompletionOutput(
                i, TEXT, list(range(len(WORDS))), "stop", num_forward_passes=4, num_rows=40, num_committed=8
            )
            for i in range(params.n)
        ]
        return RequestOutput("0", prompt, [1, 2], answers)

    def _call(self, name, what, params):
        self.calls.append((name, what, params))
        if self.error:
            raise self.error

    def generate(self, prompts, params):
        self._call("generate", prompts, params)
        return [self.output(prompt, params) for prompt in prompts]

    def chat(self, messages, params):
        self._call("chat", messages, params)
        return [self.output(None, params) for _ in messages]

    def infill(self, text, params, messages=None):
        self._call("infill", (text, messages), params)
        return self.output(text, params)

    def stream(self, prompt, params, canvas=False):
        self._call("stream", prompt, params)
        return self._chunks(params, canvas)

    def _chunks(self, params, canvas):
        done = final_cells()
        try:
            for num_passes in range(1, 5):
                time.sleep(self.delay)
                if self.interrupt_after == num_passes:
                    raise KeyboardInterrupt
                cells = [cell if cell.num_pass <= num_passes else UNDECIDED for cell in done]
                last = num_passes == 4
                for index in range(params.n):
                    output = self.output(None, params) if last and index == params.n - 1 else None
                    yield StreamChunk(index, TEXT if last else "", [], num_passes, cells if canvas else None, output)
        finally:
            self.closed += 1
