"""What watches an engine: recorder, measured timeline, and measuring settings by running a recording again."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import edit_weights, words

from foreload.backend.engine import Engine
from foreload.backend.measure import measure, recorded_requests
from foreload.backend.policy import Counter
from foreload.backend.policy import state as policy_state
from foreload.backend.recorder import Prompt, read_prompts, record
from foreload.backend.sampling import Sampling
from foreload.backend.timeline import measured_spans
from foreload.errors import BudgetError, FileError, MismatchError
from foreload.settings import Settings
from foreload.traces.io import partial_folder, read_trace
from foreload.traces.schema import DECODE, PREFILL, Trace
from foreload.traces.timings import KINDS, TRACKS, Span

PROMPTS = [Prompt("one", words(*range(1, 13))), Prompt("two", words(*range(40, 30, -1)))]
MakeEngine = Callable[..., Engine]


def make_recording(engine: Engine, out: Path, **options: Any) -> Trace:
    record(engine, PROMPTS, out, **{"prompt_tokens": 10, "max_tokens": 6, "stop": False, **options})
    return read_trace(out)


# Prompts


@pytest.mark.unit
def test_bundled_prompts() -> None:
    prompts = read_prompts()
    assert len(prompts) >= 32
    assert all(prompt.text and prompt.subject for prompt in prompts)


@pytest.mark.unit
def test_prompt_files(tmp_path: Path) -> None:
    lines, plain = tmp_path / "p.jsonl", tmp_path / "p.txt"
    lines.write_text('{"text": "a b"}\n\n{"text": "c", "subject": "s"}\n')
    plain.write_text("a b\n\nc\n")
    assert read_prompts(lines) == [Prompt("", "a b"), Prompt("s", "c")]
    assert read_prompts(plain) == [Prompt("", "a b"), Prompt("", "c")]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"text": "a"}\n{"text"', "line 2 is no JSON object with a field 'text'"),
        ('{"subject": "a"}', "line 1 is no JSON object with a field 'text'"),
        ("[1]", "line 1 is no JSON object"),
        ("7", "line 1 is no JSON object"),
        ('{"text": 7}', "line 1: fields 'text'"),
        ('{"text": ""}', "line 1: fields 'text'"),
        ('{"text": "a", "subject": 7}', "line 1: fields 'text'"),
        ("\xff\xfe", "are not UTF-8"),
    ],
)
def test_wrong_prompt_files(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(FileError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


@pytest.mark.unit
def test_missing_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="prompts cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


# Recordings


@pytest.mark.integration
def test_recording_describes_itself(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, sampling = make_engine(), Sampling(0.7, 0.9, 5)
    trace = make_recording(engine, tmp_path / "t.parquet", sampling=sampling, weights=True)
    meta = trace.meta
    assert meta.subjects == ("one", "two")
    assert (meta.weights_hash, meta.shape_hash) == (engine.checkpoint.weights_hash, engine.shape.hash)
    assert Sampling(**meta.sampling) == sampling
    assert meta.seed == 5
    assert [(p.depth, p.width) for p in meta.predictions] == [(1, 4), (2, 4)]
    phases = [PREFILL] * 10 + [DECODE] * 5
    assert trace.phase.tolist() == phases * 2
    assert trace.token_id[:10].tolist() == list(range(1, 11))
    assert trace.weights is not None
    np.testing.assert_allclose(trace.weights.sum(axis=2), 1, atol=2e-3)


@pytest.mark.integration
def test_watching_changes_neither_text_nor_routing(make_engine: MakeEngine, tmp_path: Path) -> None:
    one = make_recording(make_engine(Settings(cache_ratio=1.0)), tmp_path / "a.parquet", depth=0)
    gate = Settings(cache_ratio=0.25, predictor="gate", prefetch_depth=1)
    two = make_recording(make_engine(gate), tmp_path / "b.parquet", width=8)
    assert one.predictions == {}
    assert np.array_equal(one.token_id, two.token_id)
    assert np.array_equal(one.experts, two.experts)
    plain = make_engine(gate).generate(list(range(1, 11)), 6, stop=False).token_ids
    assert two.token_id[10:15].tolist() == plain[:5]


@pytest.mark.integration
def test_a_folder_that_cannot_be_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match=r"t.parquet: cannot be written"):
        make_recording(make_engine(), tmp_path / "file" / "t.parquet")


@pytest.mark.integration
def test_a_full_disk_leaves_nothing_under_the_final_name(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, out = make_engine(), tmp_path / "t.parquet"

    def full(self: Path, _: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(FileError, match=r"t.parquet: cannot be written: No space left on device"):
            make_recording(engine, out)
    assert not out.exists()
    assert list(tmp_path.iterdir()) in ([], [partial_folder(out)])
    assert make_recording(engine, out).rows == 30


# Timelines


def timeline(engine: Engine) -> list[Span]:
    engine.reset_cache()
    spans = measured_spans(engine, list(range(1, 9)), 6)
    assert engine.copies.spans is None
    assert engine.cpu.spans is None
    return spans


@pytest.mark.integration
@pytest.mark.parametrize(
    "settings",
    [
        Settings(cache_ratio=0.0),
        Settings(cache_ratio=0.25, predictor="gate", prefetch_depth=2),
        Settings(cache_ratio=0.25, miss_action="cpu", admission="background"),
        Settings(cache_ratio=0.0, miss_action="split"),
    ],
    ids=lambda s: s.describe(),
)
def test_timelines_cover_the_steps(make_engine: MakeEngine, settings: Settings) -> None:
    """The decoding thread's spans follow each other without a gap from a step's embedding to its head."""
    engine = make_engine(settings)
    spans = timeline(engine)
    assert {s.track for s in spans} <= set(TRACKS)
    assert {s.kind for s in spans} <= set(KINDS)
    assert spans == sorted(spans, key=lambda s: s.start_us)
    assert all(s.duration_us >= 0 for s in spans)
    for step in range(5):
        mine = [s for s in spans if s.step == step and s.track in ("host", "gpu")]
        assert (mine[0].kind, mine[-1].kind) == ("embed", "head")
        assert Tally(s.kind for s in mine)["attention"] == engine.shape.n_moe_layers
        for a, b in pairwise(mine):
            assert b.start_us == pytest.approx(a.start_us + a.duration_us, abs=1e-3)
    assert {s.step for s in spans} == set(range(5))


@pytest.mark.integration
def test_timelines_show_every_copy_and_cpu_share(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.0, miss_action="split"))
    before = engine.brain.counters[policy_state.DECODE].copy()
    spans = timeline(engine)
    counted = (engine.brain.counters[policy_state.DECODE] - before).sum(axis=0)
    links = [s for s in spans if s.track == "link"]
    assert len(links) == counted[Counter.FETCHED] > 0
    assert {(s.kind, s.bytes) for s in links} == {("fetch", engine.expert_bytes)}
    assert len([s for s in spans if s.track == "cpu"]) == counted[Counter.ON_CPU] > 0


@pytest.mark.integration
def test_timeline_without_decode_steps_is_empty(make_engine: MakeEngine) -> None:
    assert measured_spans(make_engine(), [1, 2, 3], 1) == []


# Measuring


@pytest.mark.integration
def test_measuring_runs_the_recorded_requests_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(Settings(cache_ratio=0.5))
    trace = make_recording(engine, tmp_path / "t.parquet", sampling=Sampling(1.0, 0.9, 3))
    chosen, calls = [Settings(cache_ratio=0.0), Settings(cache_ratio=1.0)], []
    found = measure(engine, trace, [1, 0], chosen, 3, lambda done, total: calls.append((done, total)))
    assert engine.settings == Settings(cache_ratio=0.5)
    assert calls == [(n, 6) for n in range(1, 7)]
    for measured, settings in zip(found, chosen, strict=True):
        assert measured.settings == settings
        assert (measured.diverged, measured.tokens) == (0, 10)
        assert len(measured.tpot_ns) == len(measured.ttft_ns) == 3
        assert measured.tpot_ms == sorted(measured.tpot_ns)[1] / 1e6
    assert found[0].hit_rate == 0
    assert found[0].bytes_per_token(engine.layer_bytes) == 6 * engine.expert_bytes
    assert found[1].hit_rate > 0
    assert [m.capacity for m in found] == [(0, 0, 0), (8, 8, 8)]


@pytest.mark.integration
def test_every_turn_starts_with_an_empty_cache(make_engine: MakeEngine, tmp_path: Path) -> None:
    warm, fresh = make_engine(), make_engine()
    trace = make_recording(warm, tmp_path / "t.parquet")
    one, two = (measure(engine, trace, [0, 1], [Settings(cache_ratio=0.5)], 1)[0] for engine in (warm, fresh))
    assert np.array_equal(one.counters, two.counters)


@pytest.mark.integration
def test_measuring_restores_the_settings_after_an_error(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(Settings(cache_ratio=0.5), vram_bytes=400_000)
    trace = make_recording(engine, tmp_path / "t.parquet")
    with pytest.raises(BudgetError):
        measure(engine, trace, [0], [Settings(cache_ratio=0.0), Settings(headroom_bytes=10**9)], 1)
    assert engine.settings == Settings(cache_ratio=0.5)
    assert engine.capacity == (4, 4, 4)


@pytest.mark.integration
def test_recordings_that_cannot_be_run_again(make_engine: MakeEngine, tmp_path: Path, spoilt: Path) -> None:
    engine = make_engine()
    trace = make_recording(engine, tmp_path / "t.parquet")
    edit_weights(spoilt, layers__0__mlp__gate__weight=engine.forward.decoder.layers[0].gate + 1)
    other = make_engine(model=spoilt)
    with pytest.raises(MismatchError) as caught:
        measure(other, trace, [0], [Settings(cache_ratio=0.0)], 1)
    assert engine.checkpoint.weights_hash in str(caught.value)
    assert other.checkpoint.weights_hash in str(caught.value)
    prompt_only = trace.take(np.flatnonzero(trace.phase == PREFILL))
    with pytest.raises(MismatchError, match="request 0 has no prompt or no decode steps"):
        recorded_requests(prompt_only, engine, [0])
    with pytest.raises(MismatchError, match="request 9 has no prompt"):
        recorded_requests(trace, engine, [9])
