"""The rows of `benchmarks.union_h200` as Markdown: one table for each workload, settings by cache size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PUBLISHED: Mapping[str, float] = {
    "mixtral_offloading": 2.36,
    "fate": 7.79,
    "llama_cpp": 15.23,
    "moe_spac": 25.06,
}
"""Tokens/s of Qwen3-30B-A3B with 17 % of the experts cached on an RTX 4090, mean of 7 tasks: arXiv 2603.09983."""
PUBLISHED_RATIO = 0.17
FLOORS = {
    "bound: link and CPU": "link_ms",
    "bound: compute": "compute_ms",
    "every expert resident (simulated)": "resident_ms",
}


def markdown(found: Mapping[str, Any]) -> str:
    """Milliseconds per token, measured and (simulated), and under them what no setting can beat."""
    parts = [f"{found['model']} on {found['device']}, {found['date']}, decode steps: {found['path']}\n"]
    for name, source in found["routing"].items():
        rows = [one for one in found["rows"] if one["workload"] == name]
        if rows:
            head = f"\nRouting `{name}` ({source}); ms per token measured (simulated)\n\n"
            parts += [head, _table(found, name, rows), _beside_published(rows)]
    assumed: dict[str, list[str]] = {}
    for one in found["rows"]:
        for what in one.get("assumed", ()):
            assumed.setdefault(what, []).append(one["name"])
    for what, names in assumed.items():
        parts.append(f"\nAssumed for {', '.join(dict.fromkeys(names))}: {what}.\n")
    if found.get("bounds"):
        parts.append("\nBounds: of the whole recording, from an empty cache, one token a step.\n")
    refused = {f"{one['name']}: {one['refused']}" for one in found["rows"] if one["refused"]}
    parts += [f"\nNot run: {what}.\n" for what in sorted(refused)]
    return "".join(parts)


def _table(found: Mapping[str, Any], name: str, rows: list[dict[str, Any]]) -> str:
    ratios = sorted({one["cache_ratio"] for one in rows})
    names = list(dict.fromkeys(one["name"] for one in rows))
    lines = [f"| settings | {' | '.join(f'cache {ratio:g}' for ratio in ratios)} |", "|---|" + "---:|" * len(ratios)]
    for setting in names:
        cells = {one["cache_ratio"]: _cell(one) for one in rows if one["name"] == setting}
        lines.append(f"| {setting} | {' | '.join(cells.get(ratio, '') for ratio in ratios)} |")
    bounds = found.get("bounds", {}).get(name, {})
    for title, key in FLOORS.items():
        if bounds:
            shown = [f"{bounds[str(ratio)][key]:.2f}" if str(ratio) in bounds else "" for ratio in ratios]
            lines.append(f"| {title} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _beside_published(rows: list[dict[str, Any]]) -> str:
    """Tokens per second at the published cache size, and against llama.cpp's placement there and here."""
    at = [one for one in rows if one["cache_ratio"] == PUBLISHED_RATIO and "tpot_ms" in one]
    here = {one["name"]: 1e3 / one["tpot_ms"] for one in at}
    if "llama_cpp" not in here:
        return ""
    titles = ("at 17 % cached", "tokens/s", "x llama_cpp", "published tokens/s, RTX 4090", "x llama_cpp")
    lines = [f"\n| {' | '.join(titles)} |", "|---|" + "---:|" * 4]
    for name, rate in here.items():
        shown = [name, f"{rate:.1f}", f"{rate / here['llama_cpp']:.2f}", "", ""]
        if name in PUBLISHED:
            shown[3:] = [f"{PUBLISHED[name]:.2f}", f"{PUBLISHED[name] / PUBLISHED['llama_cpp']:.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _cell(one: Mapping[str, Any]) -> str:
    if "tpot_ms" not in one:
        return "refused" if one["refused"] else "no time"
    simulated = one.get("simulated", {}).get("tpot_ms")
    return f"{one['tpot_ms']:.2f}" + (f" ({simulated:.2f})" if simulated is not None else "")
