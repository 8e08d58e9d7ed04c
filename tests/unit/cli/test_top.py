"""serve-llm top: frames from the metrics of this server and of others, and readable errors."""

import math

import pytest

from serve_llm.cli import top
from serve_llm.cli.api_client import ApiError
from serve_llm.common.errors import OptionError
from support.scripted_api import serve_script

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2
vllm:num_requests_running{engine="1",model_name="m"} 1
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 5
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} GENERATED
# TYPE vllm:request_success counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3
vllm:request_success_total{engine="1",finished_reason="stop",model_name="m"} 4
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 400
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 100
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} FAST
vllm:time_to_first_token_seconds_bucket{engine="0",le="1.0",model_name="m"} 10
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1
"""


def metrics(generated: int, fast: int) -> str:
    return METRICS.replace("GENERATED", str(generated)).replace("FAST", str(fast))


def test_a_frame_since_the_last_one() -> None:
    before = top.parse_metrics(metrics(100, 0), 10.0)
    now = top.parse_metrics(metrics(300, 0), 12.0)
    frame = top.format_frame("http://h", now, before)
    assert frame.splitlines()[0] == "m at http://h"
    assert "3 running, 5 waiting in the engine\n" in frame
    assert "finished       stop: 7\n" in frame and "output 100.0 (300)" in frame
    assert "prefix cache   25.0% of 400 prompt tokens" in frame
    assert "first token    p50 -, p90 -, p99 -" in frame, "nothing since then"
    assert "engine 0       KV cache [##########..........] 50.0%, 2 running" in frame
    assert "engine 1       KV cache [....................] 0.0%, 1 running" in frame
    assert "p50 550 ms" in top.format_frame("http://h", now, None)


def test_quantiles_are_prometheus() -> None:
    histogram = top.LatencyHistogram({0.1: 5.0, 1.0: 10.0, math.inf: 20.0})
    assert histogram.find_quantile(0.25) == pytest.approx(0.1)
    assert histogram.find_quantile(0.4) == pytest.approx(0.64)
    assert histogram.find_quantile(0.99) == 1.0
    assert top.LatencyHistogram({}).find_quantile(0.5) is None


def test_once_with_a_server_of_another_make(capsys: pytest.CaptureFixture[str]) -> None:
    with serve_script([], {"/metrics": metrics(1, 9)}) as api:
        assert top.main([api.url, "--once"], {"SERVE_LLM_API_KEY": "k"}) == 0
        assert set(api.keys) == {"Bearer k"}
    assert "output - (1)" in capsys.readouterr().out, "without /status nobody knows since when"


def test_a_server_that_restarts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    samples = [top.parse_metrics(metrics(100, 0), 1.0), ApiError("http://h does not answer"), KeyboardInterrupt()]
    samples.insert(2, top.parse_metrics(metrics(5, 0), 3.0))

    def take_sample(client: object) -> top.MetricsSample:
        sample = samples.pop(0)
        if isinstance(sample, BaseException):
            raise sample
        return sample

    monkeypatch.setattr(top, "take_sample", take_sample)
    assert top.main(["http://h", "--interval", "0.1"], {}) == 0
    first, second, third = capsys.readouterr().out.split("\n\n")[:3]
    assert "(100)" in first
    assert second == "http://h does not answer\nTrying again every 0.1 s."
    assert "output - (5)" in third or "(5)" in third, "counters begin anew"


def test_what_cannot_be_shown() -> None:
    with serve_script([], {"/metrics": "# nothing\n"}) as api, pytest.raises(ApiError, match="does not know"):
        top.main([api.url, "--once"], {})
    with pytest.raises(OptionError, match="--interval"):
        top.main(["--interval", "0"], {})
    with pytest.raises(OptionError, match="unknown option --twice"):
        top.main(["--twice"], {})
    with pytest.raises(OptionError, match="--port; give the server's URL instead: serve-llm top http://HOST:PORT"):
        top.main(["--port", "9000"], {})
