"""Run servers as whole processes for measurements: start, suspend, resume and stop them, and measure start time, memory
and idle load of the process tree. Independent of workloads."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from bench.load import model_name

HERE = Path(__file__).parent
# The program beside this interpreter, else the one on the path.
SERVE_LLM = (
    shutil.which("serve-llm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "serve-llm"
)
START_SECONDS = 300.0
POLL_SECONDS = 0.02
REFUSALS = (400, 401, 403, 422)  # statuses that do not go away by waiting
IDLE_SECONDS = 2.0
IDLE_TIMES = 3
STOP_SECONDS = 20.0


class StartError(Exception):
    """A server did not start; says why and where its log is."""


@dataclass(frozen=True)
class Recipe:
    """How to reach a server. If there is a command, it is started and will answer at `url`."""

    name: str
    url: str
    command: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    takes_text: bool = False  # accepts prompts only as text, not as token ids


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def named(text: str, model: str) -> Recipe:
    """Parse `serve-llm`, `NAME=URL`, or `NAME=COMMAND`, in which {port} and {model} are replaced. Raises ValueError.

    `serve-llm` alone does not draft tokens, as its peers do not."""
    if text == "serve-llm":
        text = f"serve-llm={shlex.quote(SERVE_LLM)} {{model}} --port {{port}} --speculative-config none"
    name, _, rest = text.partition("=")
    if rest.startswith(("http://", "https://")):
        return Recipe(name, rest.rstrip("/"))
    if not name or "{port}" not in rest:
        raise ValueError(f"{text!r} is neither serve-llm nor NAME=URL nor NAME=COMMAND with {{port}} in it")
    port = free_port()
    command = [word.replace("{port}", str(port)).replace("{model}", model) for word in shlex.split(rest)]
    return Recipe(name, f"http://127.0.0.1:{port}", tuple(command))


def peer(text: str, model: str, threads: int) -> Recipe:
    """Parse `NAME=PROGRAM[,MODEL]` or `NAME:LABEL=...`: a known server in its own environment. Raises ValueError.

    PROGRAM is that environment's Python interpreter (for llama-cpp: the program llama-server). MODEL is what it loads
    if that is not `model`: openvino needs a converted folder, llama-cpp a GGUF file. A label tells the same server with
    different models apart.
    """
    name, _, rest = text.partition("=")
    kind = name.partition(":")[0]
    program, _, own_model = rest.partition(",")
    model, port = own_model or model, str(free_port())
    commands: dict[str, tuple[str, dict[str, str]]] = {
        "vllm": (
            "-m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype bfloat16 "
            "--max-model-len 4096 --max-num-seqs 64",
            {
                "HF_HUB_OFFLINE": "1",
                "PATH": f"{Path(program).parent}:{os.environ['PATH']}",  # it compiles
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # by default it leaves one core idle
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        "openvino": (f"{HERE}/peers/openvino_server.py {{model}} --port {{port}} --threads {threads}", {}),
        "llama-cpp": (
            f"--model {{model}} --port {{port}} --threads {threads} --parallel 32 --ctx-size 65536 --no-webui",
            {},
        ),
        "transformers": (
            "-m transformers.cli.transformers serve {model} --port {port} --continuous-batching --dtype bfloat16 "
            "--attn-implementation sdpa --cb-block-size 32 --cb-num-blocks 2048 --cb-max-batch-tokens 512",
            {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(HERE / "peers")},  # must exist; it lists the models there
        ),
    }
    if kind not in commands:
        raise ValueError(f"--peer {text}: {kind!r} is not known; there are {', '.join(commands)}")
    if not Path(program).is_file():
        raise ValueError(f"--peer {text}: there is no program {program!r}; install the peer in its own environment")
    if not Path(model).exists():
        raise ValueError(f"--peer {text}: there is no model {model!r}")
    arguments, environ = commands[kind]
    words = [word.replace("{port}", port).replace("{model}", model) for word in shlex.split(arguments)]
    return Recipe(name, f"http://127.0.0.1:{port}", (program, *words), environ, takes_text=kind == "transformers")


class Server:
    """A running server. `start_seconds`: from exec to the first token; 0 if it was not started here."""

    def __init__(self, recipe: Recipe, process: subprocess.Popen[bytes] | None, start_seconds: float) -> None:
        self.name, self.url, self.start_seconds = recipe.name, recipe.url, start_seconds
        self.takes_text = recipe.takes_text
        self._process = process

    def tree(self) -> list[psutil.Process]:
        """Return the server's processes; empty if it has ended or was not started here."""
        if self._process is None or self._process.poll() is not None:
            return []
        root = psutil.Process(self._process.pid)
        children = root.children(recursive=True)
        return [root, *(child for child in children if child.status() != psutil.STATUS_ZOMBIE)]

    def resident_bytes(self) -> int:
        """Return the memory of all its processes; shared memory counts once (PSS)."""
        total = 0
        for process in self.tree():
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total

    def idle_cores(self) -> float:
        """Return its CPU seconds per second while idle: the minimum of a few measurements, as work may go on after the
        start."""
        return min(self._measure_cores() for _ in range(IDLE_TIMES))

    def _measure_cores(self) -> float:
        tree = self.tree()
        before = [sum(process.cpu_times()[:2]) for process in tree]
        time.sleep(IDLE_SECONDS)
        return (sum(sum(process.cpu_times()[:2]) for process in tree) - sum(before)) / IDLE_SECONDS

    def pause(self) -> None:
        """Suspend all processes. Returns once they have stopped."""
        for process in self.tree():
            process.suspend()
            while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                time.sleep(0.001)

    def resume(self) -> None:
        """Resume all processes. Returns once the server has answered a request."""
        for process in reversed(self.tree()):
            process.resume()
        wait_for_token(self.url, self.takes_text)

    def stop(self) -> None:
        if self._process is None:
            return
        tree = self.tree()
        for process in reversed(tree):
            process.resume()
        self._process.terminate()
        _, alive = psutil.wait_procs(tree, STOP_SECONDS)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ProcessLookupError):  # children that outlived it; it leads its own process group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def running(recipe: Recipe) -> Iterator[Server]:
    """Start the server, wait for its first token, and stop it at the end. Raises StartError."""
    if not recipe.command:
        yield Server(recipe, None, 0.0)
        return
    log = Path(tempfile.gettempdir()) / f"compare-{recipe.name}.log"
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if not recipe.command[0].endswith("serve-llm"):  # a peer has its own packages
        inherited = {name: value for name, value in inherited.items() if not name.startswith("PYTHON")}
    with log.open("wb") as output:
        began = time.perf_counter()
        try:
            process = subprocess.Popen(
                recipe.command,
                stdout=output,
                stderr=output,
                env=inherited | dict(recipe.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise StartError(f"{recipe.name} cannot be started: {error}") from error
    server = Server(recipe, process, 0.0)
    try:

        def check() -> None:
            if process.poll() is not None:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
                raise StartError(f"{recipe.name} ended with code {process.returncode} ({log}):\n{last}")

        wait_for_token(recipe.url, recipe.takes_text, check)
        server.start_seconds = time.perf_counter() - began
        yield server
    finally:
        server.stop()


def wait_for_token(url: str, takes_text: bool, check: Callable[[], None] = lambda: None) -> None:
    """Send requests until the server has completed one token. check: called after each failed attempt; may raise.

    Raises StartError if it takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    prompt = "one two three" if takes_text else [400, 500, 600]
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    while True:
        try:
            asked = body | {"model": model_name(url)}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                if b'"choices"' in answer.read():
                    return
        except urllib.error.HTTPError as error:
            if error.code in REFUSALS:
                raise StartError(f"{url} refuses a request: {error.code} {error.read().decode()[:300]}") from error
        except (OSError, http.client.HTTPException, ValueError, LookupError):
            pass
        check()
        if time.monotonic() > deadline:
            raise StartError(f"{url} gave no token within {START_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def stop_on_signals() -> None:
    """Make SIGTERM end this program as Ctrl-C does, so that no server outlives it."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
