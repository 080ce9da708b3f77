"""One step of decoding for everybody who is seated: admit, look, let wait, run, tell.

S seats, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unmask import ops
from unmask.cache.pool import PAGE_SIZE, PagePool, num_pages_for
from unmask.cache.prefix import Prefix, PrefixCache
from unmask.config import EngineConfig
from unmask.core import layout
from unmask.core.canvas import SEALED, Canvas
from unmask.decoding.params import DecodeParams
from unmask.engine.axes import Axes
from unmask.engine.graphs import FixedSteps, Messages
from unmask.engine.memory import make_pool
from unmask.engine.outputs import BLOCK_STATES, CanvasCell, CommitEvent, CompletionOutput, StreamChunk
from unmask.engine.request import Answer
from unmask.engine.scheduler import Scheduler
from unmask.engine.scoring import Model
from unmask.engine.stats import Stats
from unmask.engine.step import READBACK, Budgets, Look, Step
from unmask.engine.text import Decoder
from unmask.errors import EngineError, RequestError
from unmask.methods import Method, check_prefix_caching, check_weights


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclass
class Told:
    """What the host knows of a step: the device's tensors after a ragged one, copies of them after a replay."""

    rows: list[list[int]]
    """By seat, the columns of `READBACK`."""
    token_SN: Tensor
    commit_pass_SN: Tensor
    details: Sequence[Tensor] | None = None
    """final, commit_prob, run, block_state, where somebody watches the canvas or wants a trajectory."""

    def of(self, seat: int) -> dict[str, int]:
        """A seat's row by name."""
        return dict(zip(READBACK, self.rows[seat]))


