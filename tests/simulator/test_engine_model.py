"""The engine model against totals worked out by hand, and its invariants on random routing."""

from itertools import pairwise

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape, make_trace, manual_trace

from foreload.backend.policy import Counter
from foreload.errors import MismatchError
from foreload.settings import Settings
from foreload.simulator import simulate
from foreload.simulator.clock import STALLS
from foreload.simulator.result import AFTER_PREFILL, COLD, STEADY
from foreload.traces.schema import DECODE, PREFILL

ONE, TWO = make_shape(layers=1), make_shape(layers=2)
GATE = {"predictor": "gate", "prefetch_depth": 1}


def token_us(shape, settings, capacity, decode, predicted=None, **profile):
    result = simulate(manual_trace(shape, decode, predicted), make_profile(shape, **profile), shape, settings, capacity)
    return (result.token_ns / 1e3).tolist(), result


# One token with nothing resident costs 5 embed + 30 attention + 10 route + 8 plan, then experts, 6 finish, 30 head.


@pytest.mark.unit
def test_fetch_only_is_the_sum_of_its_parts():
    times, result = token_us(ONE, Settings(), (0,), [[[0, 1]]])
    # Copies land 100 and 200 after the plan; each is noticed 3 later and runs 20.
    assert times == [53 + 203 + 20 + 36]
    assert result.time_ns["wait_link"] == 100_000 + 77_000
    assert result.time_ns["wake"] == 6_000
    assert result.count(Counter.FETCHED) == result.count(Counter.MISSES) == 2


@pytest.mark.unit
def test_residents_run_as_one_group():
    times, result = token_us(ONE, Settings(), (2,), [[[0, 1]], [[0, 1]]])
    assert times == [312, 53 + 40 + 36]
    assert result.hit_rate == 0.5


@pytest.mark.unit
def test_residents_run_while_the_copy_is_on_its_way():
    times, _ = token_us(ONE, Settings(), (2,), [[[0, 1]], [[0, 2]]])
    assert times[1] == 53 + 103 + 20 + 36


@pytest.mark.unit
def test_cpu_alone():
    times, result = token_us(ONE, Settings(miss_action="cpu"), (0,), [[[0, 1]]])
    assert times == [53 + 120 + 36]
    assert result.stall_ns["wait_cpu"] == 120_000
    times, _ = token_us(ONE, Settings(miss_action="cpu", cpu_threads=2), (0,), [[[0, 1]]])
    assert times == [53 + 60 + 36]


@pytest.mark.unit
def test_prefetched_copies_follow_the_demand_on_the_link():
    times, result = token_us(TWO, Settings(**GATE), (0, 0), [[[0, 1], [2, 3]]], [[[-1, -1], [2, 3]]])
    # Plan ends at 57 (predict takes 4). The link: 57-157, 157-257 demand, 257-357, 357-457 prefetch.
    # Layer 0 runs 260-280 last, finishes 286; layer 1 plans until 334, runs 360-380 and 460-480.
    assert times == [480 + 36]
    assert result.count(Counter.LATE) == result.count(Counter.PREFETCHED) == 2
    assert result.count(Counter.WASTED) == 0


@pytest.mark.unit
def test_a_fast_link_hides_a_right_prediction_entirely():
    fast = {"copy_us": 1.0}
    times, result = token_us(TWO, Settings(**GATE), (0, 0), [[[0, 1], [2, 3]]], [[[-1, -1], [2, 3]]], **fast)
    # Layer 0: lands after 1 + 3 and 2, runs 20 + 20 from 61; layer 1 finds both.
    assert times == [57 + 4 + 40 + 6 + 48 + 40 + 36]
    assert result.counters[0, 1, Counter.HITS] == 2


@pytest.mark.unit
def test_a_wrong_prediction_delays_the_demand_behind_it():
    decode, wrong = [[[0, 1], [2, 3]]], [[[-1, -1], [4, 5]]]
    times, result = token_us(TWO, Settings(**GATE), (0, 0), decode, wrong)
    # Both wrong copies are in the stream when layer 1 plans at 334: the first lands 357, the second 457.
    # The demand is issued then, lands 557 and 657.
    assert times == [660 + 20 + 36]
    assert result.count(Counter.WASTED) == 2


def with_prompt(shape, decode, prompt):
    trace = manual_trace(shape, prompt + decode)
    trace.phase[:] = [PREFILL] * len(prompt) + [DECODE] * len(decode)
    return trace


