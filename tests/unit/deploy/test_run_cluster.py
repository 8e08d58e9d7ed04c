"""deploy/run_cluster.sh, with a fake `docker` on PATH that records its arguments and runs until it is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "run_cluster.sh"
SECONDS = 20.0

# Written elsewhere and then moved, so that readers never see half of it.
DOCKER = """#!/bin/sh
number=$(ls "$RECORD" | wc -l)
{ printf '%s\\0' "$@"; printf 'HF_TOKEN=%s\\0' "$HF_TOKEN"; } > "$RECORD/.new"
mv "$RECORD/.new" "$RECORD/$number"
[ "$1" = run ] || exit 0
[ -z "$DOCKER_STAYS" ] || exec sleep 60
exit "${DOCKER_EXITS:-0}"
"""
IP = """#!/bin/sh
[ -z "$UNREACHABLE" ] || exit 2
echo "$4 dev eth1 src 10.0.0.9 uid 0 \\    cache"
"""


class Node:
    """A machine to run the script on. `home` is the Hugging Face cache, whose path has spaces."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "a cache with spaces"
        self.record = folder / "record"
        self.bin = folder / "bin"
        for path in (self.home, self.record, self.bin):
            path.mkdir()
        for name, text in (("docker", DOCKER), ("ip", IP)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.environ = {"PATH": f"{self.bin}:{os.environ['PATH']}", "RECORD": str(self.record)}

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = ["bash", str(SCRIPT), *arguments]
        return subprocess.Popen(
            command, env=self.environ | environ, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_signals
        )

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        """Run the script. Returns exit code, output and errors."""
        process = self.start(*arguments, **environ)
        output, errors = process.communicate(timeout=SECONDS)
        return process.returncode, output, errors

    def calls(self) -> list[list[str]]:
        """Return the arguments of each docker call, in order, followed by the HF_TOKEN in its environment."""
        paths = sorted(path for path in self.record.iterdir() if path.name != ".new")
        return [path.read_text().split("\0")[:-1] for path in paths]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def value_after(call: list[str], flag: str) -> list[str]:
    return [call[at + 1] for at, argument in enumerate(call) if argument == flag]


def wait_until(met: Callable[[], object]) -> None:
    limit = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_head(node: Node) -> None:
    extra = ["--gpus", "all", "--privileged", "-e", "NCCL_IB_HCA=mlx5", "-e", "NCCL_IB_PKEY=1", "-v", "/a b:/data"]
    code, output, _ = node.run("image:tag", "10.0.0.1", "--head", str(node.home), *extra)
    assert code == 0
    run, removed = node.calls()
    at = run.index("image:tag")
    assert run[at + 1 : at + 3] == ["start", "--node-ip-address=10.0.0.1"]
    assert {"--head", "--port=6379", "--block"} <= set(run[at:])
    name = run[at - 1]
    assert run[at - 2] == "--name" and removed[:3] == ["rm", "--force", name]
    assert run[at - 2 - len(extra) : at - 2] == extra
    assert value_after(run, "--network") == ["host"] and value_after(run, "--ipc") == ["host"]
    assert value_after(run, "--shm-size") and "memlock=-1:-1" in value_after(run, "--ulimit")
    assert value_after(run, "--volume") == [f"{node.home}:/home/serve/.cache/huggingface"]
    assert {"SERVE_LLM_HOST_IP=10.0.0.1", "RAY_AUTH_MODE=disabled", "RAY_health_check_period_ms=1000"} <= set(
        value_after(run, "--env")
    )
    assert f"docker exec -it {name} serve-llm" in output


def test_the_command_that_the_head_prints_starts_a_worker(node: Node) -> None:
    _, output, _ = node.run("image", "10.0.0.1", "--head", str(node.home), "-v", "/a b:/data")
    (line,) = (line for line in output.splitlines() if "--worker" in line)
    done = subprocess.run(["bash", "-c", line], env=node.environ, capture_output=True, timeout=SECONDS, text=True)
    assert done.returncode == 0, done.stderr
    worker = node.calls()[2]
    at = worker.index("image")
    assert worker[at + 1 : -1] == [
        "start", "--node-ip-address=10.0.0.9", "--disable-usage-stats", "--block", "--address=10.0.0.1:6379"
    ]  # fmt: skip
    assert value_after(worker, "-v") == ["/a b:/data"]
    assert not any("health_check" in value for value in value_after(worker, "--env"))


@pytest.mark.parametrize("flags", [["-e", "SERVE_LLM_HOST_IP=10.0.0.1"], ["--env=SERVE_LLM_HOST_IP=10.0.0.1"]])
def test_the_command_for_workers_has_no_address_of_the_head(node: Node, flags: list[str]) -> None:
    around = ["-e", "NCCL_IB_HCA=mlx5", *flags, "-v", "/a b:/data"]
    _, output, errors = node.run("image", "10.0.0.1", "--head", str(node.home), *around)
    (line,) = (line for line in output.splitlines() if "--worker" in line)
    assert "SERVE_LLM_HOST_IP" not in line and line.endswith("-e NCCL_IB_HCA=mlx5 -v /a\\ b:/data "), errors
    assert flags[-1].removeprefix("--env=") in value_after(node.calls()[0], "-e"), "the head keeps it"


@pytest.mark.parametrize("by", ["environment", "flag"])
def test_worker_with_a_chosen_address(node: Node, by: str) -> None:
    arguments = ["image", "fd00::1", "--worker", str(node.home)]
    if by == "flag":
        code, _, errors = node.run(*arguments, "-e", "SERVE_LLM_HOST_IP=fd00::2")
    else:
        code, _, errors = node.run(*arguments, SERVE_LLM_HOST_IP="fd00::2")
    assert code == 0, errors
    assert {"--node-ip-address=fd00::2", "--address=[fd00::1]:6379"} <= set(node.calls()[0])


def test_a_head_that_cannot_be_reached(node: Node) -> None:
    code, _, errors = node.run("image", "10.0.0.1", "--worker", str(node.home), UNREACHABLE="1")
    assert code == 2 and "towards 10.0.0.1: set SERVE_LLM_HOST_IP" in errors
    assert node.calls() == []


def test_secrets_are_passed_by_name(node: Node) -> None:
    code, output, errors = node.run(
        "image", "10.0.0.1", "--head", str(node.home), "-e", "HF_TOKEN", HF_TOKEN="hf-1234", RAY_AUTH_TOKEN="ray-1234"
    )
    assert code == 0
    *run, environ = node.calls()[0]
    assert {"HF_TOKEN", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE=token"} <= set(value_after(run, "--env"))
    assert environ == "HF_TOKEN=hf-1234"
    assert not any("-1234" in text for text in [*run, output, errors])


@pytest.mark.parametrize(
    "flags",
    [["-e", "HF_TOKEN=hf_x"], ["-eHF_TOKEN=hf_x"], ["--env", "SERVE_LLM_API_KEY=hf_x"], ["--env=X_SECRET=hf_x"]],
)
def test_the_value_of_a_secret_goes_no_further(node: Node, flags: list[str]) -> None:
    """The command works as copied. Docker's own command line, and the one for workers, only have the name."""
    code, output, errors = node.run("image", "10.0.0.1", "--head", str(node.home), *flags)
    assert code == 0 and "export it" in errors
    *run, environ = node.calls()[0]
    name = "".join(flags).removeprefix("-e").removeprefix("--env").removeprefix("=").partition("=")[0]
    assert name in value_after(run, "-e") and f"-e {name} " in output
    assert not any("hf_x" in text for text in [*run, output, errors])
    assert environ == ("HF_TOKEN=hf_x" if name == "HF_TOKEN" else "HF_TOKEN=")


@pytest.mark.parametrize(("mode", "warns"), [(0o777, False), (0o555, True)])
def test_a_cache_that_the_containers_user_cannot_write(node: Node, mode: int, warns: bool) -> None:
    node.home.chmod(mode)
    code, _, errors = node.run("image", "10.0.0.1", "--head", str(node.home))
    assert code == 0 and node.calls()[0][0] == "run"
    assert (f"cannot write to {node.home}: chown" in errors) == warns


def test_a_flag_without_its_variable_is_refused(node: Node) -> None:
    code, _, errors = node.run("image", "10.0.0.1", "--head", str(node.home), "--env")
    assert code == 2 and "needs the name of a variable" in errors and node.calls() == []


@pytest.mark.parametrize("count", range(4))
def test_missing_arguments(node: Node, count: int) -> None:
    code, output, errors = node.run(*["image", "10.0.0.1", "--head", str(node.home)][:count])
    assert (code, output) == (2, "") and errors.startswith("usage:")
    assert node.calls() == []


@pytest.mark.parametrize(("role", "home"), [("--boss", "."), ("head", "."), ("--head", "/does/not/exist")])
def test_wrong_arguments(node: Node, role: str, home: str) -> None:
    code, _, errors = node.run("image", "10.0.0.1", role, home)
    assert code == 2 and ("usage:" in errors or "no such directory: /does/not/exist" in errors)
    assert node.calls() == []


def heed_signals() -> None:
    """Reset ignored signals: tests in the background or under nohup ignore some, and bash cannot handle signals that
    were ignored when it started."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_removes_the_container(node: Node, number: signal.Signals) -> None:
    process = node.start("image", "10.0.0.1", "--worker", str(node.home), DOCKER_STAYS="1")
    wait_until(node.calls)
    process.send_signal(number)
    output, errors = process.communicate(timeout=SECONDS)  # the fake docker, which has the pipes too, has ended
    assert process.returncode == 128 + number, output + errors
    run, removed = node.calls()
    assert removed[:3] == ["rm", "--force", value_after(run, "--name")[0]]


def test_the_exit_code_is_dockers(node: Node) -> None:
    code, _, _ = node.run("image", "10.0.0.1", "--head", str(node.home), DOCKER_EXITS="125")
    assert code == 125
    assert [call[0] for call in node.calls()] == ["run", "rm"]


def long_options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ray_knows_the_options(node: Node, role: str) -> None:
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        pytest.skip("Ray is not installed")
    node.run("image", "10.0.0.1", f"--{role}", str(node.home))
    call = node.calls()[0]
    (command, *options) = call[call.index("image") + 1 : -1]
    shown = subprocess.run([str(ray), command, "--help"], capture_output=True, text=True, timeout=60)
    assert long_options(options) - long_options(shown.stdout.replace(",", " ").split()) == set()


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker is not installed")
def test_docker_knows_the_options(node: Node) -> None:
    node.run("image", "10.0.0.1", "--head", str(node.home))
    call = node.calls()[0]
    shown = subprocess.run(["docker", "run", "--help"], capture_output=True, text=True, timeout=60)
    assert shown.returncode == 0
    assert long_options(call[: call.index("image")]) - long_options(shown.stdout.split()) == set()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
