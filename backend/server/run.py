"""Running the server: bounded connections, and a drain on SIGTERM before the engine is let go."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from foreload.backend.engine import Engine
from foreload.backend.server.app import create_app
from foreload.backend.server.context import Context
from foreload.backend.server.options import ServerOptions
from foreload.errors import UsageError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def serve(engine: Engine, options: ServerOptions, bound: socket.socket, started: Callable[[str], None]) -> bool:
    """Serve on a socket until SIGTERM or SIGINT; `started` is given the URL. Returns whether all were answered.

    The signal ends the taking of requests; those that run or wait are answered for up to `drain_seconds`. A second one
    ends at once.
    """
    return asyncio.run(_serve(create_app(engine, options), bound, options, started))


@contextmanager
def listening(options: ServerOptions) -> Iterator[socket.socket]:
    """The socket to serve on; UsageError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((options.host.strip("[]"), options.port))
    except OSError as error:
        bound.close()
        raise UsageError(f"{options.host}:{options.port} cannot be listened on: {error.strerror or error}") from error
    with bound:
        yield bound


async def _serve(app: Any, bound: socket.socket, options: ServerOptions, started: Callable[[str], None]) -> bool:
    server = Server(app, options)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, server.end)
    serving = asyncio.create_task(server.serve([bound]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        host, port = bound.getsockname()[:2]
        started(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    await serving
    return not server.cut


class Server(uvicorn.Server):
    """Signals are handled by `end` alone."""

    def __init__(self, app: Any, options: ServerOptions) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_protocol(options),
                ws="none",
                lifespan="on",
                access_log=False,
                log_level="error",
                log_config=None,
                server_header=False,
                timeout_keep_alive=int(max(1, options.client_seconds)),
                timeout_graceful_shutdown=int(options.drain_seconds + options.client_seconds),
            )
        )
        self.cut = False
        self._context: Context = app.state.context
        self._drain_seconds = options.drain_seconds

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    def end(self) -> None:
        """First call: drain. Second: end what is left now."""
        if self.should_exit:
            self._cut()
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            return
        self._context.desk.draining = True
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_seconds, self._cut)

    def _cut(self) -> None:
        self.cut = self.cut or any(self._context.desk.counts())
        self._context.desk.cancel_all()


def _protocol(options: ServerOptions) -> type[H11Protocol]:
    """HTTP/1.1 for a bounded number of clients, each of which must go on sending its request and taking its answer."""

    class Bounded(H11Protocol):
        _sending: asyncio.TimerHandle | None = None
        _taking: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > options.connection_limit:
                transport.abort()
            else:
                self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            for timer in (self._sending, self._taking):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_request()

        def _expect_request(self) -> None:
            """Begin to wait for the head of a request, or stop waiting because it is there."""
            idle = self.cycle is None or self.cycle.response_complete
            if idle and self._sending is None:
                self._sending = self.loop.call_later(options.client_seconds, self.transport.abort)
            elif not idle and self._sending is not None:
                self._sending.cancel()
                self._sending = None

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._taking is not None:
                self._taking.cancel()
                self._taking = None

        def _watch(self) -> None:
            if self._taking is None:
                self._taking = self.loop.call_later(options.client_seconds, self._not_taken)

        def _not_taken(self) -> None:
            self._taking = None
            if self.transport.get_write_buffer_size() > 0:
                self.transport.abort()

    return Bounded
