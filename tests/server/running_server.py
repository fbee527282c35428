"""A server in this process, in a thread of its own, on a free loopback port."""

from __future__ import annotations

import asyncio
import socket
import threading

from http_client import Client, until

from foreload.backend.engine import Engine
from foreload.backend.server.app import create_app
from foreload.backend.server.options import ServerOptions
from foreload.backend.server.run import Server, listening

CONTEXT = 256


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
