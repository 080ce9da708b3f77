"""One engine for many threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from unmask.engine.engine import Engine
from unmask.engine.outputs import CompletionOutput
from unmask.engine.request import Answer, Request
from unmask.errors import EngineError


class Stepper:
    """Lets threads share an engine: one of them steps, for everybody; the others wait for it, or leave word and go.

    Nothing is locked while a step runs, so nobody who comes or goes has to win a lock against a thread that takes it
    again and again. Whoever arrives or leaves meanwhile is written down, and the thread that steps sees to it before
    the next step can begin.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        """Notified after every step, and when somebody arrives or leaves. Held for moments only."""
        self._stepping = False
        self._arriving: list[Request] = []
        self._leaving: list[Request] = []
        self._broken: BaseException | None = None

    @property
    def num_running(self) -> int:
        """Answers that are seated."""
        return self.engine.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Answers that are not seated yet."""
        return self.engine.scheduler.num_waiting + sum(len(request.answers) for request in list(self._arriving))

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: now, or after the step that is running.

        Raises:
            EngineError: what a failed step left behind could not be cleared away.
        """
        with self.changed:
            if self._broken is not None:
                raise EngineError("the engine broke down and takes no more requests; make a new one") from self._broken
            self._arriving += requests
            self._come_and_go()

    def drop(self, requests: Sequence[Request]) -> None:
        """End requests and free what they hold: now, or after the step that is running.

        Their output is what has settled, with ``finish_reason`` "abort". Those that are done stay as they are.
        """
        with self.changed:
            self._leaving += requests
            self._come_and_go()

    def step(self, requests: Sequence[Request]) -> bool:
        """Take a step, or wait while another thread takes one; False, at once, if one of ``requests`` is done.

        Raises:
            BaseException: the step failed. Every request in the engine gets an `EngineError` with this as its cause.
        """
        with self.changed:
            if any(request.done for request in requests):
                return False
            if self._stepping:
                self.changed.wait()
                return True
            self._stepping = True
        failure: BaseException | None = None
        try:
            self.engine.step()
        except BaseException as error:
            failure = error
            raise
        finally:
            with self.changed:
                self._stepping = False
                if failure is not None:
                    self._fail(failure)
                self._come_and_go()
        return True

    # --- with `changed` held

    def _come_and_go(self) -> None:
        if not self._stepping:
            arriving, self._arriving = self._arriving, []
            leaving, self._leaving = self._leaving, []
            try:
                for request in arriving:
                    for answer in request.answers:
                        self.engine.add(answer)
                for request in leaving:
                    self._cut(request)
            except Exception as error:
                self._fail(error, [*arriving, *leaving])
        self.changed.notify_all()

    def _cut(self, request: Request) -> None:
        for answer in request.answers:
            if not answer.done:
                answer.output = self._so_far(answer)
                self.engine.abort(answer)

    def _so_far(self, answer: Answer) -> CompletionOutput:
        """An answer that ends early: the tokens and the text that were told."""
        canvas, seat, start = self.engine.canvas, answer.seat, len(answer.prompt_ids)
        text = answer.tracker.text if answer.tracker is not None else ""
        if seat < 0:
            return CompletionOutput(answer.index, text, [], "abort")
        ids = canvas.token_SN[seat, start : start + answer.num_streamed].tolist()
        counts = (canvas.num_forward_S, canvas.pass_S, canvas.rows_S)
        num_passes, num_steps, num_rows = (int(count_S[seat]) for count_S in counts)
        return CompletionOutput(answer.index, text, ids, "abort", None, num_passes, num_steps, num_rows, len(ids))

    def _fail(self, error: BaseException, requests: Sequence[Request] = ()) -> None:
        """Something broke off in the middle: nobody's canvas can be trusted, so everybody is told."""
        inside = [*self.engine.scheduler.running, *self.engine.scheduler.waiting]
        inside += [answer for request in requests for answer in request.answers if not answer.done]
        for answer in inside:
            answer.error = error
        try:
            for answer in inside:
                self.engine.abort(answer)
        except Exception as worse:  # a GPU that is gone, say
            self._broken = worse
