"""Processor sharing and the link's window, alone."""

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape

from foreload.backend.policy import Brain
from foreload.settings import Settings
from foreload.simulator.costs import SCALE, CostModel
from foreload.simulator.graph_costs import DeviceTimes
from foreload.simulator.resources import CPU, GPU, LINK, Clockwork, Link, Sharing
from foreload.simulator.timeline import Timeline

SHAPE = make_shape(layers=1)


def finished(*jobs, threads=1, contended=True):
    """Completion times of (which, work ns, start ns, experts)."""
    env, ends = Clockwork(), {}
    sharing = Sharing(env, CostModel(make_profile(SHAPE, contended=contended), SHAPE), threads)

    def begin(which, work, start, experts):
        yield env.timeout(start)
        sharing.start(which, work, lambda: ends.__setitem__(which, env.now), experts)

    for job in jobs:
        env.process(begin(*job))
    env.run()
    return ends


@pytest.mark.unit
def test_alone_is_verbatim():
    assert finished((LINK, 100_000, 7, 0)) == {LINK: 100_007}
    assert finished((CPU, 60_000, 0, 1)) == {CPU: 60_000}
    assert finished((LINK, 0, 5, 0)) == {LINK: 5}


@pytest.mark.unit
def test_copy_and_cpu_slow_each_other_while_both_run():
    # The CPU takes 90 at 2/3; the copy has done 72 of 100 by then and the rest at full rate.
    ends = finished((LINK, 100_000, 0, 0), (CPU, 60_000, 0, 1))
    assert ends[CPU] == pytest.approx(90_000, abs=2)
    assert ends[LINK] == pytest.approx(118_000, abs=4)


@pytest.mark.unit
def test_a_late_start_changes_only_what_is_left():
    # 50 of the copy are done alone; then 60 CPU take 90 while the copy does its last 50 in 62.5; the CPU then
    # has 60 - 62.5 * 2/3 left at full rate.
    ends = finished((LINK, 100_000, 0, 0), (CPU, 60_000, 50_000, 1))
    assert ends[LINK] == pytest.approx(112_500, abs=4)
    assert ends[CPU] == pytest.approx(112_500 + 60_000 - 62_500 * 2 / 3, abs=4)


@pytest.mark.unit
def test_all_three():
    # GPU at 1/1.2, CPU at 1/1.2 * 2/3 until the GPU's 20 are done at 24; the CPU then at 2/3 beside the copy.
    ends = finished((GPU, 20_000, 0, 1), (CPU, 60_000, 0, 1), (LINK, 500_000, 0, 0))
    assert ends[GPU] == pytest.approx(24_000, abs=2)
    assert ends[CPU] == pytest.approx(24_000 + (60_000 - 24_000 / 1.2 * 2 / 3) * 1.5, abs=6)


@pytest.mark.unit
def test_without_contention_nothing_changes():
    jobs = ((GPU, 20_000, 0, 1), (CPU, 60_000, 3, 1), (LINK, 70_000, 0, 0))
    assert finished(*jobs, contended=False) == {GPU: 20_000, CPU: 60_003, LINK: 70_000}


@pytest.mark.unit
def test_the_window_admits_two_and_serves_one_at_a_time():
    env, settings = Clockwork(), Settings()
    costs = CostModel(make_profile(SHAPE), SHAPE)
    brain = Brain(make_shape(layers=1, top_k=4), settings, (0,))
    timeline = Timeline(on=True)
    link = Link(env, Sharing(env, costs, 1), brain, costs, timeline, lambda: False, DeviceTimes(), (SCALE,))
    brain.begin(0, np.arange(4, dtype=np.int32), np.ones(4, np.int32))
    link.watch()
    link.pump()
    assert list(link.issued) == [0, 1]
    env.run(until=100_001)
    assert list(link.issued) == [1, 2]
    env.run()
    assert link.landed_at == {0: 100_000, 1: 200_000, 2: 300_000, 3: 400_000}
    assert [(e.kind, e.expert, e.start_ns) for e in timeline.events] == [("fetch", i, i * 100_000) for i in range(4)]
