"""Loading: what a folder may lack, what is checked afterwards, how much memory it takes, and giving up half-way."""

from __future__ import annotations

import json
import mmap
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, edit_weights, save_tiny

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.experts.check import check_placement
from foreload.backend.experts.pages import PART, POPULATE, _advise, _pages, populate
from foreload.backend.experts.slab import HostSlab
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.packed import Mxfp4
from foreload.backend.models.published import published_config
from foreload.errors import FileError, InternalError
from foreload.settings import Settings

MakeEngine = Callable[..., Engine]
OPTIONS = EngineOptions(context_tokens=16)


def load(folder: Path, progress: Any = None) -> None:
    Engine(Checkpoint.open(str(folder)), OPTIONS, Settings(cache_ratio=0.0), progress=progress).close()


def refusal(folder: Path) -> str:
    with pytest.raises(FileError) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny model in several numbered shards with an index."""
    folder = save_tiny(tmp_path / "sharded", shard_size="40KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    return folder


@pytest.mark.unit
def test_shards_without_their_index(sharded: Path) -> None:
    with_index = HostSlab(Checkpoint.open(str(sharded)), torch.float32, False)
    (sharded / "model.safetensors.index.json").unlink()
    without = HostSlab(Checkpoint.open(str(sharded)), torch.float32, False)
    assert torch.equal(with_index.blocks, without.blocks)


@pytest.mark.unit
def test_a_shard_missing_with_the_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    lost = sorted(sharded.glob("model-*"))[1]
    lost.unlink()
    total = int(lost.stem[-5:])
    assert refusal(sharded) == f"{lost}: weights are missing, shard 2 of {total}"


@pytest.mark.unit
def test_an_index_of_another_save(sharded: Path) -> None:
    """Two tensors have changed places since the index was written."""
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    one = "model.layers.0.mlp.gate.weight"
    other = next(name for name, file in index.items() if file != index[one])
    path.write_text(json.dumps({"weight_map": {**index, one: index[other]}}))
    assert f"{sharded / index[other]}: tensor {one!r} is missing, though the index names this file" in refusal(sharded)


@pytest.mark.unit
@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_that_leaves_the_folder(sharded: Path, file: Any) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())["weight_map"]
    path.write_text(json.dumps({"weight_map": {**index, "lm_head.weight": file}}))
    assert f"tensor 'lm_head.weight' is in {file!r}: the name of a file in this folder is needed" in refusal(sharded)


@pytest.mark.unit
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["layers__0__mlp__gate__weight", "layers__2__mlp__experts__5__up_proj__weight"])
def test_weights_that_are_no_numbers(spoilt: Path, value: float, name: str) -> None:
    full = "model." + name.replace("__", ".")
    weights = load_file(spoilt / "model.safetensors")[full]
    weights[1, 2] = value
    edit_weights(spoilt, **{name: weights})
    assert f"tensor {full!r} holds NaN or infinity" in refusal(spoilt)


@pytest.mark.unit
def test_experts_in_no_known_layout(spoilt: Path) -> None:
    path = spoilt / "model.safetensors"
    save_file({name: t for name, t in load_file(path).items() if "experts" not in name}, path)
    message = refusal(spoilt)
    assert (
        "tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' or 'model.layers.0.mlp.experts.gate_up_proj'" in message
    )


@pytest.mark.unit
@pytest.mark.parametrize("method", ["gptq", "mxfp4", None])
def test_unknown_quantisation_lists_the_known(spoilt: Path, method: str | None) -> None:
    edit_config(spoilt, quantization_config={"quant_method": method, "bits": 4})
    assert f"'quantization_config.quant_method' is {method!r}: qwen3_moe can be read in float" in refusal(spoilt)


@pytest.mark.unit
def test_fp8_is_refused_where_the_configuration_does_not_speak_of_it(spoilt: Path) -> None:
    edit_weights(spoilt, layers__0__mlp__gate__weight=torch.zeros(8, 32).to(torch.float8_e4m3fn))
    assert "is F8_E4M3: a float type is needed" in refusal(spoilt)


@pytest.mark.unit
def test_giving_up_leaves_nothing_behind(tiny: Path) -> None:
    before = sorted(path.stat().st_mtime_ns for path in tiny.iterdir()), threading.active_count()

    def give_up(done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(tiny, give_up)
    assert (sorted(path.stat().st_mtime_ns for path in tiny.iterdir()), threading.active_count()) == before
    load(tiny)


def placed(engine: Engine) -> None:
    check_placement(engine.checkpoint, engine.slab, engine.pool, engine.forward.decoder, engine.device)


@pytest.mark.unit
@pytest.mark.parametrize("what", ["copy", "size", "place", "order", "slot", "dense"])
def test_what_is_not_where_it_was_planned_is_named(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine = make_engine()
    placed(engine)
    slab, block = engine.slab, engine.slab.block
    name = "model.layers.1.mlp.experts.3.gate_proj.weight: its block"
    if what in ("copy", "size", "place"):
        odd = {
            "copy": lambda t: t.clone(),
            "size": lambda t: t[:-1],
            "place": lambda t: torch.empty_like(t, device="meta"),
        }[what]
        monkeypatch.setattr(slab, "block", lambda at, e: odd(block(at, e)) if (at, e) == (1, 3) else block(at, e))
    elif what == "order":
        wrong = slab.addresses()
        wrong[1, 3] = wrong[1, 2]
        monkeypatch.setattr(slab, "addresses", lambda: wrong)
        monkeypatch.setattr(slab, "block", lambda at, e: block(at, 2 if (at, e) == (1, 3) else e))
    elif what == "slot":
        monkeypatch.setattr(engine.pool, "slot", lambda _: torch.empty(1, device="meta"))
        name = "slot 0 is on meta: cpu is planned"
    else:
        engine.forward.decoder.head_weight = engine.forward.decoder.head_weight.to("meta")
        name = "output head is on meta: cpu is planned"
    with pytest.raises(InternalError, match=re.escape(name)):
        placed(engine)


def peak_bytes() -> int:
    """The most memory this process has had at a time since it was last reset."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]


