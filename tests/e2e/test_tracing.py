"""`--otlp-traces-endpoint`: what a collector gets from a server whose engine dies under a request."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request

import pytest

from support.collector import read_attributes, serve_collector
from support.daemon import Daemon
from support.faults import FAULTS, KILLER

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def complete(url: str, body: dict[str, object], headers: dict[str, str] | None = None) -> None:
    content = json.dumps(body).encode()
    request = urllib.request.Request(url + "/v1/completions", content, {"Content-Type": "application/json"})
    for name, value in (headers or {}).items():
        request.add_header(name, value)
    with urllib.request.urlopen(request, timeout=300) as answer:
        answer.read()


def test_a_request_that_is_replayed_is_one_trace() -> None:
    with serve_collector() as collector:
        arguments = ("demo", "--kv-cache-memory", "64MiB", "--otlp-traces-endpoint", collector.url)
        with Daemon(*arguments, environ=FAULTS) as daemon:
            url = daemon.wait_until_serving()
            complete(url, {"prompt": "secret words", "max_tokens": 4})
            context = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
            with pytest.raises(urllib.error.HTTPError, match="500"):
                complete(url, {"prompt": [KILLER], "max_tokens": 4}, context)
            daemon.signal(signal.SIGTERM)
            assert daemon.wait(60) == 0
    assert collector.paths == {"/v1/traces"}
    killed = [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]
    others = [span for span in collector.spans if span not in killed]
    assert sorted(span.name for span in others) == ["decode", "llm_request", "prefill", "queue"]
    assert len({span.trace_id for span in others}) == 1 and "secret" not in str(others)
    assert sorted(span.name for span in killed) == ["llm_request", "replay", "replay", "replay"]
    (root,) = (span for span in killed if span.name == "llm_request")
    assert root.parent_span_id.hex() == "00f067aa0ba902b7"
    assert read_attributes(root)["error.type"] == "GenerationFailed"
    for replay in killed:
        if replay is not root:
            assert replay.parent_span_id == root.span_id
            assert "died while serving by signal SIGKILL" in str(read_attributes(replay)["serve_llm.replay.cause"])
            assert root.start_time_unix_nano <= replay.start_time_unix_nano <= replay.end_time_unix_nano
