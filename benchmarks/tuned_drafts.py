"""Settings tuned on recordings of verify windows, with their drafts allowed and without, for `decode --also`.

    python -m benchmarks.tuned_drafts --profile FILE --trace FILE [--trace FILE ...] --out DIR [--ratio 0.25]

Without drafts the recording is its text token by token. Writes DIR/NAME-drafts.json and DIR/NAME-plain.json for each.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from joblib import Parallel, delayed

from benchmarks.beside import costs_of
from benchmarks.tuned_grid import Budget, Inputs
from foreload.files import write_json
from foreload.machine import cores
from foreload.settings import Settings
from foreload.traces.histogram import uses
from foreload.traces.io import read_trace
from foreload.traces.remodel import of_shape, without_windows


def tuned(profile: Path, recording: Path, ratio: float, drafts: bool) -> tuple[Settings, float]:
    """The tuner's choice for that share of all experts on the device, and its simulated milliseconds per token."""
    costs = costs_of(profile)
    trace = of_shape(read_trace(recording), costs.shape)
    start = uses(trace.experts, costs.shape.experts)
    result = Inputs(costs.profile, trace if drafts else without_windows(trace), start).tune(Budget(None, ratio))
    return result.best.settings, result.best.tpot_ns / 1e6


def main(args: Sequence[str] | None = None) -> None:
    """Tune, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--trace", type=Path, action="append", required=True)
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    asked = [(path, drafts) for path in given.trace for drafts in (True, False)]
    jobs = [delayed(tuned)(given.profile, path, given.ratio, drafts) for path, drafts in asked]
    for (path, drafts), (settings, ms) in zip(asked, Parallel(min(cores(), len(jobs)))(jobs), strict=True):
        name = f"{path.stem}-{'drafts' if drafts else 'plain'}"
        write_json(given.out / f"{name}.json", settings.model_dump(mode="json", exclude_defaults=True))
        print(f"{name}: {ms:.2f} ms per token simulated, drafts of {settings.draft.gamma}", flush=True)


if __name__ == "__main__":
    main()
