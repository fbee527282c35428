"""Two lanes of commands: in order, beside each other, within limits, ended with all they started."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks import decode, h200, h200_pair, mini_h200, tuned_h200
from benchmarks.h200_pair import (
    DRAFTED,
    PARTS,
    TOPO,
    Lane,
    Step,
    first_lane,
    only_lane,
    part_done,
    run,
    second_lane,
)

ROOT = Path(__file__).parents[1]


def sleeping(seconds: float) -> list[str]:
    """A module that takes so long."""
    return ["timeit", "-n", "1", "-r", "1", "-s", "import time", f"time.sleep({seconds})"]


@pytest.mark.integration
def test_steps_wait_and_end_at_their_limits(tmp_path: Path) -> None:
    here = frozenset(sorted(os.sched_getaffinity(0))[:1])
    done = part_done(tmp_path, "validate")

    def said() -> bool:
        (tmp_path / "h200.json").write_text(json.dumps({"validate": {}}))
        return True

    first = [Step("long", sleeping(60), 1.0), Step("says", ["platform"], 30, said)]
    second = [
        Step("waits", ["json.tool", str(tmp_path / "h200.json")], 30, done),
        Step("wrong", ["no_such_module"], 30),
    ]
    until = time.monotonic() + 60
    lanes = [Lane(gpu, here, steps, tmp_path, until) for gpu, steps in enumerate((first, second))]
    told = run(lanes, tmp_path)
    assert json.loads((tmp_path / "lanes.json").read_text()) == told
    codes = [{step["step"]: step["code"] for step in lane["steps"]} for lane in told]
    assert codes == [{"long": -signal.SIGKILL, "says": 0}, {"waits": 0, "wrong": 1}]
    assert "validate" in (tmp_path / "waits.log").read_text()
    assert "no_such_module" in (tmp_path / "wrong.log").read_text()
    late = Lane(0, here, [Step("late", ["platform"], 30)], tmp_path, time.monotonic() - 1)
    late.run()
    assert late.told[0]["code"] is None


@pytest.mark.unit
def test_what_is_asked_for_is_there(tmp_path: Path) -> None:
    """Modules, recordings and parts; what one lane waits for is what the other one writes."""
    steps = [*first_lane(tmp_path, 29), *second_lane(tmp_path, Path("corpus"))]
    assert len({step.name for step in steps}) == len(steps)
    assert {step.name for step in only_lane(tmp_path, 29, None)} < {step.name for step in steps}
    for step in steps:
        assert importlib.util.find_spec(step.command[0]) is not None, step.name
    assert [name for name, _ in h200.parts(PARTS)][:2] == ["profile", "validate"]
    for path in (TOPO, *(f"traces/samples/{name}.parquet" for name in DRAFTED)):
        assert (ROOT / path).exists()
    main = tmp_path / "main"
    assert not part_done(main, "validate")()
    main.mkdir()
    (main / "h200.json").write_text(json.dumps({"ended": "now"}))
    assert part_done(main, "validate")()
    (main / "tuned-0.25.json").write_text("{}")
    (main / tuned_h200.PREPARED).write_text("{}")
    assert list(decode.tuned_of(sorted(main.glob("tuned-[0-9]*.json")))) == [0.25]


@pytest.mark.integration
def test_commands_of_the_bundled_model_end_with_the_first_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = argparse.Namespace(out=tmp_path, device="cpu")
    asked = [["doctor", "--help"], ["doctor", "--no-such-flag"], ["plan", "--help"]]
    monkeypatch.setattr(mini_h200, "commands", lambda out: asked)
    assert h200.mini(given, 60) == {"done": ["doctor"], "complete": False}
    assert "no-such-flag" in (tmp_path / "mini" / "mini.log").read_text()
    assert h200.mini(given, -1)["done"] == []
    monkeypatch.setattr(mini_h200, "commands", lambda out: asked[:1])
    assert mini_h200.main(["--out", str(tmp_path), "--minutes", "1"]) == ["doctor"]


@pytest.mark.unit
def test_lanes_share_the_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Lane] = []
    monkeypatch.setattr(h200_pair, "run", lambda lanes, out: seen.extend(lanes) or [])
    h200_pair.main(["--out", str(tmp_path), "--cores", "32", "--minutes", "1"])
    assert [(lane.gpu, min(lane.cores), len(lane.cores)) for lane in seen] == [(0, 0, 16), (1, 16, 16)]
    assert "train" not in {step.name for step in seen[1].steps}
    one = ["--out", str(tmp_path), "--cores", "16", "--minutes", "9", "--gpus", "1"]
    h200_pair.main(one)
    assert [(lane.gpu, len(lane.cores)) for lane in seen[2:]] == [(0, 16)]
    h200_pair.main([*one, "--corpus", str(tmp_path)])
    main, beside = seen[3:]
    assert [step.name for step in main.steps[:2]] == ["train", "main"]
    assert (len(main.cores), len(beside.cores)) == (16, 8)
    assert main.until - beside.until == pytest.approx(60 * 5.8), "tests end before anything is timed"
    assert main.steps[1].limit_s == pytest.approx(60 * 6.6)
    last = seen[1].steps[-1]
    assert not last.ready()
    (tmp_path / "main").mkdir()
    (tmp_path / "main" / "h200.json").write_text(json.dumps({"ended": "now"}))
    assert last.ready()
    with pytest.raises((SystemExit, argparse.ArgumentError)):
        h200_pair.main([])
