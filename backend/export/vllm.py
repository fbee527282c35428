"""vLLM: whole layers' experts in host memory, copied ahead of use, or read in place where no room is left for buffers.

`--offload-group-size G --offload-num-in-group K` keeps the last K layers of every G on the host. The prefetch step
counts offloaded layers and costs as many layer buffers; below K it would stall inside each group, so it is K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreload.backend.export.base import CPU, Explanation, Exported, Exporter, Placed, Placement, Target, unexpressed
from foreload.backend.export.flags import Flag, Parsed, parse_flags
from foreload.backend.export.placement import resident, slots
from foreload.backend.export.tensors import gguf_tensors
from foreload.errors import UsageError
from foreload.settings import staging_slots
from foreload.shape import ModelShape
from foreload.units import format_bytes

NAME = "vllm"
CHECKED = "vLLM main as of 2026-11: options as in its configuration source, not run"
EXPRESSES = frozenset({"slots_per_layer", "cache_ratio", "headroom_bytes"})
GROUPS = range(1, 33)
SEGMENT = "experts"
FLAGS = {
    "--cpu-offload-gb": Flag(("--cpu-offload-gb",)),
    "--cpu-offload-params": Flag(("--cpu-offload-params",), many=True),
    "--offload-backend": Flag(("--offload-backend",)),
    "--offload-group-size": Flag(("--offload-group-size",)),
    "--offload-num-in-group": Flag(("--offload-num-in-group",)),
    "--offload-prefetch-step": Flag(("--offload-prefetch-step",)),
    "--offload-params": Flag(("--offload-params",), many=True),
    "--max-model-len": Flag(("--max-model-len",)),
}


@dataclass(frozen=True)
class Grouping:
    """The last `offloaded` of every `size` decoder layers are on the host; `step` layer buffers on the device."""

    size: int
    offloaded: int
    step: int

    def off(self, layer: int) -> bool:
        """Whether a decoder layer is offloaded."""
        return layer % self.size >= self.size - self.offloaded


def ends(shape: ModelShape) -> tuple[int, int]:
    """Weights outside the layers, all on the device."""
    head = shape.vocab * shape.hidden
    return head, shape.hidden + (0 if shape.tied_embeddings else head)


def grouping(shape: ModelShape, room: int) -> Grouping | None:
    """The grouping that keeps most layers' experts resident beside its buffers in `room` layers; None if none fits."""
    best: tuple[int, Grouping] | None = None
    for size in GROUPS:
        for offloaded in range(1, size + 1):
            tried = Grouping(size, offloaded, offloaded)
            kept = sum(not tried.off(layer) for layer in shape.moe_layers)
            if kept + tried.step <= room and kept < shape.n_moe_layers and (best is None or kept > best[0]):
                best = kept, tried
    return best[1] if best else None


