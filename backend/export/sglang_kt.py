"""sglang-kt (KTransformers kernels in SGLang): a fixed set of experts on the GPU, the others on the CPU.

`frequency` ranks all experts of all layers together by a file of counts and keeps the first; the ratio's share is cut
to a whole number of experts.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreload.backend.export.base import Explanation, Exported, Exporter, Placed, Target, unexpressed
from foreload.backend.export.flags import Flag, Parsed, parse_flags
from foreload.backend.export.placement import slots
from foreload.backend.export.tensors import gguf_tensors
from foreload.backend.export.vllm import ends
from foreload.errors import FileError, UsageError
from foreload.settings import Settings
from foreload.traces.export import sglang_kt_counts

NAME = "sglang-kt"
CHECKED = "sglang-kt as of 2026-11: options as in its documentation and source, not run"
EXPRESSES = frozenset(
    {"slots_per_layer", "cache_ratio", "miss_action", "cpu_threads", "expert_format", "headroom_bytes"}
)
COUNTS = "expert_counts.pt"
FLAGS = {
    "--kt-gpu-experts-ratio": Flag(("--kt-gpu-experts-ratio",)),
    "--kt-num-gpu-experts": Flag(("--kt-num-gpu-experts",)),
    "--kt-expert-placement-strategy": Flag(("--kt-expert-placement-strategy",)),
    "--init-expert-location": Flag(("--init-expert-location",)),
    "--kt-cpuinfer": Flag(("--kt-cpuinfer",)),
    "--kt-max-deferred-experts-per-token": Flag(("--kt-max-deferred-experts-per-token",)),
    "--context-length": Flag(("--context-length",)),
}
METHODS = {None: "BF16", "bf16": "BF16", "bf12": "BF16", "fp8": "FP8", "int8": "AMXINT8", "mxfp4": "MXFP4"}
STRATEGIES = ("uniform", "frequency", "front-loading", "random")


def make(target: Target) -> Exported:
    """The command of `target`, and the file of counts if it has any."""
    shape, counts = target.shape, slots(target, ends(target.shape))
    command = ["python", "-m", "sglang.launch_server", "--model", target.weights, "--kt-weight-path", target.weights]
    command += [
        "--kt-method",
        method(target.settings),
        "--kt-cpuinfer",
        str(target.settings.cpu_threads),
        "--kt-threadpool-count",
        "1",
    ]
    command += ["--kt-max-deferred-experts-per-token", "0", "--context-length", str(target.context)]
    files: dict[str, bytes] = {}
    if target.counts is None:
        command += ["--kt-num-gpu-experts", str(sum(counts) // shape.n_moe_layers)]
        command += ["--kt-expert-placement-strategy", "uniform"]
    else:
        files[COUNTS] = frequency_file(target.counts, target)
        command += ["--kt-gpu-experts-ratio", ratio(sum(counts), shape.n_moe_layers * shape.experts)]
        command += ["--kt-expert-placement-strategy", "frequency"]
        command += ["--init-expert-location", f"{target.folder.rstrip('/')}/{COUNTS}" if target.folder else COUNTS]
    command.append("--disable-shared-experts-fusion")
    return Exported(NAME, CHECKED, tuple(command), files, _notes(target))


def method(settings: Settings) -> str:
    """`--kt-method` for the experts' format; UsageError for formats by layer."""
    if isinstance(settings.expert_format, tuple):
        raise UsageError("expert_format: sglang-kt has one format for all layers: give one")
    return METHODS[settings.expert_format]


def _notes(target: Target) -> tuple[str, ...]:
    notes = [*unexpressed(target.settings, EXPRESSES, NAME)]
    notes.append("the experts on the GPU are chosen once and never change; all others are computed on the CPU")
    if target.counts is None:
        notes.append("without a recording (--trace) the experts on the GPU are not chosen by use")
    else:
        notes.append("the share is given to the most used experts of all layers together, not layer by layer")
    notes.append("threads are physical cores, thread pools are NUMA nodes: correct both for the machine")
    notes.append(
        "look in the log for the number of experts on the GPU: a build without the kernels ignores these options"
    )
    return tuple(notes)


def ratio(chosen: int, total: int) -> str:
    """The shortest decimal whose share of `total`, cut to a whole number, is `chosen`."""
    for digits in range(1, 12):
        at = int(np.ceil(chosen / total * 10**digits))
        for text in (f"{n / 10**digits:.{digits}f}" for n in (at, at + 1)):
            if int(total * float(text)) == chosen:
                return text
    return repr(chosen / total)


