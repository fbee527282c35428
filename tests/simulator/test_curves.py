"""One pass per policy equals a replay at every slot count; Belady loads least."""

from collections import Counter as Counts
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_inputs import make_shape, make_trace, manual_trace

from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator import belady_loads, load_requests
from foreload.simulator.curves import POLICIES, curve_steps, curves, slot_points
from foreload.simulator.replay import replay
from foreload.traces.io import read_trace
from foreload.traces.schema import DRAFT_VERIFY, PREFILL

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"


def random_case(seed, experts, repeat, prompt, tokens=12):
    shape = make_shape(layers=2, experts=experts, top_k=3)
    trace = make_trace(shape, requests=2, prompt=prompt, tokens=tokens, seed=seed, depths=0, repeat=repeat)
    return shape, trace, curves(curve_steps([trace], trace.meta))


CASES = given(
    seed=st.integers(0, 999), experts=st.integers(3, 12), repeat=st.floats(0, 1), prompt=st.sampled_from([0, 1, 6])
)


@pytest.mark.integration
@settings(max_examples=15, deadline=None)
@CASES
def test_each_policy_equals_its_replay_at_every_slot_count(seed, experts, repeat, prompt):
    shape, trace, found = random_case(seed, experts, repeat, prompt)
    requests = load_requests(trace, shape)
    for policy in ("lru", "lfu", "lfru", "aged"):
        for size in range(experts + 1):
            hits = replay(requests, shape, Settings(eviction=policy), (size, size)).hits
            assert hits.tolist() == found.hits[policy][:, size].tolist()


@pytest.mark.integration
@settings(max_examples=30, deadline=None)
@CASES
def test_belady_loads_the_fewest(seed, experts, repeat, prompt):
    shape, trace, found = random_case(seed, experts, repeat, prompt)
    loads = {policy: found.demanded[:, None] - hits for policy, hits in found.hits.items()}
    assert np.array_equal(loads["belady"], belady_loads(load_requests(trace, shape), shape))
    for policy in POLICIES:
        assert (loads["belady"] <= loads[policy]).all()
        assert (np.diff(loads[policy], axis=1) <= 0).all()
        assert (loads[policy][:, 0] == found.demanded).all()


def keeps_best(demands, capacity, rank):
    """Hits of a cache that keeps the `capacity` experts that `rank` at a step puts first."""
    kept, hits = set(), 0
    for at, demand in enumerate(demands):
        hits += len(kept & demand)
        kept = set(sorted(kept | demand, key=lambda expert, at=at: rank(at, expert))[:capacity])
    return hits


@pytest.mark.unit
@pytest.mark.parametrize("prompt", [0, 2])
def test_static_keeps_the_most_demanded_and_pays_for_its_first_use(prompt):
    shape, trace, found = random_case(3, 9, 0.4, prompt)
    for layer in range(shape.n_moe_layers):
        rows = [
            (phase == PREFILL, set(row))
            for phase, row in zip(trace.phase, trace.experts[:, layer].tolist(), strict=True)
        ]
        uses = Counts(expert for in_prompt, demand in rows if not in_prompt for expert in sorted(demand))
        for size in range(10):
            listed = set(sorted(uses, key=lambda expert: (-uses[expert], expert))[:size])
            kept, hits = set(), 0
            for in_prompt, demand in rows:
                hits += 0 if in_prompt else len(kept & demand)
                kept |= demand & listed
            assert found.hits["static"][layer, size] == hits


@pytest.mark.unit
def test_random_depends_on_the_seed_alone():
    steps = curve_steps([(trace := random_case(1, 12, 0.5, 0, tokens=40)[1])], trace.meta)
    first, again, other = (curves(steps, ("random",), seed) for seed in (0, 0, 1))
    assert np.array_equal(first.hits["random"], again.hits["random"])
    assert not np.array_equal(first.hits["random"], other.hits["random"])


@pytest.mark.unit
def test_a_verify_step_is_looked_up_whole():
    shape = make_shape(layers=1, experts=6, top_k=2)
    trace = manual_trace(shape, [[[0, 1]], [[0, 2]], [[0, 3]], [[4, 1]]])
    trace.phase[:] = DRAFT_VERIFY
    trace.step[:] = [0, 0, 1, 1]
    found = curves(curve_steps([trace], trace.meta))
    assert found.demanded.tolist() == [3 + 4]
    assert found.steps == 2
    # After {0, 1, 2} with 2, 1, 1 tokens, {0, 1, 3, 4} finds 0 from one slot on and 1 from two.
    assert found.hits["lru"][0].tolist() == [0, 1, 2, 2, 2, 2, 2]
    demands = [{0, 1, 2}, {0, 1, 3, 4}]
    assert found.hits["belady"][0, 2] == keeps_best(demands, 2, lambda at, e: (e not in (0, 1), e)) == 2


@pytest.mark.unit
def test_long_recordings_are_judged_by_their_beginning():
    shape = make_shape(layers=1, experts=8, top_k=2)
    trace = make_trace(shape, requests=2, prompt=3, tokens=10, depths=0)
    pieces = [trace.take(slice(at, at + 4)) for at in range(0, trace.rows, 4)]
    whole, part = curve_steps(pieces, trace.meta), curve_steps(pieces, trace.meta, max_tokens=12)
    assert (whole.whole, part.whole) == (True, False)
    assert (whole.counted.sum(), part.counted.sum()) == (20, 12)
    assert np.array_equal(part.experts, whole.experts[: len(part.experts)])
    assert whole.fresh.sum() == 2
    assert curve_steps(pieces, trace.meta, max_tokens=20).whole


@pytest.mark.unit
def test_table_and_points():
    shape, _, found = random_case(0, 8, 0.5, 0)
    points = slot_points(shape.experts)
    assert points[0] == 0
    assert points[-1] == shape.experts
    table = found.table(points)
    assert list(table.columns) == ["slots", "share", *POLICIES]
    assert table["lru"].iloc[0] == 0
    assert found.layer_rates("lru").shape == (2, 9)
    with pytest.raises(UsageError, match="policy 'mru' is unknown: there are belady, lru"):
        curves(curve_steps([], found.meta), ("mru",))
    assert curves(curve_steps([], found.meta)).rate("lru").tolist() == [0.0] * 9


@pytest.mark.integration
def test_fading_uses_follow_a_change_of_subject():
    trace = read_trace(SAMPLES / "topo-switch.parquet")
    found = curves(curve_steps([trace], trace.meta), ("lru", "lfu", "aged"))
    assert found.rate("aged")[32] > max(found.rate("lru")[32], found.rate("lfu")[32])
