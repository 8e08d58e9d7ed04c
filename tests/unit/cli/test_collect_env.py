"""`serve-llm collect-env`: its findings on this machine, without secrets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import serve_llm
from serve_llm.cli import collect_env


def test_the_command() -> None:
    command = [sys.executable, "-P", "-m", "serve_llm", "collect-env"]
    environ = os.environ | {"SERVE_LLM_API_KEY": "sk-1", "HF_TOKEN": "hf_2", "OMP_NUM_THREADS": "1", "OTHER": "here"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert (done.returncode, done.stderr) == (0, "")
    lines = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert lines["serve-llm"] == serve_llm.__version__
    assert {"Python", "torch", "processor", "kernels", "memory"} <= lines.keys() and "GPU" in done.stdout
    assert (lines["SERVE_LLM_API_KEY"], lines["HF_TOKEN"], lines["OMP_NUM_THREADS"]) == ("(set)", "(set)", "1")
    assert "sk-1" not in done.stdout and "hf_2" not in done.stdout and "OTHER" not in lines


def test_the_user_of_an_address_is_hidden() -> None:
    settings = dict(collect_env.list_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:pw@host:4318/v1"}))
    assert settings == {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://(hidden)@host:4318/v1"}


def test_it_takes_no_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert collect_env.main(["demo"], {}) == 2
    assert "unexpected argument 'demo'" in capsys.readouterr().err


def test_missing_and_broken_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from serve_llm.kernels.cpu import library

    monkeypatch.setattr(library, "find", lambda: None)
    assert collect_env.describe_kernels().startswith("none compiled")
    broken = tmp_path / "compiled.so"
    broken.write_text("no library")
    monkeypatch.setattr(library, "find", lambda: broken)
    assert collect_env.describe_kernels().startswith("unusable: ")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '0, NVIDIA H100 80GB HBM3, 580.65.06, 81559 MiB, 9.0, Disabled'", "0, NVIDIA H100 80GB HBM3"),
        ("echo 'NVIDIA-SMI has failed'; exit 9", "none found: NVIDIA-SMI has failed"),
    ],
)
def test_gpus(script: str, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert next(collect_env.describe_gpus())[1].startswith(expected)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert next(collect_env.describe_gpus()) == ("GPUs", "none found (no nvidia-smi that answers)")


def test_system_name(tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text('ID=debian\nPRETTY_NAME="Debian GNU/Linux 13"\n')
    assert collect_env.read_system_name(file) == "Debian GNU/Linux 13"
    assert collect_env.read_system_name(tmp_path / "none") == "unknown system"
