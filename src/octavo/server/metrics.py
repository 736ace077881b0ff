"""The figures at /metrics, for Prometheus: what requests experienced (histograms), and what the engine reports of itself.

Owner of its registry (the process-wide default one is left alone) and of the recent pace of finished requests.
Labels hold the model's name and words from closed sets, nothing that comes with a request.
Not here: the engine's counters (engine/metrics.py), the log.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.metrics import EngineStats
from octavo.server.request_record import RequestRecord

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)
_BATCH_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
#: Seconds that Retry-After may promise.
_MIN_RETRY, _MAX_RETRY = 1, 30


@dataclass(frozen=True, slots=True)
class EngineView:
    """How the metrics read the engine, at the moment somebody asks."""

    stats: Callable[[], EngineStats]
    restarts: Callable[[], int]
    healthy: Callable[[], bool]


class ServerMetrics:
    def __init__(self, model: str, engine: EngineView) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second gauge for every series, of no use here
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"octavo_{name}", help, ["model"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._ttft = histogram("time_to_first_token_seconds", "From the arrival of a request to its first token", _SECONDS)
        self._itl = _TokenLatencies(model)
        self.registry.register(self._itl)
        self._e2el = histogram("request_latency_seconds", "From the arrival of a request to the end of its reply", _SECONDS)
        self._queue = histogram("request_queue_seconds", "From the arrival of a request to the first step with it", _SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._generation = histogram("request_generation_tokens", "Tokens generated for a request", _TOKENS)
        self._choices = Counter("octavo_choices", "Choices that ended, by reason", ["model", "finish_reason"], registry=self.registry)
        self._requests = Counter(
            "octavo_requests", "Generation requests, by HTTP status (499: the client hung up)", ["model", "status"], registry=self.registry
        )
        self.registry.register(_EngineCollector(model, engine))
        self._pace = _Pace()

    def token_latency(self, seconds: float) -> None:
        self._itl.observe(seconds)

    def add(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(self._model, str(record.status)).inc()
        for reason in record.finish_reasons:
            self._choices.labels(self._model, reason).inc()
        if record.num_prompt_tokens == 0:  # it never came to the engine
            return
        self._pace.finished()
        self._prompt.observe(record.num_prompt_tokens)
        self._generation.observe(record.num_output_tokens)
        self._e2el.observe(time.perf_counter() - record.arrival)
        for seconds, metric in ((record.ttft, self._ttft), (record.queue_time, self._queue)):
            if seconds is not None:
                metric.observe(seconds)

    def retry_after(self) -> int:
        """Seconds after which a place in a full queue has probably become free: requests have recently ended at that pace."""
        return min(_MAX_RETRY, max(_MIN_RETRY, math.ceil(self._pace.interval)))

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class _Pace:
    """Mean seconds between two finished requests, the recent ones weighing most."""

    def __init__(self) -> None:
        self.interval = 0.0
        self._last = time.monotonic()

    def finished(self) -> None:
        now = time.monotonic()
        self.interval += 0.1 * (now - self._last - self.interval)
        self._last = now


class _TokenLatencies(Collector):
    """A histogram for one thread that costs a tenth of prometheus_client's: it is counted in for every token."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(_TOKEN_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_TOKEN_SECONDS, seconds)] += 1
        self._sum += seconds

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        metric = HistogramMetricFamily("octavo_inter_token_latency_seconds", "From one token of a choice to its next", labels=["model"])
        bounds = [*map(str, _TOKEN_SECONDS), "+Inf"]
        metric.add_metric([self._model], list(zip(bounds, accumulate(map(float, self._counts)), strict=True)), self._sum)
        yield metric


class _EngineCollector(Collector):
    """Reads the engine when asked. Its counters begin at 0 again when the engine's process was restarted."""

    def __init__(self, model: str, engine: EngineView) -> None:
        self._labels = [model]
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        counters: tuple[tuple[str, str, float], ...] = (
            ("engine_restarts", "Times the engine's process was started again", self._engine.restarts()),
            ("engine_steps", "Steps of the engine", stats.steps),
            ("engine_steps_replayed", "Forward passes replayed by one native call", stats.steps_replayed),
            ("engine_steps_eager", "Forward passes whose operations were called one by one", stats.steps_eager),
            ("prompt_tokens", "Prompt tokens computed (not those found in the prefix cache)", stats.prompt_tokens_computed),
            ("generation_tokens", "Tokens generated", stats.tokens_sampled),
            ("prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache", stats.prefix_query_tokens),
            ("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", stats.prefix_hit_tokens),
            ("preemptions", "Requests that lost their blocks for a while", stats.preemptions),
            ("recomputed_tokens", "Tokens computed again after a preemption", stats.tokens_recomputed),
            ("prefix_waits", "Times a request waited for another one to compute a common beginning", stats.prefix_waits),
            ("refused_requests", "Requests refused because the queue was full", stats.requests_refused),
            ("promoted_requests", "Requests that had been overtaken for promote_after_steps and went first", stats.requests_promoted),
        )
        gauges: tuple[tuple[str, str, float], ...] = (
            ("engine_healthy", "1: the engine is ready and makes progress", float(self._engine.healthy())),
            ("requests_running", "Sequences that are computed", stats.running),
            ("requests_waiting", "Sequences that wait in the engine's queue", stats.waiting),
            ("waiting_tokens", "Tokens of the sequences that wait in the engine's queue", stats.waiting_tokens),
            ("kv_cache_usage_ratio", "Share of the KV pool that is held", stats.kv_usage),
        )
        for name, help, value in counters:
            counter = CounterMetricFamily(f"octavo_{name}", help, labels=["model"])
            counter.add_metric(self._labels, value)
            yield counter
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(f"octavo_{name}", help, labels=["model"])
            gauge.add_metric(self._labels, value)
            yield gauge
        batches = HistogramMetricFamily("octavo_decode_batch_size", "Sequences that got one token in the same step", labels=["model"])
        buckets, total = batch_buckets(stats.decode_batch_sizes)
        batches.add_metric(self._labels, buckets, total)
        yield batches


def batch_buckets(sizes: dict[int, int]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets and the sum, as Prometheus has them, from (batch size -> number of steps)."""
    buckets = [(str(float(bound)), float(sum(count for size, count in sizes.items() if size <= bound))) for bound in _BATCH_SIZES]
    buckets.append(("+Inf", float(sum(sizes.values()))))
    return buckets, float(sum(size * count for size, count in sizes.items()))
