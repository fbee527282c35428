"""`/metrics`: the statistics in Prometheus's text format, from a registry of the one moment."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foreload.backend.server.views import StatsView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def exposition(stats: StatsView) -> bytes:
    """All metrics; counters count since the start."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Moment(stats))
    return generate_latest(registry)


class _Moment(Collector):
    def __init__(self, stats: StatsView) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from _requests(self._stats)
        yield from _tokens(self._stats)
        yield from _layers(self._stats)


def _requests(stats: StatsView) -> Iterator[Metric]:
    requests = stats.requests
    ended = CounterMetricFamily("foreload_requests", "Requests that are over.", labels=["outcome"])
    for outcome in ("finished", "cancelled", "failed", "refused"):
        ended.add_metric([outcome], getattr(requests, outcome))
    yield ended
    present = GaugeMetricFamily("foreload_requests_present", "Requests that are not over.", labels=["state"])
    for state in ("waiting", "running", "delivering"):
        present.add_metric([state], getattr(requests, state))
    yield present


def _tokens(stats: StatsView) -> Iterator[Metric]:
    tokens = CounterMetricFamily("foreload_tokens", "Tokens fed as prompts and generated.", labels=["kind"])
    tokens.add_metric(["prompt"], stats.prompt_tokens)
    tokens.add_metric(["generated"], stats.generated_tokens)
    yield tokens
    drafts = CounterMetricFamily("foreload_drafts", "Drafted tokens of requests that are over.", labels=["fate"])
    drafts.add_metric(["accepted"], stats.drafts.accepted)
    drafts.add_metric(["rejected"], stats.drafts.drafted - stats.drafts.accepted)
    yield drafts
    for name, times, what in (
        ("foreload_tpot_seconds", stats.tpot, "Time per token after a request's first, over the latest."),
        ("foreload_ttft_seconds", stats.ttft, "Time to the first token, over the latest requests."),
    ):
        quantiles = GaugeMetricFamily(name, what, labels=["statistic"])
        for statistic in ("mean", "p50", "p95"):
            value = getattr(times, f"{statistic}_ms")
            if value is not None:
                quantiles.add_metric([statistic], value / 1e3)
        yield quantiles
    time = CounterMetricFamily("foreload_decode_thread_seconds", "Decoding thread, by what it did.", labels=["kind"])
    for kind, each in stats.total.time_ms_per_token.items():
        time.add_metric([kind], each * stats.total.tokens / 1e3)
    yield time


def _layers(stats: StatsView) -> Iterator[Metric]:
    demanded = CounterMetricFamily("foreload_experts_demanded", "In decode.", labels=["layer", "found"])
    copied = CounterMetricFamily("foreload_copied_bytes", "Experts copied in decode.", labels=["layer"])
    slots = GaugeMetricFamily("foreload_slots", "Persistent expert slots.", labels=["layer", "state"])
    for layer in stats.layers:
        name = str(layer.layer)
        for found in ("hits", "late", "misses"):
            demanded.add_metric([name, found], getattr(layer, found))
        copied.add_metric([name], layer.bytes_copied)
        slots.add_metric([name, "all"], layer.slots)
        slots.add_metric([name, "used"], layer.resident)
    yield from (demanded, copied, slots)
