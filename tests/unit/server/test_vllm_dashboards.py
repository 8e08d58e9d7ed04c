"""With --metrics-prefix vllm:, the panels of vLLM's own Grafana dashboards have data, except for those listed in
docs/metrics.md."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve_llm.common.types import Adapter, EngineCoreRequest, LoRATarget, OffloadStats, Sampling, SchedulerStats
from serve_llm.server.engines.replicas import Replicas
from serve_llm.server.metrics.http_meter import HttpMeter
from support.asgi import fetch
from support.fakes import ScriptedEngine, make_model_info
from support.front_ends import find_replicas, link
from support.serving import Served
from support.vllm_dashboards import NOT_SERVED, SERVED, VALUES

Serve = Callable[..., Served]
ROOT = Path(__file__).parents[3]
PREFIX = {"metrics_prefix": "vllm:"}
LORA = make_model_info(lora_targets={"layer": LoRATarget("layer", 12, 8)})


def read(served: Served) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return labels and values by the name of the metric, with the suffix of a counter."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(served.get("/metrics").content.decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        found[name] = [(dict(sample.labels), sample.value) for sample in family.samples]
    return found


def select(found: dict[str, list[tuple[dict[str, str], float]]], name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for labels, value in found[name] if label in labels}


def test_what_the_dashboards_ask_for_is_served(serve: Serve) -> None:
    served = serve(options=PREFIX | {"enable_lora": True}, model_info=LORA)
    assert served.complete().status == 200
    found = read(served)
    missing = [name for name in SERVED if not found.get(name)]
    assert missing == []
    labels = {name: set().union(*(sample[0] for sample in found[name])) for name in SERVED}
    assert {name: SERVED[name] - labels[name] for name in SERVED if SERVED[name] - labels[name]} == {}
    values = {key: {sample[0].get(key[1], "") for sample in found[key[0]]} for key in VALUES}
    assert {key: VALUES[key] - values[key] for key in VALUES if VALUES[key] - values[key]} == {}
    assert NOT_SERVED & set(found) == set()


def test_the_documentation_says_which_panels_stay_empty() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.partition("## vLLM's dashboards")[2].partition("\n## ")[0]
    patterns = re.findall(r"`([\w*]+)`", section)
    unnamed = [name for name in NOT_SERVED if not any(fnmatch(name.removeprefix("vllm:"), one) for one in patterns)]
    assert sorted(unnamed) == []


def test_only_this_prefix_has_the_names_of_other_servers(serve: Serve) -> None:
    served = serve()
    served.complete()
    found = read(served)
    assert "http_requests_total" not in found and "serve_llm_engine_sleep_state" not in found
    assert found["serve_llm_http_requests_total"]


def test_sources_of_prompt_tokens(serve: Serve) -> None:
    served = serve(options=PREFIX, cached_tokens=1)
    prompt_tokens = sum(served.complete(prompt="def main()", n=2).json()["usage"]["prompt_tokens"] for _ in range(3))
    found = read(served)
    by_source = select(found, "vllm:prompt_tokens_by_source_total", "source")
    assert by_source == {"local_compute": prompt_tokens - 3, "local_cache_hit": 3, "external_kv_transfer": 0}
    assert found["vllm:prompt_tokens_cached_total"][0][1] == 3
    assert prompt_tokens == found["vllm:prompt_tokens_total"][0][1] > 3
    computed = next(value for labels, value in found["vllm:request_prefill_kv_computed_tokens"] if "le" not in labels)
    assert computed == 3, "the number of prompts"


def test_draft_positions_and_offloaded_bytes(serve: Serve) -> None:
    served = serve(options=PREFIX)
    served.engine.stats = SchedulerStats(
        accepted_by_position=[5, 3, 1], offload_memory=OffloadStats(hit_bytes=70, stored_bytes=90)
    )
    found = read(served)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert select(found, name, "position") == {"0": 5, "1": 3, "2": 1}
    assert [found[f"vllm:kv_offload_{way}_bytes_total"][0][1] for way in ("load", "store")] == [70, 90]
    replica = find_replicas(served).engines[0]
    replica.mark_lost()
    replica.replace(ScriptedEngine(lambda request: [], meter=replica.meter))
    replica.engine.stats = SchedulerStats(accepted_by_position=[1, 1, 1, 1])
    assert list(select(read(served), name, "position").values()) == [6, 4, 2, 1], "counters never decrease"


def test_the_kv_cache_as_labels(serve: Serve) -> None:
    (sample,) = read(serve(options=PREFIX | {"kv_offload_memory": "3GiB", "kv_cache_dtype": "int8"}))[
        "vllm:cache_config_info"
    ]
    expected = {
        "cache_dtype": "int8",
        "gpu_memory_utilization": "0.9",
        "enable_prefix_caching": "True",
        "prefix_caching_hash_algo": "sha256",
        "kv_offloading_backend": "native",
        "kv_offloading_size": "3",
    }
    assert {name: sample[0][name] for name in expected} == expected
    (off,) = read(serve(options=PREFIX | {"prefix_caching": False}))["vllm:cache_config_info"]
    names = ("enable_prefix_caching", "kv_offloading_backend", "kv_offloading_size")
    assert [off[0][name] for name in names] == ["False", "None", "None"]


def test_adapters_of_open_requests() -> None:
    async def run() -> None:
        engine = ScriptedEngine(lambda request: [7, 7, 7], automatic=False)
        replicas = Replicas([engine])
        for number, name in enumerate(("b", "a", None)):
            adapter = None if name is None else Adapter(name=name, directory="", digest=name)
            sampling = Sampling(max_tokens=9, seed=1)
            request = EngineCoreRequest(id=replicas.next_id(), prompt_ids=[number], sampling=sampling, adapter=adapter)
            replicas.submit_many([(request, lambda output: None)])
        assert replicas.list_adapters_in_use() == ([], ["a", "b"])
        engine.step()
        assert replicas.list_adapters_in_use() == (["a", "b"], [])

    asyncio.run(run())


def test_lora_requests_info_is_there_only_with_adapters(serve: Serve) -> None:
    assert "vllm:lora_requests_info" not in read(serve(options=PREFIX))
    (sample,) = read(serve(options=PREFIX | {"enable_lora": True, "max_loras": 7}, model_info=LORA))[
        "vllm:lora_requests_info"
    ]
    labels, value = sample
    assert labels == {"max_lora": "7", "running_lora_adapters": "", "waiting_lora_adapters": ""} and value > 1e9


def test_http_requests_by_route_not_by_path(serve: Serve) -> None:
    served = serve(options=PREFIX | {"api_key": "key"})
    key = {"authorization": "Bearer key"}
    for path in ("/v1/models/demo", "/v1/models/demo/", "/v1/models/a-secret", "/no/such/path", "/health", "/status"):
        served.get(path, key)
    served.get("/v1/models")
    served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, key)
    served.post("/v1/completions", {"prompt": "x", "n": 0}, key)
    fetch(served.app, "BREW", "/no/such/path", None, key)
    text = served.get("/metrics", key).content.decode()
    counts = re.findall(r'^http_requests_total{handler="(.*)",method="(.*)",status="(.*)"} (\S+)$', text, re.MULTILINE)
    assert sorted(counts) == [
        ("/v1/completions", "POST", "2xx", "1.0"),
        ("/v1/completions", "POST", "4xx", "1.0"),
        ("/v1/models/{name}", "GET", "2xx", "2.0"),
        ("/v1/models/{name}", "GET", "4xx", "1.0"),
        ("none", "GET", "4xx", "2.0"),
        ("none", "other", "4xx", "1.0"),
    ]
    durations = re.findall(
        r'^http_request_duration_seconds_count{handler="(.*)",method="(.*)"} (\S+)$', text, re.MULTILINE
    )
    assert ("/v1/models/{name}", "GET", "3.0") in durations and len(durations) == 4
    assert "secret" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_counts_of_front_ends_add_up(serve: Serve, stream: bool) -> None:
    served = serve(options=PREFIX)
    meter: HttpMeter = served.app.app._meter
    body = {"prompt": "x", "max_tokens": 3, "stream": stream}
    served.complete(**body)
    for number in (1, 2):
        front_end = link(served, number, PREFIX)
        fetch(front_end.app, "POST", "/v1/completions", body)
        fetch(front_end.app, "GET", "/v1/models/other", None)
        find_replicas(served).engines[0].meter.add(front_end.dispatcher.meters[0].take())
        meter.add(front_end.counts.http.take())
        assert front_end.counts.http.take() == HttpMeter().take()
    found = read(served)
    handlers = [(labels["handler"], labels["status"], value) for labels, value in found["http_requests_total"]]
    assert handlers == [("/v1/completions", "2xx", 3), ("/v1/models/{name}", "4xx", 2)]
    assert select(found, "vllm:http_requests_total", "status") == {"200": 3, "404": 2}
    (count,) = [
        value
        for labels, value in found["http_request_duration_seconds"]
        if labels["handler"] == "/v1/completions" and labels.get("le") == "+Inf"
    ]
    assert count == 3
    assert select(found, "vllm:request_time_per_output_token_seconds", "le")["+Inf"] == 3