def make(target: Target) -> Exported:
    """The command of `target`."""
    shape, counts = target.shape, slots(target, ends(target.shape))
    notes: list[str] = []
    chosen = grouping(shape, (sum(counts) + staging_slots(target.settings, shape)) // shape.experts)
    if min(counts) == shape.experts:
        placement = resident(target, ends(shape), counts, shape.n_moe_layers)
        options = ["--cpu-offload-gb", "0"]
    elif chosen is not None:
        placement = Placement((0,) * shape.layers, tuple(CPU if chosen.off(layer) else 0 for layer in shape.moe_layers))
        options, notes = _prefetched(target, chosen, placement.experts.count(CPU))
    else:
        kept = sum(counts) // shape.experts
        placement = Placement((0,) * shape.layers, (CPU,) * (shape.n_moe_layers - kept) + (0,) * kept)
        options = _in_place(target, shape.n_moe_layers - kept)
        notes = ["no room for layer buffers: experts on the host are read over the link in place, without prefetch"]
    if CPU in placement.experts:
        notes.append("there is no cache of single experts: what is offloaded stays offloaded")
    command = ("vllm", "serve", target.weights, "--max-model-len", str(target.context), *options)
    notes = [*unexpressed(target.settings, EXPRESSES, NAME), *notes]
    return Exported(NAME, CHECKED, command, notes=tuple(notes), placement=placement)


def _prefetched(target: Target, chosen: Grouping, layers: int) -> tuple[list[str], list[str]]:
    """Options and notes of layers copied ahead of use; `layers` are offloaded."""
    options = ["--offload-backend", "prefetch", "--offload-group-size", str(chosen.size)]
    options += ["--offload-num-in-group", str(chosen.offloaded), "--offload-prefetch-step", str(chosen.step)]
    buffers = format_bytes(chosen.step * target.size(target.shape.experts * target.shape.expert_weights))
    notes = [
        f"buffers of {chosen.step} layers' experts take {buffers} of the device beside the resident layers",
        "all experts of an offloaded layer cross the link in every step, whatever is routed",
        f"one sequence may be faster with {' '.join(_in_place(target, layers))}: it reads routed experts alone",
    ]
    return [*options, "--offload-params", SEGMENT], notes


def _in_place(target: Target, layers: int) -> list[str]:
    """Options that leave the experts of the first `layers` MoE layers on the host, read in place.

    Parameters move while less than the budget has moved, so it ends inside the last one.
    """
    both = target.size(target.shape.experts * target.shape.expert_weights)
    gigabytes = max(0.0, layers * both - both / 6) / 2**30
    digits = max(2, 2 - math.floor(math.log10(both / 2**30)))
    return ["--cpu-offload-gb", f"{gigabytes:.{digits}f}", "--cpu-offload-params", SEGMENT]


def explain(words: Sequence[str], target: Target) -> Explanation:
    """What a vLLM command does with the tensors of `target.shape`."""
    parsed = parse_flags(words, FLAGS)
    group, budget = parsed.count("--offload-group-size", 0), parsed.number("--cpu-offload-gb", 0.0) * 2**30
    if group and budget:
        raise UsageError("--offload-group-size and --cpu-offload-gb exclude each other: give one of them")
    chosen = _read_grouping(parsed) if group else None
    key = "--offload-params" if group else "--cpu-offload-params"
    placed, moved, buffer = [], 0.0, 0
    for tensor, weights in _parameters(target.shape):
        size, name = target.size(weights), tensor
        hit = _selected(name, parsed.words(key))
        layer = int(name.split(".")[2]) if name.startswith("model.layers.") else -1
        off = layer >= 0 and hit and (chosen.off(layer) if chosen else moved < budget)
        moved += size if off else 0
        role = "experts" if ".experts." in name else "dense" if layer >= 0 else "ends"
        placed.append(Placed(name, layer, role, "CPU" if off else "CUDA0", size, key if off else "default"))
        buffer = max(buffer, sum(p.bytes for p in placed if p.layer == layer and p.device == "CPU")) if off else buffer
    kv = target.shape.kv_bytes("bfloat16", parsed.count("--max-model-len", 0))
    extra = {"CUDA0": kv + (buffer * chosen.step if chosen else 0)}
    return Explanation(NAME, tuple(placed), tuple(_warnings(parsed, chosen)), extra, parsed.not_read)


def _read_grouping(parsed: Parsed) -> Grouping:
    size, offloaded = parsed.count("--offload-group-size", 0), parsed.count("--offload-num-in-group", 1)
    step = parsed.count("--offload-prefetch-step", 1)
    if not 1 <= offloaded <= size:
        raise UsageError(f"--offload-num-in-group is {offloaded}: 1 to the group size, {size}, is needed")
    if step < 1:
        raise UsageError(f"--offload-prefetch-step is {step}: 1 or more is needed")
    return Grouping(size, offloaded, step)


def _warnings(parsed: Parsed, chosen: Grouping | None) -> list[str]:
    warnings = []
    if chosen and chosen.step < chosen.offloaded:
        warnings.append(
            f"--offload-prefetch-step {chosen.step} counts offloaded layers: below {chosen.offloaded}, the number in a "
            "group, it waits inside every group"
        )
    if chosen and parsed.last("--offload-backend") != "prefetch":
        warnings.append("--offload-backend is not prefetch: the groups may be ignored")
    return warnings


def _selected(name: str, segments: Sequence[str]) -> bool:
    """Whether a parameter is chosen: by whole dotted segments, or all of them without any."""
    dotted = f".{name}."
    return not segments or any(f".{segment}." in dotted for segment in segments)


def _parameters(shape: ModelShape) -> list[tuple[str, int]]:
    """Parameters as vLLM names them, each layer's experts as w13 and w2."""
    found: list[tuple[str, int]] = []
    for tensor in gguf_tensors(shape):
        prefix = f"model.layers.{tensor.layer}."
        if tensor.layer < 0:
            found.append((tensor.name, tensor.weights))
        elif tensor.role != "experts":
            found.append((prefix + tensor.name.split(".", 2)[2], tensor.weights))
        else:
            kind = "bias" if tensor.name.endswith(".bias") else "weight"
            matrix = "w2" if "ffn_down" in tensor.name else "w13"
            found.append((f"{prefix}mlp.experts.{matrix}_{kind}", tensor.weights))
    return _merged(found)


def _merged(parts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Gate and up projection as the one parameter they are there."""
    total: dict[str, int] = {}
    for name, weights in parts:
        total[name] = total.get(name, 0) + weights
    return list(total.items())


EXPORTER = Exporter(NAME, CHECKED, EXPRESSES, make, explain)
