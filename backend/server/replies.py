"""From a job's events to HTTP: one JSON object, or server-sent events that go out as the text becomes certain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from foreload.backend.server.errors import error_body, refusal
from foreload.backend.server.formats import Format
from foreload.backend.server.job import Choice, Ended, Event, Failed, Piece, TokenScore, Waiting

T = TypeVar("T")
Events = asyncio.Queue[Event]


async def whole_reply(request: Request, events: Events, form: Format, choices: int) -> Response:
    """The answer once the job is over, or an answer nobody reads once the client is gone."""
    return await first_of(_collect(events, form, choices), _disconnected(request.receive)) or Response(status_code=499)


async def first_of(wanted: Coroutine[Any, Any, T], end: Coroutine[Any, Any, None]) -> T | None:
    """The result of `wanted`, or None if `end` is over before; the other one is cancelled."""
    tasks = (asyncio.create_task(wanted), asyncio.create_task(end))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect(events: Events, form: Format, choices: int) -> Response:
    texts: list[list[str]] = [[] for _ in range(choices)]
    scores: list[list[TokenScore]] = [[] for _ in range(choices)]
    reasons = ["length"] * choices
    while not isinstance(event := await events.get(), Ended):
        if isinstance(event, Failed):
            return refusal(event.status, event.message, event.code)
        if isinstance(event, Piece):
            texts[event.index].append(event.text)
            scores[event.index] += event.scores
        elif isinstance(event, Choice):
            reasons[event.index] = event.reason
            form.generated += event.tokens
    return JSONResponse(form.whole(["".join(text) for text in texts], scores, reasons))


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stream(events: Events, form: Format, position: int, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events. While the request waits, comments tell its place in the queue (clients skip them)."""
    yield f": queue position {position}\n\n"
    head = form.first_chunks()
    while not isinstance(event := await events.get(), Ended):
        if isinstance(event, Waiting):
            yield f": queue position {event.position}\n\n"
            continue
        for chunk in head:
            yield _data({**chunk, "usage": None} if with_usage else chunk)
        head = []
        if isinstance(event, Failed):
            yield _data(error_body(event.status, event.message, event.code))
            return
        if isinstance(event, Piece):
            chunk = form.chunk(event.index, event.text, event.scores, None)
        else:
            form.generated += event.tokens
            chunk = form.chunk(event.index, None, (), event.reason)
        yield _data({**chunk, "usage": None} if with_usage else chunk)
    if with_usage:
        yield _data(form.last_chunk())
    yield "data: [DONE]\n\n"


def _data(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, allow_nan=False)}\n\n"


class EventStream(Response):
    """Sends pieces as they come, as fast as the client takes them, until it has all or goes away."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[str], release: Callable[[], None]) -> None:
        """`release` is called at the end, however it comes."""
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._pieces, self._release = pieces, release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run as an ASGI application."""
        try:
            await first_of(self._send_all(send), _disconnected(receive))
        finally:
            self._release()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece.encode("utf-8", "replace"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
