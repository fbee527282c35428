"""ik_llama.cpp: the same rules, but every `-ot` counts and `-ncmoe` takes layers from the end, so layers are listed."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.backend.export import llama_cpp
from foreload.backend.export.base import Explanation, Exported, Exporter, Target
from foreload.backend.export.flags import Flag, parse_flags
from foreload.backend.export.patterns import EXPERTS, Rule, read_rules
from foreload.backend.export.placement import whole_layers
from foreload.errors import UsageError

NAME = "ik_llama"
CHECKED = "ik_llama.cpp as of 2026-11: options as in its source, not run"
FLAGS = {**llama_cpp.FLAGS, "-fit": Flag(("--fit",), values=0), "--fit-margin": Flag(("--fit-margin",))}
del FLAGS["--moe-cache-mib"]


def make(target: Target) -> Exported:
    """The command of `target`; BudgetError if its devices cannot hold the settings."""
    several, shape = target.devices > 1, target.shape
    placement = whole_layers(target, llama_cpp.ends(shape))
    command = ["llama-server", "-m", target.weights, "-ngl", "999", "-c", str(target.context)]
    if several:
        command += ["-ts", llama_cpp.tensor_split(placement, target.devices)]
    moved = llama_cpp.rules(placement, shape, several, target.backend)
    command += ["-ot", moved] if moved else []
    command += ["-fmoe", "-t", str(target.settings.cpu_threads)]
    notes = llama_cpp.placement_notes(target, placement, NAME)
    notes.append("slots are rounded down to whole layers: there is no cache of single experts")
    notes.append("compute buffers are not counted: leave room with headroom_bytes")
    return Exported(NAME, CHECKED, tuple(command), notes=tuple(notes), placement=placement)


def explain(words: Sequence[str], target: Target) -> Explanation:
    """What an ik_llama.cpp command does with the tensors of `target.shape`."""
    parsed = parse_flags(words, FLAGS)
    found = [rule for value in parsed.all("-ot") for rule in read_rules(value)]
    if parsed.has("-cmoe"):
        found.append(Rule(EXPERTS, "CPU", "-cmoe"))
    last = parsed.count("-ncmoe", 0)
    if last:
        if parsed.has("-fit"):
            raise UsageError("-ncmoe and --fit: ik_llama.cpp refuses both together")
        if target.devices > 1 or len(llama_cpp.shares_of(parsed.last("-ts"))) > 1:
            raise UsageError("-ncmoe with several devices is shared out by ik_llama.cpp itself: list layers with -ot")
        taken = target.shape.moe_layers[-last:]
        found += [Rule(rf"blk\.{layer}{EXPERTS}", "CPU", "-ncmoe") for layer in taken]
    warnings = []
    if last:
        warnings.append(f"-ncmoe {last} takes the last {last} layers with experts here, the first blocks in llama.cpp")
    if not parsed.has("-c"):
        warnings.append("-c is not given: keys and values are not counted")
    return llama_cpp.assign(target, parsed, found, NAME, warnings)


EXPORTER = Exporter(NAME, CHECKED, llama_cpp.EXPRESSES, make, explain, several_gpus=True)
