"""Small changes of good settings, one at a time: what the integer programs do not vary, and what they fix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreload.settings import NEXT_STEP, Settings
from foreload.simulator.candidates import NO_PREFETCH, Space, looked, said_format


def neighbours(space: Space, settings: Settings) -> Iterator[tuple[str, Settings]]:
    """What was changed, in words, and `settings` with that change, as far as it fits and is allowed."""
    seen = {settings}
    for what, change in _changes(space, settings):
        other = space.fitted(settings.changed(**change))
        if other is not None and other not in seen and space.loss_pct(other) is not None:
            seen.add(other)
            yield what, other
    for what, drafting in _drafts(space, settings):
        if drafting is not None and drafting not in seen:
            seen.add(drafting)
            yield what, drafting


def _changes(space: Space, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    for fields in space.evictions():
        aged = f", half-life {fields['half_life']}" if fields["eviction"] == "aged" else ""
        yield f"eviction {fields['eviction']}{aged}", fields
    if settings.pool == "layer":
        for miss in space.misses():
            fields = {**miss, "cpu_read_ahead": settings.cpu_read_ahead and miss["miss_action"] != "fetch"}
            ahead = settings.predictor in NEXT_STEP and miss["miss_action"] == "fetch"
            yield _of_miss(miss), {**fields, **(NO_PREFETCH if ahead else {})}
        yield from _prefetch_changes(space, settings)
    if settings.admission == "background":
        yield from ((f"admit_per_step {n}", {"admit_per_step": n}) for n in (1, 2, 4))
    if space.reads_ahead and settings.miss_action != "fetch" and settings.prefetch_depth:
        yield from _reading(space, settings)
    if settings.miss_action == "split":
        rules = ("makespan", "tau", "bandwidth")
        yield from ((f"split_rule {rule}", {"split_rule": rule, "objective": "makespan"}) for rule in rules)
    even = space.filled(settings.changed(slots_per_layer=None))
    if even is not None:
        yield "uniform slots", {"slots_per_layer": even.slots_per_layer}


def _of_miss(miss: dict[str, Any]) -> str:
    threads = f" on {miss['cpu_threads']}" if "cpu_threads" in miss else ""
    return f"miss_action {miss['miss_action']}{threads}, admission {miss['admission']}"


def _prefetch_changes(space: Space, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    format = settings.expert_format
    if not settings.speculate_layers:
        yield "no prefetch", NO_PREFETCH
        if settings.admission != "none" and settings.miss_action != "fetch":
            yield from ((f"predictor {name}", {**NO_PREFETCH, "predictor": name}) for name in NEXT_STEP)
        for depth, found in space.looks.items():
            for look in found:
                widths = space.widths if depth in (1, settings.prefetch_depth) else space.widths[:1]
                for width in widths:
                    fields = {**looked(look), "prefetch_depth": depth, "prefetch_width": width}
                    yield f"{look[0]}, depth {depth}, width {width}", fields
    if space.smaller is not None and space.same_numbers(settings):
        other = space.base.expert_format if format == space.smaller else space.smaller
        yield f"expert_format {said_format(other) if other else 'as stored'}", {"expert_format": other}
    for option in space.prefetches():
        if option.get("expert_format") != format and not option["speculate_layers"] and "expert_format" in option:
            name = option["expert_format"]
            yield f"expert_format {said_format(name)}", {"expert_format": name}


def _reading(space: Space, settings: Settings) -> Iterator[tuple[str, dict[str, Any]]]:
    """CPU workers that read ahead or not; what they read is not copied, so one more may be predicted."""
    width, on = settings.width(space.shape), not settings.cpu_read_ahead
    yield f"cpu_read_ahead {'on' if on else 'off'}", {"cpu_read_ahead": on}
    if on and width < max(space.widths):
        yield f"cpu_read_ahead on, width {width + 1}", {"cpu_read_ahead": on, "prefetch_width": width + 1}


def _drafts(space: Space, settings: Settings) -> Iterator[tuple[str, Settings | None]]:
    for draft in space.drafts:
        yield f"drafts of {draft.gamma}", space.drafted(settings, draft)
    if settings.draft.kind != "none" and settings.draft != space.base.draft:
        plain = settings.changed(draft=space.base.draft.model_dump())
        yield "no drafts", space.filled(plain.changed(slots_per_layer=None))
