"""Run benchmarks and print a table, or JSON with --json. Each rate is the median of repeats in this one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from benchmarks import curves, simulator, traces
from benchmarks.timing import Rate
from foreload.cli.output import table
from foreload.machine import machine_name, software

BENCHMARKS: Mapping[str, Callable[[], list[Rate]]] = {
    "curves": curves.run,
    "simulator": simulator.run,
    "traces": traces.run,
}


def main(args: Sequence[str] | None = None) -> None:
    """Parse flags, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(args)
    unknown = sorted(set(given.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}: there are {', '.join(BENCHMARKS)}")
    found = {name: BENCHMARKS[name]() for name in given.names or BENCHMARKS}
    if given.json:
        rates = {name: [rate.as_dict() for rate in group] for name, group in found.items()}
        print(json.dumps({"machine": machine_name(), "software": software(), "rates": rates}))
        return
    for name, group in found.items():
        rows = [(rate.name, f"{rate.per_second:,.0f} {rate.unit}/s", f"{rate.ratio:.2f}") for rate in group]
        note = f"source: measured on {machine_name()}; ratio to the first line"
        Console(width=100, highlight=False).print(table(name, ("", "rate", "ratio"), rows, note))


if __name__ == "__main__":
    main()
