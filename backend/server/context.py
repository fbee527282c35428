"""What the routes of one server share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from starlette.requests import Request

from foreload.backend.chat import ChatTemplate
from foreload.backend.engine import Engine
from foreload.backend.server.desk import Desk
from foreload.backend.server.options import ServerOptions
from foreload.backend.server.recording import LiveRecording
from foreload.backend.server.statistics import Statistics

READERS = 2  # prompts made into tokens at a time, which takes a hundred times the memory of their text


@dataclass
class Context:
    """One engine behind one desk."""

    engine: Engine
    options: ServerOptions
    template: ChatTemplate
    recording: LiveRecording
    statistics: Statistics
    desk: Desk
    pushing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one change of settings at a time
    pushes_waiting: int = 0
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(READERS))

    @classmethod
    def of(cls, engine: Engine, options: ServerOptions) -> Context:
        """Everything for serving `engine`; FileError if its chat template cannot be read."""
        template = ChatTemplate.of(engine.checkpoint.folder)
        recording, statistics = LiveRecording(engine, options.record_folder), Statistics(engine)
        desk = Desk(engine, options, recording, statistics)
        return cls(engine, options, template, recording, statistics, desk)

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return self.engine.checkpoint.name


def context_of(request: Request) -> Context:
    """The context of the server that got `request`."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
