"""`foreload apply` and `foreload watch`: settings into, and statistics out of, a running server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.output import JsonFlag, Output, facts, table
from foreload.client import EngineClient
from foreload.settings import Settings
from foreload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

UrlFlag = Annotated[str, typer.Option("--url", help="Where foreload serve listens.")]
DEFAULT_URL = "http://127.0.0.1:8000"
WAITERS_SHOWN = 8


def apply(
    file: Annotated[Path, typer.Argument(metavar="SETTINGS", help="JSON or TOML, as written by foreload tune.")],
    url: UrlFlag = DEFAULT_URL,
    key: Annotated[
        str | None, typer.Option("--key", envvar="FORELOAD_ADMIN_KEY", help="Admin key, or api key if there is none.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Push settings into a running server.

    They are in force between two tokens. Refused ones (exit 3 if they do not fit) leave the old ones in force.
    """
    settings = Settings.load(file)
    answer = EngineClient(url, key).apply(settings)
    Output(as_json).finish(answer, lambda console: console.print(_applied(answer)))


def watch(
    url: UrlFlag = DEFAULT_URL,
    key: Annotated[str | None, typer.Option("--key", envvar="FORELOAD_API_KEY", help="The server's api key.")] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch a running server: time per token, hits, stalls, layers, queue.

    With --json, one line per look.
    """
    client, output = EngineClient(url, key), Output(as_json)
    stats = client.stats()
    if once:
        return output.finish(stats, lambda console: console.print(_view(stats)))
    if as_json:
        while True:
            print(json.dumps(stats), flush=True)
            time.sleep(interval)
            stats = client.stats()
    from rich.live import Live

    with Live(_view(stats), console=output.stdout, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(_view(client.stats()), refresh=True)


def _applied(answer: dict[str, Any]) -> RenderableType:
    cost = answer["cost"]
    rows = {
        field: f"{_short(change['before'])} → {_short(change['after'])}" for field, change in answer["changed"].items()
    }
    before, after = (format_bytes(cost[f"device_bytes_{when}"]) for when in ("before", "after"))
    rows |= {
        "slots": f"{cost['slots_before']} → {cost['slots_after']} ({before} → {after} on the device)",
        "experts": f"{cost['experts_kept']} stay, {cost['experts_dropped']} dropped, {cost['experts_moved']} moved",
        "cost": f"{cost['paused_ms']:.2f} ms without a token, after waiting {cost['waited_ms']:.2f} ms for one",
    }
    return facts("in force" if answer["changed"] else "nothing changed", rows, "measured")


def _short(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value) if isinstance(value, (list, dict)) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _view(stats: dict[str, Any]) -> RenderableType:
    from rich.console import Group

    recent, requests = stats["recent"], stats["requests"]
    link = stats["emulated_link_bytes_per_s"]
    where = f"{stats['device']}, {stats['dtype']}" + (f", link emulated at {format_bytes(link)}/s" if link else "")
    stalls = ", ".join(f"{cause} {ms:.2f} ms" for cause, ms in recent["stall_ms_per_token"].items())
    copied = recent["bytes_per_token"]
    rows = {
        "engine": f"{stats['model']} on {where}, up {stats['uptime_s']:.0f} s",
        "settings": stats["settings"],
        "memory": stats["memory"],
        "requests": ", ".join(f"{count} {state}" for state, count in requests.items()),
        "tokens": f"{stats['prompt_tokens']} prompt, {stats['generated_tokens']} generated",
        "time per token": _times(stats["tpot"], "tokens"),
        "first token": _times(stats["ttft"], "requests"),
        "experts": f"{_rate(recent['hit_rate'])} hits, {_rate(recent['late_rate'])} late, "
        f"{_rate(recent['miss_rate'])} misses",
        "copied": "-" if copied is None else f"{format_bytes(copied)} per token",
        "stalls per token": stalls or "-",
    }
    if stats["drafts"]["drafted"]:
        rows["drafts"] = "{accepted} of {drafted} accepted, {tokens_per_step:.2f} tokens per step".format(
            **stats["drafts"]
        )
    if stats["recording"] is not None:
        rows["recording"] = "{file}: {requests} requests, {rows} rows".format(**stats["recording"])
    parts: list[RenderableType] = [facts("engine", rows, f"measured; rates over the last {recent['tokens']} tokens")]
    parts.append(table("layers", ("layer", "slots", "in use", "hits", "late", "misses", "copied"), _layers(stats)))
    if stats["queue"]:
        waiting = [[w["id"], str(w["position"]), f"{w['seconds']:.1f} s"] for w in stats["queue"][:WAITERS_SHOWN]]
        parts.append(table("queue", ("request", "ahead", "since"), waiting))
    return Group(*parts)


def _layers(stats: dict[str, Any]) -> list[list[str]]:
    return [
        [
            *(str(layer[name]) for name in ("layer", "slots", "resident")),
            _rate(layer["hit_rate"]),
            *(str(layer[name]) for name in ("late", "misses")),
            format_bytes(layer["bytes_copied"]),
        ]
        for layer in stats["layers"]
    ]


def _times(times: dict[str, Any], of: str) -> str:
    if times["mean_ms"] is None:
        return "-"
    return "mean {mean_ms:.2f}, p50 {p50_ms:.2f}, p95 {p95_ms:.2f} ms over {count} ".format(**times) + of


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
