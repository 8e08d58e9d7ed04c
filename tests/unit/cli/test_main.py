"""The program under its other names."""

import os
import signal
import subprocess
import sys

import pytest

import serve_llm
from serve_llm.cli import main as program
from serve_llm.common.errors import OptionError


def test_python_m_serve_llm() -> None:
    command = [sys.executable, "-P", "-m", "serve_llm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"serve-llm {serve_llm.__version__}\n"), done.stderr


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "serve_llm", "completion", "bash"]
    with os.fdopen(writer, "w") as closed:
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("module", ["serve_llm.common.options.sources", "serve_llm.server.daemon", "uvloop"])
def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from serve_llm.cli.main import main\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['serve-llm', 'demo', '--port', '0']\n"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_serve_is_the_server() -> None:
    assert program.COMMANDS["serve"] is program.serve


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("list", "Ollama's `list` has no counterpart"),
        ("pull llama3", "`serve-llm MODEL` downloads what is missing"),
        ("completions bash", "unknown command 'completions'; did you mean completion?"),
        ("complete --quick hi", "vLLM's `complete` has no counterpart: POST /v1/completions"),
        ("ps", "Ollama's `ps` is `serve-llm top`"),
        ("rm llama3", "`hf cache rm` removes them"),
        ("http://127.0.0.1:8000", "`serve-llm chat URL`, `bench serve URL` and `top URL` talk to a running server"),
        ("https://huggingface.co/org/model", "a model is a directory or a Hugging Face id"),
        ("runbatch demo -i a -o b", "unknown command 'runbatch'; did you mean run-batch?"),
    ],
)
def test_a_first_word_that_is_no_model(argv: str, words: str) -> None:
    with pytest.raises(OptionError) as raised:
        program.check_first_word(argv.split())
    assert words in str(raised.value)


@pytest.mark.parametrize("argv", ["demo", "plans", "gpt2 --port 1", "org/model", "tests bench", ""])
def test_a_model_is_no_mistyped_command(argv: str) -> None:
    program.check_first_word(argv.split())


@pytest.mark.parametrize(("word", "words"), [("help", "usage: serve-llm MODEL"), ("version", "serve-llm ")])
def test_words_for_options(word: str, words: str) -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "serve_llm", word], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith(words)


def test_without_arguments() -> None:
    done = subprocess.run([sys.executable, "-P", "-m", "serve_llm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("serve-llm: no model: give a checkpoint directory")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("run-batch", "the following arguments are required: -i/--input-file"),
        ("top --intervall=3", "unknown option --intervall; did you mean --interval?"),
        ("scale -dp 2 --zzz 1", "unknown option --zzz; see serve-llm scale --help"),
        ("top http://127.0.0.1:1 more", "unexpected argument 'more'; see serve-llm top --help"),
    ],
)
def test_a_wrong_argument_of_a_command(argv: str, words: str) -> None:
    command, *arguments = argv.split()
    with pytest.raises(OptionError) as raised:
        program.COMMANDS[command](arguments)
    assert words in str(raised.value)
