"""Observability of a generator: the logger "rollmesh", and Prometheus.

Input: a tiny model that is synced, generates and sleeps. Oracle: Generator.metrics(), and the text
format as prometheus_client parses it. By default the library prints and registers nothing."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import helpers
import pytest

import rollmesh as rm


@pytest.fixture
def generator() -> Iterator[rm.Generator]:
    case = helpers.Case("dense", helpers.tiny_config(False))
    with rm.Generator(
        rm.ModelSpec.from_hf(case.config), max_model_len=64, kv_cache_gib=0.01, threads=1
    ) as made:
        made.sync_weights(helpers.numpy_state_dict(case.config, 0, "float32"), 4, cast=True)
        yield made


def test_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    case = helpers.Case("dense", helpers.tiny_config(False))
    with caplog.at_level(logging.INFO, "rollmesh"):
        made = rm.Generator(
            rm.ModelSpec.from_hf(case.config), max_model_len=64, kv_cache_gib=0.01, threads=1
        )
        with made:
            made.sync_weights(helpers.numpy_state_dict(case.config, 0, "float32"), 4, cast=True)
            made.sleep("kv")
            made.wake("kv")
            with pytest.raises(rm.MissingKeyError):
                made.sync_weights({})
    told = [record.getMessage() for record in caplog.records if record.name == "rollmesh"]
    assert [line.partition(":")[0] for line in told] == ["generator", "sync", "sleep", "wake"]
    assert told[0].startswith(
        "generator: qwen3, 0.00 B parameters, bfloat16, tp=1 dp=1 ep=1, cpu ("
    )
    assert told[1].startswith("sync: version 4 serves, ")
    assert {record.levelno for record in caplog.records} == {logging.INFO}


def test_nothing_is_printed_by_default() -> None:
    script = """if True:
        import logging, sys
        import rollmesh.generator
        logging.getLogger("rollmesh").warning("a line")
        assert "prometheus_client" not in sys.modules"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_prometheus(generator: rm.Generator) -> None:
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    registry.register(rm.prometheus.GeneratorCollector(generator, model_name="tiny"))

    def scraped() -> dict[str, float]:
        families = text_string_to_metric_families(client.generate_latest(registry).decode())
        samples = [sample for family in families for sample in family.samples]
        assert {sample.labels["model_name"] for sample in samples} <= {"tiny"}
        return {sample.name: sample.value for sample in samples}

    first = scraped()
    generator.generate(
        [[1, 2, 3]] * 4, rm.SamplingParams(max_tokens=5, seed=1, ignore_eos=True), use_tqdm=False
    )
    generator.submit([[1, 2, 3]] * 2, rm.SamplingParams(max_tokens=5, seed=1, ignore_eos=True))
    second, metrics = scraped(), generator.metrics()
    assert first["vllm:generation_tokens_total"] == 0
    assert second["vllm:generation_tokens_total"] == metrics["generated_tokens"] == 20
    assert second["vllm:prompt_tokens_total"] == metrics["prompt_tokens"] == 12
    assert second["vllm:num_requests_waiting"] == metrics["waiting"] == 2
    assert second["rollmesh:weight_version"] == 4
    assert set(second) == {name for name, _ in rm.prometheus.GAUGES.values()} | {
        f"{n}_total" for n, _ in rm.prometheus.COUNTERS.values()
    }
    generator.close()
    assert scraped() == {}


def test_a_missing_cast_is_one_short_message(generator: rm.Generator) -> None:
    case = helpers.Case("dense", helpers.tiny_config(False))
    with pytest.raises(rm.DTypeError) as caught:
        generator.sync_weights(helpers.numpy_state_dict(case.config, 0, "float32"))
    message = str(caught.value)
    assert message.count("cast=True") == 3
    assert "; and " in message
    assert message.endswith(" more")
