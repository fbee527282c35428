"""The kernel tests under NVIDIA's compute-sanitizer.

    python -m benchmarks.sanitizer --out FILE [--tools memcheck,racecheck,initcheck] [--minutes 5]
        [--only "expert or attend"]

Kernels run compiled on small inputs, a tool after the other, with torch's caching of device memory off, so that memory
beyond a tensor is nobody's. Writes FILE (JSON): of each tool the errors it counted and the end of what it said. Where
the tool is not installed (it comes with the CUDA toolkit) the result says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from foreload.files import write_json
from foreload.machine import machine_name, software

TOOLS = "memcheck,racecheck,initcheck"
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def found_tool() -> str | None:
    """Where compute-sanitizer is."""
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


def counted(said: str) -> int | None:
    """Errors that a tool's summary counts; None without a summary."""
    match = SUMMARY.search(said)
    return int(match[1]) if match else None


def check(executable: str, tool: str, only: str, limit_s: float) -> dict[str, Any]:
    """The tests under one tool."""
    tests = [sys.executable, "-m", "pytest", "-q", "tests/backend/cuda", "-m", "unit", "-p", "no:cacheprovider", "-x"]
    command = [executable, "--tool", tool, "--target-processes", "all", *tests, *(["-k", only] if only else [])]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begun = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        errors="replace",
        start_new_session=True,
    ) as running:
        try:
            said = running.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the tests, too: they would keep the device
            said = running.communicate()[0]
        code = running.returncode
    errors = counted(said)
    seconds = time.monotonic() - begun
    return {
        "errors": errors,
        "clean": code == 0 and errors == 0,
        "code": code,
        "tail": said[-1500:],
        "seconds": seconds,
    }


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the tools, write, print; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", default=TOOLS)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--only", default="", help="tests whose names fit, as pytest's -k")
    given = parser.parse_args(args)
    executable, until = found_tool(), time.monotonic() + 60 * given.minutes
    found: dict[str, Any] = {"machine": machine_name(), "software": software(), "executable": executable, "tools": {}}
    for tool in given.tools.split(",") if executable else []:
        found["tools"][tool] = check(str(executable), tool, given.only, max(1.0, until - time.monotonic()))
        write_json(given.out, found)
        print(tool, {name: found["tools"][tool][name] for name in ("errors", "clean", "seconds")}, flush=True)
    if executable is None:
        print("compute-sanitizer is not installed")
    write_json(given.out, found)
    return found


if __name__ == "__main__":
    main()
