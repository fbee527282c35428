"""Settings as other engines take them, and their commands explained. One file per engine, entered in `ENGINES`.

Every export is read back: the command it makes must put each layer's experts where the plan has them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from foreload.backend.export import device_map, freetoken, ik_llama, llama_cpp, own, sglang_kt, vllm
from foreload.backend.export.base import Explanation, Exported, Exporter, Placement, Target, device_name
from foreload.backend.export.flags import split_command
from foreload.errors import InternalError, UsageError

ENGINES: dict[str, Exporter] = {
    module.EXPORTER.name: module.EXPORTER
    for module in (own, llama_cpp, ik_llama, sglang_kt, vllm, device_map, freetoken)
}
MARKS = {"vllm": "vllm", "--kt-weight-path": "sglang-kt", "sglang.launch_server": "sglang-kt", "ft": "freetoken"}
"""Words of a command that name its engine."""


def engine(name: str) -> Exporter:
    """The exporter called `name`; UsageError lists the known ones."""
    if name not in ENGINES:
        raise UsageError(f"engine {name!r} is unknown: known are {', '.join(ENGINES)}")
    return ENGINES[name]


def export(name: str, target: Target) -> Exported:
    """What the engine `name` is started with, read back and compared with the plan.

    Raises UsageError for several devices where the engine's export is for one, BudgetError if devices are too small.
    """
    chosen = engine(name)
    if target.devices > 1 and not chosen.several_gpus:
        raise UsageError(f"{name}: exports are for one GPU: give --gpu once")
    made = chosen.make(target)
    if chosen.explain is not None and made.placement is not None:
        _check(made, chosen.explain(made.command, target), target)
    return made


def _check(made: Exported, found: Explanation, target: Target) -> None:
    """InternalError if the command does not do what was planned."""
    assert made.placement is not None
    devices = found.expert_devices()
    for layer, device in zip(target.shape.moe_layers, made.placement.experts, strict=True):
        wanted = device_name(device, "CUDA" if made.engine == vllm.NAME else target.backend)
        if devices.get(layer) != {wanted}:
            raise InternalError(f"{made.engine}: experts of layer {layer} end on {devices.get(layer)}, not {wanted}")
    if found.warnings:
        raise InternalError(f"{made.engine}: the export warns of itself: {found.warnings[0]}")


def check_help(made: Exported, text: str, source: str) -> Exported:
    """`made`, checked against what the engine's own `--help` printed; UsageError names options it does not have."""
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", text))
    missing = [word for word in made.command if word.startswith("-") and not word[1:].isdigit() and word not in known]
    if missing:
        raise UsageError(f"{source}: this {made.engine} has no {', '.join(missing)}: another version is needed")
    return replace(made, checked=f"{source}, the help text of the installed build")


def explain(command: str | Sequence[str], target: Target, name: str | None = None) -> Explanation:
    """What a command line does with the tensors of `target.shape`; `name`: the engine, where the command is not enough.

    Raises UsageError if the engine is unknown or a flag cannot be read.
    """
    words = split_command(command) if isinstance(command, str) else list(command)
    chosen = engine(name or _engine_of(words))
    if chosen.explain is None:
        raise UsageError(f"{chosen.name} is not started by a command: there is nothing to explain")
    if words[0].rsplit("/", 1)[-1].startswith("python") and words[1:2] == ["-m"]:
        words = words[2:]  # that flag is the interpreter's
    return chosen.explain(words, target)


def _engine_of(words: Sequence[str]) -> str:
    for word in words:
        program = word.rsplit("/", 1)[-1]
        if program in MARKS:
            return MARKS[program]
        if program.startswith("llama-"):
            return "llama.cpp"
    known = ", ".join(name for name, chosen in ENGINES.items() if chosen.explain)
    raise UsageError(f"whose command is this? {words[0]!r} is not known: name the engine with --to ({known})")


__all__ = ["ENGINES", "Explanation", "Exported", "Placement", "Target", "check_help", "engine", "explain", "export"]
