"""docs/distributed.md: what can run on a CPU runs as written, and the rest names existing options and files.

Each block of the page says after `sh` what it needs: `cpu` runs here, `examples` in test_examples.py, and the others
(gpu, hosts, docker, kubernetes) are only run by readers.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import subprocess
import urllib.request
from pathlib import Path

import pytest
import yaml

from serve_llm.common.options.schema import OPTION_FIELDS
from serve_llm.common.options.sources import make_options, parse_args
from support.daemon import SERVE_LLM, Daemon
from support.manifests import documents

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"^```sh ?(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
NEEDS = {"cpu", "examples", "gpu", "hosts", "docker", "kubernetes"}

COMMANDS = [(needs, line.partition(" #")[0].strip()) for needs, block in BLOCKS for line in block.splitlines()]
DAEMONS = [(needs, line) for needs, line in COMMANDS if re.match(r"serve-llm (?!plan|check)", line)]
TOOLS = [(needs, line) for needs, line in COMMANDS if re.match(r"serve-llm (plan|check)", line)]

# The page is about them; a build that lacks some is not finished.
ABSENT = {
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "distributed_executor_backend",
    "nnodes",
    "node_rank",
    "master_addr",
} - {option.name for option in OPTION_FIELDS}
needs_options = pytest.mark.skipif(bool(ABSENT), reason=f"not in this build: {', '.join(sorted(ABSENT))}")


def arguments(line: str) -> list[str]:
    return shlex.split(line.replace("<model>", "demo"))[1:]


def greedy_text(url: str) -> str:
    body = {"model": "demo", "prompt": "def main():\n", "max_tokens": 24, "temperature": 0}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def test_every_block_says_what_it_needs() -> None:
    assert {needs for needs, _ in BLOCKS} == NEEDS
    assert PAGE.count("```sh") == len(BLOCKS) == PAGE.count("```") // 2
    assert len(DAEMONS) >= 6 and len(TOOLS) >= 3


@needs_options
@pytest.mark.slow
@pytest.mark.parametrize("line", [line for needs, line in DAEMONS if needs == "cpu"])
def test_a_daemon_gives_the_text_of_one_device(line: str) -> None:
    with Daemon(*arguments(line), "--dtype", "float32") as daemon, Daemon("demo", "--dtype", "float32") as alone:
        assert greedy_text(daemon.wait_until_serving()) == greedy_text(alone.wait_until_serving()) != ""


@needs_options
@pytest.mark.parametrize("line", [line for needs, line in TOOLS if needs == "cpu"])
def test_a_tool(line: str) -> None:
    """`check` may find a problem on this machine; it then ends with 1."""
    done = subprocess.run([SERVE_LLM, *arguments(line)], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    assert done.returncode == 0 or (" check" in line and done.returncode == 1 and "PROBLEM" in done.stdout), done.stderr


@needs_options
@pytest.mark.parametrize("line", [line for needs, line in DAEMONS if needs != "cpu" and "--node-rank 1" not in line])
def test_the_options_of_a_daemon_that_cannot_run_here_exist(line: str) -> None:
    parse_args(arguments(line), {})


@needs_options
def test_the_options_in_the_manifests_exist() -> None:
    text = (ROOT / "deploy" / "kuberay" / "raycluster.yaml").read_text()
    (line,) = re.findall(r"exec (serve-llm .*)", text)
    options = parse_args(arguments(line), {})
    (service,) = documents(ROOT / "deploy" / "kuberay" / "rayservice.yaml")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    asked = make_options(**application["args"])
    assert dataclasses.replace(asked, distributed_executor_backend="ray") == options


def test_what_it_points_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert len(links) > 5 and all((ROOT / "docs" / link).exists() for link in links)
    scripts = [word for _, line in COMMANDS for word in shlex.split(line) if word.startswith("deploy/")]
    assert len(scripts) >= 3 and all((ROOT / script).exists() for script in scripts)
    target = re.search(r"docker build --target (\w+)", PAGE)
    assert target is not None and f" AS {target[1]}\n" in (ROOT / "Dockerfile").read_text()


def test_the_readme_and_the_page_agree_on_the_cluster_script() -> None:
    """Its own usage text is the reference."""
    usage = subprocess.run(["bash", str(ROOT / "deploy/run_cluster.sh")], capture_output=True, text=True, timeout=20)
    assert usage.returncode == 2 and "<image> <head ip> --head|--worker <hf home>" in usage.stderr
    lines = [line for _, line in COMMANDS if "run_cluster.sh" in line]
    assert lines
    for line in lines:
        assert re.match(r"deploy/run_cluster.sh \S+ [\d.]+ --(head|worker) \S+ ", line)
