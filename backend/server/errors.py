"""Refusals over HTTP, in the OpenAI API's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse

from foreload.errors import BudgetError, ForeloadError

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
}


class ErrorDetail(BaseModel):
    """What was refused and why, on one line."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    budget: str | None = None  # which budget is short
    shortfall_bytes: int | None = None  # and by how much


class ErrorBody(BaseModel):
    """The body of every answer that is no success."""

    error: ErrorDetail


def error_body(status: int, message: str, code: str | None = None, **more: Any) -> dict[str, Any]:
    """The body for a refusal; `more` are further fields of `ErrorDetail`."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    detail = {"message": " ".join(message.split()), "type": kind, "param": None, "code": code}
    return {"error": {**detail, **more}}


def refusal(status: int, message: str, code: str | None = None, **headers: str) -> JSONResponse:
    """A refusal; `headers` with underscores for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse(error_body(status, message, code), status, named)


def refuse(error: ForeloadError, status: int, code: str) -> JSONResponse:
    """An error of ours as a refusal; a BudgetError also names the budget and the shortfall."""
    more: dict[str, Any] = {}
    if isinstance(error, BudgetError):
        more = {"budget": error.budget, "shortfall_bytes": error.shortfall_bytes}
    return JSONResponse(error_body(status, str(error), code, **more), status)


class Refused(Exception):  # noqa: N818 - an answer to the client, not a fault
    """Raised while a request is read; carries the answer."""

    def __init__(self, response: JSONResponse) -> None:
        super().__init__()
        self.response = response
