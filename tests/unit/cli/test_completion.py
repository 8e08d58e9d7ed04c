"""Scripts that complete the command line: bash's is run, those of zsh and fish are read."""

import subprocess
from pathlib import Path

import pytest

from serve_llm.cli import completion
from serve_llm.cli.bench.command import BENCHMARKS
from serve_llm.cli.main import COMMANDS
from serve_llm.common.errors import OptionError
from serve_llm.common.options.fields import option_name
from serve_llm.common.options.schema import OPTION_FIELDS


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    options = {name: completion.read_options(make()) for name, make in completion.PARSERS.items()}
    return {shell: completion.format_script(shell, options) for shell in completion.INSTALL}


def complete(script: str, folder: Path, *words: str) -> set[str]:
    """What bash would offer for the last word."""
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


def test_zsh_and_fish_have_second_words(scripts: dict[str, str]) -> None:
    assert "compadd -- serve latency throughput start" in scripts["zsh"]
    assert "'bench start')" in scripts["zsh"] and "'plan '*)" in scripts["zsh"]
    assert "-f -a 'serve latency throughput start'" in scripts["fish"] and "-f -a 'bash zsh fish'" in scripts["fish"]
    assert "'__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from start' -l num-iters" in scripts["fish"]


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
