"""Prometheus metrics under vLLM's names, so that dashboards and autoscalers made for it read this server too.

`Metrics(router, name).text()` is what /metrics says. Source of the names: vLLM's documentation of its production
metrics. Leaves out what this engine has not (speculation, LoRA).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

from gnomon.serve.engine import Reason
from gnomon.serve.router import Router

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
E2E_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """The metrics of a server."""

    def __init__(self, router: Router, name: str) -> None:
        import prometheus_client as prometheus
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self.registry = prometheus.CollectorRegistry()
        self.latest = prometheus.generate_latest
        self.content_type = prometheus.CONTENT_TYPE_LATEST
        own: dict[str, Any] = {"registry": self.registry, "labelnames": ["model_name"]}

        def histogram(what: str, text: str, buckets: Sequence[float]) -> Any:
            return prometheus.Histogram(f"vllm:{what}", text, buckets=buckets, **own).labels(name)

        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", TTFT_S)
        self.itl = histogram("inter_token_latency_seconds", "Between tokens.", TPOT_S)
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean of a request.", TPOT_S)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", E2E_S)
        self.prompt = histogram("request_prompt_tokens", "Tokens of prompts.", COUNTS)
        self.generation = histogram("request_generation_tokens", "Tokens of answers.", COUNTS)
        self.prompt_total = prometheus.Counter("vllm:prompt_tokens", "Tokens of prompts.", **own).labels(name)
        self.generation_total = prometheus.Counter("vllm:generation_tokens", "Tokens of answers.", **own).labels(name)
        self.success = prometheus.Counter(
            "vllm:request_success", "Requests by why they ended.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        for reason in get_args(Reason):  # a rate needs a 0 to begin at, as vLLM's has
            self.success.labels(name, reason)
        self.refused = prometheus.Counter("gnomon:requests_refused", "Requests refused with 429.", **own).labels(name)
        self.name = name

        class Now:
            """What workers say when it is asked for."""

            def collect(self) -> Any:
                stats = router.stats()

                def gauge(what: str, text: str, value: float) -> Any:
                    family = GaugeMetricFamily(what, text, labels=["model_name"])
                    family.add_metric([name], value)
                    return family

                def counter(what: str, text: str, value: float) -> Any:
                    family = CounterMetricFamily(what, text, labels=["model_name"])
                    family.add_metric([name], value)
                    return family

                yield gauge("vllm:num_requests_running", "Requests with blocks.", sum(s.running for s in stats))
                yield gauge("vllm:num_requests_waiting", "Requests without.", sum(s.waiting for s in stats))
                used = sum(s.kv_used for s in stats) / max(1, len(stats))
                yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", used)
                yield counter("vllm:num_preemptions", "Requests that lost blocks.", sum(s.preemptions for s in stats))
                yield counter("vllm:prefix_cache_queries", "Prompt tokens.", sum(s.asked_tokens for s in stats))
                yield counter("vllm:prefix_cache_hits", "Of them found.", sum(s.found_tokens for s in stats))
                yield counter("gnomon:worker_deaths", "Workers that were started again.", router.deaths)

        self.registry.register(Now())  # type: ignore[arg-type]

    def text(self) -> bytes:
        """Writes the metrics in Prometheus' format."""
        return self.latest(self.registry)

    def request(self, prompt_tokens: int) -> AnswerTimes:
        """One answer that begins to be waited for."""
        return AnswerTimes(self, prompt_tokens)


class AnswerTimes:
    """The times of one answer, as they come."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self.metrics, self.prompt_tokens = metrics, prompt_tokens
        self.arrival_s = self.last_s = time.monotonic()
        self.first_s = 0.0
        self.tokens = 0

    def add_tokens(self, tokens: int, reason: str | None) -> None:
        """So many more tokens; reason: why it ended."""
        m, now = self.metrics, time.monotonic()
        if tokens and not self.tokens:
            self.first_s = now
            m.ttft.observe(now - self.arrival_s)
        elif tokens:
            # Tokens that come together count once, with their mean.
            m.itl.observe((now - self.last_s) / tokens)
        self.last_s = now
        self.tokens += tokens
        m.generation_total.inc(tokens)
        if reason is None:
            return
        m.success.labels(m.name, reason).inc()
        m.e2e.observe(now - self.arrival_s)
        m.prompt.observe(self.prompt_tokens)
        m.generation.observe(self.tokens)
        m.prompt_total.inc(self.prompt_tokens)
        if self.tokens > 1:
            # Without the first token, whose time is the prompt's.
            m.tpot.observe((now - self.first_s) / (self.tokens - 1))
