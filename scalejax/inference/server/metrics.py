"""What Prometheus reads of a server: vLLM's names, so that dashboards made for it show this one."""

from collections.abc import Callable, Iterable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from scalejax.inference.requests import LoopStats

_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40)
_REQUEST_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_ENDS = ("stop", "length", "error", "abort")
_GAUGES = {
    "num_requests_running": ("Continuations in slots.", "running"),
    "num_requests_waiting": ("Requests that have not begun, or were put back.", "waiting"),
    "kv_cache_usage_perc": ("Share of the KV cache in use, 0 to 1.", "kv_usage"),
}
_COUNTERS = {
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", "prefix_queries"),
    "prefix_cache_hits": ("Prompt tokens found in it.", "prefix_hits"),
    "prompt_tokens": ("Prompt tokens read.", "prompt_tokens"),
    "generation_tokens": ("Tokens generated.", "generation_tokens"),
    "num_preemptions": ("Requests put back for want of KV cache.", "preemptions"),
    "rows_scored": ("Rows scored.", "rows"),
    "batches_scored": ("Batches in which they were.", "batches"),
    "compilations": ("Programs compiled since the warm-up; 0 is what is wanted.", "compilations"),
}
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST


class Metrics:
    """Those of one server, in a registry of its own.

    Args:
      stats: Of its loop, now.
      model: The label model_name of all of them.
      prefix: Of their names: "scalejax", or "vllm".
    """

    def __init__(self, stats: Callable[[], LoopStats], *, model: str, prefix: str) -> None:
        self._stats, self._model, self._prefix = stats, model, prefix
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(self)
        self._ended = prometheus_client.Counter(
            f"{prefix}:request_success",
            "Continuations that ended, by why.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in _ENDS:
            self._ended.labels(model, reason)
        self.first_token_s = self._histogram("time_to_first_token_seconds", "From request to token.", _FIRST_TOKEN_S)
        self.between_tokens_s = self._histogram("inter_token_latency_seconds", "From token to token.", _TOKEN_S)
        self.request_s = self._histogram("e2e_request_latency_seconds", "From request to end.", _REQUEST_S)
        self.queued_s = self._histogram("request_queue_time_seconds", "Until a request began.", _REQUEST_S)

    def ended(self, reason: str) -> None:
        """Counts a continuation: "stop", "length", "error" or "abort"."""
        self._ended.labels(self._model, reason).inc()

    def text(self) -> bytes:
        """In the form that Prometheus reads."""
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        """For the registry: what the loop counts."""
        stats = self._stats()
        for families, kind in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, (help_, field) in families.items():
                if not hasattr(stats, field):  # of another kind of model
                    continue
                family = kind(f"{self._prefix}:{name}", help_, labels=["model_name"])
                family.add_metric([self._model], getattr(stats, field))
                yield family

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
        made = prometheus_client.Histogram(
            f"{self._prefix}:{name}", help_, ["model_name"], buckets=buckets, registry=self._registry
        )
        return made.labels(self._model)