@pytest.mark.integration
@pytest.mark.parametrize("stacked", [False, True])
def test_peak_memory_is_the_slab_and_one_shard(tmp_path: Path, stacked: bool) -> None:
    """160 MB of experts in shards of 10 MB; mapped files count as memory while they are open."""
    shape = {"layers": 4, "experts": 16, "hidden": 512, "width": 416}
    folder = big_model(tmp_path, stacked, **shape)
    checkpoint = Checkpoint.open(str(folder))
    shard = max(path.stat().st_size for path in checkpoint.files())
    before = reset_peak()
    slab = HostSlab(checkpoint, torch.float32, False)
    size = slab.blocks.numel() * slab.blocks.element_size()
    assert size > 160e6
    assert shard < 25e6
    assert peak_bytes() - before <= size + shard + 8e6


@pytest.mark.integration
def test_mxfp4_is_never_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """107 MB of packed experts: the slab holds the file's very bytes, and took no more memory than that."""
    folder = big_packed_model(tmp_path, layers=4, experts=16, size=1024)
    checkpoint = Checkpoint.open(str(folder))
    monkeypatch.setattr(Mxfp4, "floats", lambda _: pytest.fail("experts were expanded"))
    before = reset_peak()
    slab = HostSlab(checkpoint, torch.float32, False, formats=("mxfp4",) * 4)
    assert peak_bytes() - before <= slab.blocks.numel() + (folder / "1.safetensors").stat().st_size + 8e6
    stored = load_file(folder / "2.safetensors")
    start, layout, block = "model.layers.1.mlp.experts.", slab.layout(1), slab.block(1, 5)
    for name, at in (("gate_up_proj", layout.gate_up), ("down_proj", layout.down)):
        blocks = stored[f"{start}{name}_blocks"][5].flatten()
        assert torch.equal(block[at : at + len(blocks)], blocks)
    scales = stored[f"{start}down_proj_scales"][5].flatten()
    assert torch.equal(block[layout.down_scale : layout.down_scale + len(scales)], scales)


def reset_peak() -> int:
    """Forget the peak so far; what it is then."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak of a process")
    return peak_bytes()


def big_packed_model(folder: Path, layers: int, experts: int, size: int) -> Path:
    """Random MXFP4 experts in the layout of gpt-oss, one shard per layer, hidden and expert width `size`."""
    index = {}
    for layer in range(layers):
        start, shard = f"model.layers.{layer}.mlp.experts.", {}
        for name, rows in (("gate_up_proj", 2 * size), ("down_proj", size)):
            groups = (experts, rows, size // 32)
            shard[f"{start}{name}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
            shard[f"{start}{name}_scales"] = torch.randint(118, 121, groups, dtype=torch.uint8)
            shard[f"{start}{name}_bias"] = torch.zeros(experts, rows)
        save_file(shard, folder / f"{layer + 1}.safetensors")
        index |= dict.fromkeys(shard, f"{layer + 1}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts, "layer_types": None}
    config = {**published_config("gpt-oss-20b"), **sizes, "hidden_size": size, "intermediate_size": size}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def big_model(folder: Path, stacked: bool, layers: int, experts: int, hidden: int, width: int) -> Path:
    """Expert weights alone, in shards of a quarter layer or (stacked) one matrix of a layer."""
    torch.manual_seed(0)
    sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    number, index = 0, {}
    for layer in range(layers):
        start = f"model.layers.{layer}.mlp.experts."
        if stacked:
            shards = [{start + "gate_up_proj": torch.rand(experts, 2 * width, hidden).bfloat16()}]
            shards.append({start + "down_proj": torch.rand(experts, hidden, width).bfloat16()})
        else:
            shards = [
                {
                    f"{start}{e}.{name}_proj.weight": torch.rand(size)
                    for e in range(at, at + 4)
                    for name, size in sizes.items()
                }
                for at in range(0, experts, 4)
            ]
        for shard in shards:
            number += 1
            save_file(shard, folder / f"{number}.safetensors")
            index |= dict.fromkeys(shard, f"{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    base = json.loads((save_tiny(folder / "tiny") / "config.json").read_text())
    sized = {"num_hidden_layers": layers, "num_experts": experts, "num_local_experts": experts}
    config = {**base, **sized, "hidden_size": hidden, "moe_intermediate_size": width}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.unit
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says how much of its memory a process has")
def test_pages_are_there_before_anything_is_written() -> None:
    """Odd ends too; what was written stays."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    memory = torch.empty(3 * PART // 2 + 777, dtype=torch.uint8)[5:]
    memory[:100] = 7
    before, code = resident(), _advise(_pages(memory).start, mmap.PAGESIZE, POPULATE)
    populate(memory, 2)
    if code == 0:
        assert resident() - before > PART
    assert (memory[:100] == 7).all()
    populate(memory[:10], 2)  # not one whole page
