"""llama.cpp: `-ot` rules per layer, and a cache of experts where the settings have one.

Rules are searched in order and the first hit decides; only the last `-ot` counts; `-cmoe` and `-ncmoe` append to the
same list, counting dense layers too. `-fit` would stop half-way over such rules: it is off, `-ngl` and `-c` explicit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreload.backend.export.base import (
    CPU,
    Explanation,
    Exported,
    Exporter,
    Placed,
    Placement,
    Target,
    device_name,
    unexpressed,
)
from foreload.backend.export.flags import Flag, Parsed, parse_flags
from foreload.backend.export.patterns import EXPERTS, Rule, first_hit, layers_rule, read_rules
from foreload.backend.export.placement import whole_layers, with_cache, without_effect
from foreload.backend.export.tensors import Tensor, expert_variants, gguf_tensors
from foreload.errors import UsageError
from foreload.shape import ModelShape

NAME = "llama.cpp"
NO_FETCH = "experts that are not on the device are computed on the CPU: they are never fetched in decoding"
FROM_THE_START = "experts of layers on the device are there from the start, not from their first use on"
CHECKED = "llama.cpp build 11549 (2026-10): -ot read by its own parser, the other options as documented"
EXPRESSES = frozenset({"slots_per_layer", "cache_ratio", "miss_action", "cpu_threads", "headroom_bytes"})
FLAGS = {
    "-m": Flag(("-m", "--model")),
    "-ngl": Flag(("-ngl", "--gpu-layers", "--n-gpu-layers")),
    "-c": Flag(("-c", "--ctx-size")),
    "-ot": Flag(("-ot", "--override-tensor")),
    "-cmoe": Flag(("-cmoe", "--cpu-moe"), values=0),
    "-ncmoe": Flag(("-ncmoe", "--n-cpu-moe")),
    "-fit": Flag(("-fit", "--fit")),
    "-ts": Flag(("-ts", "--tensor-split")),
    "--moe-cache-mib": Flag(("--moe-cache-mib",)),
    "-t": Flag(("-t", "--threads")),
}


def ends(shape: ModelShape) -> tuple[int, int]:
    """Weights outside the layers on the first and the last device: the embedding stays in host memory."""
    return 0, shape.hidden + shape.vocab * shape.hidden


def rules(placement: Placement, shape: ModelShape, several: bool, backend: str) -> str:
    """One comma-joined value of `-ot`; empty if nothing has to move. With several devices every layer has its rule."""
    devices = sorted(set(placement.experts), reverse=True) if several else [CPU]
    found = []
    for device in devices:
        layers = [shape.moe_layers[at] for at, placed in enumerate(placement.experts) if placed == device]
        if layers:
            found.append(layers_rule(layers, device_name(device, backend)))
    return ",".join(found)


def tensor_split(placement: Placement, devices: int) -> str:
    """`-ts` in decoder layers per device, the output counted as one more of the last."""
    counts = [placement.dense.count(device) for device in range(devices)]
    counts[-1] += 1
    return ",".join(map(str, counts))


def make(target: Target) -> Exported:
    """The command of `target`; BudgetError if its devices cannot hold the settings."""
    several, shape = target.devices > 1, target.shape
    placement = whole_layers(target, ends(shape)) if several else with_cache(target, ends(shape))
    command = ["llama-server", "-m", target.weights, "-ngl", "all", "-fit", "off", "-c", str(target.context)]
    if several:
        command += ["-ts", tensor_split(placement, target.devices)]
    moved = rules(placement, shape, several, target.backend)
    command += ["-ot", moved] if moved else ["-ncmoe", "0"]
    if placement.cache_experts:
        mib = target.size(shape.expert_weights) * placement.cache_experts // 2**20
        command += ["--moe-cache-mib", str(mib)]
    command += ["-t", str(target.settings.cpu_threads)]
    return Exported(NAME, CHECKED, tuple(command), notes=_notes(target, placement), placement=placement)


def placement_notes(target: Target, placement: Placement, name: str) -> list[str]:
    """What is done otherwise than the settings say, by both engines of this family."""
    fixed = without_effect(target, ends(target.shape))
    notes = [*unexpressed(target.settings, EXPRESSES | fixed, name)]
    if fixed and set(placement.experts) != {CPU} and target.settings.admission != "none":
        notes.append(FROM_THE_START)
    if CPU in placement.experts and target.settings.miss_action != "cpu":
        notes.append(NO_FETCH)
    return notes


def _notes(target: Target, placement: Placement) -> tuple[str, ...]:
    notes = placement_notes(target, placement, NAME)
    if placement.cache_experts:
        notes.append(
            "--moe-cache-mib is in recent builds alone and for one device: see llama-server --help; it keeps experts "
            "by its own order, whatever `eviction` says, and can be slower than no cache where the link is slow"
        )
    notes.append("compute buffers are not counted: leave room with headroom_bytes")
    return tuple(notes)


@dataclass(frozen=True)
class _Defaults:
    """Where tensors go that no rule moves: `-ngl` layers, cut by `-ts`."""

    layers: int
    on_device: int  # of layers + 1, counted from the end
    shares: tuple[float, ...]
    backend: str

    def device(self, tensor: Tensor) -> str:
        """As the loader assigns it: a layer belongs to the first share that ends behind it; the output comes last."""
        if tensor.role == "embedding":
            return "CPU"
        at = (self.layers if tensor.layer < 0 else tensor.layer) - (self.layers + 1 - self.on_device)
        if at < 0:
            return "CPU"
        total, ends_at = sum(self.shares), 0.0
        for device, share in enumerate(self.shares):
            ends_at += share
            if at / self.on_device < ends_at / total:
                return device_name(device, self.backend)
        return device_name(len(self.shares) - 1, self.backend)


def defaults(parsed: Parsed, target: Target) -> _Defaults:
    """`-ngl` and `-ts` of a command; all layers without `-ngl`."""
    every = target.shape.layers + 1
    given = parsed.last("-ngl")
    on_device = every if given in (None, "all", "auto", "-1") else min(every, parsed.count("-ngl", every))
    shares = shares_of(parsed.last("-ts")) or (1.0,) * target.devices
    return _Defaults(target.shape.layers, on_device, shares, target.backend)


def shares_of(text: str | None) -> tuple[float, ...]:
    """The shares in a value of `-ts`; none without one. UsageError if they are no numbers of at least 0."""
    if text is None:
        return ()
    try:
        shares = tuple(float(part) for part in text.replace("/", ",").split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 <= share < float("inf") for share in shares) or not sum(shares):
        raise UsageError(f"-ts is {text!r}: shares of the devices are needed, like 3,1")
    return shares


def assign(target: Target, parsed: Parsed, found: Sequence[Rule], name: str, warnings: Sequence[str]) -> Explanation:
    """Every tensor by the first rule that hits, else by the defaults."""
    rest, placed = defaults(parsed, target), []
    for tensor in gguf_tensors(target.shape):
        rule = first_hit(found, tensor.name)
        device = rule.device if rule else rest.device(tensor)
        because = (rule.because if rule else None) or ("-ngl" if device != "CPU" else "default")
        placed.append(Placed(tensor.name, tensor.layer, tensor.role, device, target.size(tensor.weights), because))
    return Explanation(
        name,
        tuple(placed),
        (*warnings, *spelling_warnings(target.shape, found)),
        _caches(parsed, target),
        parsed.not_read,
    )


def _caches(parsed: Parsed, target: Target) -> dict[str, int]:
    kv = target.shape.kv_bytes("bfloat16", parsed.count("-c", 0))
    first = device_name(0, target.backend)
    cache = parsed.count("--moe-cache-mib", 0) * 2**20
    return {first: kv + cache} if kv + cache else {}


def spelling_warnings(shape: ModelShape, found: Sequence[Rule]) -> list[str]:
    """Rules that move some spellings of a layer's experts and leave others (fused files, scales, biases) behind."""
    for layer in shape.moe_layers:
        variants = expert_variants(layer)
        hits = {name: first_hit(found, name) for name in variants}
        moved = {rule.device for rule in hits.values() if rule}
        left = [name for name, rule in hits.items() if rule is None]
        if moved and left:
            shown = ", ".join(name.removeprefix(f"blk.{layer}.") for name in left[:4])
            return [
                f"rules that move experts of layer {layer} miss {shown}: a file that has them keeps them on the device"
            ]
    return []


