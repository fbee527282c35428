"""`foreload trace import`: models, guesses and errors; large models; memory."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.assets import ASSETS
from foreload.backend.models.checkpoint import Checkpoint
from foreload.cli import main
from foreload.errors import FileError
from foreload.shape import ModelShape
from foreload.traces.importers import FORMATS
from foreload.traces.importers.base import Block, Blocks, Source
from foreload.traces.importers.writing import import_with
from foreload.traces.io import TraceReader, read_trace
from foreload.traces.schema import DECODE, PREFILL

pytestmark = pytest.mark.unit
SIZES = ["--layers", "2", "--experts", "8", "--top-k", "2"]
LINES = '{"t": 0, "layer": 0, "experts": [1, 2]}\n{"t": 0, "layer": 1, "experts": [7, 0]}\n'


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """FILE and --out of a small import."""
    (tmp_path / "in.jsonl").write_text(LINES)
    return [str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.parquet")]


def test_import_by_sizes(files: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "import", *files, *SIZES, "--subject", "code", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["format"], values["rows"], values["steps"], values["requests"]) == ("jsonl", 1, 1, 1)
    assert values["notes"] == ["phases are not recorded: every token is taken as decoded"]
    meta = read_trace(tmp_path / "out.parquet").meta
    assert (meta.model, meta.scoring, meta.subjects) == ("unknown", "unknown", ("code",))
    assert meta.shape["hidden"] == 0
    assert main(["trace", "import", *files, *SIZES]) == 0
    shown = capsys.readouterr().out
    assert "1 requests, 1 steps, 1 rows" in shown
    assert "recorded by another program" in shown
    assert main(["trace", "info", str(tmp_path / "out.parquet")]) == 0
    assert "import jsonl on unknown, seed unknown" in capsys.readouterr().out


def test_import_by_model_and_moe_layers(files: list[str], tmp_path: Path, capsys: Any) -> None:
    rows = [{"t": 0, "layer": layer, "experts": [1, 2, 3, 31]} for layer in range(8)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["trace", "import", *files, "--model", "mini", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "mini"
    assert read_trace(tmp_path / "out.parquet").meta.model_shape().family == "qwen3_moe"
    (tmp_path / "in.jsonl").write_text(LINES.replace('"layer": 1', '"layer": 5').replace('"layer": 0', '"layer": 3'))
    sizes = ["--layers", "6", "--experts", "8", "--top-k", "2", "--moe-layers", "3,5"]
    assert main(["trace", "import", *files, *sizes]) == 0
    assert read_trace(tmp_path / "out.parquet").meta.layer_numbers == (3, 5)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            [*SIZES, "--format", "pcap"],
            "format 'pcap' is not known: known are vllm, sglang, sglang-recorder, megatron,",
        ),
        ([], "which model? give --model, or --layers, --experts and --top-k (--layers is missing)"),
        (SIZES[:4], "(--top-k is missing)"),
        ([*SIZES, "--model", "mini"], "--model and --layers exclude each other"),
        (["--model", "nowhere"], "model 'nowhere' is no folder here"),
        ([*SIZES[:4], "--top-k", "9"], "--top-k 9: a layer has 8 experts"),
        ([*SIZES, "--moe-layers", "a"], "--moe-layers 'a': a list like 1-47 or 0,2,4 is needed"),
        ([*SIZES, "--moe-layers", "1-2"], "--moe-layers '1-2': ascending numbers from 0 to 1 are needed"),
        ([*SIZES, "--moe-layers", "1,0"], "ascending numbers"),
        ([*SIZES, "--subject", "a", "--subject", "b"], "--subject: 2 subjects for 1 requests: one each"),
        ([*SIZES[:4], "--top-k", "3"], "in.jsonl: line 1: 2 experts: the model takes 3"),
    ],
)
def test_wrong_use(args: list[str], expected: str, files: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "import", *files, *args]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("in.pt", "", "in.pt: could be sglang-recorder or hf-logits: give --format, one of vllm,"),
        ("in.txt", "", "in.txt: is of no format that can be told: give --format, one of vllm,"),
        ("in.jsonl", '{"a": 1}', "in.jsonl: is of no format that can be told"),
        ("in.json", "[1]", "in.json: is of no format that can be told"),
        ("in.json", '{"a"', "in.json: is of no format that can be told"),
        ("in.jsonl", '{"meta_info": 0, "prompt_routed_experts": 0}', "in.jsonl: could be vllm or sglang"),
        ("in.csv", "a,b\n", "in.csv: is of no format that can be told"),
        ("in.parquet", "a", "in.parquet: not Parquet, or truncated"),
        ("none", None, "none: cannot be read: No such file or directory"),
        ("none.pt", None, "none.pt: cannot be read: No such file or directory"),
        ("none.csv", None, "none.csv: cannot be read: No such file or directory"),
        ("none.json", None, "none.json: cannot be read: No such file or directory"),
    ],
)
def test_no_guess(name: str, content: str | None, expected: str, tmp_path: Path, capsys: Any) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    assert main(["trace", "import", str(tmp_path / name), "--out", str(tmp_path / "o.parquet"), *SIZES]) == 2
    assert expected in capsys.readouterr().err


def test_help_names_every_format(capsys: Any) -> None:
    assert main(["trace", "import", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ", ".join(FORMATS) in shown


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("hf-logits",)])
def test_missing_files(name: str, tmp_path: Path, capsys: Any) -> None:
    args = ["trace", "import", str(tmp_path / "none"), "--out", str(tmp_path / "o.parquet"), "--format", name, *SIZES]
    assert main(args) == 2
    assert "none: cannot be read: No such file or directory" in capsys.readouterr().err


def test_thousand_experts(tmp_path: Path) -> None:
    ids = np.argsort(np.random.default_rng(0).random((6, 1024)), axis=1)[:, :8]
    ids[0, 0], ids[0, 1:] = 1023, np.arange(7)
    rows = [{"t": t, "layer": 0, "experts": token.tolist()} for t, token in enumerate(ids)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--layers", "1", "--experts", "1024", "--top-k", "8"]
    assert main(["trace", "import", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "o.parquet"), *sizes]) == 0
    trace = read_trace(tmp_path / "o.parquet")
    assert (trace.experts[:, 0] == ids).all()
    assert trace.experts.max() == 1023
    (tmp_path / "in.jsonl").write_text('{"t": 0, "layer": 0, "experts": [1, 2, 3, 4, 5, 6, 7, 1024]}\n')
    assert main(["trace", "import", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "p.parquet"), *sizes]) == 2


def test_validate_needs_token_ids(make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any) -> None:
    trace = make_trace(model_shape=Checkpoint.open("mini").shape)
    trace.token_id[:] = -1
    write_trace(tmp_path / "t.parquet", trace)
    assert (read_trace(tmp_path / "t.parquet").token_id == -1).all()
    args = [
        "validate",
        "mini",
        "--profile",
        str(ASSETS / "dashboard" / "profile-cpu.json"),
        "--trace",
        str(tmp_path / "t.parquet"),
    ]
    assert main(args) == 2
    assert "its token ids are not recorded, and validate runs them" in capsys.readouterr().err
    trace.token_id[3] = -2
    write_trace(tmp_path / "t.parquet", trace)
    with pytest.raises(FileError, match="row 3, column 'token_id': -2 is negative"):
        read_trace(tmp_path / "t.parquet")


@pytest.mark.integration
def test_rows_stream(tmp_path: Path, shape: ModelShape) -> None:
    """A recording of many row groups needs no more memory than a few blocks."""
    blocks, rows = 40, 4096
    ids = np.argsort(np.random.default_rng(0).random((rows, 3, 8)), axis=2)[:, :, :2]

    def importer(_: Source) -> Blocks:
        def read() -> Iterator[Block]:
            for number in range(blocks):
                yield Block(0, PREFILL, number * rows + np.arange(rows), ids, same_step=number > 0)

        return Blocks(read())

    tracemalloc.start()
    try:
        done = import_with(importer, "test", Source(Path("none"), shape), tmp_path / "o.parquet")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (done.rows, done.steps) == (blocks * rows, 1)
    with TraceReader(tmp_path / "o.parquet") as reader:
        groups = [trace.rows for trace in reader.groups()]
    assert len(groups) > 5
    assert sum(groups) == blocks * rows
    assert peak < blocks * ids.nbytes / 2


def test_decode_rows_are_steps(tmp_path: Path, shape: ModelShape) -> None:
    ids = np.argsort(np.random.default_rng(0).random((5, 3, 8)), axis=2)[:, :, :2]

    def importer(_: Source) -> Blocks:
        return Blocks(
            iter([Block(r, phase, np.arange(5), ids) for r, phase in ((0, PREFILL), (0, DECODE), (1, PREFILL))])
        )

    import_with(importer, "test", Source(Path("none"), shape), tmp_path / "o.parquet", subjects=["a"])
    trace = read_trace(tmp_path / "o.parquet")
    assert trace.step.tolist() == [0] * 5 + [1, 2, 3, 4, 5] + [6] * 5
    assert trace.meta.subjects == ("a", "a")
