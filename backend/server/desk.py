"""The desk: a bounded queue before the engine, and the one thread that decodes, request after request, in order."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress

from foreload.backend.engine import Engine
from foreload.backend.server.answer import Answer
from foreload.backend.server.job import Ended, Failed, Job, Waiting
from foreload.backend.server.options import ServerOptions
from foreload.backend.server.recording import LiveRecording
from foreload.backend.server.statistics import Statistics
from foreload.errors import ForeloadError

log = logging.getLogger("foreload.server")

CANCELLED = Failed(499, "the client went away", "cancelled")
LATE = Failed(504, "the request's time limit is over", "time_limit")
CLOSING = Failed(503, "the server is shutting down", "shutting_down")


class Busy(Exception):  # noqa: N818 - an answer to the client, not a fault
    """No more requests now; come again after `retry_seconds`."""

    def __init__(self, message: str, status: int, retry_seconds: int) -> None:
        super().__init__(message)
        self.status, self.retry_seconds = status, retry_seconds


class Desk:
    """Takes jobs from any thread. Each gets events until one that ends it: `Ended` or `Failed`."""

    def __init__(
        self, engine: Engine, options: ServerOptions, recording: LiveRecording, statistics: Statistics
    ) -> None:
        self.draining = False
        self.healthy = True
        self._engine, self._options = engine, options
        self._recording, self._statistics = recording, statistics
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._open: set[str] = set()  # jobs whose client has not got everything
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="foreload-decode", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> int:
        """Put a job in the queue; returns how many go first. Raises Busy if the queue is full or closing."""
        with self._changed:
            if self.draining:
                self._statistics.refused += 1
                raise Busy("the server is shutting down", 503, 30)
            position = len(self._waiting) + (self._running is not None)
            full = len(self._waiting) >= self._options.queue_limit
            if full or len(self._open) >= self._options.delivery_limit:
                self._statistics.refused += 1
                what = f"{len(self._waiting)} requests wait" if full else f"{len(self._open)} answers are not taken"
                raise Busy(f"{what}: no more are accepted", 429, self._statistics.expected_seconds(position))
            while job.id in self._open:
                job.id += "'"
            job.position = position
            self._waiting.append(job)
            self._open.add(job.id)
            self._changed.notify()
        return position

    def release(self, job: Job) -> None:
        """The job's client has everything, or is gone: what is left of the job is cancelled."""
        with self._changed:
            self._open.discard(job.id)
            job.cancelled.set()
            with suppress(ValueError):
                self._waiting.remove(job)
                self._statistics.cancelled += 1
                self._tell_positions()

    def positions(self) -> list[tuple[str, int, float]]:
        """(id, requests that go first, seconds since arrival) of the running job and of those that wait, in order."""
        with self._changed:
            jobs = [*([self._running] if self._running else []), *self._waiting]
            now = time.monotonic()
            return [(job.id, position, now - job.arrived) for position, job in enumerate(jobs)]

    def counts(self) -> tuple[int, int, int]:
        """Jobs that wait, run, and are done but not delivered."""
        with self._changed:
            busy = len(self._waiting) + (self._running is not None)
            return len(self._waiting), int(self._running is not None), len(self._open) - busy

    def cancel_all(self) -> None:
        """End everything now."""
        with self._changed:
            self.draining = True
            waiting, self._waiting = list(self._waiting), deque()
            if self._running is not None:
                self._running.cancelled.set()
        for job in waiting:
            job.deliver(CLOSING)

    def close(self) -> None:
        """End everything and stop the thread."""
        self.cancel_all()
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            outcome = self._run(job)
            with self._changed:
                self._running = None
            self._count(outcome, job)
            job.deliver(outcome)

    def _count(self, outcome: Ended | Failed, job: Job) -> None:
        statistics = self._statistics
        if isinstance(outcome, Ended):
            statistics.finished += 1
            statistics.took(time.monotonic() - job.arrived)
        elif outcome is CANCELLED:
            statistics.cancelled += 1
        else:
            statistics.failed += 1

    def _next(self) -> Job | None:
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting:
                return None
            self._running = self._waiting.popleft()
            self._tell_positions()
            return self._running

    def _tell_positions(self) -> None:
        ahead = int(self._running is not None)
        for position, job in enumerate(self._waiting, ahead):
            if position != job.position:
                job.position = position
                job.deliver(Waiting(position))

    def _run(self, job: Job) -> Ended | Failed:
        try:
            for index in range(len(job.ask.prompts)):
                if (over := self._over(job) or self._answer(job, index)) is not None:
                    return over
            self.healthy = True
            return Ended()
        except ForeloadError as error:
            log.error("request failed: %s", error)
            self.healthy = False
            return Failed(500, str(error), "engine_error")
        except Exception as error:  # the engine's thread must outlive whatever one request does to it
            log.exception("request failed")
            self.healthy = False
            return Failed(500, f"{type(error).__name__} (a bug)", "engine_error")

    def _over(self, job: Job) -> Failed | None:
        if job.cancelled.is_set():
            return CLOSING if self.draining else CANCELLED
        return LATE if job.late else None

    def _answer(self, job: Job, index: int) -> Failed | None:
        """Answer one prompt; returns what ended the job before that was done."""
        statistics = self._statistics
        statistics.begin_request()
        answer = Answer(self._engine, job, index, statistics.token)
        with self._recording.request() as observer:
            made = self._engine.generate(
                job.ask.prompts[index], answer.max_tokens, job.ask.sampling, observer, follower=answer
            )
        statistics.end_request(made)
        over = self._over(job)
        if over is None:
            answer.finish()
        return over
