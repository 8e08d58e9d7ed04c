"""Names, labels and arithmetic of the metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_llm.engine.types import Stats
from serve_llm.engine.wire import Step
from serve_llm.server.metrics import Histogram, Meter
from support.serving import Served

Serve = Callable[..., Served]

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "replayed_requests": "counter",
    "replayed_tokens": "counter",
    "restarts": "counter",
    "request_success": "counter",
    "requests_refused": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "iteration_tokens_total": "histogram",
    "recovery_seconds": "histogram",
    "cache_config_info": "gauge",
}


@pytest.mark.parametrize("prefix", ["serve_llm_", "vllm:"])
def test_names_and_labels(serve: Serve, prefix: str) -> None:
    served = serve(options={"metrics_prefix": prefix, "served_model_name": "m"})
    reply = served.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = [one for one in text_string_to_metric_families(reply.content.decode()) if one.name.startswith(prefix)]
    assert {family.name.removeprefix(prefix): family.type for family in families} == NAMES
    for family in families:
        assert family.samples and family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == served.model.names[0]
            is_refusal = sample.name == f"{prefix}requests_refused_total"  # no engine has seen it
            assert sample.labels.get("engine") == (None if is_refusal else "0")
    config = next(one for one in families if one.name.endswith("cache_config_info")).samples[0].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "256")
    reasons = next(one for one in families if one.name.endswith("request_success")).samples
    assert {sample.labels["finished_reason"] for sample in reasons} == {"stop", "length", "abort", "error"}


def test_the_documentation_lists_every_name(served: Served) -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    exposed = {name + ("_total" if kind == "counter" else "") for name, kind in NAMES.items()}
    assert documented == exposed


def test_the_engines_state_is_shown_as_it_is_now(served: Served) -> None:
    served.engine.stats = Stats(3, 2, 0.25, 100, 40, 5)
    text = served.get("/metrics").content.decode()
    for name, value in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.25),
        ("prefix_cache_queries_total", 100),
        ("prefix_cache_hits_total", 40),
        ("num_preemptions_total", 5),
    ):
        assert re.search(rf"^serve_llm_{name}{{[^}}]*}} {float(value)}$", text, re.MULTILINE), name
    served.engine.ready = False
    assert "cache_config_info" not in served.get("/metrics").content.decode()


def test_every_engine_has_its_own_samples_and_their_sum_is_what_was_delivered(serve: Serve) -> None:
    served = serve(num_engines=2)
    usages = [served.complete(prompt=["a", "b", "c"], n=2, max_tokens=5).json()["usage"] for _ in range(3)]
    served.engines[0].stats = Stats(1, 0, 0.5, 70, 7)
    served.engines[1].stats = Stats(2, 4, 0.25, 100, 40)
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").content.decode()):
        for sample in family.samples:
            if "engine" in sample.labels and sample.labels.get("le", "+Inf") == "+Inf":
                name = sample.name.removeprefix("serve_llm_") + sample.labels.get("finished_reason", "")
                name += sample.labels.get("reason", "")
                samples.setdefault(name, []).append(sample.value)
                assert sample.labels["engine"] == str(len(samples[name]) - 1)
    assert all(len(values) == 2 for values in samples.values())
    assert samples["num_requests_running"] == [1, 2] and samples["num_requests_waiting"] == [0, 4]
    assert samples["kv_cache_usage_perc"] == [0.5, 0.25] and samples["prefix_cache_hits_total"] == [7, 40]
    for name, key in (("prompt_tokens", "prompt_tokens"), ("generation_tokens", "completion_tokens")):
        assert sum(samples[f"{name}_total"]) == sum(usage[key] for usage in usages)
        assert samples[f"{name}_total"] == samples[f"request_{name}_sum"] and all(samples[f"{name}_total"])
    for engine, count in zip(served.engines, samples["request_success_totallength"], strict=True):
        assert count == len(engine.submitted) > 0
    assert sum(samples["time_to_first_token_seconds_count"]) == 18


@given(st.lists(st.floats(0, 100), max_size=20))
def test_histogram(values: list[float]) -> None:
    histogram = Histogram((1, 10, 50))
    for value in values:
        histogram.observe(value)
    expected = [(str(float(bound)), sum(value <= bound for value in values)) for bound in (1, 10, 50)]
    assert histogram.buckets() == [*expected, ("+Inf", len(values))]
    assert histogram.sum == pytest.approx(sum(values))


def test_several_tokens_at_once_share_the_time_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter()
    times = iter([10.0, 10.6])
    monkeypatch.setattr(meter, "clock", lambda: next(times), raising=False)
    meter.count_step(Step([], Stats(step_tokens=9)))
    first = meter.count_tokens(1, None)
    meter.count_step(Step([], Stats()))
    assert meter.count_tokens(3, first) == 10.6
    assert meter.generation_tokens == 4
    assert meter.inter_token_latency.buckets()[-1] == ("+Inf", 3)
    assert meter.inter_token_latency.sum == pytest.approx(0.6)
    assert meter.step_tokens.buckets()[-1] == ("+Inf", 1), "a step that computed nothing is none"
