"""FreeToken: a cache of single experts with misses fetched, computed on the CPU, or split, much like our own."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.backend.export.base import Explanation, Exported, Exporter, Placed, Target, unexpressed
from foreload.backend.export.flags import Flag, parse_flags
from foreload.backend.export.placement import slots
from foreload.backend.export.sglang_kt import ratio
from foreload.backend.export.tensors import gguf_tensors
from foreload.backend.export.vllm import ends
from foreload.errors import UsageError

NAME = "freetoken"
CHECKED = "FreeToken as of 2026-11: options as in its argument parser, not run"
EXPRESSES = frozenset({"slots_per_layer", "cache_ratio", "miss_action", "split_rule", "cpu_threads", "headroom_bytes"})
FLAGS = {
    "--moe-strategy": Flag(("--moe-strategy", "--moe-backend")),
    "--moe-cache-rate": Flag(("--moe-cache-rate",)),
    "--kv-reserve-tokens": Flag(("--kv-reserve-tokens",)),
    "--moe-hybrid-max-fetch": Flag(("--moe-hybrid-max-fetch",)),
    "--moe-cpu-threads": Flag(("--moe-cpu-threads",)),
}
FETCHES = {"fetch": None, "cpu": 0, "split": -1}
"""`--moe-hybrid-max-fetch` by miss action: all (the strategy `offload`), none, or the share of the measured rates."""


def make(target: Target) -> Exported:
    """The command of `target`."""
    shape, settings = target.shape, target.settings
    counts = slots(target, ends(shape))
    fetches = FETCHES[settings.miss_action]
    command = ["ft", "serve", "--model", target.weights]
    command += ["--moe-strategy", "offload" if fetches is None else "hybrid"]
    command += ["--moe-cache-rate", ratio(sum(counts), shape.n_moe_layers * shape.experts)]
    command += ["--kv-reserve-tokens", str(target.context)]
    if fetches is not None:
        command += ["--moe-hybrid-max-fetch", str(fetches), "--moe-cpu-threads", str(settings.cpu_threads)]
    notes = [*unexpressed(settings, EXPRESSES, NAME)]
    if len(set(counts)) > 1:
        notes.append("one cache serves all layers: slots by layer become their sum")
    if settings.miss_action == "split":
        if settings.split_rule != "bandwidth":
            notes.append("misses are split by bandwidth, not by the makespan of each step")
        notes.append("run `ft bench bw` first: the split is read from its measurement, and is 1 fetch without it")
    return Exported(NAME, CHECKED, tuple(command), notes=tuple(notes))


def explain(words: Sequence[str], target: Target) -> Explanation:
    """Where a command keeps what: experts in host memory, and the bytes of the cache on the GPU."""
    parsed, shape = parse_flags(words, FLAGS), target.shape
    rate = parsed.number("--moe-cache-rate", 0.0)
    if rate > 1:
        raise UsageError(f"--moe-cache-rate is {rate:g}: 0 to 1 is needed")
    placed = []
    for tensor in gguf_tensors(shape):
        device = "CPU" if tensor.role == "experts" else "CUDA0"
        name = tensor.name if tensor.layer < 0 else f"model.layers.{tensor.layer}.{tensor.name.split('.', 2)[2]}"
        because = "--moe-strategy" if device == "CPU" else "default"
        placed.append(Placed(name, tensor.layer, tensor.role, device, target.size(tensor.weights), because))
    cache = int(rate * shape.n_moe_layers * shape.experts) * target.size(shape.expert_weights)
    kv = shape.kv_bytes("bfloat16", parsed.count("--kv-reserve-tokens", 0))
    warnings = [] if parsed.has("--moe-cache-rate") else ["--moe-cache-rate is not given: the cache takes what is free"]
    return Explanation(NAME, tuple(placed), tuple(warnings), {"CUDA0": cache + kv}, parsed.not_read)


EXPORTER = Exporter(NAME, CHECKED, EXPRESSES, make, explain)
