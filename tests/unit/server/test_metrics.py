"""Names, labels and arithmetic of the metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serve_llm.common.types import (
    Adapter,
    EngineCoreRequest,
    EPLBStats,
    FinishReason,
    OffloadStats,
    Sampling,
    SchedulerStats,
)
from serve_llm.server.metrics.histogram import Histogram
from serve_llm.server.metrics.meter import ChoiceTimes, Clock, Meter
from serve_llm.server.metrics.usage import MAX_LABELS, OTHERS, UsageMeter
from support.asgi import Call, Reply
from support.serving import Served

Serve = Callable[..., Served]

NAMES = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "num_requests_waiting_by_reason": "gauge",
    "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens_by_source": "counter",
    "forced_tokens": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "spec_decode_num_accepted_tokens_per_pos": "counter",
    "kv_offload_blocks": "gauge",
    "kv_offload_bytes": "gauge",
    "kv_offload_hits": "counter",
    "kv_offload_hit_bytes": "counter",
    "kv_offload_stored": "counter",
    "kv_offload_stored_bytes": "counter",
    "kv_offload_evicted": "counter",
    "kv_offload_corrupt": "counter",
    "kv_offload_errors": "counter",
    "eplb_placements": "counter",
    "eplb_moved_experts": "counter",
    "eplb_moved_bytes": "counter",
    "eplb_balancedness": "gauge",
    "replayed_requests": "counter",
    "replayed_tokens": "counter",
    "restarts": "counter",
    "request_success": "counter",
    "requests_refused": "counter",
    "ignored_fields": "counter",
    "http_requests": "counter",
    "stored_responses": "gauge",
    "stored_response_bytes": "gauge",
    "evicted_responses": "counter",
    "front_ends": "gauge",
    "front_end_restarts": "counter",
    "engines_ready": "gauge",
    "batch_requests_running": "gauge",
    "batch_requests": "counter",
    "key_requests": "counter",
    "key_prompt_tokens": "counter",
    "key_generation_tokens": "counter",
    "adapter_requests": "counter",
    "adapter_prompt_tokens": "counter",
    "adapter_generation_tokens": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_prompt_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_num_preemptions": "histogram",
    "iteration_tokens_total": "histogram",
    "recovery_seconds": "histogram",
    "cache_config_info": "gauge",
}


VLLM_NAMES = {  # only served with its prefix
    "gpu_cache_usage_perc": "gauge",
    "time_per_output_token_seconds": "histogram",
    "engine_sleep_state": "gauge",
    "prompt_tokens_cached": "counter",
    "kv_offload_load_bytes": "counter",
    "kv_offload_store_bytes": "counter",
}
OF_SERVER = ("requests_refused", "ignored_fields", "http_requests", "stored_responses", "stored_response_bytes")
OF_SERVER += ("evicted_responses", "batch_requests_running", "batch_requests", "front_ends", "front_end_restarts")
OF_SERVER += ("engines_ready",)
OF_SERVER += tuple(name for name in NAMES if name.startswith(("key_", "adapter_")))


@pytest.mark.parametrize("prefix", ["serve_llm_", "vllm:"])
def test_names_and_labels(serve: Serve, prefix: str) -> None:
    served = serve(options={"metrics_prefix": prefix, "served_model_name": "m"})
    served.get("/health")
    reply = served.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = [one for one in text_string_to_metric_families(reply.content.decode()) if one.name.startswith(prefix)]
    expected = NAMES | VLLM_NAMES if prefix == "vllm:" else NAMES
    assert {family.name.removeprefix(prefix): family.type for family in families} == expected
    for family in families:
        assert family.samples and family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == served.model.names[0]
            is_of_server = family.name.removeprefix(prefix) in OF_SERVER
            assert sample.labels.get("engine") == (None if is_of_server else "0")
    config = next(one for one in families if one.name.endswith("cache_config_info")).samples[0].labels
    assert (config["block_size"], config["num_gpu_blocks"]) == ("16", "256")
    assert (config["kv_cache_size_tokens"], config["kv_cache_max_concurrency"]) == ("4096", "2.00")
    reasons = next(one for one in families if one.name.endswith("request_success")).samples
    assert {sample.labels["finished_reason"] for sample in reasons} == {
        "stop",
        "length",
        "repetition",
        "abort",
        "error",
    }


def test_the_documentation_lists_every_name(served: Served) -> None:
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    exposed = {name + ("_total" if kind == "counter" else "") for name, kind in NAMES.items()}
    assert documented == exposed


def test_keys_are_counted_apart(serve: Serve) -> None:
    served = serve(options={"api_key": ["hidden-1", "hidden-2"]})
    expected = {}
    for index, key in enumerate(("hidden-1", "hidden-2")):
        headers = {"authorization": f"Bearer {key}"}
        bodies = [{"prompt": "a b", "max_tokens": 3 + index, "n": 2}] * (index + 1)
        usages = [served.post("/v1/completions", body, headers).json()["usage"] for body in bodies]
        prompt, generated = (sum(usage[name] for usage in usages) for name in ("prompt_tokens", "completion_tokens"))
        expected |= {("requests", str(index)): 2 * len(bodies), ("prompt_tokens", str(index)): prompt}
        expected[("generation_tokens", str(index))] = generated
    text = served.get("/metrics", {"authorization": "Bearer hidden-1"}).content.decode()
    found = re.findall(r'^serve_llm_key_(\w+)_total{key="(\d)".*} (\S+)$', text, re.MULTILINE)
    assert {(name, key): float(value) for name, key, value in found} == expected
    assert "hidden" not in text


def test_the_number_of_labels_is_bounded() -> None:
    usage = UsageMeter()
    for number in range(300):
        adapter = Adapter(name=f"adapter-{number}", directory="", digest="")
        usage.count(
            EngineCoreRequest(id=number, prompt_ids=[1, 2], sampling=Sampling(max_tokens=9, seed=1), adapter=adapter), 3
        )
    counted = dict(usage.by_adapter.items())
    assert len(counted) == MAX_LABELS + 1 and counted[OTHERS].num_requests == 300 - MAX_LABELS
    assert sum(one.prompt_tokens for one in counted.values()) == 600
    usage.count(EngineCoreRequest(id=0, prompt_ids=[1, 2], sampling=Sampling(max_tokens=9, seed=1)), None)
    assert dict(usage.by_adapter.items()) == counted
    by_key = dict(usage.by_key.items())["0"]
    assert (by_key.num_requests, by_key.prompt_tokens, by_key.generation_tokens) == (301, 600, 900)


def test_an_adapter_that_is_no_longer_loaded_makes_room() -> None:
    usage = UsageMeter()
    loaded = {f"adapter-{number}" for number in range(MAX_LABELS)}
    usage.watch_adapters(loaded)

    def count(name: str) -> None:
        adapter = Adapter(name=name, directory="", digest="")
        usage.count(
            EngineCoreRequest(id=1, prompt_ids=[1], sampling=Sampling(max_tokens=9, seed=1), adapter=adapter), 3
        )

    for name in sorted(loaded):
        count(name)
    loaded.add("new")
    count("new")
    assert dict(usage.by_adapter.items())[OTHERS].num_requests == 1
    loaded.discard("adapter-7")
    count("adapter-7")  # a request that had started before
    count("new")
    counted = dict(usage.by_adapter.items())
    assert "adapter-7" not in counted and counted["new"].num_requests == 1 and len(counted) == MAX_LABELS + 1


def test_gauges_show_the_newest_engine_stats(served: Served) -> None:
    drafts = {"num_drafts": 7, "num_draft_tokens": 21, "num_accepted_tokens": 9, "num_forced_tokens": 4}
    served.engine.stats = SchedulerStats(3, 2, 0.25, 100, 40, 5, **drafts, num_deferred=1)
    text = served.get("/metrics").content.decode()
    waiting = dict(
        re.findall(r'^serve_llm_num_requests_waiting_by_reason{.*reason="(\w+)"} (\S+)$', text, re.MULTILINE)
    )
    assert waiting == {"capacity": "1.0", "deferred": "1.0"}
    for name, value in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.25),
        ("prefix_cache_queries_total", 100),
        ("prefix_cache_hits_total", 40),
        ("num_preemptions_total", 5),
        ("spec_decode_num_drafts_total", 7),
        ("spec_decode_num_draft_tokens_total", 21),
        ("spec_decode_num_accepted_tokens_total", 9),
        ("forced_tokens_total", 4),
    ):
        assert re.search(rf"^serve_llm_{name}{{[^}}]*}} {float(value)}$", text, re.MULTILINE), name
    assert 'source="none"' in text
    served.engine.ready = False
    assert "cache_config_info" not in served.get("/metrics").content.decode()


def test_offloaded_blocks_by_tier(served: Served) -> None:
    served.engine.stats = SchedulerStats(
        offload_memory=OffloadStats(num_blocks=3, num_hits=5), offload_disk=OffloadStats(9)
    )
    text = served.get("/metrics").content.decode()
    for name, tier, value in (
        ("blocks", "memory", 3),
        ("hits_total", "memory", 5),
        ("blocks", "disk", 9),
        ("hits_total", "disk", 0),
    ):
        assert re.search(rf'^serve_llm_kv_offload_{name}{{.*tier="{tier}".*}} {float(value)}$', text, re.MULTILINE)


def test_the_expert_load_balancer(served: Served) -> None:
    served.engine.stats = SchedulerStats(
        eplb=EPLBStats(3, 7, 7000, mean_rows=60.0, busiest_rows=120.0, busiest_rows_after=80.0)
    )
    found = dict(re.findall(r"^serve_llm_eplb_(\w+{.*}) (\S+)$", served.get("/metrics").content.decode(), re.MULTILINE))
    labels = f'engine="0",model_name="{served.model.names[0]}"'
    assert found == {
        f"placements_total{{{labels}}}": "3.0",
        f"moved_experts_total{{{labels}}}": "7.0",
        f"moved_bytes_total{{{labels}}}": "7000.0",
        f'balancedness{{{labels},placement="before"}}': "0.5",
        f'balancedness{{{labels},placement="after"}}': "0.75",
    }


def test_every_engine_has_its_own_samples_which_add_up_to_the_usage(serve: Serve) -> None:
    served = serve(num_engines=2)
    usages = [served.complete(prompt=["a", "b", "c"], n=2, max_tokens=5).json()["usage"] for _ in range(3)]
    served.engines[0].stats = SchedulerStats(1, 0, 0.5, 70, 7)
    served.engines[1].stats = SchedulerStats(2, 4, 0.25, 100, 40)
    samples: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").content.decode()):
        for sample in family.samples:
            if "engine" in sample.labels and sample.labels.get("le", "+Inf") == "+Inf":
                name = sample.name.removeprefix("serve_llm_") + sample.labels.get("finished_reason", "")
                for label in ("reason", "tier", "source", "position", "placement"):
                    name += sample.labels.get(label, "")
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


def read_samples(served: Served) -> dict[str, float]:
    """Return the samples of the first engine and of the server, by name without the prefix and by their last label's
    value."""
    found = {}
    for family in text_string_to_metric_families(served.get("/metrics").content.decode()):
        for sample in family.samples:
            label = sample.labels.get("status") or sample.labels.get("le", "")
            found[sample.name.removeprefix("serve_llm_") + label] = sample.value
    return found


def test_what_a_request_asks_for_and_its_longest_choice(serve: Serve) -> None:
    served = serve("one two three")
    served.complete(prompt=["a", "b"], n=3, max_tokens=2)
    served.complete(max_tokens=3)
    samples = read_samples(served)
    assert (samples["request_params_n_count"], samples["request_params_n_sum"]) == (3, 7)
    assert (samples["request_params_max_tokens_count"], samples["request_params_max_tokens_sum"]) == (7, 15)
    longest = "request_max_num_generation_tokens"
    assert (samples[f"{longest}_count"], samples[f"{longest}_sum"]) == (3, 7)


def test_times_of_a_choice_add_up() -> None:
    times = iter([0.0, 10.0, 12.0, 13.0])
    meter = Meter(Clock(lambda: next(times)))
    choice = ChoiceTimes(arrival=1.0, submitted=2.0)
    meter.count_step(SchedulerStats())
    meter.count_first_output(choice, 5.0)
    choice.last_token = meter.count_tokens(1, None)
    meter.count_step(SchedulerStats())
    choice.last_token = meter.count_tokens(1, choice.last_token)
    meter.count_finished(FinishReason.STOP, 2, 9, choice, 3)
    found = (meter.time_to_first_token, meter.queue_time, meter.prefill_time, meter.decode_time, meter.inference_time)
    assert [one.sum for one in found] == [9, 5, 3, 2, 5] and meter.request_latency.sum == 12
    assert meter.time_per_output_token.sum == 2, "one token after the first"
    unscheduled = ChoiceTimes(arrival=1.0)
    meter.clock.read = lambda: 14.0
    meter.count_finished(FinishReason.ABORT, 0, 9, unscheduled, 0)
    assert (meter.request_preemptions.sum, meter.request_preemptions.cumulative_buckets()[0]) == (3, ("0.0", 1))
    assert meter.inference_time.cumulative_buckets()[-1] == ("+Inf", 1)


def test_every_answer_is_counted_by_its_status(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "serve_llm")
    served = serve(options={"api_key": "key"})
    key = {"authorization": "Bearer key"}
    for _ in range(2):
        assert served.post("/v1/completions", {"prompt": "a secret prompt", "n": 0}, key).status == 400
    assert served.get("/v1/models").status == 401
    lines = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"after .*", "", line) for line in lines] == [
        "POST '/v1/completions': status 400 ",
        "POST '/v1/completions': status 400 ",
        "GET '/v1/models': status 401 ",
    ]
    assert served.get("/health").status == 200 and len(caplog.records) == 3
    text = served.get("/metrics", key).content.decode()
    counts = dict(re.findall(r'http_requests_total{.*status="(\d+)"} (\S+)', text))
    assert counts == {"400": "2.0", "401": "1.0", "200": "1.0"}


def test_stored_responses_are_counted(serve: Serve) -> None:
    served = serve(options={"responses_store": "memory", "limit": ("stored-responses=2",)})
    ids = [served.post("/v1/responses", {"input": "Hi"}).json()["id"] for _ in range(3)]

    def read() -> dict[str, float]:
        found = re.findall(
            r"^serve_llm_(stored_\w+|evicted_\w+){.*} (.+)$", served.get("/metrics").content.decode(), re.M
        )
        return {name: float(value) for name, value in found}

    before = read()
    assert (before["stored_responses"], before["evicted_responses_total"]) == (2, 1)

    async def delete() -> Reply:
        return await Call(served.app, "DELETE", f"/v1/responses/{ids[-1]}").reply()

    assert asyncio.run(delete()).status == 200
    after = read()
    assert (after["stored_responses"], after["evicted_responses_total"]) == (1, 1)
    assert 0 < after["stored_response_bytes"] < before["stored_response_bytes"]


@given(st.lists(st.floats(0, 100), max_size=20))
def test_histogram(values: list[float]) -> None:
    histogram = Histogram((1, 10, 50))
    for value in values:
        histogram.observe(value)
    expected = [(str(float(bound)), sum(value <= bound for value in values)) for bound in (1, 10, 50)]
    assert histogram.cumulative_buckets() == [*expected, ("+Inf", len(values))]
    assert histogram.sum == pytest.approx(sum(values))


def test_several_tokens_at_once_share_the_time_between_steps() -> None:
    times = iter([0.0, 10.0, 10.6])
    meter = Meter(Clock(lambda: next(times)))
    meter.count_step(SchedulerStats(step_tokens=9))
    first = meter.count_tokens(1, None)
    meter.count_step(SchedulerStats())
    assert meter.count_tokens(3, first) == 10.6
    assert meter.generation_tokens == 4
    assert meter.inter_token_latency.cumulative_buckets()[-1] == ("+Inf", 3)
    assert meter.inter_token_latency.sum == pytest.approx(0.6)
    assert meter.step_tokens.cumulative_buckets()[-1] == ("+Inf", 1), "a step without tokens does not count"


def test_the_example_in_docs_has_all_metrics(served: Served) -> None:
    example = (Path(__file__).parents[3] / "docs" / "metrics-example.txt").read_text(encoding="utf-8")
    found = (served.get("/metrics").content.decode(), example)
    served_types, example_types = (set(re.findall(r"^# TYPE serve_llm_.*", text, re.MULTILINE)) for text in found)
    assert served_types == example_types
