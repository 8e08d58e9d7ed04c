"""The thread pool of the compiled kernels: results equal those of one thread, for several concurrent callers and in a
forked child."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator

import pytest
import torch

from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.linear import Packer

COMPILED = library.find()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")


@pytest.fixture(params=[2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_many_short_pieces_of_work(threads: int) -> None:
    assert COMPILED is not None
    layer = Packer(Library(COMPILED)).pack(random(3000, 64))
    x = random(40, 64, seed=1)
    expected = layer(x)
    for number in range(2000):
        rows = 1 + number % 40
        assert torch.equal(layer(x[:rows]), expected[:rows])


def test_several_callers_at_a_time(threads: int) -> None:
    """Each caller has its own layer: a layer keeps its arguments where the kernel reads them."""
    assert COMPILED is not None
    packer, weight, x = Packer(Library(COMPILED)), random(3000, 64), random(9, 64, seed=1)
    expected = packer.pack(weight)(x)
    wrong: list[int] = []

    def call(caller: int) -> None:
        layer = packer.pack(weight)
        if not all(torch.equal(layer(x), expected) for _ in range(200)):
            wrong.append(caller)

    callers = [threading.Thread(target=call, args=(caller,)) for caller in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_a_child_of_fork_has_threads_of_its_own() -> None:
    program = """
        import os
        import torch
        from serve_llm.kernels.cpu import library
        from serve_llm.kernels.cpu.linear import Packer
        torch.set_num_threads(3)
        layer = Packer(library.Library(library.find())).pack(torch.eye(2048).bfloat16())
        x = torch.randn(3, 2048).bfloat16()
        assert torch.equal(layer(x), x)
        child = os.fork()
        if child == 0:
            os._exit(0 if torch.equal(layer(x), x) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(layer(x), x)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
