"""What a command shows of the server that it starts."""

import sys

import pytest

from serve_llm.cli.server_process import ServerProcess
from serve_llm.common.errors import ServeError

LOG = """\
INFO 11-25 13:56:04 [daemon.py:76] Listening on http://127.0.0.1:1; loading a/b
INFO 11-25 13:56:04 [hub.py:203] Looking for a/b on the Hub; missing files are downloaded
INFO 11-25 13:56:14 [progress.py:50] rank 0: Loading weights: 40%
WARNING 11-25 13:56:15 [startup.py:90] rank 1: something is slow
INFO 11-25 13:56:16 [mp.py:131] Weights loaded and packed by 2 ranks in 2.00 s
"""
NEWS = """\
Looking for a/b on the Hub; missing files are downloaded
Loading weights: 40%
rank 1: something is slow
Weights loaded and packed by 2 ranks in 2.00 s
"""
SERVING = "INFO 11-25 13:56:17 [daemon.py:90] Serving a/b on http://127.0.0.1:1 after 3.0 s\n"
LATER = "WARNING 11-25 13:56:18 [a.py:1] later\n"


def play(log: str) -> ServerProcess:
    """Start a server that writes this log and waits to be stopped."""
    server = ServerProcess(["demo"])
    script = "import sys, time; sys.stderr.write(sys.argv[1]); sys.stderr.flush(); time.sleep(60)"
    server._command = [sys.executable, "-c", script, log]
    return server


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_what_the_server_does_until_it_serves(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with play(LOG + SERVING + LATER) as server:
        assert server.url == "http://127.0.0.1:1"
    assert capsys.readouterr() == ("", NEWS if is_terminal else "")


def test_the_error_of_the_server_is_raised() -> None:
    server = play("")
    server._command = [sys.executable, "-c", "import sys; sys.exit('serve-llm: no such model')"]
    with pytest.raises(ServeError, match=r"^no such model$"), server:
        pass
