"""Which ranks are started, and the errors if they cannot be."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.sources import make_options
from serve_llm.engine.distributed import start


def test_one_rank_is_no_process() -> None:
    choice, worker_group = start.start_workers(make_options("demo", device="cpu"))
    assert choice.backend == "inprocess" and worker_group is None


def test_without_ray_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = make_options("demo", device="cuda", tensor_parallel_size=4)
    with pytest.raises(OptionError) as raised:
        start.start_workers(options)
    assert str(raised.value) == (
        "--distributed-executor-backend: ray, because 4 ranks need more than the 0 GPUs of this host: Ray is not "
        "installed: pip install '.[ray]' in the repository, or use mp with as many ranks as this host has devices for "
        "(--tensor-parallel-size, --pipeline-parallel-size)"
    )


def test_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "find_spec", lambda name: object())
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    options = make_options("demo", device="cpu", distributed_executor_backend="ray")
    with pytest.raises(OptionError, match=r"ray, because it was requested: no Ray cluster answers at 127\.0\.0\.1:1"):
        start.start_workers(options)


def test_ray_is_not_imported_where_it_is_not_chosen() -> None:
    """Nor is torch: ranks must start first."""
    program = (
        "import sys, serve_llm.engine.__main__\n"
        "from serve_llm.engine.distributed.start import start_workers\n"
        "from serve_llm.common.options.sources import make_options\n"
        "choice, worker_group = start_workers(make_options('demo', tensor_parallel_size=2, device='cpu'))\n"
        "worker_group.close()\n"
        "assert choice.backend == 'mp' and not {'ray', 'torch'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)
