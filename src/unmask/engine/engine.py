"""One step of decoding for everybody who is seated: admit, look, let wait, run, tell.

S seats, N positions.
"""

from __future__ import annotations

import torch

from unmask.cache.pool import PAGE_SIZE, PagePool, num_pages_for
from unmask.cache.prefix import Prefix, PrefixCache
from unmask.config import EngineConfig
from unmask.core import layout
from unmask.core.canvas import SEALED, Canvas
from unmask.decoding.params import DecodeParams
from unmask.engine.axes import Axes
from unmask.engine.memory import make_pool
from unmask.engine.outputs import BLOCK_STATES, CanvasCell, CommitEvent, CompletionOutput, StreamChunk
from unmask.engine.request import Answer
from unmask.engine.scheduler import Scheduler
from unmask.engine.scoring import Model
from unmask.engine.stats import Stats
from unmask.engine.step import READBACK, Look, Step
from unmask.engine.text import Decoder
from unmask.errors import EngineError, RequestError
from unmask.methods import Method, check_prefix_caching, check_weights


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


class Engine:
    """Runs answers to their end, joining and leaving at any step. Not thread-safe: threads share it in a `Stepper`.

    Raises:
        MethodError: the row and the weights do not fit together.
        ConfigError: not even one canvas of ``max_model_len`` fits the memory.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        config: EngineConfig,
        *,
        max_model_len: int,
        decoder: Decoder | None,
        unknown_ids: list[int],
    ) -> None:
        check_weights(method, model.config, allow=config.allow_attention_mismatch)
        self.model, self.method, self.decoder = model, method, decoder
        self.device = model.head.device
        self.stats = Stats()
        self.axes = Axes.of(method, model.config)
        self.pool: PagePool = make_pool(
            model, config, num_seats=_bucket(config.max_num_seqs), max_model_len=max_model_len, axes=self.axes
        )
        self.prefixes = PrefixCache(self.pool) if check_prefix_caching(method, config.enable_prefix_caching) else None
        self._found: dict[Answer, Prefix | None] = {}
        """What was known of an answer's prompt when it was seated, or last tried to be."""
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            rows_of=self._most_rows,
            reserve=self._reserve_pages,
            max_refresh=2 * max_model_len,  # a guided request's two canvases
        )
        self.step_program = Step(
            model,
            Canvas.empty(1, PAGE_SIZE, model.config.mask_token_id, self.device, 2, self.axes.drafter.num_pending),
            DecodeParams(1, 1, self.device),
            self.pool,
            frontier=self.axes.frontier,
            policy=self.axes.policy,
            drafter=self.axes.drafter,
            unknown_ids=unknown_ids,
            stats=self.stats,
        )

    @property
    def canvas(self) -> Canvas:
        """The state of all seats."""
        return self.step_program.canvas

    @property
    def params(self) -> DecodeParams:
        """The parameters of all seats."""
        return self.step_program.params

    # --- the queue

    def check(self, answer: Answer) -> None:
        """Whether an answer can ever be seated.

        Raises:
            RequestError: its canvas is larger than the whole pool.
        """
        num_pages = num_pages_for(answer.length) * answer.num_seats
        if num_pages > self.pool.num_pages:
            raise RequestError(
                f"a canvas of {answer.length} positions in {answer.num_seats} seats needs {num_pages} pages of "
                f"{PAGE_SIZE} and the pool has {self.pool.num_pages}; ask for less or raise kv_cache_memory_bytes"
            )

    def add(self, answer: Answer) -> None:
        """Queue an answer.

        Raises:
            RequestError: as `check` does.
        """
        self.check(answer)
        self.scheduler.add(answer)

    @torch.inference_mode()
    def abort(self, answer: Answer) -> None:
        """Forget an answer, wherever it is; others are not touched. Nothing happens if it is done."""
        self._found.pop(answer, None)
        for seat in self.scheduler.release(answer):
            self._free(seat)

    @property
    def busy(self) -> bool:
        """Whether somebody waits or runs."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # --- one step

    @torch.inference_mode()
    def step(self) -> None:
        """One pass (two, where the drafter verifies in its own) over all who are seated and need not wait."""
        for answer in self.scheduler.admit():
            self._seat(answer)
        if not self.scheduler.running:
            return
        program = self.step_program
        with self.stats.time("rules"):
            look = program.look()
            waiting = self._who_waits(look)
            if waiting:
                waits_S = torch.zeros_like(self.canvas.active_S)
                waits_S[[seat for answer in waiting for seat in answer.seats]] = True
                look = program.hold(look, waits_S)
        program.run(look)
        if waiting:
            program.let_go(waits_S)
        with self.stats.time("readback"):
            self._read_back(set(waiting))

    def _who_waits(self, look: Look) -> list[Answer]:
        """Refreshes that the row budget does not grant in this pass."""
        rows, due = torch.stack((look.run_SN.sum(1), look.due_S.long())).tolist()
        return self.scheduler.grant(rows, [bool(each) for each in due])

    # --- seats

    def _most_rows(self, answer: Answer) -> int:
        p, num_answer = answer.seat_params, len(answer.answer_ids)
        reach = self.axes.frontier.reach(num_answer, answer.block_length, p)
        return self.axes.policy.most_rows(len(answer.prompt_ids), num_answer, reach, p) * answer.num_seats

    def _reserve_pages(self, answer: Answer) -> bool:
        """Pages for the whole canvas of every seat of an answer, or none."""
        done: list[int] = []
        for seat in answer.seats:
            if not self._reserve_seat(answer, seat):
                for other in done:
                    self.pool.release(other)
                return False
            done.append(seat)
        return True

    def _reserve_seat(self, answer: Answer, seat: int) -> bool:
        prefixes = self.prefixes
        if prefixes is None:
            return self.pool.reserve(seat, answer.length)
        if answer.num_seats > 1:  # a guided request's twin has another prompt, and the two start together
            return prefixes.reserve(seat, answer.length)
        # Every attempt asks anew, since what was found may be evicted meanwhile; only the first one counts.
        prefix = prefixes.find(answer.prompt_ids, count=answer not in self._found)
        warm = prefix is not None and prefixes.seat(seat, answer.length, prefix)
        self._found[answer] = prefix if warm else None
        return warm or prefixes.reserve(seat, answer.length)

    def _seat(self, answer: Answer) -> None:
        token_N = torch.tensor([*answer.prompt_ids, *answer.answer_ids], dtype=torch.int32)
        prompt = len(answer.prompt_ids)
        block_N = layout.blocks(answer.length, prompt, answer.block_length)
        self._make_room(max(answer.seats) + 1, answer.length, _num_steps(answer), int(block_N.max()) + 1)
        self.canvas.place(answer.seat, token_N, prompt=prompt, block_N=block_N)
        if answer.twin >= 0:
            self.canvas.place(answer.twin, token_N, prompt=prompt, block_N=block_N, leader=answer.seat)
        self.params.write(answer.seat, answer.seat_params, twin=answer.twin)
        if (prefix := self._found.get(answer)) is not None:
            self._use_prefix(answer.seat, prompt, prefix)

    def _use_prefix(self, seat: int, prompt: int, prefix: Prefix) -> None:
        """The prompt's block is sealed from the start, and the row that scores the first position is known."""
        self.canvas.block_state_SK[seat, 0] = SEALED
        if prefix.hidden_D is not None:
            self.step_program.saved_SD[seat] = prefix.hidden_D
            self.canvas.saved_pos_S[seat] = prompt - 1

    def _keep_prefix(self, answer: Answer) -> None:
        """After an answer's first pass its prompt's K/V are final."""
        if self.prefixes is None or answer.num_seats > 1 or self._found.get(answer) is not None:
            return
        shift, hidden_D = self.model.config.logit_shift, None
        if shift:
            if int(self.canvas.saved_pos_S[answer.seat]) != len(answer.prompt_ids) - 1:
                return  # infilling that begins elsewhere: the row that scores the first position was not kept
            hidden_D = self.step_program.saved_SD[answer.seat]
        self.prefixes.store(answer.prompt_ids, answer.seat, hidden_D)

    def _free(self, seat: int) -> None:
        self.canvas.release(seat)
        self.params.release(seat)
        self.pool.release(seat)

    def _make_room(self, num_seats: int, length: int, num_steps: int, num_blocks: int) -> None:
        canvas, params = self.canvas, self.params
        seats = max(canvas.num_seats, _bucket(num_seats))
        capacity = max(canvas.capacity, num_pages_for(length) * PAGE_SIZE)
        blocks = max(canvas.block_state_SK.shape[1], num_blocks)
        steps = max(params.num_steps, _bucket(num_steps))
        if (seats, capacity, blocks) != (canvas.num_seats, canvas.capacity, canvas.block_state_SK.shape[1]):
            canvas = canvas.grown(seats, capacity, blocks)
        if (seats, steps) != (params.num_seats, params.num_steps):
            params = params.grown(seats, steps)
        self.step_program.resize(canvas, params)

    # --- what came of it

    def _read_back(self, waiting: set[Answer]) -> None:
        """One small transfer a step; token rows only for those who need them now."""
        state = self.step_program.readback.tolist()
        columns = {name: place for place, name in enumerate(READBACK)}
        self.stats.num_passes += 1
        self.stats.num_rows += sum(row[columns["num_rows"]] for row in state)
        finished = []
        for answer in [each for each in self.scheduler.running if each not in waiting]:
            row = state[answer.seat]
            num_settled, num_steps = row[columns["num_settled"]], row[columns["num_steps"]]
            if row[columns["overflow"]]:
                raise EngineError("a pass had no room for its rows; please report")
            complete = row[columns["num_undecided"]] == 0
            if num_steps == 1:
                self._keep_prefix(answer)
            if answer.tracker is not None or answer.watch:
                complete |= self._tell(answer, num_settled)
            if complete:
                finished.append(answer)
            elif num_steps > answer.length + _num_steps(answer):
                raise EngineError(
                    f"a request of {answer.length} positions is unfinished after {num_steps} steps; please report"
                )
        for answer in finished:
            self._finish(answer)

    def _tell(self, answer: Answer, num_settled: int) -> bool:
        """Follow the settled text; True when a stop string ends the answer here."""
        ids = self._settled_ids(answer, num_settled)
        delta, tracker = "", answer.tracker
        if tracker is not None:
            with self.stats.time("tokenizer"):
                delta = tracker.push(ids)
        if answer.watch:
            cells = self._cells(answer) if answer.watch_canvas else None
            num_passes = int(self.canvas.num_forward_S[answer.seat])
            answer.stream(StreamChunk(answer.index, delta, ids[answer.num_streamed :], num_passes, cells))
        return tracker is not None and tracker.match is not None

    def _settled_ids(self, answer: Answer, num_settled: int) -> list[int]:
        start = len(answer.prompt_ids)
        ids: list[int] = self.canvas.token_SN[answer.seat, start : start + num_settled].tolist()
        return _without_end(ids, answer)

    def _cells(self, answer: Answer) -> list[CanvasCell]:
        canvas, seat, start = self.canvas, answer.seat, len(answer.prompt_ids)
        span = slice(start, int(canvas.end_S[seat]))
        rows = (
            canvas.token_SN,
            canvas.final_SN,
            canvas.commit_prob_SN,
            canvas.commit_pass_SN,
            self.step_program.run_SN,
        )
        states: list[str | None] = [None] * answer.length
        if self.method.frontier == "pipeline":
            state_N = canvas.block_state_SK[seat][canvas.block_SN[seat, span].long()]
            states = [BLOCK_STATES[state] for state in state_N.tolist()]
        return [self._cell(*cell) for cell in zip(*(row[seat, span].tolist() for row in rows), states)]

    def _cell(
        self, token: int, final: bool, prob: float, num_pass: int, ran: bool, block_state: str | None
    ) -> CanvasCell:
        if not final:
            return CanvasCell(None, "", None, None, ran, block_state)
        text = self.decoder.decode([token], skip_special_tokens=False) if self.decoder else str(token)
        return CanvasCell(token, text, prob if num_pass else None, num_pass, ran, block_state)

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
            num_forward_passes=int(canvas.num_forward_S[seat]),
            num_steps=int(canvas.pass_S[seat]),
            num_rows=int(canvas.rows_S[seat]),
            num_committed=sum(1 for number in num_pass if number > 0),
            trajectory=self._trajectory(answer, ids, num_pass) if answer.params.trajectory else None,
        )

    def _text(self, answer: Answer, ids: list[int]) -> str:
        with self.stats.time("tokenizer"):
            if answer.tracker is not None:
                rest = answer.tracker.finish(ids)
                if answer.watch and rest:
                    answer.stream(
                        StreamChunk(answer.index, rest, num_passes=int(self.canvas.num_forward_S[answer.seat]))
                    )
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
