"""`foreload serve`, `apply` and `watch` as people run them: in processes, ended by signals."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from http_client import Client, Reply, until
from processes import Serve

from foreload.cli import main
from foreload.settings import Settings
from foreload.traces.io import partial_folder, read_trace, recover

pytestmark = pytest.mark.integration


def in_background(call: Callable[[], Reply]) -> tuple[threading.Thread, list[Reply]]:
    found: list[Reply] = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def test_sigterm_answers_what_is_open(serve: Serve) -> None:
    process, ask, _ = serve("--link", "20MB/s", "--device", "cpu")
    streams = [in_background(lambda n=n: ask.complete(f"Chapter {n}", max_tokens=40, stream=True)) for n in range(3)]
    until(lambda: ask("GET", "/engine/stats").json["generated_tokens"] > 2)
    until(lambda: len(ask("GET", "/engine/stats").json["queue"]) == 3)
    process.send_signal(signal.SIGTERM)
    for thread, found in streams:
        thread.join()
        assert found[0].body.endswith(b"data: [DONE]\n\n")
    assert process.wait(60) == 0
    assert process.communicate()[1] == ""


def test_apply_watch_and_a_killed_recording(serve: Serve, tmp_path: Path, capsys: Any) -> None:
    process, ask, url = serve("--admin-key", "sesame", "--records", tmp_path)
    check_apply_and_watch(ask, url, tmp_path, capsys)
    check_killed_recording(process, Client(ask.port, {"Authorization": "Bearer sesame"}), tmp_path)


def check_killed_recording(process: subprocess.Popen[str], ask: Client, tmp_path: Path) -> None:
    """What was flushed before kill -9 is readable, and recovers."""
    assert ask("POST", "/engine/record/start", {"name": "live.parquet"}).status == 200
    path = tmp_path / "live.parquet"
    while not list(partial_folder(path).glob("part-*.parquet")):
        assert ask.complete("The kernel " * 100, max_tokens=64).status == 200
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert not path.exists()
    parts = sorted(partial_folder(path).glob("part-*.parquet"))
    flushed = [read_trace(part).rows for part in parts]
    trace = read_trace(recover(path))
    assert trace.rows == sum(flushed) > 0
    assert trace.requests() == tuple(range(len(trace.requests())))
    assert trace.meta.source == "foreload server"


def check_apply_and_watch(ask: Client, url: str, tmp_path: Path, capsys: Any) -> None:
    Settings(cache_ratio=0.25, eviction="lfu").save(tmp_path / "good.toml")
    Settings(slots_per_layer=(1, 2)).save(tmp_path / "bad.json")
    push = ["apply", str(tmp_path / "good.toml"), "--url", url]
    assert main(push) == 2
    assert "a key is needed" in capsys.readouterr().err
    assert main([*push, "--key", "sesame"]) == 0
    shown = capsys.readouterr().out
    assert "cache_ratio" in shown
    assert "unset → 0.25" in shown
    assert "256 → 64" in shown
    assert main(["apply", str(tmp_path / "bad.json"), "--url", url, "--key", "sesame", "--json"]) == 2
    assert "slots_per_layer has 2 entries" in json.loads(capsys.readouterr().out)["error"]
    ask.complete(max_tokens=32)
    assert main(["watch", "--url", url, "--once"]) == 0
    shown = capsys.readouterr().out
    for expected in ("cache_ratio=0.25 eviction=lfu", "time per token", "stalls per token", "layers", "1 finished"):
        assert expected in shown
    assert main(["watch", "--url", url, "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["generated_tokens"] == 32
    assert main(["watch", "--url", "http://127.0.0.1:1"]) == 1


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--host", "0.0.0.0"], "can be reached from other machines: give an api key"),
        (["--port", "70000"], "port 70000 must be from 0"),
        (["--queue", "0"], "queue_limit 0 must be at least 1"),
        (["--host", "0.0.0.0", "--api-key", "a b"], "api_key must be printable ASCII without spaces"),
        (["--host", "203.0.113.1", "--api-key", "x"], "203.0.113.1:8000 cannot be listened on"),
    ],
)
def test_wrong_use(flags: list[str], expected: str, capsys: Any) -> None:
    assert main(["serve", "mini", *flags]) == 2
    assert expected in capsys.readouterr().err
