"""Floods, slow and vanishing clients, wrong keys and hosts: the right status, bounded memory, a living engine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_client import Client, Reply, read_all, until
from running_server import CONTEXT, Running

pytestmark = pytest.mark.integration

Start = Callable[..., Running]
COMPLETE = {"model": "mini", "prompt": "The kernel", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "mini", "messages": [{"role": "user", "content": "x"}]}


@contextmanager
def held(running: Running) -> Iterator[None]:
    """Nothing is decoded meanwhile."""
    with running.engine._turns.guest():
        yield


def send(running: Running, found: list[Reply], **fields: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: found.append(running.client().complete(**fields)))
    thread.start()
    return thread


def requests(running: Running) -> dict[str, int]:
    return dict(running.client()("GET", "/engine/stats").json["requests"])


def alive(running: Running) -> None:
    """The engine answers as ever, and nobody waits."""
    until(lambda: sum(running.context.desk.counts()) == 0)
    assert running.client().complete().status == 200
    assert running.client()("GET", "/health").status == 200
    running.engine.brain.check_integrity()


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        ("/v1/completions", b"{", 400, "the body is not JSON: EOF while parsing an object at line 1 column 1"),
        (
            "/v1/completions",
            b'{"model": "mini"\n "prompt"}',
            400,
            "the body is not JSON: expected `,` or `}` at line 2",
        ),
        (
            "/v1/completions",
            b'{"model": "mini", "prompt": "\xff"}',
            400,
            "the body is not JSON: invalid unicode code point at line 1",
        ),
        ("/v1/completions", b"[" * 100_000, 400, "recursion limit exceeded"),
        ("/v1/completions", b"9" * 100_000, 400, "number out of range"),
        ("/v1/completions", b"", 400, "EOF while parsing"),
        ("/v1/completions", {**COMPLETE, "prompt": ""}, 400, "at least 1 character"),
        (
            "/v1/completions",
            {**COMPLETE, "prompt": []},
            400,
            "field 'prompt.texts' is []",
        ),
        ("/v1/completions", {**COMPLETE, "prompt": [[]]}, 400, "field 'prompt.token_lists.0' is []"),
        ("/v1/completions", {**COMPLETE, "prompt": [4096]}, 400, "prompt token ids must be from 0 to 4095"),
        ("/v1/completions", {**COMPLETE, "prompt": [10**30]}, 400, "prompt token ids must be from 0 to 4095"),
        ("/v1/completions", {**COMPLETE, "prompt": "word " * CONTEXT}, 400, "exceed the context of 256 tokens by"),
        ("/v1/completions", {**COMPLETE, "prompt": ["x"] * 129}, 400, "at most 128 items"),
        ("/v1/completions", {**COMPLETE, "max_tokens": -1}, 400, "greater than or equal to 0"),
        ("/v1/completions", {**COMPLETE, "max_tokens": "8"}, 400, "valid integer"),
        ("/v1/completions", {**COMPLETE, "max_tokens": 10**9}, 400, "exceed the context"),
        ("/v1/completions", {**COMPLETE, "temperature": -0.1}, 400, "field 'temperature' is -0.1"),
        ("/v1/completions", {**COMPLETE, "top_p": 0}, 400, "field 'top_p' is 0"),
        ("/v1/completions", {**COMPLETE, "n": 2}, 400, "field 'n' is 2"),
        ("/v1/completions", {**COMPLETE, "seed": 2**63}, 400, "field 'seed'"),
        ("/v1/completions", {**COMPLETE, "stop": ["x"] * 17}, 400, "stop"),
        ("/v1/completions", {**COMPLETE, "stop": ""}, 400, "stop"),
        ("/v1/completions", {**COMPLETE, "logprobs": 21}, 400, "less than or equal to 20"),
        ("/v1/completions", {**COMPLETE, "frequency_penalty": 1}, 400, "field 'frequency_penalty' is 1"),
        ("/v1/completions", {**COMPLETE, "nonsense": 1}, 400, "unknown field 'nonsense': known are model, stream"),
        ("/v1/completions", {**COMPLETE, "stream_options": {}}, 400, "stream_options goes with stream true"),
        ("/v1/completions", {**COMPLETE, "model": "other"}, 404, "model 'other' is not served here"),
        ("/v1/completions", {"model": "mini"}, 400, "field 'prompt' is missing"),
        ("/v1/chat/completions", {**CHAT, "messages": []}, 400, "at least 1 item"),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "x", "content": "x"}]}, 400, "messages.0.role"),
        ("/v1/chat/completions", {**CHAT, "tools": [{}]}, 400, "field 'tools'"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 1}, 400, "top_logprobs goes with logprobs true"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 1, "max_completion_tokens": 2}, 400, "different things"),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 0}, 400, "max_tokens"),
        ("/engine/record/start", {"name": "../x.parquet"}, 422, "field 'name'"),
        ("/engine/record/start", {"name": "x.parquet"}, 409, "this server does not record"),
        ("/engine/record/stop", {}, 409, "no recording runs"),
        ("/v1/nothing", {}, 404, "POST /v1/nothing: Not Found"),
        ("/v1/models", {}, 405, "POST /v1/models: Method Not Allowed"),
    ],
)
def test_refused_requests(ask: Client, path: str, body: Any, status: int, expected: str) -> None:
    reply = ask("POST", path, body)
    assert reply.status == status
    assert expected in reply.error["message"]
    assert "\n" not in reply.error["message"]
    assert len(reply.error["message"]) < 700


def test_bodies_are_limited(start: Start) -> None:
    running = start(body_bytes=2000, client_seconds=1.0)
    ask = running.client()
    large = {**COMPLETE, "prompt": "x" * 2000}
    assert ask("POST", "/v1/completions", large).status == 413
    assert ask("POST", "/v1/completions", COMPLETE, Content_Type="text/plain").status == 415
    assert ask("POST", "/v1/completions", b"x" * 7000, Content_Type="text/plain").status == 413
    chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ask.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + 4 * chunk + b"0\r\n\r\n") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 413 ")
    with ask.raw(head + b"Content-Length: 100\r\n\r\n{") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 408 ")
    with ask.raw(head[:30]) as connection:
        assert read_all(connection) == b""
    with ask.raw(b"nonsense\r\n\r\n") as connection:
        assert read_all(connection).startswith(b"HTTP/1.1 400 ")
    alive(running)


def test_the_queue_is_bounded(start: Start) -> None:
    running, found = start(queue_limit=2), list[Reply]()
    with held(running):
        threads = []
        for number in range(3):
            threads.append(send(running, found))
            until(lambda n=number: len(running.context.desk.positions()) == n + 1)
        refused = [running.client().complete(stream=number % 2 == 0) for number in range(20)]
        assert {reply.status for reply in refused} == {429}
        assert all(1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused)
        assert refused[0].error["message"] == "2 requests wait: no more are accepted"
    for thread in threads:
        thread.join()
    assert [reply.status for reply in found] == [200] * 3
    assert {reply.headers["x-queue-position"] for reply in found} == {"0", "1", "2"}
    assert requests(running)["refused"] == 20
    alive(running)


def test_a_flood_of_connections(start: Start) -> None:
    running = start(connection_limit=8)
    flood = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(64)]
    until(lambda: len(running.server.server_state.connections) == 8)
    for connection in flood:
        connection.close()
    until(lambda: not running.server.server_state.connections)
    alive(running)


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_go_away(start: Start, stream: bool) -> None:
    """The running request ends at its next token and the waiting one leaves the queue."""
    running = start()
    body = {**COMPLETE, "max_tokens": 200, "stream": stream}
    ask = running.client()
    with held(running):
        first = socket.create_connection(("127.0.0.1", running.port))
        first.sendall(ask.post_bytes("/v1/completions", body))
        until(lambda: running.context.desk.counts()[1] == 1)
        with ask.raw(ask.post_bytes("/v1/completions", body)):
            until(lambda: running.context.desk.counts()[0] == 1)
        until(lambda: running.context.desk.counts()[0] == 0)
        first.close()
        until(lambda: running.context.desk._running.cancelled.is_set())
    until(lambda: running.context.statistics.cancelled == 2)
    assert running.context.statistics.generated_tokens < 200
    alive(running)


def test_a_reader_that_does_not_read(start: Start) -> None:
    """Its answer stops at the buffers between, the engine goes on, and the connection is cut."""
    running = start(client_seconds=0.5)
    ask = running.client()
    body = {**COMPLETE, "prompt": [[7] * 200] * 128, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", running.port))
        reader.sendall(ask.post_bytes("/v1/completions", body))
        until(lambda: not running.server.server_state.connections)
    alive(running)


def test_time_limits(start: Start) -> None:
    running, found = start(request_seconds=0.3), list[Reply]()
    with held(running):
        threads = [send(running, found), send(running, found, stream=True)]
        until(lambda: len(running.context.desk.positions()) == 2)
        until(lambda: all(job.late for job in [*running.context.desk._waiting, running.context.desk._running]))
    for thread in threads:
        thread.join()
    whole, streamed = sorted(found, key=lambda reply: reply.status, reverse=True)
    assert (whole.status, whole.error["code"]) == (504, "time_limit")
    assert streamed.events[-1]["error"]["code"] == "time_limit"
    assert requests(running)["failed"] == 2


def test_keys(start: Start) -> None:
    running = start(api_key="user", admin_key="admin")
    asked = [
        ("GET", "/v1/models", None),
        ("GET", "/engine/stats", None),
        ("GET", "/metrics", None),
        ("GET", "/openapi.json", None),
        ("POST", "/v1/completions", COMPLETE),
    ]
    changes = [("PUT", "/engine/settings", {"cache_ratio": 0.5}), ("POST", "/engine/record/stop", {})]
    for headers, reads, writes in [
        ({}, 401, 401),
        ({"Authorization": "Bearer wrong"}, 401, 401),
        ({"Authorization": "Basic user"}, 401, 401),
        ({"Authorization": "Bearer us\u00e9r"}, 401, 401),
        ({"Authorization": "Bearer user"}, 200, 403),
    ]:
        ask = running.client(**headers)
        assert {ask(*each).status for each in asked} == {reads}
        assert {ask(*each).status for each in changes} == {writes}
        assert ask("GET", "/health").status == 200
    admin = running.client(Authorization="Bearer admin")
    assert {admin(*each).status for each in asked} == {200}
    assert [admin(*each).status for each in changes] == [200, 409]


def test_pages_of_others_cannot_reach_it(ask: Client, running: Running) -> None:
    host = f"127.0.0.1:{running.port}"
    stop = ("POST", "/engine/record/stop", {})
    assert ask(*stop, Host="evil.example").error["code"] == "wrong_host"
    assert ask(*stop, Origin="http://evil.example").error["code"] == "wrong_origin"
    assert ask(*stop, Origin="null").status == 403
    assert ask(*stop, Origin=f"http://{host}").status == 409
    assert ask("GET", "/health", Host=f"localhost:{running.port}").status == 200


def test_a_drain_has_an_end(start: Start) -> None:
    """New requests are refused, those that are open are cut when the time is over."""
    running, found = start(drain_seconds=0.5), list[Reply]()
    with held(running):
        threads = [send(running, found, stream=True), send(running, found)]
        until(lambda: len(running.context.desk.positions()) == 2)
        running.context.desk.draining = True
        assert running.client()("GET", "/health").json == {"status": "shutting down"}
        refused = running.client().complete()
        assert (refused.status, refused.error["code"]) == (503, "shutting_down")
        running.end()
        until(lambda: running.server.cut)
    running.join()
    for thread in threads:
        thread.join()
    whole, streamed = sorted(found, key=lambda reply: reply.status, reverse=True)
    assert (whole.status, whole.error["code"]) == (503, "shutting_down")
    assert streamed.events[-1]["error"]["code"] == "shutting_down"


def test_an_engine_that_fails_says_so_and_goes_on(ask: Client, running: Running, monkeypatch: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(running.engine, "generate", broken)
        reply = ask.complete()
        assert (reply.status, reply.error["message"]) == (500, "RuntimeError (a bug)")
        assert ask.complete(stream=True).events[-1]["error"]["type"] == "server_error"
        assert ask("GET", "/health").status == 503
    assert ask.complete().status == 200
    alive(running)