@pytest.mark.unit
def test_resident_and_cpu_experts_slow_each_other():
    trace = with_prompt(ONE, [[[0, 1]]], [[[0, 2]]])
    result = simulate(trace, make_profile(ONE), ONE, Settings(miss_action="cpu"), (1,))
    # Resident 20 and CPU 60 together: the resident one takes 24, the CPU one 64.
    assert result.token_ns[0] == pytest.approx(153_000 - 64_000 + 64_000, abs=5)
    assert result.time_ns["experts_gpu"] == pytest.approx(24_000, abs=5)
    assert result.stall_ns["wait_cpu"] == pytest.approx(40_000, abs=5)


@pytest.mark.unit
def test_a_prompt_fetches_in_waves_and_fills_the_cache():
    trace = with_prompt(ONE, [[[0, 1]]], [[[0, 1]], [[2, 3]], [[0, 4]]])
    result = simulate(trace, make_profile(ONE), ONE, Settings(), (2,))
    # Five experts over the link, 100 each; the last lands at 548, runs 21; head 30. Expert 0 had two tokens.
    assert result.ttft_ns.tolist() == [(5 + 43 + 500 + 3 + 21 + 30) * 1000]
    assert result.count(Counter.FETCHED, 1) == 5
    assert result.count(Counter.HITS) == 2
    assert sum(result.prefill_time_ns.values()) == int(result.ttft_ns.sum())


@pytest.mark.unit
def test_a_prompt_in_two_chunks_starts_the_second_with_an_unfilled_cache():
    trace = with_prompt(ONE, [[[0, 1]]], [[[0, 1]], [[0, 1]]])
    result = simulate(trace, make_profile(ONE), ONE, Settings(prefill_chunk_tokens=1), (2,))
    assert result.count(Counter.FETCHED, 1) == 4
    assert result.ttft_ns.tolist() == [2 * (5 + 41 + 200 + 3 + 21 + 30) * 1000]


# A GPU behind the host.


@pytest.mark.unit
def test_the_host_goes_on_while_copies_for_the_gpu_are_in_the_stream():
    times, result = token_us(ONE, Settings(), (0,), [[[0, 1]]], device="cuda")
    # The host has launched everything at 129; the GPU sees the second copy at 53 + 200 + 3.
    assert times == [256]
    assert result.time_ns["wait_link"] == (256 - 129) * 1000


@pytest.mark.unit
def test_the_host_waits_for_a_place_in_the_window():
    shape = make_shape(layers=1, top_k=3)
    times, result = token_us(shape, Settings(), (0,), [[[0, 1, 2]]], device="cuda")
    # The third copy is issued when the first has landed, at 153; noticed 3 later.
    assert result.time_ns["wait_issue"] == (153 - 93) * 1000
    assert result.time_ns["wake"] == 3_000
    assert times == [53 + 300 + 3]


@pytest.mark.unit
def test_a_slow_gpu_sets_the_pace():
    times, result = token_us(ONE, Settings(), (2,), [[[0, 1]], [[0, 1]]], device="cuda", gpu_us=100.0)
    # embed, attention, route, plan, finish, head 100 each; two experts 400.
    assert times[1] == 1000
    host = 5 + 30 + 10 + 8 + 40 + 6 + 30
    assert result.time_ns["wait_gpu"] + result.time_ns["wait_link"] == int(sum(times) - host * 2) * 1000


@pytest.mark.unit
def test_with_all_resident_and_no_gpu_time_both_devices_agree():
    trace = make_trace(TWO, requests=1, prompt=30, tokens=12)
    runs = [
        simulate(trace, make_profile(TWO, device), TWO, Settings(), (TWO.experts,) * 2) for device in ("cpu", "cuda")
    ]
    full = [run.token_ns[run.token_ns == run.token_ns.min()] for run in runs]
    assert full[0][0] == full[1][0]


@pytest.mark.unit
def test_gpu_experts_share_memory_with_the_cpu():
    trace = with_prompt(ONE, [[[0, 1]]], [[[0, 2]]])
    result = simulate(trace, make_profile(ONE, "cuda", gpu_us=20.0), ONE, Settings(miss_action="cpu"), (1,))
    alone = simulate(
        trace, make_profile(ONE, "cuda", gpu_us=20.0, contended=False), ONE, Settings(miss_action="cpu"), (1,)
    )
    assert result.total_ns > alone.total_ns


# Whole runs.

SHAPE = make_shape(layers=4, experts=12, top_k=3)
SCENARIOS = {
    "default": Settings(),
    "depth 2": Settings(predictor="gate", prefetch_depth=2),
    "cpu": Settings(miss_action="cpu", cpu_threads=2),
    "background": Settings(miss_action="cpu", admission="background", eviction="lfu"),
    "split": Settings(miss_action="split", admission="background", **GATE),
    "bandwidth": Settings(miss_action="split", split_rule="bandwidth", cpu_threads=2, eviction="lfru"),
    "fixed": Settings(admission="none", prefill_chunk_tokens=5),
}


