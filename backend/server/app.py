"""The application: routes behind the guard, the desk started and stopped with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import foreload
from foreload.backend.engine import Engine
from foreload.backend.server import live, openai
from foreload.backend.server.context import Context
from foreload.backend.server.errors import Refused, refusal
from foreload.backend.server.guard import Guard
from foreload.backend.server.openapi import describe
from foreload.backend.server.options import ServerOptions

log = logging.getLogger("foreload.server")


def create_app(engine: Engine, options: ServerOptions) -> FastAPI:
    """An application that serves `engine`, which stays the caller's to close. FileError for a broken chat template."""
    context = Context.of(engine, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        context.desk.start()
        try:
            yield
        finally:
            await run_in_threadpool(context.desk.close)
            await run_in_threadpool(context.recording.close)

    app = FastAPI(title="Foreload", version=foreload.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.context = context
    app.include_router(openai.router)
    app.include_router(live.router)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.add_middleware(Guard, options=options)
    describe(app, context.model)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return error.response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = refusal(error.status_code, message, "not_found" if error.status_code == 404 else None)
    response.headers.update(error.headers or {})
    return response


async def _unexpected(_: Request, error: Exception) -> Response:
    log.error("request failed", exc_info=error)
    return refusal(500, f"{type(error).__name__} (a bug)", "internal_error")
