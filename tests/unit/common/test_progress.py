"""Progress in logs: long work is not silent, and quick work adds no lines."""

import logging
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils.tqdm import _create_progress_bar

from serve_llm.common.hub import resolve_tokenizer
from serve_llm.common.progress import ProgressLog, make_download_log


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_shares_are_logged_at_tenths_or_after_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = ProgressLog("Loading weights", clock)
    with caplog.at_level(logging.INFO):
        for second, done in ((1, 150), (2, 290), (3, 310), (11.9, 390), (12, 395), (14, 400), (14.5, 1000)):
            clock.seconds = second
            log.report_share(done, 1000)
    assert caplog.messages == [f"Loading weights: {share}%" for share in (29, 39, 40)]


def test_bytes_are_logged_after_silence(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = ProgressLog("Downloading a/b", clock)
    with caplog.at_level(logging.INFO):
        for second in (9.9, 10, 19, 20.5):
            clock.seconds = second
            log.report_bytes(int(second * 2**30))
    assert caplog.messages == ["Downloading a/b: 10.00 GiB so far", "Downloading a/b: 20.50 GiB so far"]


def test_the_hub_reports_bytes_where_there_is_no_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("serve_llm.common.progress.SILENCE_SECONDS", 0.0)
    classes = []

    def download(name: str, **arguments: object) -> str:
        classes.append(arguments["tqdm_class"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with caplog.at_level(logging.INFO):
        resolve_tokenizer("org/model")
        files = _create_progress_bar(cls=classes[0], log_level=logging.WARNING, total=3, unit="it", desc="Fetching")
        files.update(1)
        chunks = _create_progress_bar(cls=classes[0], log_level=logging.WARNING, name="a.b", total=0, unit="B")
        chunks.update(2**30)
        chunks.update(2**29)
        chunks.set_description("done")
    assert [line for line in caplog.messages if line.startswith("Downloading")] == [
        "Downloading org/model: 1.00 GiB so far",
        "Downloading org/model: 1.50 GiB so far",
    ]
    assert capsys.readouterr().err == "", "no bar"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    resolve_tokenizer("org/model")
    assert classes[1] is None, "the Hub's own bars"


def test_a_download_log_is_a_bar_that_iterates() -> None:
    """Older clients of the Hub wrap the list of files in the progress bar."""
    assert list(make_download_log("Downloading a/b")([1, 2], total=2)) == [1, 2]
