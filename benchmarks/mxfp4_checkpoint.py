"""Write a checkpoint in the shape of gpt-oss with random MXFP4 experts, load it, decode; how much memory that took.

    python -m benchmarks.mxfp4_checkpoint --gib 3 --device cuda

Layers are as published; their number and the vocabulary are smaller. The folder is removed afterwards unless --out is
given. Prints one JSON object; memory is that of a process of its own, at its highest.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from torch import Tensor

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.published import published_config
from foreload.backend.models.tensors import global_tensors, layer_tensors
from foreload.settings import Settings

BASE, VOCAB, CONTEXT = "gpt-oss-20b", 16384, 512


def write(folder: Path, gib: float) -> None:
    """A folder of about `gib` GiB: one shard per layer, one for the rest, and an index."""
    layers = max(2, round(gib * (1 << 30) / 0.45e9))
    types = published_config(BASE)["layer_types"]
    config = {**published_config(BASE), "num_hidden_layers": layers, "vocab_size": VOCAB}
    config["layer_types"] = [types[layer % 2] for layer in range(layers)]
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    checkpoint = Checkpoint.open(str(folder))
    torch.manual_seed(0)
    index: dict[str, str] = {}
    for layer in [None, *range(layers)]:
        sizes = global_tensors(checkpoint.shape) if layer is None else layer_tensors(checkpoint.shape, layer)
        shard = {checkpoint.family.spellings(name, layer)[0]: _dense(name, size) for name, size in sizes.items()}
        if layer is not None:
            shard |= _experts(checkpoint, layer)
        name = f"model-{0 if layer is None else layer + 1:05d}.safetensors"
        save_file(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _dense(name: str, size: tuple[int, ...]) -> Tensor:
    if name.endswith("norm"):
        return torch.ones(size, dtype=torch.bfloat16)
    return (torch.randn(size) * (size[-1] ** -0.5 if len(size) > 1 else 0.02)).bfloat16()


def _experts(checkpoint: Checkpoint, layer: int) -> dict[str, Tensor]:
    shape = checkpoint.shape
    start = f"model.layers.{layer}.mlp.experts."
    found: dict[str, Tensor] = {}
    for part, rows, columns in (
        ("gate_up_proj", 2 * shape.expert_width, shape.hidden),
        ("down_proj", shape.hidden, shape.expert_width),
    ):
        groups = (shape.experts, rows, columns // 32)
        found[f"{start}{part}_blocks"] = torch.randint(256, (*groups, 16), dtype=torch.uint8)
        found[f"{start}{part}_scales"] = torch.randint(118, 121, groups, dtype=torch.uint8)
        found[f"{start}{part}_bias"] = (torch.randn(shape.experts, rows) * 0.02).bfloat16()
    return found


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found.group(1)) * 1024 if found else 0


def load(folder: Path, device: str, tokens: int) -> dict[str, Any]:
    """Load and decode in this process; how much memory it took beyond what it had."""
    options = EngineOptions(device=device, dtype="bfloat16", context_tokens=CONTEXT)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(str(folder))
    if device == "cuda":
        torch.zeros(1, device=device)  # the runtime's own memory is there before and after
    before = _status("VmRSS")
    with Engine(checkpoint, options, Settings(cache_ratio=0.25)) as engine:
        generation = engine.generate(list(range(1, 33)), tokens, stop=False)
        files = sum(path.stat().st_size for path in checkpoint.files())
        return {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "layers": checkpoint.shape.layers,
            "files_bytes": files,
            "largest_shard_bytes": max(path.stat().st_size for path in checkpoint.files()),
            "slab_bytes": engine.slab_bytes,
            "dense_bytes": engine.forward.decoder.dense_bytes,
            "host_peak_bytes": _status("VmHWM") - before,
            "pinned": engine.slab.pinned,
            "tokens": len(generation.token_ids),
            "tpot_ms": generation.tpot_ms,
            "memory": engine.describe_memory(),
        }


def main() -> None:
    """Write, then load in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.load is not None:
        print(json.dumps(load(given.load, given.device, given.tokens), indent=1))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write(folder, given.gib)
        again = [sys.executable, "-m", "benchmarks.mxfp4_checkpoint", "--load", str(folder)]
        subprocess.run([*again, "--device", given.device, "--tokens", str(given.tokens)], check=True)


if __name__ == "__main__":
    main()