def explain(words: Sequence[str], target: Target) -> Explanation:
    """What a llama.cpp command does with the tensors of `target.shape`."""
    parsed = parse_flags(words, FLAGS)
    found = read_rules(parsed.all("-ot")[-1]) if parsed.has("-ot") else []
    if parsed.has("-cmoe"):
        found.append(Rule(EXPERTS, "CPU", "-cmoe"))
    first = parsed.count("-ncmoe", 0)
    found += [Rule(rf"blk\.{layer}{EXPERTS}", "CPU", "-ncmoe") for layer in range(first)]
    return assign(target, parsed, found, NAME, _warnings(parsed, target.shape, bool(found), first))


def _warnings(parsed: Parsed, shape: ModelShape, moved: bool, first: int) -> list[str]:
    warnings = []
    if len(parsed.all("-ot")) > 1:
        warnings.append(f"-ot is given {len(parsed.all('-ot'))} times: only the last counts; join the rules by commas")
    if moved and parsed.last("-fit") not in ("off", "0"):
        warnings.append("-fit is on by default and stops half-way over rules of one's own: add -fit off")
    if not parsed.has("-ngl"):
        warnings.append("-ngl is not given: -fit decides; all layers are assumed to be on the device")
    if not parsed.has("-c"):
        warnings.append("-c is not given: keys and values are not counted")
    dense = sum(layer not in shape.moe_layers for layer in range(first))
    if dense:
        warnings.append(f"-ncmoe {first} counts {dense} dense layers: experts of {first - dense} layers are on the CPU")
    if first and len(shares_of(parsed.last("-ts"))) > 1:
        warnings.append(
            "-ncmoe with several devices leaves all resident experts to the last of them: use rules by device"
        )
    return warnings


EXPORTER = Exporter(NAME, CHECKED, EXPRESSES, make, explain, several_gpus=True)
