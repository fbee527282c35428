"""What is written is what is read, whatever the shape, the phases and the size of the parts."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreload.errors import InternalError, UsageError
from foreload.shape import ModelShape
from foreload.traces.io import TraceReader, TraceWriter, partial_folder, read_meta, read_trace
from foreload.traces.schema import DECODE, PHASES, PredictionColumn, Trace, TraceMeta, demand

pytestmark = pytest.mark.unit
GATE = PredictionColumn(predictor="gate", depth=1, width=3)


def assert_same(one: Trace, two: Trace) -> None:
    assert one.meta == two.meta
    for name in ("request", "step", "phase", "position", "token_id", "accepted", "experts"):
        a, b = getattr(one, name), getattr(two, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)
    assert (one.weights is None) == (two.weights is None)
    if one.weights is not None and two.weights is not None:
        np.testing.assert_array_equal(one.weights, two.weights)
    assert one.predictions.keys() == two.predictions.keys()
    for key, block in one.predictions.items():
        np.testing.assert_array_equal(block, two.predictions[key])


@st.composite
def recordings(draw: st.DrawFn) -> tuple[TraceMeta, list[dict[str, Any]]]:
    """Metadata and the arguments of one `append` per step."""
    layers = draw(st.integers(1, 3))
    experts = draw(st.integers(1, 6))
    top_k = draw(st.integers(1, experts))
    first = draw(st.integers(0, 2))
    shape = ModelShape(
        "qwen3_moe", layers + first, tuple(range(first, first + layers)), 8, 1, 1, 8, 16, experts, top_k, 4,
        "softmax_topk", True, 1e4, 1e-6, 64, True,
    )  # fmt: skip
    keys = draw(st.lists(st.tuples(st.sampled_from(["gate", "quasi_hidden"]), st.integers(1, 2)), unique=True))
    columns = tuple(PredictionColumn(predictor=p, depth=d, width=draw(st.integers(1, experts))) for p, d in keys)
    weights = draw(st.booleans())
    meta = TraceMeta(
        model="mini", weights_hash="w", tokenizer_hash="t", shape=asdict(shape), shape_hash=shape.hash,
        moe_layers=layers, experts=experts, top_k=top_k, scoring="softmax_topk", source="test", sampling={},
        machine="m", software={}, seed=0, has_weights=weights, predictions=columns,
    )  # fmt: skip
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    step = 0
    steps: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(0, 6))):
        step += draw(st.integers(1, 3))
        n = draw(st.integers(1, 4))

        def ids(width: int, n: int = n) -> np.ndarray:
            return rng.permuted(np.tile(np.arange(experts, dtype=np.int16), (n, layers, 1)), axis=2)[:, :, :width]

        guesses = {}
        for column in columns:
            block = ids(column.width)
            block[:, : column.depth] = -1
            block[:, :, draw(st.integers(0, column.width)) :] = -1
            guesses[column.predictor, column.depth] = block
        steps.append(
            {
                "request": draw(st.integers(0, 3)),
                "step": step,
                "phase": draw(st.integers(0, len(PHASES) - 1)),
                "position": rng.integers(0, 2**31 - 1, n, dtype=np.int32),
                "token_id": rng.integers(0, 2**31 - 1, n, dtype=np.int32),
                "experts": ids(top_k),
                "accepted": rng.random(n) < 0.5,
                "weights": rng.random((n, layers, top_k)).astype(np.float16) if weights else None,
                "predictions": guesses,
            }
        )
    return meta, steps


def joined(meta: TraceMeta, steps: list[dict[str, Any]], name: str, dtype: Any) -> Any:
    parts = [np.full(len(s["experts"]), s[name]) if np.isscalar(s[name]) else s[name] for s in steps]
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recording=recordings(), flush_rows=st.integers(1, 9))
def test_round_trip(tmp_path: Path, recording: tuple[TraceMeta, list[dict[str, Any]]], flush_rows: int) -> None:
    meta, steps = recording
    path = tmp_path / "a.parquet"
    with TraceWriter(path, meta, flush_rows) as writer:
        for step in steps:
            writer.append(**step)
    trace = read_trace(path)
    assert trace.meta == meta == read_meta(path)
    assert trace.rows == writer.rows == sum(len(step["experts"]) for step in steps)
    for name, dtype in (("request", np.int32), ("step", np.int32), ("phase", np.int8), ("position", np.int32),
                        ("token_id", np.int32), ("accepted", np.bool_)):  # fmt: skip
        np.testing.assert_array_equal(getattr(trace, name), joined(meta, steps, name, dtype), err_msg=name)
    if steps:
        np.testing.assert_array_equal(trace.experts, np.concatenate([step["experts"] for step in steps]))
        if meta.has_weights:
            assert trace.weights is not None
            np.testing.assert_array_equal(trace.weights, np.concatenate([step["weights"] for step in steps]))
        for key, block in trace.predictions.items():
            np.testing.assert_array_equal(block, np.concatenate([step["predictions"][key] for step in steps]))
    assert [p.name for p in tmp_path.iterdir()] == ["a.parquet"]


def test_layout_of_the_file(tmp_path: Path, make_trace: Any, write_trace: Any) -> None:
    trace = make_trace(has_weights=True, predictions=[GATE])
    write_trace(tmp_path / "a.parquet", trace)
    schema = pq.ParquetFile(tmp_path / "a.parquet").schema_arrow
    assert schema.names == [
        "request", "step", "phase", "position", "token_id", "accepted",
        "e1", "e2", "e3", "w1", "w2", "w3", "p2_gate_1", "p3_gate_1",
    ]  # fmt: skip
    assert str(schema.field("phase").type).startswith("dictionary<values=string")
    assert str(schema.field("e1").type) == "fixed_size_list<element: int16 not null>[2]"
    assert str(schema.field("w1").type) == "fixed_size_list<element: halffloat not null>[2]"
    assert str(schema.field("p2_gate_1").type) == "fixed_size_list<element: int16 not null>[3]"
    assert b"foreload" in schema.metadata
    assert pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(0).column(0).compression == "ZSTD"


def test_predictions_not_given_are_none(tmp_path: Path, make_meta: Any) -> None:
    meta = make_meta(predictions=(GATE,))
    with TraceWriter(tmp_path / "a.parquet", meta) as writer:
        writer.append(0, 0, DECODE, 0, 7, np.tile([0, 1], (1, 3, 1)))
    trace = read_trace(tmp_path / "a.parquet")
    assert (trace.predictions["gate", 1] == -1).all()
    assert trace.accepted.all()


def test_buffers_may_be_reused(tmp_path: Path, make_meta: Any) -> None:
    experts = np.tile(np.asarray([0, 1], np.int16), (1, 3, 1))
    with TraceWriter(tmp_path / "a.parquet", make_meta()) as writer:
        writer.append(0, 0, DECODE, 0, 7, experts)
        experts[:] = [5, 6]
        writer.append(0, 1, DECODE, 1, 7, experts)
    assert read_trace(tmp_path / "a.parquet").experts[:, 0].tolist() == [[0, 1], [5, 6]]


def test_rows_of_another_shape_are_a_bug(tmp_path: Path, make_meta: Any) -> None:
    writer = TraceWriter(tmp_path / "a.parquet", make_meta())
    with pytest.raises(InternalError, match=r"experts have shape \(1, 2, 2\)"):
        writer.append(0, 0, DECODE, 0, 7, np.zeros((1, 2, 2)))
    with pytest.raises(InternalError, match="weights are announced"):
        TraceWriter(tmp_path / "b.parquet", make_meta(has_weights=True)).append(
            0, 0, DECODE, 0, 7, np.tile([0, 1], (1, 3, 1))
        )


def test_streaming_reads_the_same(tmp_path: Path, make_trace: Any, write_trace: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("foreload.traces.io.GROUP_ROWS", 7)
    trace = make_trace(requests=3, predictions=[GATE], has_weights=True)
    write_trace(tmp_path / "a.parquet", trace, flush_rows=3)
    with TraceReader(tmp_path / "a.parquet") as reader:
        pieces = list(reader.groups())
        assert reader.rows == trace.rows
    assert len(pieces) > 2
    assert_same(trace, read_trace(tmp_path / "a.parquet"))


def test_select_and_demand(make_trace: Any) -> None:
    trace = make_trace(requests=3, prompt=4, tokens=2)
    chosen = trace.select([2, 0])
    assert chosen.requests() == (0, 2)
    assert chosen.rows == 12
    with pytest.raises(UsageError, match=r"request 9 is not recorded: there are 0, 1, 2"):
        trace.select([9])
    starts = trace.step_starts()
    assert starts.tolist() == [0, 4, 5, 6, 10, 11, 12, 16, 17, 18]
    experts, counts = demand(trace, slice(0, 4), 1)
    assert experts.dtype == counts.dtype == np.int32
    assert experts.tolist() == sorted(set(trace.experts[:4, 1].reshape(-1).tolist()))
    assert counts.sum() == 8
    assert not partial_folder(Path("x.parquet")).exists()
