"""`foreload plan`: whether a model fits, from its configuration and weight index or a GGUF header alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreload.cli.engine_options import ContextFlag, SettingsFlag, load_settings
from foreload.cli.output import JsonFlag, Output, facts, table
from foreload.errors import BudgetError
from foreload.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.plan import Inventory, Plan, Rates


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, `mini`, `shape:NAME` or a GGUF file.")
    ],
    vram: Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Device memory, like 8GiB.")] = None,
    ram: Annotated[str | None, typer.Option("--ram", metavar="SIZE", help="Host memory for experts.")] = None,
    context: ContextFlag = 2048,
    settings: SettingsFlag = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Machine profile; default: assumed rates.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say whether a model fits, before any weight is loaded: bytes, slots, and a range of tokens/s."""
    from foreload.backend.models.inventory import take_inventory
    from foreload.plan import ASSUMED, make_plan

    output = Output(as_json)
    inventory, chosen = take_inventory(model), load_settings(settings)
    rates = ASSUMED if profile is None else _measured(profile, inventory, context)
    vram_bytes = None if vram is None else parse_bytes(vram, "--vram")
    ram_bytes = None if ram is None else parse_bytes(ram, "--ram")
    try:
        made = make_plan(inventory, chosen, context, vram_bytes, ram_bytes, rates)
    except BudgetError:
        if not as_json:
            _show(output.stdout, make_plan(inventory, chosen, context))
        raise
    output.finish(made.as_dict(), lambda console: _show(console, made))


def _measured(path: Path, inventory: Inventory, context: int) -> Rates:
    """The rates of a profile of the same model; MismatchError otherwise."""
    from foreload.plan import Rates
    from foreload.profiler.schema import HardwareProfile
    from foreload.simulator.costs import CostModel

    measured = HardwareProfile.load(path)
    costs, shape = CostModel(measured, inventory.shape), inventory.shape
    size, k = costs.expert_bytes, shape.top_k
    layer_ns = costs.between_ns(context)
    ends_ns = costs.cost("embed").host_ns + costs.cost("head").host_ns
    own_ns = layer_ns + ends_ns // shape.n_moe_layers
    link = size * 1e9 / costs.copy_ns
    threads = max(costs.cpu_threads, default=0)
    cpu = k * size * 1e9 / costs.experts_cpu_ns(k, threads) if threads else 0.0
    device = k * size * 1e9 / costs.experts_gpu_ns(k)
    emulated = measured.meta.emulated_link_bytes_per_s
    source = f"measured on {measured.meta.device_name}"
    source += f", emulated link {emulated / 1e6:.0f} MB/s" if emulated else ""
    return Rates((link, link), (cpu, cpu), (device, device), source, (own_ns, own_ns), True)


def _show(console: Console, made: Plan) -> None:
    inventory, shape = made.inventory, made.inventory.shape
    total, active = inventory.total_weights / 1e9, inventory.active_weights / 1e9
    layers = f"{shape.n_moe_layers} layers of {shape.experts}, {shape.top_k} per token"
    shown = {
        "read from": inventory.read_from,
        "weights": f"{total:.3f} billion, {active:.3f} active per token",
        "experts": f"{layers}; stored as {inventory.stored}",
        "one expert": f"{format_bytes(inventory.expert_bytes)} as stored, {format_bytes(made.slot_bytes)} in a slot",
        "host memory": f"{format_bytes(made.experts_bytes)} of experts" + _of(made.ram_bytes),
    }
    if made.format != inventory.stored:
        shown["format"] = (
            f"as stored they take {format_bytes(inventory.experts_bytes)}: {made.format} is the largest that fits"
        )
    if made.slots_per_layer is not None and made.tokens_per_s is not None:
        slow, fast = made.tokens_per_s
        share = made.slots_per_layer / shape.experts
        shown["cache"] = f"{made.slots_per_layer} of {shape.experts} experts per layer ({share:.0%})"
        shown["speed"] = f"{slow:,.1f} to {fast:,.1f} tokens/s, an estimate ({made.rates.source})"
    console.print(facts(inventory.name, shown))
    rows = [(name, format_bytes(size), str(size)) for name, size in made.device_rows().items()]
    together = sum(made.device_rows().values())
    rows.append(("together", format_bytes(together) + _of(made.vram_bytes), str(together)))
    note = f"in bfloat16, {made.context_tokens} positions; calculated"
    console.print(table("device memory", ("what", "size", "bytes"), rows, note))


def _of(budget: int | None) -> str:
    return "" if budget is None else f" of {format_bytes(budget)}"
