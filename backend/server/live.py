"""`/engine`: statistics, settings and recordings of the running engine; and `/health` and `/metrics`."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from foreload.backend.server.context import context_of
from foreload.backend.server.errors import refusal, refuse
from foreload.backend.server.metrics import CONTENT_TYPE, exposition
from foreload.backend.server.openapi import answers, takes
from foreload.backend.server.reading import parse, read_body
from foreload.backend.server.summary import stats
from foreload.backend.server.views import AppliedView, RecordingView, SettingsView, StatsView
from foreload.backend.server.wire import RecordRequest
from foreload.errors import BudgetError, FileError, MismatchError, ReloadError, UsageError
from foreload.settings import Settings

router = APIRouter()
PUSHES_WAITING = 8


@router.get("/health", responses={200: {"description": "ok"}, 403: {"description": "wrong host"}, **answers(503)})
async def health(request: Request) -> Response:
    """Whether requests are taken. 503 while the server shuts down, or after the engine has failed at a request."""
    desk = context_of(request).desk
    status = "shutting down" if desk.draining else "ok" if desk.healthy else "failing"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/metrics", response_class=PlainTextResponse, responses=answers(200, 401))
async def metrics(request: Request) -> Response:
    """Everything countable, as Prometheus reads it."""
    return Response(exposition(stats(context_of(request))), media_type=CONTENT_TYPE)


@router.get("/engine/stats", responses=answers(200, 401, model=StatsView))
async def engine_stats(request: Request) -> Response:
    """What the engine does now and has done, per layer, and who waits."""
    return JSONResponse(stats(context_of(request)).model_dump(mode="json"))


@router.get("/engine/settings", responses=answers(200, 401, model=SettingsView))
async def get_settings(request: Request) -> Response:
    """The settings in force."""
    return JSONResponse(SettingsView.of(context_of(request).engine).model_dump(mode="json"))


@router.put(
    "/engine/settings", openapi_extra=takes(Settings), responses=answers(200, 401, 409, 422, 429, model=AppliedView)
)
async def put_settings(request: Request) -> Response:
    """Take settings between two tokens. 422, with the old ones in force, if they are wrong or do not fit.

    409 if a running engine cannot take them: what is fixed when the model is loaded, or while a recording runs.
    """
    context = context_of(request)
    wanted = parse(Settings, await read_body(request, context.options), 422)
    if context.pushes_waiting >= PUSHES_WAITING:
        return refusal(429, f"{PUSHES_WAITING} changes of settings wait", "queue_full", Retry_After="1")
    context.pushes_waiting += 1
    try:
        async with context.pushing:
            if (conflict := context.recording.conflict(wanted)) is not None:
                return refusal(409, conflict, "recording")
            applied = await run_in_threadpool(context.engine.apply, wanted)
    except ReloadError as error:
        return refuse(error, 409, "needs_reload")
    except BudgetError as error:
        return refuse(error, 422, "does_not_fit")
    except (UsageError, MismatchError) as error:
        return refuse(error, 422, "invalid_settings")
    finally:
        context.pushes_waiting -= 1
    return JSONResponse(AppliedView.of(applied, context.engine).model_dump(mode="json"))


@router.post(
    "/engine/record/start",
    openapi_extra=takes(RecordRequest),
    responses=answers(200, 401, 409, 422, model=RecordingView),
)
async def record_start(request: Request) -> Response:
    """Record the routing of all requests that begin from now on. 409 if a recording runs, or none may."""
    context = context_of(request)
    asked = parse(RecordRequest, await read_body(request, context.options), 422)
    recording = context.recording
    try:
        state = await run_in_threadpool(recording.start, asked.name, asked.weights, asked.depth, asked.width)
    except FileError as error:
        return refuse(error, 500, "not_writable")
    except UsageError as error:
        return refuse(error, 409, "recording")
    return JSONResponse(asdict(state))


@router.post("/engine/record/stop", responses=answers(200, 401, 409, model=RecordingView))
async def record_stop(request: Request) -> Response:
    """Finish the recording. 409 if none runs."""
    try:
        state = await run_in_threadpool(context_of(request).recording.stop)
    except FileError as error:
        return refuse(error, 500, "not_writable")
    except UsageError as error:
        return refuse(error, 409, "recording")
    return JSONResponse(asdict(state))
