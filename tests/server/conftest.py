"""Servers in this process on free loopback ports, over one engine on the bundled model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from http_client import Client
from processes import Serve, start_process
from running_server import CONTEXT, Running

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.server.options import ServerOptions
from foreload.settings import Settings


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """An engine on `mini` whose device memory holds half of the experts."""
    from foreload.backend.models.checkpoint import Checkpoint

    checkpoint = Checkpoint.open("mini")
    options = EngineOptions(context_tokens=CONTEXT, vram_bytes=40 << 20)
    with Engine(checkpoint, options, Settings(cache_ratio=0.5)) as made:
        yield made


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


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Servers in processes of their own, killed at the end if they still run."""
    made: list[subprocess.Popen[str]] = []

    def begin(*flags: Any) -> tuple[subprocess.Popen[str], Client, str]:
        started = start_process(*flags)
        made.append(started[0])
        return started

    yield begin
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()
