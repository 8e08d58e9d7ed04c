"""`--otlp-traces-endpoint`: what a collector or a file receives from a server whose engine dies during a request."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from support.collector import read_attributes, serve_collector
from support.daemon import Daemon
from support.faults import FAULTS, KILLER

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


CONTEXT = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
INTERRUPTED = {"prompt": "secret words", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


def build_request(url: str, body: dict[str, object], headers: dict[str, str]) -> urllib.request.Request:
    content = json.dumps(body).encode()
    return urllib.request.Request(url + "/v1/completions", content, {"Content-Type": "application/json", **headers})


def complete(url: str, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
    with urllib.request.urlopen(build_request(url, body, headers or {}), timeout=300) as answer:
        answer.read()


def complete_and_kill(daemon: Daemon) -> int:
    """Stream a completion, kill the engine that computes it, and read to the end. Returns the engine's index."""
    with urllib.request.urlopen(build_request(daemon.url, INTERRUPTED, CONTEXT), timeout=300) as answer:
        answer.readline()
        pids = daemon.engine_pids()
        (index,) = (index for index in range(len(pids)) if daemon.metrics(index)["serve_llm_num_requests_running"])
        os.kill(pids[index], signal.SIGKILL)
        events = answer.read().decode().split("\n\n")
    last = json.loads(events[-3].removeprefix("data: "))  # before [DONE] and the end
    assert last["choices"][0]["finish_reason"] == "length"
    return index


def read_file(path: Path) -> list[dict[str, Any]]:
    """Return the spans of a file that OpenTelemetry's exporter has written, with their attributes as a dict."""
    spans = []
    for line in path.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            spans += [span for scope in resource["scopeSpans"] for span in scope["spans"]]
    for span in spans:
        span["attributes"] = {item["key"]: read_value(item["value"]) for item in span.get("attributes", [])}
    return spans


def read_value(value: dict[str, Any]) -> object:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [read_value(one) for one in content["values"]]
    return int(content) if kind == "intValue" else content


@pytest.mark.slow
def test_a_request_whose_engine_is_killed_is_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl"
    with Daemon("demo", "-dp", "2", "--kv-cache-memory", "64MiB", "--otlp-endpoint", path.as_uri()) as daemon:
        daemon.wait_until_serving()
        lost = complete_and_kill(daemon)
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(60) == 0
    spans = {span["name"]: span for span in read_file(path)}
    assert sorted(spans) == ["decode", "prefill", "queue", "replay", "text_completion demo"]
    assert {span["traceId"] for span in spans.values()} == {TRACE_ID} and "secret" not in path.read_text()
    root = spans.pop("text_completion demo")
    assert root["parentSpanId"] == "00f067aa0ba902b7"
    assert root["attributes"]["serve_llm.num_replays"] == 1 and root["attributes"]["serve_llm.engines"] == [0, 1]
    assert root["attributes"]["gen_ai.usage.output_tokens"] == 1500 and "error.type" not in root["attributes"]
    for span in spans.values():
        assert span["parentSpanId"] == root["spanId"]
        begin, end = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
        assert int(root["startTimeUnixNano"]) <= begin <= end <= int(root["endTimeUnixNano"])
    replay = spans["replay"]["attributes"]
    assert "died while serving by signal SIGKILL" in replay["serve_llm.replay.cause"]
    assert replay["serve_llm.replay.from_engines"] == [lost] and replay["serve_llm.engines"] == [1 - lost]
    assert spans["queue"]["attributes"]["serve_llm.engines"] == [lost]
    assert spans["prefill"]["attributes"]["serve_llm.engines"] == [lost]
    assert spans["decode"]["attributes"]["serve_llm.engines"] == [0, 1]


@pytest.mark.slow
def test_a_request_that_kills_engines_is_one_trace() -> None:
    with serve_collector() as collector:
        arguments = ("demo", "--kv-cache-memory", "64MiB", "--otlp-traces-endpoint", collector.url)
        with Daemon(*arguments, environ=FAULTS) as daemon:
            url = daemon.wait_until_serving()
            complete(url, {"prompt": "secret words", "max_tokens": 4})
            with pytest.raises(urllib.error.HTTPError, match="500") as raised:
                complete(url, {"prompt": [KILLER], "max_tokens": 4}, CONTEXT)
            with raised.value as refused:
                assert refused.headers["traceresponse"].startswith(f"00-{TRACE_ID}-")
            daemon.signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
    assert collector.paths == {"/v1/traces"}
    killed = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    others = [span for span in collector.spans if span not in killed]
    assert sorted(span.name for span in others) == ["decode", "prefill", "queue", "text_completion demo"]
    assert len({span.trace_id for span in others}) == 1 and "secret" not in str(others)
    assert sorted(span.name for span in killed) == ["replay", "replay", "replay", "text_completion demo"]
    (root,) = (span for span in killed if span.name != "replay")
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert read_attributes(root)["error.type"] == "GenerationFailed"
    for replay in killed:
        if replay is not root:
            assert replay.parent_span_id == root.span_id
            assert "died while serving by signal SIGKILL" in str(read_attributes(replay)["serve_llm.replay.cause"])
            assert root.start_time_unix_nano <= replay.start_time_unix_nano <= replay.end_time_unix_nano
