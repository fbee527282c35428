"""A client of a running server's `/engine`: settings, statistics, recordings."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from foreload.errors import BudgetError, ForeloadError, ReloadError, SettingsError, UsageError
from foreload.settings import Settings

TIMEOUT_S = 60.0
LARGEST_ANSWER = 64 << 20


@dataclass(frozen=True)
class EngineClient:
    """`url` is where `foreload serve` listens; `key` its api key, or the admin key where one is needed."""

    url: str
    key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"url {self.url!r} is none of a server: give one like http://127.0.0.1:8000")

    def stats(self) -> dict[str, Any]:
        """Statistics of the engine (`StatsView` of the server)."""
        return self._ask("GET", "/engine/stats")

    def settings(self) -> dict[str, Any]:
        """The settings in force, and what they come to (`SettingsView`)."""
        return self._ask("GET", "/engine/settings")

    def apply(self, settings: Settings) -> dict[str, Any]:
        """Push settings; returns what changed and what it cost (`AppliedView`).

        BudgetError, ReloadError or SettingsError if the engine refuses them, which leaves the old ones in force.
        """
        return self._ask("PUT", "/engine/settings", settings.model_dump(mode="json"))

    def record_start(self, name: str, **options: Any) -> dict[str, Any]:
        """Record live traffic into the file `name` of the server's folder."""
        return self._ask("POST", "/engine/record/start", {"name": name, **options})

    def record_stop(self) -> dict[str, Any]:
        """Finish the recording."""
        return self._ask("POST", "/engine/record/stop", {})

    def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
        # No proxy between this program and an engine, which is nearly always on the same machine.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(asked, timeout=TIMEOUT_S) as reply:
                return self._object(reply.read(LARGEST_ANSWER))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read(LARGEST_ANSWER)) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise ForeloadError(f"{self.url}: no engine answers there: {reason}") from error

    def _object(self, raw: bytes) -> dict[str, Any]:
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError("the answer is no JSON object")
        return value

    def _refused(self, status: int, raw: bytes) -> ForeloadError:
        try:
            detail = self._object(raw)["error"]
            message, code, shortfall = detail["message"], detail["code"], detail.get("shortfall_bytes")
        except (ValueError, KeyError, TypeError):
            return ForeloadError(f"{self.url}: answers {status}, not as a Foreload server does")
        if code == "does_not_fit" and isinstance(shortfall, int):
            return BudgetError(str(message), str(detail.get("budget")), shortfall)
        if code == "needs_reload":
            return ReloadError(str(message))
        return (SettingsError if status == 422 else UsageError if status < 500 else ForeloadError)(str(message))
