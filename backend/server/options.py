"""What is fixed while a server runs: where it listens, who may ask, and every limit."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from foreload.errors import UsageError


@dataclass(frozen=True)
class ServerOptions:
    """Limits hold memory bounded whatever clients do; times are in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None  # asked of every request but /health
    admin_key: str | None = None  # asked, instead of the api key, to change settings and to record
    queue_limit: int = 32  # requests that wait for the engine
    connection_limit: int = 256
    body_bytes: int = 4 << 20
    request_seconds: float = 600.0  # from arrival to the last token
    client_seconds: float = 30.0  # for a request to arrive whole, and for a client to go on reading
    drain_seconds: float = 60.0  # for running and waiting requests after SIGTERM
    record_folder: Path | None = None  # where recordings of live traffic go; None: there are none

    def __post_init__(self) -> None:
        for name in ("api_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and (not key.isascii() or not key.isprintable() or " " in key or not key):
                raise UsageError(f"{name} must be printable ASCII without spaces, and not empty")
        if not is_loopback(self.host) and self.api_key is None:
            raise UsageError(f"host {self.host!r} can be reached from other machines: give an api key, or 127.0.0.1")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port {self.port} must be from 0 (any free one) to 65535")
        for name in ("queue_limit", "connection_limit", "body_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        for name in ("request_seconds", "client_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} {getattr(self, name)} must be above 0")

    @property
    def delivery_limit(self) -> int:
        """Requests that are not over: waiting, running, or finished and not yet taken by their client."""
        return 2 * self.queue_limit


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
