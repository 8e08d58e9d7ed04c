"""All log lines have one format, whatever wrote them, and appear once."""

import json
import logging
import re

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.logs import (
    CURRENT_REQUEST,
    LoggedRequest,
    configure,
    hold_records,
    read_format,
    write_final_error,
)


def test_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    logging.getLogger("serve_llm.engine.memory").info("GPU KV cache size: %s tokens", "643,232")
    captured = capsys.readouterr()
    pattern = r"INFO \d\d-\d\d \d\d:\d\d:\d\d \[test_logs\.py:\d+\] GPU KV cache size: 643,232 tokens\n"
    assert re.fullmatch(pattern, captured.err) and captured.out == ""


def test_one_of_several_processes_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "engine 1")
    logging.getLogger("serve_llm.engine.memory").info("%d%% used", 3)
    assert capsys.readouterr().err.endswith("] engine 1: 3% used\n")


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    configure("warning")
    logging.getLogger("serve_llm.server").info("hidden")
    logging.getLogger("serve_llm.server").warning("shown")
    configure("debug")
    logging.getLogger("serve_llm.server").debug("shown")
    logging.getLogger("httpx").info("hidden")
    logging.getLogger("httpx").warning("shown")
    text = capsys.readouterr().err
    assert text.count("shown") == 3 and "hidden" not in text
    configure("error")
    logging.getLogger("httpx").warning("hidden")
    assert capsys.readouterr().err == ""


def test_uvicorn_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.StreamHandler())
        logger.propagate = False
    configure("info")
    configure("info")
    logging.getLogger("uvicorn.error").info("started")
    logging.getLogger("uvicorn.access").info("GET /")
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("] ")[1] for line in lines] == ["started", "GET /"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "engine 1", "json")
    assert read_format() == "json"
    token = CURRENT_REQUEST.set(LoggedRequest("abc"))
    logging.getLogger("serve_llm.engine.memory").info("%d%% used", 3, extra={"status": 400, "_of_a_library": 1})
    CURRENT_REQUEST.reset(token)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("serve_llm.server").exception("failed")
    write_final_error(RuntimeError("the end"))
    captured = capsys.readouterr()
    first, second, third = (json.loads(line) for line in captured.err.splitlines())
    assert captured.out == ""
    line = first.pop("line")
    assert isinstance(line, int) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "logger": "serve_llm.engine.memory",
        "file": "test_logs.py",
        "process": "engine 1",
        "request_id": "abc",
        "message": "3% used",
        "status": 400,
    }
    assert "request_id" not in second and second["exception"].endswith("ValueError: two\nlines")
    assert (third["level"], third["message"]) == ("error", "the end")


def test_records_of_a_traced_request_name_its_span(capsys: pytest.CaptureFixture[str]) -> None:
    traced = LoggedRequest("abc", "/v1/completions", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    for kind in ("text", "json"):
        configure("info", format=kind)
        token = CURRENT_REQUEST.set(traced)
        try:
            raise ValueError("reason")
        except ValueError:
            logging.getLogger("serve_llm.server").exception("failed")
        CURRENT_REQUEST.reset(token)
        logging.getLogger("serve_llm.server").info("of no request")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("] failed trace_id=4bf92f3577b34da6a3ce929d0e0e4736 span_id=00f067aa0ba902b7")
    assert lines[-3].endswith("] of no request")
    first, second = map(json.loads, lines[-2:])
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736" and first["span_id"] == "00f067aa0ba902b7"
    assert first["request_id"] == "abc" and not {"trace_id", "span_id"} & set(second)


def test_the_final_error_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    assert read_format() == "text"
    write_final_error(RuntimeError("the end"))
    assert capsys.readouterr().err == "serve-llm: the end\n"


def test_records_before_the_options_are_read_are_held(capsys: pytest.CaptureFixture[str]) -> None:
    with hold_records([], {}):
        logging.getLogger("serve_llm.common.options").warning("a notice")
    assert capsys.readouterr().err == ""
    configure("info", format="json")
    assert json.loads(capsys.readouterr().err)["message"] == "a notice"
    configure("info", format="json")
    assert capsys.readouterr().err == "", "once"
    with hold_records([], {}):
        logging.getLogger("serve_llm.common.options").warning("hidden")
    configure("error")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argv", "environ", "expected"),
    [
        ("demo --log-format json", {}, "json"),
        ("demo --log-format=json", {}, "json"),
        ("demo", {"SERVE_LLM_LOG_FORMAT": "JSON"}, "json"),
        ("demo --log-format text", {"SERVE_LLM_LOG_FORMAT": "json"}, "text"),
        ("demo --log-format", {}, "text"),
    ],
)
def test_options_that_cannot_be_read(
    argv: str, environ: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OptionError), hold_records(argv.split(), environ):
        logging.getLogger("serve_llm.common.options").warning("a notice")
        raise OptionError("no such option")
    assert read_format() == expected and "a notice" in capsys.readouterr().err
