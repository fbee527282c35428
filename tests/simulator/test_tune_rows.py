"""Budgets beside device memory: host memory, the link's time, what formats lose; and formats that differ by layer."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pytest
from sim_inputs import in_formats, make_profile, make_shape, make_trace

from foreload.backend.policy import Counter
from foreload.errors import BudgetError
from foreload.formats import block_layout
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel
from foreload.simulator.solver import Outcome, Problem, require, solve
from foreload.simulator.tune import TuneResult, prepare, tune
from foreload.simulator.tuner.forecast import forecast
from foreload.simulator.tuner.rows import LOSS_UNITS, InFormat, Limits, planned, program
from foreload.traces.schema import Trace

SHAPE = make_shape(layers=3, experts=4, top_k=2)
COUNTS = SHAPE.experts + 1
SLOTS = 8


def random_tables(rng: np.random.Generator) -> tuple[list[InFormat], int, Limits]:
    """Two formats, the second smaller, faster and with a loss; and budgets that may be too small."""
    large, small = (
        InFormat(
            np.sort(rng.uniform(0, 100, (3, COUNTS)), axis=1)[:, ::-1] * scale,
            np.sort(rng.uniform(0, 50, (3, COUNTS)), axis=1)[:, ::-1] * scale,
            (size,) * 3,
            name,
            loss,
        )
        for scale, size, name, loss in ((1.0, 100, "bf16", 0.0), (rng.uniform(0.4, 0.9), 50, "fp8", 0.6))
    )
    limits = Limits(int(rng.integers(500, 1300)), 1100, int(rng.integers(10, 140)), float(rng.uniform(0, 0.7)))
    return [large, small], int(rng.integers(0, 12)), limits


def by_force(tables: list[InFormat], slots: int, limits: Limits) -> float:
    """The cost of the cheapest plan, found without the program; infinite without any."""
    best = np.inf
    for plan in product(product(range(2), range(COUNTS)), repeat=3):
        held = [(tables[format], count) for format, count in plan]
        ram = sum(SHAPE.experts * table.layer_bytes[0] for table, _ in held)
        link = sum(int(np.ceil(table.link_ns[layer, count])) for layer, (table, count) in enumerate(held))
        loss = sum(table.loss_pct for table, _ in held) / 3
        if (
            sum(count for _, count in held) > slots
            or ram > min(limits.ram_bytes, limits.pinned_bytes)
            or link > limits.link_ns
        ):
            continue
        if loss <= limits.loss_pct + 1e-9:
            best = min(best, sum(table.costs_ns[layer, count] for layer, (table, count) in enumerate(held)))
    return best


@pytest.mark.integration
def test_formats_and_slots_equal_brute_force() -> None:
    rng, outcomes = np.random.default_rng(7), list[Outcome]()
    for _ in range(40):
        tables, slots, limits = random_tables(rng)
        problem, best = program(tables, slots, limits), by_force(tables, slots, limits)
        assert list(problem.limit) == ["vram", "ram", "pinned", "link", "quality"]
        found = solve(problem)
        outcomes.append(found.outcome)
        if best == np.inf:
            assert found.outcome is Outcome.INFEASIBLE
            continue
        assert found.outcome is Outcome.PROVEN
        assert found.objective == pytest.approx(best, abs=1e-6)
        assert found.relaxed <= found.objective + 1e-6
        settings = planned(Settings(), found.choice, tables, SHAPE)
        formats, counts = settings.expert_format, settings.slots_per_layer or ()
        of_layer = formats if isinstance(formats, tuple) else (formats,) * 3
        cost = sum(
            tables[("bf16", "fp8").index(str(name))].costs_ns[layer, count]
            for layer, (name, count) in enumerate(zip(of_layer, counts, strict=True))
        )
        assert cost == pytest.approx(best, abs=1e-6)
    assert 5 < outcomes.count(Outcome.INFEASIBLE) < 35


@pytest.mark.unit
def test_rows_that_nothing_limits_are_not_there() -> None:
    tables, _, _ = random_tables(np.random.default_rng(0))
    alone = program(tables[:1], 5, Limits())
    assert (list(alone.limit), alone.cost.shape) == (["vram"], (3, COUNTS))
    lossy = program(tables, 5, Limits(loss_pct=0.6))
    assert list(lossy.limit) == ["vram", "quality"]
    everywhere = tuple([2 * COUNTS - 1] * 3)
    used = sum(int(lossy.use["quality"][layer, at]) for layer, at in enumerate(everywhere))
    assert used <= lossy.limit["quality"] <= 0.6 * LOSS_UNITS + 3  # all layers may be in a format that may be lost


@pytest.mark.unit
def test_the_row_that_is_short_is_named() -> None:
    tables, _, _ = random_tables(np.random.default_rng(0))
    needed = int(SHAPE.experts * 50 * 3)
    problem = program(tables, 12, Limits(ram_bytes=needed - 7, loss_pct=1.0))
    with pytest.raises(BudgetError, match="ram budget is 7 B") as refused:
        require(problem, solve(problem), {"vram": 100, "ram": 1, "quality": 10**9})
    assert (refused.value.budget, refused.value.shortfall_bytes) == ("ram", 7)


# Whole tunes


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(SHAPE, requests=3, prompt=3, tokens=16, seed=4, depths=0)


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    """Of a slow link, without CPU experts; fp8 experts run as fast as others."""
    whole = make_profile(SHAPE, copy_us=400)
    kept = tuple(m for m in whole.measurements if "threads" not in m.at)
    bare = HardwareProfile(meta=whole.meta, measurements=kept)
    return in_formats(bare, ("fp32", 18.0, 50.0), ("bf16", 18.0, 50.0), ("fp8", 18.0, 50.0))


def link_ns(result: TuneResult) -> float:
    assert result.best.result is not None
    return result.best.result.link_ns


@pytest.mark.integration
def test_the_time_of_the_link_is_kept(trace: Trace, profile: HardwareProfile) -> None:
    asked: dict[str, Any] = {"slots": SLOTS, "base": Settings(eviction="random")}
    free = tune(trace, profile, SHAPE, "float32", **asked)
    assert free.default.result is not None
    costs, busy = CostModel(profile, SHAPE), free.default.result
    copied = sum(busy.count(counter) for counter in (Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED))
    assert busy.link_ns == copied * costs.copy_ns / busy.tokens > 0
    limit = int(busy.link_ns) - 1
    held = tune(trace, profile, SHAPE, "float32", link_ns=limit, **asked)
    assert link_ns(held) <= limit < busy.link_ns
    assert not held.kept_default  # which is over it
    assert all(c.result is not None and c.result.link_ns <= limit for c in held.candidates)
    json.dumps(held.as_dict(), allow_nan=False)
    with pytest.raises(BudgetError, match=r"link time of 0 ms per token: the copies of .* take .* ms more") as refused:
        tune(trace, profile, SHAPE, "float32", link_ns=0, **asked)
    assert (refused.value.budget, refused.value.exit_code) == ("link", 3)
    assert refused.value.shortfall_bytes > 0


@pytest.mark.integration
def test_formats_by_layer_within_a_loss(trace: Trace, profile: HardwareProfile) -> None:
    """fp8 in all layers would lose too much, in two of three it does not: those move half as many bytes."""
    asked: dict[str, Any] = {"slots": 5, "format_loss_pct": {"fp8": 0.9, "bf16": 0.3}}
    found = tune(trace, profile, SHAPE, "float32", max_quality_loss_pct=0.7, **asked)
    chosen = found.best.settings
    assert isinstance(chosen.expert_format, tuple)
    assert set(chosen.expert_format) == {"bf16", "fp8"}
    assert found.loss_assumed
    assert found.quality_loss_pct == pytest.approx(sum({"fp8": 0.3, "bf16": 0.1}[n] for n in chosen.expert_format))
    assert found.quality_loss_pct == pytest.approx(0.7)  # the whole of it is used
    whole = {c.settings.expert_format for c in found.candidates if not isinstance(c.settings.expert_format, tuple)}
    assert whole == {None, "bf16"}
    again = simulate(trace, profile, SHAPE, chosen, chosen.slots_per_layer or (), found.select)
    assert again.tpot_ns == found.best.tpot_ns
    assert found.as_dict()["quality_loss_source"] == "assumed"
    for candidate in found.candidates:
        assert sum(candidate.settings.slots_per_layer or ()) > 0 or "cache off" in candidate.family


@pytest.mark.integration
def test_formats_by_layer_within_host_memory(trace: Trace, profile: HardwareProfile) -> None:
    """Host memory for one layer in bf16 and the others in fp8: losses alone would have allowed more bf16."""
    sizes = {name: SHAPE.experts * block_layout(name, SHAPE).bytes for name in ("bf16", "fp8")}  # type: ignore[arg-type]
    room = sizes["bf16"] + 2 * sizes["fp8"]
    asked: dict[str, Any] = {"slots": SLOTS, "format_loss_pct": {"fp8": 0.9, "bf16": 0.3}, "max_quality_loss_pct": 1.0}
    start = Settings(expert_format="fp8")
    with prepare(trace, profile, SHAPE, "float32", ram_bytes=room, base=start, **asked) as tuning:
        assert [[name for name, _ in mix] for mix in tuning.space.mixes()] == [["bf16", "fp8"]]
        search = tuning.search()
        found = search.run()
        told = forecast(tuning)
    used = [layers for c in found.ranked() if isinstance(layers := c.settings.expert_format, tuple)]
    assert all(sum(sizes[name] for name in layers) <= room for layers in used)
    assert told.replays > 0


@pytest.mark.integration
def test_experts_beyond_what_may_be_pinned(trace: Trace, profile: HardwareProfile) -> None:
    """Their memory is registered whole or not: then all copies are pageable, and a plan of mixed formats avoids it."""
    size, measured = SHAPE.expert_bytes("float32"), [m for m in profile.measurements if m.probe != "copy"]
    for part, us in ((4, 80.0), (1, 300.0)):
        for pinned in (0, 1):
            at = {"bytes": size // part, "pinned": pinned}
            measured.append(Measurement(probe="copy", at=at, p50_us=us / (1 + 2 * pinned), p95_us=us, repeats=1))
    sizes = {name: SHAPE.experts * block_layout(name, SHAPE).bytes for name in ("bf16", "fp8")}  # type: ignore[arg-type]
    room = sizes["bf16"] + 2 * sizes["fp8"]
    meta = profile.meta.model_copy(update={"pinned_bytes": room})
    held = HardwareProfile(meta=meta, measurements=tuple(measured))
    costs = CostModel(held, SHAPE)
    free = CostModel(HardwareProfile(meta=profile.meta, measurements=tuple(measured)), SHAPE)
    assert (costs.copy_ns, free.copy_ns, costs.all_pinned().copy_ns) == (300_000, 100_000, 100_000)
    names = [("bf16",) * 3, ("bf16", "bf16", "fp8"), ("bf16", "fp8", "fp8"), ("fp8",) * 3]
    found = [costs.for_settings(Settings(expert_format=name)) for name in names]
    assert [model.copies_ns == model.all_pinned().copies_ns for model in found] == [False, False, True, True]
    asked: dict[str, Any] = {"slots": 5, "format_loss_pct": {"fp8": 0.9, "bf16": 0.3}, "max_quality_loss_pct": 0.8}
    chosen = tune(trace, held, SHAPE, "float32", **asked).best.settings.expert_format
    assert isinstance(chosen, tuple)
    assert sum(sizes[name] for name in chosen) <= room


@pytest.mark.unit
def test_a_problem_without_choices_of_format_is_what_it_was() -> None:
    tables, _, _ = random_tables(np.random.default_rng(1))
    one = program(tables[:1], 6, Limits())
    counts = np.tile(np.arange(COUNTS), (3, 1))
    same = Problem(tables[0].costs_ns, {"vram": counts}, {"vram": 6})
    assert solve(one).objective == solve(same).objective
