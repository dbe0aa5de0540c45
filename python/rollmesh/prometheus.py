"""A generator's counters for Prometheus, read when it is scraped. Needs prometheus_client: pip
install 'rollmesh[prometheus]'.

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(GeneratorCollector(gen, model_name="qwen3"))
    start_http_server(9000)

Names are vLLM's where they mean the same (`vllm:num_requests_running`), else `rollmesh:…`. Label:
model_name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rollmesh.errors import ConfigError, StateError

if TYPE_CHECKING:
    from rollmesh.generator import Generator

# Key of Generator.metrics() → name, what it is. Counters get `_total` from prometheus_client.
GAUGES = {
    "running": ("vllm:num_requests_running", "samples that run"),
    "waiting": ("vllm:num_requests_waiting", "samples that wait to be scheduled"),
    "kv_usage": ("vllm:kv_cache_usage_perc", "pages of the KV cache in use, in [0, 1]"),
    "version": ("rollmesh:weight_version", "version of the serving weights; -1: none"),
    "weight_bytes": ("rollmesh:weight_bytes", "memory of one version of the weights"),
    "kv_bytes": ("rollmesh:kv_cache_bytes", "memory of the KV cache"),
}
COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "tokens of prompts"),
    "generated_tokens": ("vllm:generation_tokens", "tokens generated"),
    "preemptions": ("vllm:num_preemptions", "samples that had to give their pages back"),
    "cached_tokens": ("rollmesh:prompt_tokens_cached", "tokens of prompts whose KV was reused"),
    "steps": ("rollmesh:engine_steps", "engine steps"),
    "forward_seconds": ("rollmesh:forward_seconds", "seconds in forward passes"),
    "comm_bytes": ("rollmesh:exchanged_bytes", "bytes that ranks of this process exchanged"),
}


class GeneratorCollector:
    """A collector of prometheus_client for one generator, whose metrics it reads at each scrape: a
    scrape waits for the step that runs. A closed generator has no samples. ConfigError without
    prometheus_client."""

    def __init__(self, generator: Generator, model_name: str = "rollmesh"):
        try:
            from prometheus_client import core
        except ImportError as error:
            raise ConfigError(
                "expected prometheus_client, which is not installed: pip install "
                "'rollmesh[prometheus]'"
            ) from error
        self._families, self._generator, self._model_name = core, generator, model_name

    def describe(self) -> list[Any]:
        """Nothing: names are told by collect."""
        return []

    def collect(self) -> Iterator[Any]:
        try:
            metrics = self._generator.metrics()
        except StateError:
            return
        metrics["version"] = -1 if metrics["version"] is None else metrics["version"]
        for kind, table in (
            (self._families.GaugeMetricFamily, GAUGES),
            (self._families.CounterMetricFamily, COUNTERS),
        ):
            for key, (name, text) in table.items():
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self._model_name], float(metrics[key]))
                yield family