def frequency_file(counts: NDArray[np.int64], target: Target) -> bytes:
    """The file of counts; FileError for a MoE layer that was never used."""
    import torch

    buffer = io.BytesIO()
    torch.save({"logical_count": torch.from_numpy(sglang_kt_counts(COUNTS, target.shape, counts))}, buffer)
    return buffer.getvalue()


def explain(words: Sequence[str], target: Target) -> Explanation:
    """How many experts of each layer a command keeps on the GPU, as far as it says."""
    parsed, shape = parse_flags(words, FLAGS), target.shape
    strategy = parsed.last("--kt-expert-placement-strategy") or "uniform"
    if strategy not in STRATEGIES:
        raise UsageError(f"--kt-expert-placement-strategy is {strategy!r}: one of {', '.join(STRATEGIES)} is needed")
    per_layer, warnings = _on_gpu(parsed, target, strategy)
    share = target.size(shape.expert_weights)
    placed = []
    for tensor in gguf_tensors(shape):
        if tensor.role != "experts":
            name = tensor.name if tensor.layer < 0 else f"model.layers.{tensor.layer}.{tensor.name.split('.', 2)[2]}"
            placed.append(Placed(name, tensor.layer, tensor.role, "CUDA0", target.size(tensor.weights), "default"))
    for layer, kept in zip(shape.moe_layers, per_layer, strict=True):
        for device, number in (("CUDA0", kept), ("CPU", shape.experts - kept)):
            if number:
                name = f"model.layers.{layer}.mlp.experts ({number} of {shape.experts})"
                placed.append(Placed(name, layer, "experts", device, number * share, strategy))
    kv = shape.kv_bytes("bfloat16", parsed.count("--context-length", 0))
    return Explanation(NAME, tuple(placed), tuple(warnings), {"CUDA0": kv}, parsed.not_read)


def _on_gpu(parsed: Parsed, target: Target, strategy: str) -> tuple[list[int], list[str]]:
    """Experts on the GPU per MoE layer, and what to know about the number."""
    layers, experts = target.shape.n_moe_layers, target.shape.experts
    warnings = []
    if parsed.has("--kt-gpu-experts-ratio"):
        share = parsed.number("--kt-gpu-experts-ratio", 0.0)
        if share > 1:
            raise UsageError(f"--kt-gpu-experts-ratio is {share:g}: 0 to 1 is needed")
        if parsed.has("--kt-num-gpu-experts"):
            warnings.append("--kt-gpu-experts-ratio overrides --kt-num-gpu-experts")
        total = int(layers * experts * share)
    else:
        per_layer = parsed.count("--kt-num-gpu-experts", 0)
        if per_layer > experts:
            raise UsageError(f"--kt-num-gpu-experts is {per_layer}: it is per layer, and a layer has {experts}")
        total = per_layer * layers
    if parsed.number("--kt-max-deferred-experts-per-token", 0.0):
        warnings.append("deferred experts change the output: 0 is exact")
    if strategy == "frequency":
        found = _counts(parsed.last("--init-expert-location"), target)
        if found is not None:
            return _ranked(found, total), warnings
        warnings.append("the file of counts is not here: an even share per layer is shown")
    if strategy == "front-loading":
        return [max(0, min(experts, total - at * experts)) for at in range(layers)], warnings
    return [total // layers + (at < total % layers) for at in range(layers)], warnings


def _ranked(counts: NDArray[np.int64], total: int) -> list[int]:
    """Experts per layer among the `total` most used of all layers."""
    first = np.argsort(-counts.reshape(-1), kind="stable")[:total]
    return [int(kept) for kept in np.bincount(first // counts.shape[1], minlength=counts.shape[0])]


def _counts(name: str | None, target: Target) -> NDArray[np.int64] | None:
    """Counts [L, E] of the MoE layers in the named file or of the target itself; None if there are none here."""
    if target.counts is not None:
        return target.counts
    if name is None or not Path(name).is_file():
        return None
    import torch

    try:
        held = torch.load(name, weights_only=True)
    except Exception as error:  # whatever the unpickler finds wrong
        raise FileError(f"{name}: expert counts cannot be read: {type(error).__name__}") from error
    table = held["logical_count"] if isinstance(held, dict) and "logical_count" in held else held
    wanted = (target.shape.layers, target.shape.experts)
    if not isinstance(table, torch.Tensor) or tuple(table.shape[-2:]) != wanted:
        raise FileError(f"{name}: expert counts of {wanted[0]} layers and {wanted[1]} experts are needed")
    summed: NDArray[np.int64] = table.reshape(-1, *wanted).sum(0).numpy().astype(np.int64)
    return summed[list(target.shape.moe_layers)]


EXPORTER = Exporter(NAME, CHECKED, EXPRESSES, make, explain)
