"""The clockless replay equals the brain driven by hand and, where time cannot matter, the engine model."""

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape, make_trace

from foreload.backend.policy import Brain, Counter
from foreload.settings import Settings
from foreload.simulator import load_requests, simulate
from foreload.simulator.replay import replay

SHAPE = make_shape(layers=3, experts=10, top_k=3)
UNTIMED = [
    Settings(eviction="lru"),
    Settings(eviction="lfu"),
    Settings(eviction="lfru"),
    Settings(admission="none", prefill_chunk_tokens=4),
    Settings(miss_action="cpu"),
]


@pytest.mark.integration
@pytest.mark.parametrize("chosen", UNTIMED, ids=Settings.describe)
def test_equals_the_simulated_engine_counter_by_counter(chosen):
    trace = make_trace(SHAPE, requests=3, prompt=7, tokens=15, seed=4)
    found = replay(load_requests(trace, SHAPE, chosen), SHAPE, chosen, (0, 4, 10))
    simulated = simulate(trace, make_profile(SHAPE), SHAPE, chosen, (0, 4, 10))
    if chosen.prefill_chunk_tokens == 4:  # the replay looks at the last chunk alone, and counts only it
        assert np.array_equal(found.counters[0], simulated.counters[0])
    else:
        assert np.array_equal(found.counters, simulated.counters)
    assert found.hits.tolist() == simulated.counters[0, :, Counter.HITS].tolist()
    assert found.histogram.sum() == 3 * 45


@pytest.mark.integration
def test_equals_the_brain_driven_by_hand():
    trace = make_trace(SHAPE, requests=2, prompt=0, tokens=20, seed=5)
    chosen, capacity = Settings(eviction="lfru"), (2, 3, 5)
    brain = Brain(SHAPE, chosen, capacity)
    ones = np.ones(3, np.int32)
    for request in load_requests(trace, SHAPE, chosen):
        brain.start_request()
        for token in request.demand:
            for layer in range(3):
                brain.begin(layer, token[layer], ones)
                while (key := brain.next_copy()) >= 0:
                    brain.complete(key)
                brain.finish(layer)
            brain.end_step()
    found = replay(load_requests(trace, SHAPE, chosen), SHAPE, chosen, capacity)
    assert np.array_equal(found.counters, brain.counters)


@pytest.mark.unit
def test_a_prefetch_demanded_before_it_lands_a_step_late_was_not_wasted():
    shape = make_shape(layers=2, experts=6, top_k=2)
    brain = Brain(shape, Settings(miss_action="cpu", predictor="gate", prefetch_depth=1), (0, 0))
    ones, layer_1 = np.ones(2, np.int32), np.array([2, 3], np.int32)
    brain.begin(0, np.array([0, 1], np.int32), ones)
    brain.prefetch(1, np.array([4, -1], np.int32))
    key = brain.next_copy()
    brain.finish(0)
    brain.begin(1, layer_1, ones)
    brain.finish(1)
    brain.end_step()
    assert brain.counters[0, 1, Counter.WASTED] == 1
    brain.begin(1, np.array([4, 5], np.int32), ones)
    brain.complete(key)
    brain.finish(1)
    assert brain.counters[0, 1, [Counter.LATE, Counter.PREFETCHED, Counter.WASTED]].tolist() == [1, 1, 0]
    brain.check_integrity()


@pytest.mark.integration
def test_counts_prefetches_used_and_wasted():
    chosen = Settings(predictor="gate", prefetch_depth=1)
    trace = make_trace(SHAPE, requests=1, prompt=0, tokens=20, recall=1.0)
    found = replay(load_requests(trace, SHAPE, chosen), SHAPE, chosen, (0, 0, 0))
    assert found.counters[0, 1:, Counter.MISSES].tolist() == [0, 0]
    assert found.prefetched.tolist() == [0.0, 3.0, 3.0]
    assert found.histogram[1, 0, 0, 3] == 20
