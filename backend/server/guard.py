"""Who may ask, and how much: checks before any request is read."""

from __future__ import annotations

import asyncio
import hmac
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from foreload.backend.server.errors import refusal
from foreload.backend.server.options import ServerOptions, is_loopback

OPEN_PATHS = ("/health",)
DISCARDED_BODIES = 4  # so much of a refused body is read, in largest bodies


class Guard:
    """An ASGI layer: host and origin, keys, and the size of bodies.

    On a loopback address other host names are refused, and everywhere requests that a page of another origin makes: a
    web page in somebody's browser must not reach the engine.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app, self._options = app, options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        refused = self._foreign(headers) or self._unknown(scope, headers) or self._large(headers)
        if refused is not None:
            await discard(receive, self._options)
            return await refused(scope, receive, send)
        await self._app(scope, receive, send)

    def _foreign(self, headers: dict[str, str]) -> ASGIApp | None:
        host = _hostname(f"//{headers.get('host', '')}")
        if is_loopback(self._options.host) and host and not is_loopback(host):
            return refusal(403, f"host {host!r} is not this server: ask for 127.0.0.1", "wrong_host")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != headers.get("host"):
            return refusal(403, "requests from pages of another origin are refused", "wrong_origin")
        return None

    def _unknown(self, scope: Scope, headers: dict[str, str]) -> ASGIApp | None:
        keys = self._options.api_key, self._options.admin_key
        if scope["path"] in OPEN_PATHS or keys == (None, None):
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        is_user, is_admin = (_same(given, key) for key in keys)
        if changes(scope) and self._options.admin_key is not None:
            if is_admin:
                return None
            if is_user:
                return refusal(403, "this needs the admin key", "admin_key_needed")
        elif is_user or is_admin or self._options.api_key is None:
            return None
        return refusal(401, "a key is needed: Authorization: Bearer KEY", "invalid_api_key", WWW_Authenticate="Bearer")

    def _large(self, headers: dict[str, str]) -> ASGIApp | None:
        length = headers.get("content-length", "0")
        return None if length.isdecimal() and int(length) <= self._options.body_bytes else too_large(self._options)


async def discard(receive: Receive, options: ServerOptions) -> None:
    """Take the body of a refused request, within limits: a client that still sends would not read the answer."""
    left = DISCARDED_BODIES * options.body_bytes
    with suppress(TimeoutError):
        async with asyncio.timeout(options.client_seconds):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def changes(scope: Scope) -> bool:
    """Whether a request changes the engine or records its traffic."""
    return scope["path"].startswith("/engine/") and scope["method"] not in ("GET", "HEAD", "OPTIONS")


def _same(given: str, key: str | None) -> bool:
    """Compares in a time that does not depend on where the two differ."""
    return key is not None and hmac.compare_digest(given.encode("latin-1"), key.encode())


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "(invalid)"


def too_large(options: ServerOptions) -> JSONResponse:
    """The answer to a body over the limit."""
    return refusal(413, f"the body is larger than {options.body_bytes} bytes", "body_too_large", Connection="close")
