"""Recordings of live traffic, and what statistics and metrics say about it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_client import Client, Reply, until
from prometheus_client.parser import text_string_to_metric_families
from running_server import Running

from foreload.backend.policy.state import DECODE
from foreload.backend.predict import PREDICTORS
from foreload.backend.server.recording import LiveRecording
from foreload.traces import schema
from foreload.traces.io import partial_folder, read_trace

pytestmark = pytest.mark.integration

Start = Callable[..., Running]


@pytest.fixture
def recording(start: Start, tmp_path: Path) -> Running:
    return start(record_folder=tmp_path)


def begin(ask: Client, **fields: Any) -> Reply:
    return ask("POST", "/engine/record/start", {"name": "live.parquet", **fields})


def test_requests_that_begin_while_it_runs(recording: Running, tmp_path: Path) -> None:
    """The rows are the tokens that went in, request by request; what ran before and after is not there."""
    ask, engine = recording.client(), recording.engine
    ask.complete("before")
    assert begin(ask, weights=True, depth=1, width=5).json == {
        "file": str(tmp_path / "live.parquet"),
        "requests": 0,
        "rows": 0,
    }
    assert begin(ask, name="other.parquet").error["code"] == "recording"
    prompts = ["The kernel", "Memory is"]
    replies = [ask.complete(prompt, max_tokens=9, logprobs=0) for prompt in prompts]
    told = ask("GET", "/engine/stats").json["recording"]
    stopped = ask("POST", "/engine/record/stop").json
    ask.complete("after")
    trace = read_trace(tmp_path / "live.parquet")
    assert stopped == told == {"file": str(tmp_path / "live.parquet"), "requests": 2, "rows": trace.rows}
    assert not partial_folder(tmp_path / "live.parquet").exists()
    for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        rows = trace.select([number])
        text = reply.json["choices"][0]["text"]
        assert engine.tokenizer.decode(rows.token_id.tolist()) == (prompt + text)[: -len(last_token(reply))]
        assert rows.position.tolist() == list(range(rows.rows))
        assert (rows.phase == schema.PREFILL).sum() == len(engine.tokenizer.encode(prompt))
    assert trace.meta.has_weights
    columns = [(p.predictor, p.depth, p.width) for p in trace.meta.predictions]
    assert columns == [(name, 1, 5) for name in PREDICTORS]
    assert (begin(ask).status, begin(ask).error["message"]) == (409, "live.parquet exists already: give another name")


def last_token(reply: Reply) -> str:
    return str(reply.json["choices"][0]["logprobs"]["tokens"][-1])


def test_it_may_end_in_the_middle_of_a_request(recording: Running, tmp_path: Path) -> None:
    ask, found = recording.client(), list[Reply]()
    begin(ask)
    thread = threading.Thread(target=lambda: found.append(ask.complete(max_tokens=120)))
    thread.start()
    until(lambda: ask("GET", "/engine/stats").json["recording"]["rows"] > 10)
    rows = ask("POST", "/engine/record/stop").json["rows"]
    thread.join()
    assert found[0].status == 200
    trace = read_trace(tmp_path / "live.parquet")
    assert trace.rows == rows
    assert np.array_equal(trace.position, np.arange(rows))


def test_drafts_and_speculation_stay_as_they_are_while_it_runs(recording: Running, tmp_path: Path) -> None:
    ask = recording.client()
    drafts = {"cache_ratio": 0.5, "draft": {"kind": "ngram", "gamma": 3}}
    begin(ask)
    assert ask("PUT", "/engine/settings", drafts).status == 409
    speculated = {"cache_ratio": 0.5, "predictor": "gate", "prefetch_depth": 1, "speculate_layers": [3]}
    assert ask("PUT", "/engine/settings", speculated).status == 409
    assert ask("PUT", "/engine/settings", {**speculated, "speculate_layers": [99]}).status == 422
    assert ask("PUT", "/engine/settings", {"cache_ratio": 0.25}).status == 200
    ask("POST", "/engine/record/stop")
    assert ask("PUT", "/engine/settings", drafts).status == 200
    begin(ask, name="drafts.parquet")
    plain = ask.complete("one two one two one", max_tokens=40, logprobs=1, stream=True).events
    stats = ask("GET", "/engine/stats").json["drafts"]
    assert 0 < stats["accepted"] <= stats["drafted"]
    assert stats["steps"] + stats["accepted"] == 39
    ask("POST", "/engine/record/stop")
    trace = read_trace(tmp_path / "drafts.parquet")
    assert trace.meta.sampling == {"draft": "ngram", "gamma": 3}
    assert (trace.phase == schema.DRAFT_VERIFY).any()
    ask("PUT", "/engine/settings", {"cache_ratio": 0.5})
    again = ask.complete("one two one two one", max_tokens=40, logprobs=1, stream=True).events
    assert texts(again) == texts(plain)
    scores = [[e["choices"][0]["logprobs"]["token_logprobs"][0] for e in run[:-1]] for run in (plain, again)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def texts(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_full_disk_ends_the_recording_and_not_the_request(recording: Running, monkeypatch: Any) -> None:
    from foreload.errors import FileError
    from foreload.traces.io import TraceWriter

    def full(*_: Any, **__: Any) -> None:
        raise FileError("live.parquet: cannot be written: No space left on device")

    ask = recording.client()
    begin(ask)
    with monkeypatch.context() as patch:
        patch.setattr(TraceWriter, "append", full)
        assert ask.complete().status == 200
    reply = ask("POST", "/engine/record/stop")
    assert (reply.status, reply.error["code"]) == (500, "not_writable")
    assert "No space left on device" in reply.error["message"]
    assert begin(ask).status == 200


def test_ending_the_server_finishes_the_recording(start: Start, tmp_path: Path) -> None:
    running = start(record_folder=tmp_path)
    begin(running.client())
    assert isinstance(running.context.recording, LiveRecording)
    running.client().complete()
    running.stop()
    assert read_trace(tmp_path / "live.parquet").requests() == (0,)


def test_statistics_and_metrics_agree_with_the_engine(running: Running) -> None:
    ask, engine = running.client(), running.engine
    before = engine.brain.counters.copy()
    for number in range(3):
        ask.complete(f"Number {number} of", max_tokens=33)
    stats = ask("GET", "/engine/stats").json
    counted = (engine.brain.counters - before)[DECODE].sum(axis=0)
    total = stats["total"]
    assert [total[name] for name in ("hits", "late", "misses", "fetched")] == counted[:4].tolist()
    assert total["tokens"] == 3 * 32
    assert total["hits"] + total["late"] + total["misses"] == total["tokens"] * 8 * 4
    assert total["bytes_copied"] == counted[[3, 5, 8]].sum() * engine.expert_bytes
    assert stats["recent"]["tokens"] <= total["tokens"]
    assert stats["tpot"]["count"] == total["tokens"]
    assert sum(total["time_ms_per_token"].values()) <= stats["tpot"]["mean_ms"] * 1.5
    metrics = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(ask("GET", "/metrics").body.decode())
        for sample in family.samples
    }
    assert metrics["foreload_tokens_total", "generated"] == 3 * 33
    assert metrics["foreload_requests_total", "finished"] == 3
    hits = [value for (name, *labels), value in metrics.items() if name.endswith("demanded_total") and "hits" in labels]
    assert sum(hits) == engine.brain.counters[DECODE, :, 0].sum()
