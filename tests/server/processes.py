"""`foreload serve mini` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from http_client import Client

COMMAND = "import sys; from foreload.cli import main; sys.exit(main())"
Serve = Callable[..., tuple[subprocess.Popen[str], Client, str]]


def start_process(*flags: Any) -> tuple[subprocess.Popen[str], Client, str]:
    """(process, client, URL) of a server with these flags, listening."""
    args = ["-c", COMMAND, "serve", "mini", "--port", "0", "--json", "--context", "512", *map(str, flags)]
    process = subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    url = json.loads(process.stdout.readline())["url"]
    return process, Client(int(url.rpartition(":")[2]), {}), url
