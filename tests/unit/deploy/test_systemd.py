"""deploy/systemd/serve-llm.service: systemd accepts it, and its times and codes are those of the server."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.schema import Options
from serve_llm.common.options.sources import make_parser

UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "serve-llm.service"


@pytest.fixture(scope="module")
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT, encoding="utf-8")
    return unit["Service"]


def test_the_command_is_one_of_the_server(service: configparser.SectionProxy) -> None:
    program, *arguments = service["ExecStart"].split()
    assert program.endswith("/bin/serve-llm") and make_parser().parse_args(arguments).config.startswith("/etc/")


def test_a_stop_is_a_drain_that_engines_survive(service: configparser.SectionProxy) -> None:
    assert service["KillMode"] == "mixed", "engines get no SIGTERM"
    assert int(service["TimeoutStopSec"]) >= Options(model="demo").drain_timeout + 30


def test_what_stays_wrong_is_not_started_again(service: configparser.SectionProxy) -> None:
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == str(OptionError("").exit_code)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_it(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text(encoding="utf-8").replace("/opt/serve-llm/bin/serve-llm", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, [line for line in done.stderr.splitlines() if UNIT.name in line]) == (0, [])
