"""The OpenAPI document: bodies are read by hand within limits, so their schemas are entered by hand too."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from foreload.backend.server.errors import ErrorBody
from foreload.backend.server.wire import ChatRequest, CompletionRequest

REF = "#/components/schemas/{model}"
_bodies: dict[str, type[BaseModel]] = {}

MEANINGS = {
    200: "done",
    400: "the request is wrong",
    401: "no key, or a wrong one",
    403: "not with this key, host or origin",
    404: "not served here",
    408: "the request did not arrive in time",
    409: "not now",
    413: "the body is too large",
    415: "the body is no JSON",
    422: "the settings are refused; the old ones stay in force",
    429: "too many requests wait; see Retry-After",
    499: "the client went away",
    500: "the engine failed",
    503: "shutting down",
    504: "the request's time limit is over",
}
CONTENTS: dict[str, dict[str, Any]] = {
    "text/event-stream": {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]},
}
"""Schemas of answers that are no JSON; of a stream, that of each event."""
ALWAYS = (403, 500, 503)
WITH_BODY = (408, 413, 415)


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model` itself."""
    _bodies[model.__name__] = model
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def answers(
    *statuses: int, model: type[BaseModel] | None = None, kinds: tuple[str, ...] = ()
) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route; `model` describes the answer to success, which may be of other content types, `kinds`."""
    found: dict[int | str, dict[str, Any]] = {}
    posts = any(status in statuses for status in (400, 422))
    for status in sorted({*statuses, *ALWAYS, *(WITH_BODY if posts else ())}):
        found[status] = {"description": MEANINGS[status]}
        if status == 200 and kinds:
            found[status]["content"] = {kind: {"schema": CONTENTS[kind]} for kind in kinds}
        if status != 200:
            found[status]["model"] = ErrorBody
        elif model is not None:
            found[status]["model"] = model
    return found


def describe(app: FastAPI, model: str) -> None:
    """Let `app` describe itself with the schemas of the bodies that its routes read, and the one `model` it serves."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, bodies = models_json_schema([(model, "validation") for model in _bodies.values()], ref_template=REF)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(bodies.get("$defs", {}))
            for asked in (CompletionRequest, ChatRequest):
                schemas[asked.__name__]["properties"]["model"] = {"type": "string", "enum": [model]}
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
