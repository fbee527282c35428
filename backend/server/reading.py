"""Reading a request: its body within limits, as a validated model."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from foreload.backend.server.errors import Refused, refusal
from foreload.backend.server.guard import DISCARDED_BODIES, discard, too_large
from foreload.backend.server.options import ServerOptions
from foreload.files import explain

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """The whole body of a JSON request; Refused if it is no JSON by its type, too large, too slow, or cut off."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        await discard(request.receive, options)
        raise Refused(refusal(415, f"content type {kind!r} is not understood: send application/json", "not_json"))
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(options.client_seconds):
            async for part in request.stream():
                size += len(part)
                if size <= options.body_bytes:
                    body += part
                elif size > DISCARDED_BODIES * options.body_bytes:
                    break
    except TimeoutError as error:
        raise Refused(refusal(408, "the request did not arrive in time", "timeout", Connection="close")) from error
    except ClientDisconnect as error:
        raise Refused(refusal(400, "the request was cut off", "cut_off")) from error
    if size > options.body_bytes:
        raise Refused(too_large(options))
    return bytes(body)


def parse(model: type[M], body: bytes, status: int) -> M:
    """The body as `model`, with values of exactly the right types; Refused with `status` naming the first wrong one."""
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise Refused(refusal(status, _explain(error, model), "invalid_request")) from error


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    """What is wrong with a body; of one that is no JSON, what the parser says, which ends with line and column."""
    first = error.errors(include_url=False)[0]
    if first["type"] != "json_invalid":
        return explain(error, model)
    return f"the body is not JSON: {first['ctx']['error']}"
