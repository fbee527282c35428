"""What `transformers` with `accelerate`'s offload takes for a model whose layers do not fit: a row of its own process.

    python -m benchmarks.accelerate_row --shape qwen3-30b-a3b --vram 16 --out FILE [--context 1024] [--tokens 3]

The published configuration with random weights, which stay in host memory (no file is written); `accelerate` places as
many whole layers on the GPU as fit into `--vram` GB and copies the others in whenever they run, all experts of a layer
with them. The prompt is random. Writes one JSON: milliseconds of the prompt and of each token after it.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from foreload.backend.models.published import published_config
from foreload.files import write_json
from foreload.machine import machine_name, software

PATTERN = 1 << 20
"""Random numbers that large weights repeat: drawing 30 billion would take minutes, and time does not depend on them."""


def random_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The model of a configuration in host memory, every page of its weights written."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(config)
    kind = fields.pop("model_type")
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields), dtype=dtype)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            weights = torch.empty(parameter.shape, dtype=dtype)
            fill(weights)
            setattr(module, name, nn.Parameter(weights, requires_grad=False))
    model.tie_weights()
    return model.eval()  # type: ignore[no-any-return]


def fill(weights: Tensor) -> None:
    """Write small random numbers everywhere."""
    flat, pattern = weights.view(-1), torch.randn(PATTERN).mul_(0.02).to(weights.dtype)
    whole = len(flat) // PATTERN * PATTERN
    flat[:whole].view(-1, PATTERN).copy_(pattern)
    flat[whole:].copy_(pattern[: len(flat) - whole])


def offloaded(model: nn.Module, vram_bytes: int) -> tuple[nn.Module, dict[str, int]]:
    """The model with what fits on GPU 0, and how many modules are where."""
    from accelerate import dispatch_model, infer_auto_device_map

    whole = list(getattr(model, "_no_split_modules", None) or [])
    room = {0: vram_bytes, "cpu": psutil.virtual_memory().total}
    placed = infer_auto_device_map(model, max_memory=room, no_split_module_classes=whole)
    counts: dict[str, int] = {}
    for where in placed.values():
        counts[str(where)] = counts.get(str(where), 0) + 1
    if set(counts) == {"0"}:
        return model.to("cuda:0"), counts
    return dispatch_model(model, device_map=placed, main_device=0), counts


def measure(model: nn.Module, vocab: int, context: int, tokens: int, device: str) -> dict[str, Any]:
    """Milliseconds of a prompt of `context` tokens and of each token after it."""
    ids = torch.randint(vocab, (1, context), generator=torch.Generator().manual_seed(0)).to(device)
    cache, times = None, []
    with torch.inference_mode():
        for _ in range(1 + tokens):
            begun = time.perf_counter()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = out.logits[:, -1:].argmax(-1).to(device)
            ids.item()
            cache = out.past_key_values
            times.append((time.perf_counter() - begun) * 1e3)
    return {"ttft_ms": times[0], "token_ms": times[1:], "tpot_ms": median(times[1:])}


def main(args: Sequence[str] | None = None, **fields: Any) -> dict[str, Any]:
    """Make, place, run, write; `fields` replace those of the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--vram", type=float, default=16.0, help="GB")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: all in host memory, to try it")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    config, begun = {**published_config(given.shape), **fields}, time.monotonic()
    model, placed = random_model(config, torch.bfloat16), {"cpu": 1}
    loaded_s = time.monotonic() - begun
    if given.device == "cuda":
        model, placed = offloaded(model, int(given.vram * 1e9))
    found = {
        "shape": given.shape,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software() | {name: _version(name) for name in ("transformers", "accelerate")},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "vram_bytes": int(given.vram * 1e9),
        "placed": placed,
        "context": given.context,
        "made_s": loaded_s,
        **measure(model, config["vocab_size"], given.context, given.tokens, given.device),
        "host_bytes": psutil.Process().memory_info().rss,
    }
    write_json(given.out, found)
    print(f"{found['tpot_ms']:.0f} ms per token, {found['ttft_ms']:.0f} ms to the first; {placed}")
    return found


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)


if __name__ == "__main__":
    main()
