"""Metrics for Prometheus, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..engine import HistogramData, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GAUGES = {
    "queued_sequences": "Sequences that wait to start, or to continue after a preemption.",
    "running_sequences": "Sequences that own blocks of the cache.",
    "blocks_used": "Blocks of the cache that sequences use.",
    "blocks_cached": "Unused blocks that hold a prefix.",
    "blocks_free": "Blocks that hold nothing.",
}
_COUNTERS = {
    "prefix_queried_tokens": "Tokens of prompts that were looked up in the prefix cache.",
    "prefix_hit_tokens": "Tokens of prompts that were found in the prefix cache.",
    "preemptions": "How often a sequence gave up its blocks.",
    "steps": "Calls of the model.",
    "computed_tokens": "Tokens that the model computed, recomputed ones included.",
    "prompt_tokens": "Tokens of the prompts of sequences that got a first token.",
    "generated_tokens": "Tokens of answers.",
    "drafted_tokens": "Tokens that were computed as a guess of an answer's next tokens.",
    "accepted_tokens": "Drafted tokens that were right.",
    "rejected_requests": "Requests that found the queue full.",
}
_HISTOGRAMS = {
    "time_to_first_token": "Seconds from the arrival of a sequence to its first token.",
    "time_between_tokens": "Seconds between tokens of a sequence.",
    "step": "Seconds of a call of the model and the engine's work around it.",
    "request": "Seconds from the arrival of a sequence to its end.",
}
_FIELDS = {"step": "step_seconds", "request": "request_seconds"}


class _EngineCollector(Collector):
    """Reads the engine's statistics when Prometheus asks for them."""

    def __init__(self, stats: Callable[[], Stats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"ortolan_{name}", text, value=getattr(stats, name))
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ortolan_{name}", text, value=getattr(stats, name))
        finished = CounterMetricFamily(
            "ortolan_finished_sequences", "Sequences that ended, by reason.", labels=["reason"]
        )
        for reason, count in stats.finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, text in _HISTOGRAMS.items():
            data: HistogramData = getattr(stats, _FIELDS.get(name, name))
            yield HistogramMetricFamily(f"ortolan_{name}_seconds", text, list(_buckets(data)), sum_value=data.total)


def _buckets(data: HistogramData) -> Iterable[tuple[str, float]]:
    """Yield the upper bounds with the numbers of observations up to them."""
    total = 0
    for bound, count in zip((*map(str, data.bounds), "+Inf"), data.counts, strict=True):
        total += count
        yield bound, total


class Metrics:
    """The metrics of one application.

    Attributes:
        requests: Requests by path and status.
        active: Requests that have not ended.
    """

    def __init__(self, stats: Callable[[], Stats] | None) -> None:
        """Create metrics. stats: those of the engine, if there is one."""
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "ortolan_requests", "Requests by path and status.", ["path", "status"], registry=self._registry
        )
        self.active = Gauge("ortolan_active_requests", "Requests that have not ended.", registry=self._registry)
        if stats is not None:
            self._registry.register(_EngineCollector(stats))

    def add_encoder(self) -> EncoderMetrics:
        """Return more metrics, of embeddings and reranking."""
        return EncoderMetrics(self._registry)

    def page(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)


class EncoderMetrics:
    """The metrics of embeddings and reranking."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Create the metrics in a registry."""
        self.texts = Counter("ortolan_texts", "Texts in batches.", registry=registry)
        self.tokens = Counter("ortolan_text_tokens", "Tokens of texts in batches.", registry=registry)
        self.refused = Counter(
            "ortolan_refused_texts", "Requests refused with 429 because too many tokens waited.", registry=registry
        )
        self.waiting = Gauge("ortolan_waiting_text_tokens", "Tokens that wait when a batch starts.", registry=registry)
        self.fill = Histogram(
            "ortolan_batch_fill",
            "Tokens of a batch as a fraction of the largest batch.",
            buckets=[0.1, 0.25, 0.5, 0.75, 0.9, 1],
            registry=registry,
        )