def run(name, device, **more):
    trace = make_trace(SHAPE, requests=3, prompt=9, tokens=24, seed=1)
    return simulate(trace, make_profile(SHAPE, device, gpu_us=9.0), SHAPE, SCENARIOS[name], (3, 4, 0, 12), **more)


@pytest.mark.integration
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_times_add_up_and_demand_is_whole(name, device):
    result = run(name, device)
    assert result.total_ns == sum(result.time_ns.values())
    assert int(result.ttft_ns.sum()) == sum(result.prefill_time_ns.values())
    assert result.demanded == 72 * 4 * 3
    assert set(result.stall_ns) == set(STALLS)
    assert [int((result.token_part == p).sum()) for p in (COLD, AFTER_PREFILL, STEADY)] == [16, 32, 24]
    again = run(name, device)
    assert again.token_ns.tolist() == result.token_ns.tolist()
    assert np.array_equal(again.counters, result.counters)


PINNED = {
    "default on cpu": (71616400, 9045000),
    "depth 2 on cpu": (65627300, 9045000),
    "cpu on cpu": (38436524, 9063000),
    "background on cpu": (54600736, 9146000),
    "split on cpu": (51417116, 8968800),
    "bandwidth on cpu": (46736822, 8963000),
    "fixed on cpu": (92750400, 14116000),
    "default on cuda": (67057000, 9045000),
    "depth 2 on cuda": (63642600, 9045000),
    "cpu on cuda": (38056465, 9063000),
    "background on cuda": (54533940, 9146000),
    "split on cuda": (49874496, 8993000),
    "bandwidth on cuda": (42831131, 8963000),
    "fixed on cuda": (87771600, 14116000),
}


@pytest.mark.integration
@pytest.mark.parametrize("key", sorted(PINNED))
def test_pinned_totals(key):
    name, device = key.split(" on ")
    result = run(name, device)
    assert (result.total_ns, int(result.ttft_ns.sum())) == PINNED[key]


@pytest.mark.integration
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_timeline_covers_the_run_without_overlap(device):
    result = run("split", device, timeline=True)
    plain = run("split", device)
    assert plain.total_ns == result.total_ns
    assert plain.timeline == ()
    for track in ("host", "gpu", "link", "cpu"):
        spans = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in result.timeline if e.stream == track)
        assert bool(spans) == (track != "gpu" or device == "cuda")
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    host = sum(e.duration_ns for e in result.timeline if e.stream == "host")
    assert host == result.total_ns + int(result.ttft_ns.sum())
    carried = sum(e.bytes for e in result.timeline if e.stream == "link")
    issued = sum(result.count(c, p) for c in (Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED) for p in (0, 1))
    assert carried <= issued * result.layer_bytes[0]


@pytest.mark.integration
def test_chosen_requests_run_alone_in_the_given_order():
    trace = make_trace(SHAPE, requests=3, prompt=9, tokens=24, seed=1)
    profile = make_profile(SHAPE)
    both = simulate(trace, profile, SHAPE, Settings(), (3,) * 4, [2, 0])
    first = simulate(trace, profile, SHAPE, Settings(), (3,) * 4, [2])
    assert both.token_ns[:24].tolist() == first.token_ns.tolist()
    assert both.tokens == 48


@pytest.mark.unit
def test_what_does_not_belong_together_is_refused():
    trace, profile = make_trace(SHAPE, depths=1), make_profile(SHAPE)

    def refused(match, settings=None, shape=SHAPE, capacity=(1,) * 4, requests=None, trace=trace):
        with pytest.raises(MismatchError, match=match):
            simulate(trace, profile, shape, settings or Settings(), capacity, requests)

    refused("gate at depth 2: it holds gate 1", Settings(predictor="gate", prefetch_depth=2))
    refused("3 wide, prefetch_width is 4", Settings(prefetch_width=4, **GATE))
    refused("cpu_threads 7", Settings(miss_action="cpu", cpu_threads=7))
    refused("model shape", shape=make_shape())
    refused("capacity has 1", capacity=(1,))
    refused("request 9 is not in it", requests=[9])
    refused("no verify windows of draft 'ngram' with gamma 3, but plain", Settings(draft={"kind": "ngram", "gamma": 3}))
    stray = make_trace(SHAPE)
    stray.experts[0, 0, 0] = 12
    refused("outside 0..11", trace=stray)


@pytest.mark.unit
def test_result_as_json_says_where_costs_come_from():
    values = run("default", "cpu").as_dict()
    assert values["tokens"] == 72
    assert values["sources"]["attention"] == "interpolated"
    assert values["sources"]["copy"] == "measured"
    assert "experts_cpu" not in values["sources"]
