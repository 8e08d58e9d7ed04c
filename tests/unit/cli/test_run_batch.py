"""The command line of `serve-llm run-batch`, and its work before a model loads."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from pathlib import Path

import pytest

from serve_llm.cli.run_batch import ABSENT_OPTIONS, BatchProgress, main, read_arguments
from serve_llm.common.errors import OptionError
from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.server.batches.files import BatchOutput
from serve_llm.server.batches.lines import build_result
from serve_llm.server.batches.local_call import LocalResponse

FILES = ("-i", "in.jsonl", "-o", "out.jsonl")


def write_files(folder: Path, requests: str, results: str) -> tuple[str, ...]:
    """Write files with a request and a result for each character. Returns the arguments that name them."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (folder / "in").write_text("".join(json.dumps({"custom_id": name} | line) + "\n" for name in requests))
    answer = LocalResponse(200, {}, b"{}")
    (folder / "out").write_bytes(b"".join(build_result(name, answer) for name in results))
    return ("-i", str(folder / "in"), "-o", str(folder / "out"))


def test_options_are_the_servers() -> None:
    options, source, target = read_arguments(["demo", *FILES, "--max-num-seqs", "7"], {"SERVE_LLM_SEED": "3"})
    assert (options.model, options.max_num_seqs, options.seed) == ("demo", 7, 3)
    assert (str(source), str(target)) == ("in.jsonl", "out.jsonl")


def test_what_the_environment_sets_for_a_server_refuses_no_request() -> None:
    environ = {"SERVE_LLM_API_KEY": "k", "SERVE_LLM_MAX_QUEUE": "1", "SERVE_LLM_REQUEST_TIMEOUT": "1"}
    options, _, _ = read_arguments(["demo", *FILES], environ)
    assert options.api_key == () and options.max_queue[0] > 1 and options.request_timeout is None


@pytest.mark.parametrize("name", sorted(ABSENT_OPTIONS))
def test_an_option_without_effect_is_unknown(name: str) -> None:
    assert name in {option.name for option in OPTION_FIELDS}
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(OptionError, match=f"unknown option {flag}"):
        read_arguments(["demo", *FILES, flag, "1"], {})


@pytest.mark.parametrize("arguments", [("-i", "x"), ("-o", "x"), ()])
def test_both_files_are_needed(arguments: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="-file"):
        read_arguments(["demo", *arguments], {})


def test_several_hosts_without_ray_are_refused() -> None:
    with pytest.raises(OptionError, match="--nnodes"):
        read_arguments(["demo", *FILES], {"SERVE_LLM_NNODES": "2", "SERVE_LLM_MASTER_ADDR": "a:1"})


def test_nothing_loads_when_every_request_has_a_result(tmp_path: Path) -> None:
    assert main(["/no/such/model", *write_files(tmp_path, "abc", "bca")], {}) == 0


def test_an_output_of_other_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'d'"):
        main(["/no/such/model", *write_files(tmp_path, "abc", "ad")], {})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shown = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    caplog.set_level(logging.INFO, "serve_llm")
    with contextlib.closing(BatchOutput(tmp_path / "out")) as output:
        progress = BatchProgress(output, 20, num_before=5)
        for number in range(20):
            progress.write(build_result(f"id-{number}", LocalResponse(200, {}, b"{}")), 200 if number else 500)
        progress.close()
    assert (progress.num_written, progress.num_errors) == (20, 1)
    lines = [record.getMessage() for record in caplog.records]
    if is_terminal:
        assert "25/25" in shown.getvalue() and lines == []
    else:
        assert shown.getvalue() == "" and lines[0] == "2 of 20 requests answered" and len(lines) == 10
