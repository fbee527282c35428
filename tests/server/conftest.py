"""Servers in this process on free loopback ports, over one engine on the bundled model."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from http_client import Client, until

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.server.app import create_app
from foreload.backend.server.options import ServerOptions
from foreload.backend.server.run import Server, listening
from foreload.settings import Settings

CONTEXT = 256


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine on `mini` whose device memory holds half of the experts."""
    from foreload.backend.models.checkpoint import Checkpoint

    checkpoint = Checkpoint.open("mini")
    options = EngineOptions(context_tokens=CONTEXT, vram_bytes=40 << 20)
    with Engine(checkpoint, options, Settings(cache_ratio=0.5)) as made:
        yield made


class Running:
    """A server in a thread of its own."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine = engine
        self.app = create_app(engine, options)
        self.context = self.app.state.context
        self.server = Server(self.app, options)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=[options])
        self._thread.start()
        self._ready.wait()
        until(lambda: self.server.started)

    def _run(self, options: ServerOptions) -> None:
        with listening(options) as bound:
            self.port = bound.getsockname()[1]
            asyncio.run(self._serve(bound))

    async def _serve(self, bound: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self.server.serve([bound])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **headers: str) -> Client:
        return Client(self.port, headers)

    def end(self) -> None:
        """As on SIGTERM."""
        self._loop.call_soon_threadsafe(self.server.end)

    def join(self) -> None:
        self._thread.join()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.end()
            self.end()
            self.join()


@pytest.fixture
def start(engine: Engine) -> Iterator[Callable[..., Running]]:
    """Servers with their own options; the engine's settings are put back at the end."""
    made: list[Running] = []
    before = engine.settings

    def begin(**options: Any) -> Running:
        made.append(Running(engine, ServerOptions(**{"port": 0, "client_seconds": 5.0, **options})))
        return made[-1]

    yield begin
    for running in made:
        running.stop()
    engine.apply(before)


@pytest.fixture
def running(start: Callable[..., Running]) -> Running:
    """A server with default limits."""
    return start()


@pytest.fixture
def ask(running: Running) -> Client:
    """A client of it."""
    return running.client()
