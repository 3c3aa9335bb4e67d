"""What the gateway measures, with vLLM's names where one exists (DESIGN §11)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)


class Meters:
    """One gateway's metrics in a registry of its own."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the KVCache pool.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens whose KV was found there.")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens accepted from workers.")
        self.tokens_dropped = self._counter(
            "tokens_dropped", "Tokens of older attempts, repeats, and of ended requests."
        )
        self.resubmissions = self._counter("resubmissions", "Further attempts of requests after their first.")
        self.ttft = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.")
        self.tbt = self._histogram("inter_token_latency_seconds", "Between two tokens of a request at the gateway.")
        self.e2e = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its end.")
        usage = Gauge(
            "moonpool:kv_cache_usage_perc",
            "Share of the decode workers' KV pages in use.",
            ["model_name"],
            registry=self._registry,
        )
        self.kv_usage = usage.labels(model)
        self._success = self._labelled("request_success", "Requests that ended well.", "finished_reason")
        self._rejected = self._labelled("requests_rejected", "Requests refused by cluster or gateway.", "reason")
        self._over_quota = self._labelled("requests_over_quota", "Requests beyond a quota of their API key.", "quota")
        self._unauthenticated = self._labelled(
            "requests_unauthenticated", "Requests without a valid API key.", "reason"
        )
        self._cancelled = self._labelled("requests_cancelled", "Requests that the gateway cancelled.", "reason")
        self._http = Counter(
            "moonpool:http_requests", "HTTP requests answered.", ["path", "status"], registry=self._registry
        )

    def watch(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"moonpool:{name}", help_text, ["model_name"], registry=self._registry)
        gauge.labels(self._model).set_function(read)

    def succeeded(self, reason: str) -> None:
        self._success.labels(self._model, reason).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model, reason).inc()

    def over_quota(self, quota: str) -> None:
        self._over_quota.labels(self._model, quota).inc()

    def unauthenticated(self, reason: str) -> None:
        self._unauthenticated.labels(self._model, reason).inc()

    def cancelled(self, reason: str) -> None:
        self._cancelled.labels(self._model, reason).inc()

    def answered(self, path: str, status: int) -> None:
        self._http.labels(path, str(status)).inc()

    def statuses(self) -> dict[str, float]:
        """HTTP answers by status, of all paths."""
        return _by("status", self._http)

    def refusals(self) -> dict[str, float]:
        """By reason."""
        return _by("reason", self._rejected)

    def page(self, parts: Iterable[tuple[str, str, dict[str, float]]] = ()) -> bytes:
        """The text of /metrics. `parts`: id, kind and counters of the cluster's parts."""
        return generate_latest(self._registry) + _parts_page(parts)

    def _counter(self, name: str, help_text: str) -> Counter:
        return Counter(f"moonpool:{name}", help_text, ["model_name"], registry=self._registry).labels(self._model)

    def _labelled(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(f"moonpool:{name}", help_text, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, help_text: str) -> Histogram:
        every = Histogram(f"moonpool:{name}", help_text, ["model_name"], registry=self._registry, buckets=SECONDS)
        return every.labels(self._model)


def _by(label: str, counter: Counter) -> dict[str, float]:
    """Its values, added up for each value of the label."""
    found: dict[str, float] = {}
    for sample in (sample for metric in counter.collect() for sample in metric.samples):
        if sample.name.endswith("_total"):
            name = sample.labels[label]
            found[name] = found.get(name, 0.0) + sample.value
    return found


def _parts_page(parts: Iterable[tuple[str, str, dict[str, float]]]) -> bytes:
    """`moonpool:node_blocks{node="node-0"}`: a part's kind, what it counts, which part."""
    families: dict[str, GaugeMetricFamily] = {}
    for part, kind, values in parts:
        for name, value in sorted(values.items()):
            metric = f"moonpool:{kind}_" + re.sub(r"[^a-z0-9_]", "_", name.lower())
            if metric not in families:
                families[metric] = GaugeMetricFamily(metric, f"Of each {kind}, as it reports it.", labels=[kind])
            families[metric].add_metric([part], value)
    registry = CollectorRegistry()
    for family in families.values():
        registry.register(_Fixed(family))
    return generate_latest(registry)


class _Fixed:
    """A collector of one family that is already made."""

    def __init__(self, family: GaugeMetricFamily) -> None:
        self._family = family

    def collect(self) -> Iterable[GaugeMetricFamily]:
        return [self._family]
