"""A plain HTTP client for tests: one connection a request, nothing retried, raw bytes where wanted."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        """Data of server-sent events, without the end mark."""
        lines = [line for line in self.body.decode().splitlines() if line.startswith("data: ")]
        return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@dataclass
class Client:
    port: int
    headers: dict[str, str]

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        named = {name.replace("_", "-"): value for name, value in {**self.headers, **headers}.items()}
        if body is not None and "Content-Type" not in named:
            named["Content-Type"] = "application/json"
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, named)
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def complete(self, prompt: Any = "The kernel", **fields: Any) -> Reply:
        """POST /v1/completions, greedy."""
        body = {"model": "mini", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
        return self("POST", "/v1/completions", body)

    @contextmanager
    def raw(self, data: bytes = b"") -> Iterator[socket.socket]:
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as made:
            made.sendall(data)
            yield made

    def post_bytes(self, path: str, body: Any, **headers: str) -> bytes:
        """A whole request as it goes over the wire."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + raw


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes; an abort counts as the end."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait for something that must happen; fails the test if it does not."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
    return found
