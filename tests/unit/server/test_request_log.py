"""--enable-log-requests: what is logged about a request, and what never is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

import pytest

from serve_llm import LLM
from serve_llm.common.errors import OptionError
from serve_llm.common.logs import configure
from serve_llm.common.options.sources import make_options, parse_args
from serve_llm.server.http.auth import name_owner
from support.fakes import make_model_info
from support.serving import Served

Serve = Callable[..., Served]
LOGGER = "serve_llm.server.routes.request_log"


def read_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def test_a_line_names_the_request_and_none_of_its_text(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(options={"enable_log_requests": True, "api_key": ["first", "sesame"]})
    headers = {"Authorization": "Bearer sesame", "X-Request-Id": "request-7"}
    body = {"prompt": "hidden", "max_tokens": 3, "temperature": 0.5, "stop": ["private", "words"], "seed": 4, "n": 2}
    body |= {"logit_bias": {"5": 1}, "cache_salt": "salt", "stream": True, "structured_outputs": {"regex": "secret"}}
    reply = served.post("/v1/completions", body, headers)
    assert reply.status == 200
    prompt_tokens = len(served.engine.submitted[0].prompt_ids)
    (line,) = read_lines(caplog)
    assert line == (
        f"request request-7: /v1/completions, model demo, key 1 ({name_owner('sesame')[:12]}), {prompt_tokens} prompt "
        "tokens, n 2, max_tokens 3, temperature 0.5, top_p 1.0, seed 4, stop 2, logit_bias 1, structured_outputs True, "
        "stream True"
    )
    assert not any(word in caplog.text for word in ("hidden", "private", "salt", "secret", "sesame"))


def test_fields_in_json(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(options={"enable_log_requests": True})
    configure("info", format="json")
    served.chat(max_tokens=2)
    (record,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert record["path"] == "/v1/chat/completions" and record["model"] == "demo" and record["request_id"]
    assert record["prompt_tokens"] == len(served.engine.submitted[0].prompt_ids)
    assert record["parameters"]["max_tokens"] == 2 and not {"key", "prompts"} & set(record)


def test_the_beginning_of_each_prompt_if_it_is_asked_for(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(options={"enable_log_requests": True, "max_log_len": 8})
    served.post("/v1/completions", {"prompt": ["def\nmain(): pass", "\u65e5\u672c\u8a9e"], "max_tokens": 1})
    (line,) = read_lines(caplog)
    assert line.endswith("prompts ['def\\nmain', '\u65e5\u672c\u8a9e']") and "\n" not in line


def test_vectors(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model_info = make_model_info(generates=False, pooling_task="embed", vector_size=3)
    served = serve(script=lambda request: (1.0, 0.0, 0.0), model_info=model_info, options={"enable_log_requests": True})
    assert served.post("/v1/embeddings", {"input": ["hidden", "b"]}).status == 200
    (line,) = read_lines(caplog)
    assert "/v1/embeddings, model demo, " in line and line.endswith(" prompt tokens") and "hidden" not in line


def test_no_line_without_the_option_or_for_what_was_refused(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert serve().complete(max_tokens=1).status == 200
    assert serve(options={"enable_log_requests": True}).complete(max_tokens=-1).status == 400
    assert read_lines(caplog) == []


def test_names_of_other_engines() -> None:
    assert not parse_args(["demo", "--disable-log-requests"], {}).enable_log_requests
    assert parse_args(["demo", "--log-requests", "--log-requests-level", "1"], {}).enable_log_requests
    with pytest.raises(OptionError, match="--max-log-len N logs the beginnings"):
        parse_args(["demo", "--log-requests", "--log-requests-level", "2"], {})


def test_what_does_not_go_together() -> None:
    with pytest.raises(OptionError, match="--max-log-len needs --enable-log-requests"):
        make_options("demo", max_log_len=8)
    with pytest.raises(OptionError, match="only requests over HTTP are logged"):
        LLM("demo", enable_log_requests=True)
