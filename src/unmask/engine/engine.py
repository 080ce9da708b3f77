"""One step of decoding for everybody who is seated: admit, advance, run, choose, commit, tell.

S seats, N positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unmask.cache.policy import POLICIES, CachePolicy
from unmask.config import EngineConfig
from unmask.core import layout
from unmask.core.canvas import Canvas
from unmask.core.rows import pack
from unmask.decoding.frontier import FRONTIERS, Frontier
from unmask.decoding.params import DecodeParams
from unmask.decoding.rule import choose
from unmask.engine.outputs import CanvasCell, CommitEvent, CompletionOutput, StreamChunk
from unmask.engine.request import Answer
from unmask.engine.runner import Runner
from unmask.engine.scheduler import Scheduler
from unmask.engine.scoring import Model
from unmask.engine.stats import Stats
from unmask.engine.text import Decoder
from unmask.errors import EngineError
from unmask.methods import Method

_PAGE = 16  # canvases grow by pages, so that a few sizes serve all lengths


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


class Engine:
    """Runs answers to their end. Not thread-safe: `LLM` calls it under a lock."""

    def __init__(
        self, model: Model, method: Method, config: EngineConfig, *, decoder: Decoder | None, unknown_ids: list[int]
    ) -> None:
        self.model, self.method, self.decoder = model, method, decoder
        self.device = model.head.device
        self.stats = Stats()
        self.scheduler = Scheduler(config.max_num_seqs, config.max_num_batched_tokens)
        self.frontier: Frontier = FRONTIERS[method.frontier]()
        self.policy: CachePolicy = POLICIES[method.policy]()
        self.runner = Runner(model, unknown_ids, self.stats)
        self.canvas = Canvas.empty(1, _PAGE, model.config.mask_token_id, self.device)
        self.params = DecodeParams(1, 1, self.device)

    # --- the queue

    def add(self, answer: Answer) -> None:
        """Queue an answer."""
        self.scheduler.add(answer)

    @torch.inference_mode()
    def abort(self, answer: Answer) -> None:
        """Forget an answer, wherever it is; others are not touched. Nothing happens if it is done."""
        for seat in self.scheduler.release(answer):
            self._free(seat)

    # --- one step

    @torch.inference_mode()
    def step(self) -> None:
        """One pass over all who are seated."""
        for answer in self.scheduler.admit():
            self._seat(answer)
        with self.stats.time("rules"):
            view = self.frontier.advance(self.canvas, self.params)
            plan = pack(self.canvas, self.policy.rows(self.canvas))
        scores = self.runner.forward(plan, view.candidate_SN, self.canvas, self.params)
        with self.stats.time("rules"):
            commit_SN = choose(self.canvas, view, scores, self.params)
            self._count(plan.num_rows_S)
            self.canvas.commit(commit_SN, scores.token_SN, scores.prob_SN, self.params.eos_SE)
            if self.params.needs.guided:
                self.canvas.follow()
        with self.stats.time("readback"):
            self._read_back()

    def _count(self, num_rows_S: Tensor) -> None:
        self.canvas.count_rows(num_rows_S)
        self.stats.num_passes += 1
        self.stats.num_rows += int(num_rows_S.sum())

    # --- seats

    def _seat(self, answer: Answer) -> None:
        self._reserve(max(answer.seat, answer.twin) + 1, answer.length, _num_steps(answer))
        token_N = torch.tensor([*answer.prompt_ids, *answer.answer_ids], dtype=torch.int32)
        prompt = len(answer.prompt_ids)
        block_N = layout.blocks(answer.length, prompt, answer.block_length)
        self.canvas.place(answer.seat, token_N, prompt=prompt, block_N=block_N)
        if answer.twin >= 0:
            self.canvas.place(answer.twin, token_N, prompt=prompt, block_N=block_N, leader=answer.seat)
        self.params.write(answer.seat, answer.seat_params, twin=answer.twin)

    def _free(self, seat: int) -> None:
        self.canvas.release(seat)
        self.params.release(seat)

    def _reserve(self, num_seats: int, length: int, num_steps: int) -> None:
        canvas, params = self.canvas, self.params
        seats = max(canvas.num_seats, _bucket(num_seats))
        capacity = max(canvas.capacity, -(-length // _PAGE) * _PAGE)
        steps = max(params.num_steps, _bucket(num_steps))
        if (seats, capacity) != (canvas.num_seats, canvas.capacity):
            self.canvas = canvas.grown(seats, capacity)
        if (seats, steps) != (params.num_seats, params.num_steps):
            self.params = params.grown(seats, steps)

    # --- what came of it

    def _read_back(self) -> None:
        """One small transfer a step; token rows only for those who need them now."""
        canvas = self.canvas
        columns = (canvas.num_settled_S(), canvas.end_S, canvas.pass_S, canvas.prompt_S)
        state = torch.stack([column.int() for column in columns]).tolist()
        finished = []
        for answer in list(self.scheduler.running):
            num_settled, end, num_passes, prompt = (column[answer.seat] for column in state)
            complete = prompt + num_settled >= end
            if answer.tracker is not None or answer.watch:
                complete |= self._tell(answer, num_settled, num_passes)
            if complete:
                finished.append(answer)
            elif num_passes > answer.length + _num_steps(answer):
                raise EngineError(
                    f"a request of {answer.length} positions is unfinished after {num_passes} passes; please report"
                )
        for answer in finished:
            self._finish(answer)

    def _tell(self, answer: Answer, num_settled: int, num_passes: int) -> bool:
        """Follow the settled text; True when a stop string ends the answer here."""
        ids = self._settled_ids(answer, num_settled)
        delta, tracker = "", answer.tracker
        if tracker is not None:
            with self.stats.time("tokenizer"):
                delta = tracker.push(ids)
        if answer.watch:
            cells = self._cells(answer) if answer.watch_canvas else None
            answer.stream(StreamChunk(answer.index, delta, ids[answer.num_streamed :], num_passes, cells))
        return tracker is not None and tracker.match is not None

    def _settled_ids(self, answer: Answer, num_settled: int) -> list[int]:
        start = len(answer.prompt_ids)
        ids: list[int] = self.canvas.token_SN[answer.seat, start : start + num_settled].tolist()
        return _without_end(ids, answer)

    def _cells(self, answer: Answer) -> list[CanvasCell]:
        canvas, seat, start = self.canvas, answer.seat, len(answer.prompt_ids)
        span = slice(start, int(canvas.end_S[seat]))
        rows = (canvas.token_SN, canvas.final_SN, canvas.commit_prob_SN, canvas.commit_pass_SN)
        return [self._cell(*cell) for cell in zip(*(row[seat, span].tolist() for row in rows))]

    def _cell(self, token: int, final: bool, prob: float, num_pass: int) -> CanvasCell:
        if not final:
            return CanvasCell(None, "", None, None)
        text = self.decoder.decode([token], skip_special_tokens=False) if self.decoder else str(token)
        return CanvasCell(token, text, prob if num_pass else None, num_pass)

    def _finish(self, answer: Answer) -> None:
        answer.output = self._output(answer)
        self.abort(answer)

    def _output(self, answer: Answer) -> CompletionOutput:
        canvas, seat, start = self.canvas, answer.seat, len(answer.prompt_ids)
        end = int(canvas.end_S[seat])
        raw: list[int] = canvas.token_SN[seat, start:end].tolist()
        ids = _without_end(raw, answer)
        reason, stop = "length", None  # type: tuple[str, int | str | None]
        if len(ids) < len(raw):
            ending = raw[len(ids)]
            reason, stop = "stop", ending if ending in answer.params.stop_token_ids else None
        tracker = answer.tracker
        if tracker is not None and tracker.match is not None:
            ids, reason, stop = ids[: tracker.match.num_tokens], "stop", tracker.match.stop
        num_pass = canvas.commit_pass_SN[seat, start : start + len(ids)].tolist()
        return CompletionOutput(
            index=answer.index,
            text=self._text(answer, ids),
            token_ids=ids,
            finish_reason=reason,
            stop_reason=stop,
            num_forward_passes=int(canvas.pass_S[seat]),
            num_rows=int(canvas.rows_S[seat]),
            num_committed=sum(1 for number in num_pass if number > 0),
            trajectory=self._trajectory(answer, ids, num_pass) if answer.params.trajectory else None,
        )

    def _text(self, answer: Answer, ids: list[int]) -> str:
        with self.stats.time("tokenizer"):
            if answer.tracker is not None:
                rest = answer.tracker.finish(ids)
                if answer.watch and rest:
                    answer.stream(StreamChunk(answer.index, rest, num_passes=int(self.canvas.pass_S[answer.seat])))
                return answer.tracker.text
            if self.decoder is None:
                return ""
            return self.decoder.decode(ids, skip_special_tokens=answer.params.skip_special_tokens)

    def _trajectory(self, answer: Answer, ids: list[int], num_pass: list[int]) -> list[CommitEvent]:
        start = len(answer.prompt_ids)
        prob = self.canvas.commit_prob_SN[answer.seat, start : start + len(ids)].tolist()
        events = zip(range(len(ids)), ids, num_pass, prob)
        return [CommitEvent(*event) for event in events if event[2] > 0]


def _num_steps(answer: Answer) -> int:
    return max(len(answer.seat_params.quota), len(answer.seat_params.fill))


def _without_end(ids: list[int], answer: Answer) -> list[int]:
    """The answer up to its first ending token."""
    ending = set(answer.seat_params.eos)
    given = answer.answer_ids
    for place, token in enumerate(ids):
        if token in ending and given[place] != token:
            return ids[:place]
    return ids