class Engine:
    """Runs answers to their end, joining and leaving at any step. Not thread-safe: threads share it in a `Stepper`.

    It is made with its GPU as the current one (`ops.on`), and sees to that itself in whatever thread it is called.

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
        checkpoint: Path | None = None,
    ) -> None:
        """``checkpoint`` is the directory that the model was loaded from, which keeps what is worked out of it."""
        check_weights(method, model.config, allow=config.allow_attention_mismatch)
        ops.check_kernels(config.kernels)
        self.model, self.method, self.config, self.decoder = model, method, config, decoder
        self.device = model.head.device
        self.stats = Stats()
        self.axes = Axes.of(method, model.config, model, checkpoint)
        self.pool: PagePool = make_pool(
            model, config, num_seats=_bucket(config.max_num_seqs), max_model_len=max_model_len, axes=self.axes
        )
        self.prefixes = PrefixCache(self.pool) if check_prefix_caching(method, config.enable_prefix_caching) else None
        self._found: dict[Answer, Prefix | None] = {}
        """What was known of an answer's prompt when it was seated, or last tried to be."""
        self._undecided: dict[Answer, tuple[int, int]] = {}
        """Undecided positions of a seated answer before and after the last pass that the host knows of."""
        self.scheduler = Scheduler(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            rows_of=self._most_rows,
            reserve=self._reserve_pages,
            max_refresh=2 * (max_model_len + self.axes.rows_beside),  # a guided request's two canvases
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
        self.max_capacity = num_pages_for(max_model_len) * PAGE_SIZE
        self.fixed: FixedSteps | None = None
        """Ordinary passes are captured and replayed; None: every pass is ragged."""
        self._messages = Messages()
        if self.device.type == "cuda" and not config.enforce_eager and self.axes.static:
            self.fixed = FixedSteps(self.step_program, compiled=config.enable_torch_compile)

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
        self._undecided.pop(answer, None)
        with ops.on(self.device):
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
        with ops.on(self.device), ops.kernels(self.config.kernels):
            for answer in self.scheduler.admit():
                self._seat(answer)
            if not self.scheduler.running:
                return
            if self.fixed is None:
                self._ragged_step(lambda answer: True)  # noqa: ARG005
            else:
                self._fixed_step(self.fixed)

    def _ragged_step(self, takes_part: Callable[[Answer], bool]) -> None:
        """A pass of exactly the rows that there are, of those who take part and need not wait."""
        program = self.step_program
        with self.stats.time("rules"):
            look = program.look()
            waiting = self._who_waits(look)
            resting = {each for each in self.scheduler.running if each in waiting or not takes_part(each)}
            if resting:
                waits_S = torch.zeros_like(self.canvas.active_S)
                waits_S[[seat for answer in resting for seat in answer.seats]] = True
                look = program.hold(look, waits_S)
        running = [answer for answer in self.scheduler.running if answer not in resting]
        if running:
            program.run(look)
        if resting:
            program.let_go(waits_S)
        if running:
            with self.stats.time("readback"):
                self._read_back(running, self._told())

    def _who_waits(self, look: Look) -> list[Answer]:
        """Refreshes that the row budget does not grant in this pass."""
        rows, due = torch.stack((look.run_SN.sum(1), look.due_S.long())).tolist()
        for answer in self.scheduler.running:
            answer.due = bool(due[answer.seat])
        wanted = [each + self.axes.rows_beside if each else 0 for each in rows]
        return self.scheduler.grant(wanted, [bool(each) for each in due])

    # --- one step with replays: ordinary passes in fixed shape, refreshes beside them

    def _fixed_step(self, fixed: FixedSteps) -> None:
        """The host is one replay behind the device: a seat that became due meanwhile has stood still in it."""
        if any(answer.due for answer in self.scheduler.running):
            self._catch_up()  # it may end some, and say of more that they are due
            self._ragged_step(lambda answer: answer.due)
        else:  # nothing is saved up for refreshes that nobody waits for
            self.scheduler.grant([0] * self.scheduler.max_seats, [False] * self.scheduler.max_seats)
        if any(not answer.due for answer in self.scheduler.running):
            self._replay(fixed)
            ahead = 1 if self._may_run_ahead() else 0
        else:
            ahead = 0
        while len(self._messages) > ahead:
            self._receive()

    def _may_run_ahead(self) -> bool:
        """Alone, a request whose next pass may be a refresh would lose a whole pass by standing still."""
        running = self.scheduler.running
        may_refresh = self.axes.policy.recurs or any(each.seat_params.interval for each in running)
        return len(running) > 1 or not may_refresh

    def _replay(self, fixed: FixedSteps) -> None:
        running = [answer for answer in self.scheduler.running if not answer.due]
        num_seats = _bucket(1 + max(seat for answer in self.scheduler.running for seat in answer.seats))
        fixed.get(num_seats, self._budgets(running))()
        program, canvas = self.step_program, self.canvas
        sources = [program.readback, canvas.token_SN, canvas.commit_pass_SN]
        if any(_wants_details(answer) for answer in running):
            sources += [canvas.final_SN, canvas.commit_prob_SN, program.run_SN, canvas.block_state_SK]
        self._messages.send(running, [source[:num_seats] for source in sources])

    def _budgets(self, running: Sequence[Answer]) -> Budgets:
        """Rows and candidates that suffice for each of them, in steps: every size is captured by itself. Where rows
        become fewer as the answers fill, half the size follows, and a quarter."""
        most, left = (max(self._canvas_rows(each, left=left) for each in running) for left in (False, True))
        most = min(_round_up(most, 16 if most <= 256 else 64), self.canvas.capacity)
        num_rows = next(rows for rows in (_round_up(-(-most // part), 16) for part in (4, 2, 1)) if rows >= left)
        # A row scores one position; under shifted logits the first row scores two, and the kept one another.
        num_scored = min(max(map(self._reach, running)), num_rows + 2 * self.model.config.logit_shift)
        return Budgets(num_rows, min(_round_up(num_scored, 16), self.canvas.capacity), refreshes=False)

    def _catch_up(self) -> None:
        while self._messages:
            self._receive()

    def _receive(self) -> None:
        with self.stats.time("readback"):
            answers, (rows, token_SN, commit_pass_SN, *details) = self._messages.receive()
            here = [answer for answer in answers if answer in self.scheduler.running]
            self._read_back(here, Told(rows.tolist(), token_SN, commit_pass_SN, details or None), late=True)

    # --- seats

    def _reach(self, answer: Answer) -> int:
        """Most candidates of a pass."""
        return self.axes.frontier.reach(len(answer.answer_ids), answer.block_length, answer.seat_params)

    def _canvas_rows(self, answer: Answer, *, left: bool = False) -> int:
        """Most canvas rows of each of its seats in an ordinary pass; ``left``: in those that are left."""
        canvas = len(answer.prompt_ids), len(answer.answer_ids), self._reach(answer), answer.seat_params
        policy = self.axes.policy
        return policy.most_rows_left(*canvas, self._undecided[answer][0]) if left else policy.most_rows(*canvas)

    def _most_rows(self, answer: Answer) -> int:
        """Most rows of an ordinary pass, or of the drafter's second one, all its seats together."""
        return max(self._canvas_rows(answer) + self.axes.rows_beside, self.axes.drafter.num_second) * answer.num_seats

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
        answer.due, answer.num_steps = self.axes.policy.refreshes, 0
        self._undecided[answer] = (answer.length, answer.length)
        if (prefix := self._found.get(answer)) is not None:
            self._use_prefix(answer.seat, prompt, prefix)

    def _use_prefix(self, seat: int, prompt: int, prefix: Prefix) -> None:
        """The prompt's block is sealed from the start, and the row that scores the first position is known."""
        self.canvas.block_state_SK[seat, 0].fill_(SEALED)
        if prefix.hidden_D is not None:
            self.step_program.saved_SD[seat] = prefix.hidden_D
            self.canvas.saved_pos_S[seat].fill_(prompt - 1)

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
        """Larger tensors where they are too small. Captured steps know them by address, so with those they grow in
        powers of two, and all seats are there from the start."""
        canvas, params = self.canvas, self.params
        seats, capacity = _bucket(num_seats), num_pages_for(length) * PAGE_SIZE
        if self.fixed is not None:
            seats, num_blocks = _bucket(self.config.max_num_seqs), _bucket(num_blocks)
            capacity = min(_bucket(capacity), self.max_capacity)
        seats, capacity = max(canvas.num_seats, seats), max(canvas.capacity, capacity)
        blocks = max(canvas.block_state_SK.shape[1], num_blocks)
        steps = max(params.num_steps, _bucket(num_steps))
        if (seats, capacity, blocks) != (canvas.num_seats, canvas.capacity, canvas.block_state_SK.shape[1]):
            canvas = canvas.grown(seats, capacity, blocks)
        if (seats, steps) != (params.num_seats, params.num_steps):
            params = params.grown(seats, steps)
        if self.fixed is not None and not (canvas is self.canvas and params is self.params):
            self.fixed.clear()
        self.step_program.resize(canvas, params)

    # --- what came of it

    def _told(self) -> Told:
        canvas, program = self.canvas, self.step_program
        details = (canvas.final_SN, canvas.commit_prob_SN, program.run_SN, canvas.block_state_SK)
        return Told(program.readback.tolist(), canvas.token_SN, canvas.commit_pass_SN, details)

    def _read_back(self, running: Sequence[Answer], told: Told, *, late: bool = False) -> None:
        """One small transfer a step; token rows only for those who need them now. ``late``: the device is a step
        further, or two."""
        self.stats.num_passes += 1
        self.stats.num_rows += sum(told.rows[seat][READBACK.index("num_rows")] for a in running for seat in a.seats)
        for answer in running:
            row = told.of(answer.seat)
            if row["overflow"]:
                raise EngineError("a pass had no room for its rows; please report")
            answer.due = bool(row["due"])
            if row["num_steps"] == answer.num_steps:  # it was due, and stood still
                continue
            answer.num_steps = row["num_steps"]
            self._undecided[answer] = (self._undecided[answer][1], row["num_undecided"])
            complete = row["num_undecided"] == 0
            if answer.num_steps == 1 and not late:
                self._keep_prefix(answer)
            if answer.tracker is not None or answer.watch:
                complete |= self._tell(answer, told, row)
            if complete:
                self._finish(answer, told, row)
            elif answer.num_steps > answer.length + _num_steps(answer):
                raise EngineError(
                    f"a request of {answer.length} positions is unfinished after {answer.num_steps} steps; "
                    "please report"
                )

    def _tell(self, answer: Answer, told: Told, row: dict[str, int]) -> bool:
        """Follow the settled text; True when a stop string ends the answer here."""
        ids = self._settled_ids(answer, told, row["num_settled"])
        delta, tracker = "", answer.tracker
        if tracker is not None:
            with self.stats.time("tokenizer"):
                delta = tracker.push(ids)
        if answer.watch:
            cells = self._cells(answer, told, row["end"]) if answer.watch_canvas else None
            answer.stream(StreamChunk(answer.index, delta, ids[answer.num_streamed :], row["num_forward"], cells))
        return tracker is not None and tracker.match is not None

    def _settled_ids(self, answer: Answer, told: Told, num_settled: int) -> list[int]:
        start = len(answer.prompt_ids)
        ids: list[int] = told.token_SN[answer.seat, start : start + num_settled].tolist()
        return _without_end(ids, answer)

    def _cells(self, answer: Answer, told: Told, end: int) -> list[CanvasCell]:
        assert told.details is not None, "the canvas is watched"
        final_SN, prob_SN, run_SN, state_SK = told.details
        seat, span = answer.seat, slice(len(answer.prompt_ids), end)
        rows = (told.token_SN, final_SN, prob_SN, told.commit_pass_SN, run_SN)
        states: list[str | None] = [None] * answer.length
        if self.method.kinds[0] == "pipeline":
            block_N = layout.blocks(answer.length, len(answer.prompt_ids), answer.block_length)[span]
            states = [BLOCK_STATES[state] for state in state_SK[seat].cpu()[block_N.long()].tolist()]
        return [self._cell(*cell) for cell in zip(*(row[seat, span].tolist() for row in rows), states)]

    def _cell(
        self, token: int, final: bool, prob: float, num_pass: int, ran: bool, block_state: str | None
    ) -> CanvasCell:
        if not final:
            return CanvasCell(None, "", None, None, ran, block_state)
        text = self.decoder.decode([token], skip_special_tokens=False) if self.decoder else str(token)
        return CanvasCell(token, text, prob if num_pass else None, num_pass, ran, block_state)

    def _finish(self, answer: Answer, told: Told, row: dict[str, int]) -> None:
        answer.output = self._output(answer, told, row)
        self.abort(answer)

    def _output(self, answer: Answer, told: Told, row: dict[str, int]) -> CompletionOutput:
        seat, start = answer.seat, len(answer.prompt_ids)
        raw: list[int] = told.token_SN[seat, start : row["end"]].tolist()
        ids = _without_end(raw, answer)
        reason, stop = "length", None  # type: tuple[str, int | str | None]
        if len(ids) < len(raw):
            ending = raw[len(ids)]
            reason, stop = "stop", ending if ending in answer.params.stop_token_ids else None
        tracker = answer.tracker
        if tracker is not None and tracker.match is not None:
            ids, reason, stop = ids[: tracker.match.num_tokens], "stop", tracker.match.stop
        num_pass = told.commit_pass_SN[seat, start : start + len(ids)].tolist()
        return CompletionOutput(
            index=answer.index,
            text=self._text(answer, ids, row["num_forward"]),
            token_ids=ids,
            finish_reason=reason,
            stop_reason=stop,
            num_forward_passes=row["num_forward"],
            num_steps=row["num_steps"],
            num_rows=row["total_rows"],
            num_committed=sum(1 for number in num_pass if number > 0),
            trajectory=self._trajectory(answer, told, ids, num_pass) if answer.params.trajectory else None,
        )

    def _text(self, answer: Answer, ids: list[int], num_passes: int) -> str:
        with self.stats.time("tokenizer"):
            if answer.tracker is not None:
                rest = answer.tracker.finish(ids)
                if answer.watch and rest:
                    answer.stream(StreamChunk(answer.index, rest, num_passes=num_passes))
                return answer.tracker.text
            if self.decoder is None:
                return ""
            return self.decoder.decode(ids, skip_special_tokens=answer.params.skip_special_tokens)

    def _trajectory(self, answer: Answer, told: Told, ids: list[int], num_pass: list[int]) -> list[CommitEvent]:
        assert told.details is not None, "a trajectory is wanted"
        start = len(answer.prompt_ids)
        prob = told.details[1][answer.seat, start : start + len(ids)].tolist()
        events = zip(range(len(ids)), ids, num_pass, prob)
        return [CommitEvent(*event) for event in events if event[2] > 0]


def _wants_details(answer: Answer) -> bool:
    return answer.watch_canvas or answer.params.trajectory


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
