"""The bundled model by the commands that users have: profiled, recorded, predicted and measured.

    python -m benchmarks.mini_h200 --out DIR [--minutes 4]

Writes DIR/profile.json, DIR/trace.parquet and DIR/validate.json; the text of each command is in DIR/mini.log.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TOKENS, REQUESTS, REPEATS = 200, 9, 7


def commands(out: Path) -> list[list[str]]:
    """Arguments of `foreload`, in order; of the recording one request is run, by turns."""
    profile, trace = str(out / "profile.json"), str(out / "trace.parquet")
    checked = ["--profile", profile, "--trace", trace, "--requests", "1", "--repeats", str(REPEATS)]
    return [
        ["profile", "mini", "--mode", "full", "--out", profile],
        ["record", "mini", "-n", str(TOKENS), "--requests", str(REQUESTS), "--out", trace],
        ["validate", "mini", *checked, "--out", str(out / "validate.json")],
    ]


def run(out: Path, until: float) -> list[str]:
    """The commands that ended well before a time on the monotonic clock; what fails or is late ends it."""
    out.mkdir(parents=True, exist_ok=True)
    done: list[str] = []
    with (out / "mini.log").open("wb") as log:
        for command in commands(out):
            left_s = until - time.monotonic()
            if left_s <= 0:
                break
            try:
                subprocess.run(
                    [sys.executable, "-m", "foreload.cli", *command],
                    check=True,
                    timeout=left_s,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                log.write(f"{error}\n".encode())
                break
            done.append(command[0])
    return done


def main(args: Sequence[str] | None = None) -> list[str]:
    """Run, print what was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=4.0)
    given = parser.parse_args(args)
    done = run(given.out, time.monotonic() + 60 * given.minutes)
    print(f"done: {', '.join(done)}")
    return done


if __name__ == "__main__":
    main()
