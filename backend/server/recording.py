"""Recording live traffic: the routing of every request that begins while a recording runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreload.backend.engine import Engine
from foreload.backend.observe import Observer, Routed
from foreload.backend.recorder import USUAL_DEPTH, Recorder, Watched, columns, drafting, trace_meta, watched
from foreload.backend.sampling import Sampling
from foreload.errors import FileError, UsageError
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.io import TraceWriter

FLUSH_SECONDS = 5.0


@dataclass(frozen=True)
class RecordingState:
    """A recording that runs, or has just been stopped."""

    file: str
    requests: int
    rows: int


class LiveRecording:
    """At most one recording at a time, in one folder. Requests that run when it starts are not part of it."""

    def __init__(self, engine: Engine, folder: Path | None) -> None:
        self._engine, self._folder = engine, folder
        self._lock = threading.Lock()  # held while a step is written, and by start and stop
        self._active: _Active | None = None

    @property
    def state(self) -> RecordingState | None:
        """The recording that runs."""
        active = self._active
        return None if active is None else active.state

    def start(self, name: str, weights: bool, depth: int | None, width: int | None) -> RecordingState:
        """Begin to record into `name`. UsageError if one runs already, or if the server has no folder for them."""
        if self._folder is None:
            raise UsageError("this server does not record: start it with a folder for recordings")
        path = self._folder / name
        shape = self._engine.shape
        chosen = watched(self._engine, None, USUAL_DEPTH if depth is None else depth)
        width = min(width or 2 * shape.top_k, shape.experts)
        with self._lock:
            if self._active is not None:
                raise UsageError(f"a recording into {self._active.state.file} runs: stop it first")
            if path.exists():
                raise UsageError(f"{name} exists already: give another name")
            meta = trace_meta(self._engine, [], Sampling(), columns(chosen, width), weights)
            sampling = drafting(self._engine.settings)  # how tokens are chosen is each request's own affair
            meta = meta.model_copy(update={"source": "foreload server", "sampling": sampling, "seed": -1})
            self._active = _Active(self._lock, TraceWriter(path, meta), chosen, width)
            return self._active.state

    def conflict(self, settings: Settings) -> str | None:
        """Why `settings` cannot be taken while a recording runs, if so. SettingsError if they do not fit the model."""
        active, shape = self._active, self._engine.shape
        if active is None or _held(settings, shape) == _held(self._engine.settings, shape):
            return None
        held = "drafts and speculated layers"
        return f"a recording into {active.state.file} runs, whose {held} must stay as they are: stop it first"

    def stop(self) -> RecordingState:
        """Finish the file. UsageError if no recording runs; FileError if the file cannot be written."""
        with self._lock:
            active, self._active = self._active, None
            if active is None:
                raise UsageError("no recording runs")
            active.closed = True
            if active.error is not None:
                active.writer.abandon()
                raise active.error
            active.writer.close()
            return active.state

    @contextmanager
    def request(self) -> Iterator[Observer | None]:
        """The observer of the next request, or None while nothing is recorded."""
        active = self._active
        if active is None:
            yield None
            return
        yield active
        active.end_request()

    def close(self) -> None:
        """Finish the recording, if one runs."""
        if self._active is not None:
            self.stop()


def _held(settings: Settings, shape: ModelShape) -> tuple[object, ...]:
    """What a recording says about itself as a whole."""
    layers = settings.speculated(shape)
    return drafting(settings), layers, settings.predictor if layers else ""


class _Active(Recorder):
    """A recorder that may end in the middle of a request, and that no full disk takes down the request with it."""

    def __init__(self, lock: threading.Lock, writer: TraceWriter, predictors: Watched, width: int) -> None:
        super().__init__(writer, predictors, width)
        self.writer = writer
        self.closed = False
        self.error: FileError | None = None
        self._lock = lock
        self._flushed = time.monotonic()

    @property
    def state(self) -> RecordingState:
        """How far it is."""
        return RecordingState(str(self.writer.path), self.request, self.writer.rows)

    def routed(self, routed: Routed) -> None:
        """Write the rows of one forward, unless the recording is over."""
        with self._lock:
            if self.closed or self.error is not None:
                return
            try:
                super().routed(routed)
                if time.monotonic() - self._flushed > FLUSH_SECONDS:
                    self.writer.flush()
                    self._flushed = time.monotonic()
            except FileError as error:
                self.error = error

    def end_request(self) -> None:
        """The next rows belong to another request."""
        self.request += 1
