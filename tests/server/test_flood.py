"""Hostile traffic for a while, against a server in a process of its own: its memory stays where it was."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from http_client import Client, until
from processes import Serve

pytestmark = pytest.mark.slow

ROUNDS, CLIENTS = 6, 40
GROWTH_BYTES = 48 << 20


def hostile(ask: Client, random: Random, statuses: list[int]) -> None:
    """One client: floods, vanishes, reads slowly, or sends nonsense."""
    kind = random.randrange(8)
    stream = {"model": "mini", "prompt": "The kernel", "max_tokens": 200, "stream": True, "logprobs": 20}
    if kind == 0:
        statuses.append(ask.complete("word " * 100_000).status)
    elif kind == 1:
        statuses.append(ask("POST", "/v1/completions", random.randbytes(100_000)).status)
    elif kind == 2:
        statuses.append(ask("POST", "/v1/completions", b"[" * 3_000_000).status)
    elif kind == 3:
        statuses.append(ask("PUT", "/engine/settings", {"cache_ratio": 0.5}, Authorization="Bearer wrong").status)
    elif kind == 4:
        with ask.raw(ask.post_bytes("/v1/completions", stream, Authorization="Bearer user")) as connection:
            connection.recv(1)
    elif kind == 5:
        with ask.raw(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le"):
            threading.Event().wait(random.random())
    elif kind == 6:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", ask.port))
            reader.sendall(ask.post_bytes("/v1/completions", stream, Authorization="Bearer user"))
            threading.Event().wait(1)
    else:
        statuses.append(ask.complete(max_tokens=4, stream=bool(random.getrandbits(1))).status)


def one_round(ask: Client, number: int) -> list[int]:
    statuses: list[int] = []
    threads = [
        threading.Thread(target=hostile, args=[ask, Random(number * CLIENTS + client), statuses])
        for client in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def test_memory_stays_bounded(serve: Serve, tmp_path: Path) -> None:
    process, plain, _ = serve("--api-key", "user", "--queue", "8", "--max-body", "1MB", "--records", tmp_path)
    ask = Client(plain.port, {"Authorization": "Bearer user"})
    expected = ask.complete(max_tokens=32).json["choices"][0]["text"]
    memory: list[int] = []
    found: set[int] = set()
    for number in range(ROUNDS):
        found |= set(one_round(ask, number))
        until(lambda: idle(ask), 120)
        memory.append(psutil.Process(process.pid).memory_info().rss)
    assert found <= {200, 400, 401, 413, 429}
    assert found >= {200, 400, 401, 413}
    assert memory[-1] - memory[1] < GROWTH_BYTES, memory
    assert ask.complete(max_tokens=32).json["choices"][0]["text"] == expected
    assert ask("GET", "/health").status == 200


def idle(ask: Client) -> Any:
    requests = ask("GET", "/engine/stats").json["requests"]
    return requests["waiting"] == requests["running"] == requests["delivering"] == 0
