"""`--log-format json`: every line that the server and its processes write is one JSON object."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request

import pytest

from support.daemon import SERVE_LLM


@pytest.mark.slow
def test_every_line_is_an_object() -> None:
    command = [SERVE_LLM, "demo", "--port", "0", "--log-format", "json", "--log-level", "debug", "-tp", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            records = []
            for line in process.stderr:
                records.append(json.loads(line))
                if records[-1]["message"].startswith("Serving demo on "):
                    break
            url = records[-1]["message"].split()[3]
            request = urllib.request.Request(url + "/v1/completions", b"{", {"X-Request-Id": "request-7"})
            with pytest.raises(urllib.error.HTTPError, match="400"):
                urllib.request.urlopen(request, timeout=30)
        finally:
            process.send_signal(signal.SIGTERM)
        records += [json.loads(line) for line in process.stderr]
    assert process.returncode == 0
    assert {record["process"] for record in records if "process" in record} == {"rank 0", "rank 1"}
    assert any(record["logger"].startswith("serve_llm.engine") for record in records)
    (refused,) = (record for record in records if record.get("status") == 400)
    assert refused["request_id"] == "request-7" and refused["path"] == "/v1/completions"
    assert all(record["time"].endswith("Z") and record["level"] and record["line"] >= 0 for record in records)


def test_the_error_that_ends_the_start() -> None:
    command = [SERVE_LLM, "/nonexistent/model", "--port", "0", "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 3 and last["level"] == "error" and "/nonexistent/model" in last["message"]


@pytest.mark.parametrize("options", [["/nonexistent/model"], ["demo", "--no-such-option"]])
def test_notices_and_errors_of_options(options: list[str]) -> None:
    """They are reported before the options determine the log format."""
    command = [SERVE_LLM, *options, "--port", "0", "--enable-prefix-caching", "--log-format", "json"]
    environ = os.environ | {"VLLM_API_KEY": "secret"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    records = [json.loads(line) for line in done.stderr.splitlines()]
    notices = [record["message"] for record in records if record["level"] == "warning"]
    assert notices[0] == "--enable-prefix-caching: here it is --prefix-caching"
    assert "secret" not in done.stderr and records[-1]["level"] == "error"
    if options[0] != "demo":
        assert notices[1].startswith("VLLM_API_KEY is set but not read")
