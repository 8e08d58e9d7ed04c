"""Completion scripts in bash, and in zsh and fish where they are installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from serve_llm.cli import completion
from serve_llm.cli.bench.command import BENCHMARKS
from serve_llm.cli.main import COMMANDS
from serve_llm.common.errors import OptionError
from serve_llm.common.options.fields import option_name
from serve_llm.common.options.schema import OPTION_FIELDS
from support.terminal import PseudoTerminal


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    options = {name: completion.read_options(make()) for name, make in completion.PARSERS.items()}
    return {shell: completion.format_script(shell, options) for shell in completion.INSTALL}


def complete(script: str, folder: Path, *words: str) -> set[str]:
    """Return what bash would offer for the last word."""
    typed = " ".join(f"'{word}'" for word in words)
    code = (
        f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _serve_llm\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=folder, timeout=30)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split())


def test_every_command_is_completed() -> None:
    assert {command.partition(" ")[0] for command in completion.PARSERS} == {"", *COMMANDS}
    assert completion.SECOND_WORDS["bench"] == tuple(BENCHMARKS)
    assert {f"bench {word}" for word in BENCHMARKS} <= set(completion.PARSERS)


def test_bash(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "options.yaml").touch()
    script = scripts["bash"]
    assert {"plan", "demo", "checkpoint", "options.yaml"} <= complete(script, tmp_path, "serve-llm", "")
    assert complete(script, tmp_path, "serve-llm", "conv") == {"convert"}
    assert complete(script, tmp_path, "serve-llm", "demo", "--max-model") == {"--max-model-len"}
    assert complete(script, tmp_path, "serve-llm", "demo", "--dtype", "b") == {"bfloat16"}
    assert complete(script, tmp_path, "serve-llm", "demo", "--config", "o") == {"options.yaml"}
    assert complete(script, tmp_path, "serve-llm", "demo", "--port", "o") == set()
    assert "--gpu" in complete(script, tmp_path, "serve-llm", "plan", "demo", "--gp")
    assert complete(script, tmp_path, "serve-llm", "plan", "demo", "--host") == set()
    assert complete(script, tmp_path, "serve-llm", "demo", "--dtype", "=", "b") == {"bfloat16"}
    assert complete(script, tmp_path, "serve-llm", "demo", "--dtype", "=") >= {"bfloat16", "float16"}
    assert complete(script, tmp_path, "serve-llm", "run-batch", "demo", "-i", "o") == {"options.yaml"}


def test_bash_completes_second_words_and_their_options(scripts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    script = scripts["bash"]
    assert complete(script, tmp_path, "serve-llm", "bench", "") == {"serve", "latency", "throughput", "start"}
    assert complete(script, tmp_path, "serve-llm", "completion", "z") == {"zsh"}
    assert complete(script, tmp_path, "serve-llm", "bench", "serve", "--good") == {"--goodput"}
    assert complete(script, tmp_path, "serve-llm", "bench", "start", "--good") == set()
    assert complete(script, tmp_path, "serve-llm", "bench", "start", "--num-i") == {"--num-iters"}
    assert complete(script, tmp_path, "serve-llm", "bench", "latency", "demo", "--batch-s") == {"--batch-size"}
    assert complete(script, tmp_path, "serve-llm", "bench", "throughput", "--dtype", "b") == {"bfloat16"}
    assert complete(script, tmp_path, "serve-llm", "bench", "throughput", "check") == {"checkpoint"}


# Input after `serve-llm`, and the completed line if there is only one continuation.
CONTINUED = {
    "conv": "convert",
    "demo --max-model": "demo --max-model-len",
    "demo --dtype b": "demo --dtype bfloat16",
    "demo --config o": "demo --config options.yaml",
    "demo --port o": "demo --port o",
    "plan demo --gpu-mem": "plan demo --gpu-memory-utilization",
    "plan demo --hos": "plan demo --hos",
    "bench t": "bench throughput",
    "bench serve --good": "bench serve --goodput",
    "bench start --good": "bench start --good",
    "bench throughput check": "bench throughput checkpoint/",
    "completion z": "completion zsh",
    "run-batch demo -i o": "run-batch demo -i options.yaml",
    "serve demo --max-model": "serve demo --max-model-len",
}
SET_UP_ZSH = """\
autoload -Uz compinit; compinit -u -D; unsetopt beep; source ./script
show() { print -r -- "<$BUFFER>"END; BUFFER=; }; zle -N show; bindkey ^Xs show; print REA''DY
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "options.yaml").touch()
    return tmp_path


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs the program zsh")
def test_zsh(scripts: dict[str, str], folder: Path) -> None:
    (folder / "script").write_text(scripts["zsh"])
    environ = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder)}
    with PseudoTerminal(["zsh", "-f", "-i"], environ) as terminal:
        terminal.type(f"cd {folder}; {SET_UP_ZSH}")
        terminal.wait_for("READY\r")
        for typed, continued in CONTINUED.items():
            terminal.type(f"serve-llm {typed}\t\x18s")
            shown = terminal.wait_for(">END\r")
            assert shown[shown.rindex("<") + 1 : shown.rindex(">END")].strip() == f"serve-llm {continued}"


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs the program fish")
def test_fish(scripts: dict[str, str], folder: Path) -> None:
    (folder / "script").write_text(scripts["fish"])
    code = "source script; for line in $argv; echo 'offers '(complete -C \"serve-llm $line\" | string join '|'); end"
    done = subprocess.run(
        ["fish", "--no-config", "-c", code, *CONTINUED],
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        timeout=60,
    )
    assert done.stderr == ""
    offers = [line.removeprefix("offers ").partition("\t")[0] for line in done.stdout.splitlines()]
    for (typed, continued), offered in zip(CONTINUED.items(), offers, strict=True):
        assert offered == ("" if typed == continued else continued.split()[-1]), typed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_options_are_there(shell: str, scripts: dict[str, str]) -> None:
    for option in OPTION_FIELDS:
        name = option_name(option)
        if name != "model":
            assert (f"-l {name} " if shell == "fish" else f"--{name}") in scripts[shell]
    assert scripts[shell].count("'") % 2 == 0 or "'\\''" in scripts[shell]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert completion.main(["bash"]) == 0
    assert "complete -o filenames -F _serve_llm serve-llm" in capsys.readouterr().out
    assert completion.main(["--help"]) == 0
    assert "~/.bashrc" in capsys.readouterr().out
    with pytest.raises(OptionError, match="expected one of bash, zsh, fish"):
        completion.main(["tcsh"])
