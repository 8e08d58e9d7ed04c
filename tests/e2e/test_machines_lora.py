"""Adapters on several hosts: only the engine's host has their files, and it sends them to ranks elsewhere.

The machines are network namespaces, each with its own `/tmp/serve-llm-adapters-*`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_llm import LLM, LoRARequest, SamplingParams
from serve_llm.common.hub import resolve_model
from support.adapters import make_adapter
from support.daemon import Daemon
from support.namespaces import Machine, Machines
from support.nodes import LIMIT, PROMPTS, SMALL, body
from support.ray_machines import serve_on, short_folder, start_ray
from support.ray_nodes import skip_without_ray

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT

PORT = 29700
ASK = """
import json, sys, urllib.request
url, *bodies = sys.argv[1:]
found = []
for body in bodies:
    request = urllib.request.Request(url + "/v1/completions", body.encode(), {"Content-Type": "application/json"})
    found.append([c["text"] for c in json.load(urllib.request.urlopen(request, timeout=120))["choices"]])
sys.stdout.write(json.dumps(found))
"""
ASKED = ["a", "demo", "b", "a"]  # with one slot, both adapters are sent, and one of them again


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the adapters a and b of the demo model."""
    root = tmp_path_factory.mktemp("adapters")
    for number, name in enumerate("ab"):
        make_adapter(resolve_model("demo"), root / name, seed=number, scale=0.1, use_dora=name == "b")
    return root


@pytest.fixture(scope="module")
def expected(adapters: Path) -> list[list[str]]:
    """Return the answers of one process to `ASKED`."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM("demo", enable_lora=True, dtype="float32", kv_cache_memory="32MiB", device="cpu") as llm:
        chosen = [None if name == "demo" else LoRARequest(name, str(adapters / name)) for name in ASKED]
        outputs = [llm.generate(PROMPTS, params, use_tqdm=False, lora=one) for one in chosen]
    texts = [[output.outputs[0].text for output in some] for some in outputs]
    assert texts[0] == texts[3] and len({tuple(some) for some in texts}) == 3
    return texts


@pytest.fixture
def private() -> Iterator[Path]:
    """Create a folder that is private to each machine."""
    with tempfile.TemporaryDirectory(prefix="serve-llm-adapters-", dir="/tmp") as name:
        yield Path(name)


def install(machine: Machine, adapters: Path, private: Path) -> tuple[str, ...]:
    """Copy the adapters to the machine. Returns the options that serve them."""
    copied = machine.run("cp", "-r", f"{adapters}/.", str(private))
    assert copied.returncode == 0, copied.stderr
    return "--enable-lora", "--max-loras", "1", "--lora-modules", f"a={private / 'a'}", f"b={private / 'b'}"


def ask(machine: Machine, url: str) -> list[list[str]]:
    run = machine.run(sys.executable, "-c", ASK, url, *(body(model) for model in ASKED), seconds=LIMIT)
    assert run.returncode == 0, run.stderr
    found: list[list[str]] = json.loads(run.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("how", [("-tp", "2"), ("-pp", "2"), ("-dp", "2", "--data-parallel-split", "0,2")])
def test_other_nodes_have_no_adapters(
    how: tuple[str, ...], adapters: Path, expected: list[list[str]], private: Path
) -> None:
    with Machines(2, private=[str(private)]) as machines, ExitStack() as stack:
        network = ("--nnodes", "2", "--master-addr", f"{machines[0].address}:{PORT}")
        environ = {"SERVE_LLM_CLUSTER_SECRET": "s3cret"}
        options = (*SMALL, *how, *install(machines[0], adapters, private), "--host", "0.0.0.0")
        master = Daemon("demo", *options, *network, environ=environ, machine=machines[0])
        follower = Daemon(*network, "--node-rank", "1", environ=environ, machine=machines[1])
        stack.enter_context(master)
        stack.enter_context(follower)
        url = master.wait_until_serving()
        assert ask(machines[0], url) == expected
        assert machines[1].run("ls", str(private)).stdout == ""


@pytest.mark.slow
def test_other_nodes_of_ray_have_no_adapters(
    adapters: Path, expected: list[list[str]], private: Path, tmp_path: Path
) -> None:
    skip_without_ray()
    with short_folder() as folder, Machines(2, private=[str(folder), str(private)]) as machines:
        start_ray(machines[0], folder, 1)
        start_ray(machines[1], folder, 1, machines[0].address)
        modules = install(machines[0], adapters, private)
        _, url = serve_on(machines[0], folder, tmp_path / "log", *SMALL, "-tp", "2", *modules)
        assert ask(machines[0], url) == expected
