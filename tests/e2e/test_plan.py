"""`serve-llm plan` as a command: fast, without torch, and consistent with its docs page and the daemon's log."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from support import published
from support.daemon import SERVE_LLM, Daemon
from support.matrix import mostly_long, mostly_slow

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
EXAMPLES = re.findall(r"```console\n\$ (serve-llm plan .*)\n([^`]*)```", PAGE)
WITHOUT_TORCH = """
import sys
from serve_llm.cli.main import main
sys.argv = ["serve-llm", "plan", "demo", "--device", "cpu", "--memory", "16GiB", "-tp", "2"]
code = main()
heavy = {"torch", "numpy", "transformers", "safetensors", "huggingface_hub", "fastapi", "uvloop"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else code)
"""


def run(*arguments: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [SERVE_LLM, "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=directory)


def test_it_takes_neither_torch_nor_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert "CPU KV cache size" in done.stdout
    assert after.ru_utime - before.ru_utime < 1.0  # CPU time, which a busy machine does not change


@pytest.mark.parametrize(("command", "output"), EXAMPLES)
def test_the_page_shows_what_happens(command: str, output: str, tmp_path: Path) -> None:
    for name, config in (("70B", published.LLAMA_70B), ("405B", published.LLAMA_405B)):
        directory = tmp_path / "meta-llama" / f"Llama-3.1-{name}-Instruct"
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(config))
    done = run(*command.split()[2:], directory=tmp_path)
    assert (done.stdout + done.stderr).split("\n") == output.split("\n")


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2 and all("KV cache" in output for _, output in EXAMPLES)


ERRORS: list[tuple[list[str], int, str]] = [
    (["demo", "--gpu", "h900"], 2, "--gpu: expected one of .*h200.*, not 'h900'"),
    (["demo", "--gpu", "mi300x"], 2, "for any other GPU, such as one of AMD, give --memory instead"),
    (["demo", "--gpu", "t4"], 2, "--gpu: a t4 has compute capability 7.5, but the kernels need 8.0 or more"),
    (["demo", "--gpu", "a10", "--quantization", "fp8", "--dtype", "bfloat16"], 2, "a a10 does not multiply 8-bit"),
    (["demo", "--gpu", "h100", "-dp", "9"], 4, "9 engines with .* need 9 GPUs, but there are 8; .*-size to 8"),
    (["demo", "--gpu", "h100", "-tp", "2", "-dp", "5"], 4, "5 engines with .* need 10 GPUs, .*-size to 4"),
    (["demo", "--memory", "650MiB", "-tp", "1"], 4, "with --tensor-parallel-size 1 --pipeline-parallel-size 1 a"),
    (["demo", "--port", "1"], 2, "unknown option --port; see serve-llm plan --help"),
    (["demo", "--gpus-per-nod", "1"], 2, "did you mean --gpus-per-node"),
    (["demo", "--memory", "much"], 2, "--memory: expected bytes"),
    (["demo", "-tp", "2", "--tensor-parallel-split", "1,2,3"], 2, "--tensor-parallel-split: 3 shares"),
    (["demo", "--gpu", "h100", "--kv-cache-dtype", "int8"], 2, "--kv-cache-dtype: int8 is served on a CPU only"),
    (["demo", "--kv-cache-dtype", "fp8_e5m2"], 2, "--kv-cache-dtype: fp8 with 5 bits .*, not 'fp8_e5m2'"),
    (
        ["demo", "--gpu", "b200", "--kv-cache-dtype", "fp8"],
        2,
        "--kv-cache-dtype: fp8 is not served on a b200",
    ),
    (
        ["demo", "--device", "cpu", "--dtype", "float32", "--memory", "60MiB"],
        4,
        "a machine is short of .*use --quantization int8 with .*, or use --kv-cache-dtype int8 with "
        r".*\(counted: weights, one step, and the KV cache of one request of 2,048 tokens\)",
    ),
    (["/does/not/exist"], 3, "no directory /does/not/exist"),
    (
        ["demo", "--memory", "650MiB"],
        4,
        r"it does not fit: with --tensor-parallel-size 1 --pipeline-parallel-size 6 a GPU is short of [\d.]+ MiB; "
        "use devices with more memory",
    ),
]


@pytest.mark.parametrize(("arguments", "code", "message"), mostly_slow(ERRORS, ERRORS[::5]))
def test_errors_are_one_line(arguments: list[str], code: int, message: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert re.search(f"^serve-llm: .*{message}", line)


def test_help_names_the_command_and_its_options() -> None:
    top = subprocess.run([SERVE_LLM, "--help"], capture_output=True, text=True, timeout=60).stdout
    assert "plan MODEL say whether and how a model fits" in " ".join(top.split())
    own = run("--help").stdout
    assert all(flag in own for flag in ("--gpu ", "--nodes", "--no-nvlink", "--json", "-tp", "--max-model-len"))
    assert "--port" not in own


def test_json_has_the_layers_of_a_rank_as_a_range() -> None:
    planned = json.loads(run("demo", "--device", "cpu", "--json", "-pp", "2", "-tp", "2").stdout)
    ranges = [(rank["first_layer"], rank["num_layers"]) for rank in planned["ranks"]]
    first, last = ranges[0][1], ranges[2][1]
    assert ranges == [(0, first)] * 2 + [(first, last)] * 2 and first + last == planned["num_layers"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    mostly_long(
        [
            "",
            "--max-model-len 512 --kv-cache-memory 32MiB --block-size 32",
            "-tp 2 --kv-cache-memory 32MiB",
            "-dp 2 --max-model-len 512",
            "-tp 2 --quantization int8 --kv-cache-memory 32MiB",
            "-tp 3 --kv-cache-dtype int8 --max-model-len 512 --block-size 8",
            "-tp 3 -pp 2 --max-model-len 512 --dtype float32",
        ],
        [
            "",
            "-dp 2 --max-model-len 512",
            "-tp 2 --quantization int8 --kv-cache-memory 32MiB",
            "-tp 3 -pp 2 --max-model-len 512 --dtype float32",
        ],
    ),
)
def test_a_daemon_says_the_same(options: str) -> None:
    given = options.split()
    planned = json.loads(run("demo", "--device", "cpu", "--json", *given).stdout)
    text = run("demo", "--device", "cpu", *given).stdout.splitlines()
    with Daemon("demo", "--device", "cpu", *given) as daemon:
        url = daemon.wait_until_serving()
        log = {re.sub(r"^.*?\] (engine \d: )?", "", line) for line in daemon.log}  # several engines log the same
        with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
    said = [line for line in log if "KV cache size" in line or "Maximum concurrency" in line]
    assert len(said) == 2 and all(line in text for line in said)
    (weights,) = (line for line in log if line.startswith("Weights: "))
    held = [rank["weight_bytes"] / 2**20 for rank in planned["ranks"]]
    caches = [rank["kv_cache_bytes"] / 2**20 for rank in planned["ranks"]]
    assert weights == f"Weights: {sum_of(held)}, KV cache: {sum_of(caches)}"
    engines = re.findall(r"cache_config_info\{(.*)\}", metrics)
    assert len(engines) == planned["data_parallel_size"]
    for labels in engines:
        assert f'kv_cache_tokens="{planned["kv_cache_tokens"]}"' in labels
        assert f'num_gpu_blocks="{planned["num_kv_blocks"]}"' in labels
    assert planned["fits"] and os.path.basename(planned["model"]) == "demo"


@pytest.mark.slow
def test_plan_and_daemon_refuse_the_same_for_the_same_reason() -> None:
    done = run("demo", "--device", "cpu", "--kv-cache-memory", "1MiB")
    assert done.returncode == 4
    (advice,) = re.findall(r"lower (--max-model-len to at most \d+)", done.stderr)
    with Daemon("demo", "--device", "cpu", "--kv-cache-memory", "1MiB") as daemon:
        assert daemon.wait(120.0) == 4
        assert advice in daemon.log[-1]


def sum_of(mebibytes: list[float]) -> str:
    return " + ".join(f"{size:.2f} MiB" for size in mebibytes)
