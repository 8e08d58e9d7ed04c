"""The instruction sets for which the kernels are compiled, and how a library works without the fastest one."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from serve_llm.cli import collect_env
from serve_llm.kernels import registry
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.torch_sampling import SyncSamplingKernels

ROOT = Path(__file__).parents[3]
COMPILED = library.find()
# Records its arguments and creates the requested file.
COMPILER = """#!/bin/sh
echo "$*" >> "$LOG"
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""

needs_kernels = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")


def run_setup(folder: Path, kernels: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run setup.py with a compiler that only records its arguments. Returns its result, and the record."""
    compiler, log = folder / "c++", folder / "log"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    tools = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler))
    build = ["build_ext", "--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    command = [sys.executable, "setup.py", "--quiet", *build]
    environ = os.environ | tools | {"LOG": str(log), "CPU_KERNELS": kernels}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
    return done, log.read_text() if log.exists() else ""


def compiled_variants(log: str) -> set[str]:
    return set(re.findall(r"-DVARIANT=(\w+)", log))


@needs_kernels
def test_native_kernels_are_the_fastest_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert COMPILED is not None
    monkeypatch.delenv(library.LIMIT_VARIABLE, raising=False)  # it limits what runs, not what is compiled
    _, log = run_setup(tmp_path, "native")
    fastest = Library(COMPILED).variants[-1]
    assert compiled_variants(log) == {fastest} | ({"avx512_bf16"} if fastest == "amx" else set())
    assert set(re.findall(r"-DHAVE_(\w+)", log)) == {variant.upper() for variant in compiled_variants(log)}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other processors have one variant")
def test_all_kernels_are_compiled_by_default(tmp_path: Path) -> None:
    _, log = run_setup(tmp_path, "")
    assert compiled_variants(log) == set(library.VARIANTS)


def test_an_unknown_choice_of_kernels_is_an_error(tmp_path: Path) -> None:
    done, log = run_setup(tmp_path, "avx")
    assert done.returncode != 0 and not log
    assert done.stderr.splitlines()[-1].startswith("CPU_KERNELS=avx is unknown: all, or native")


def pretend(monkeypatch: pytest.MonkeyPatch, compiled: set[int], runnable: int) -> Path:
    """Return the real library, pretending that it has only the variants `compiled` and that the processor supports the
    first `runnable`."""

    class Native(ctypes.CDLL):
        serve_llm_compiled = staticmethod(lambda number: number in compiled)
        serve_llm_supported = staticmethod(lambda number: number < runnable)

    assert COMPILED is not None
    monkeypatch.delenv(library.LIMIT_VARIABLE, raising=False)
    monkeypatch.setattr(library, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": Native}))
    return COMPILED


@needs_kernels
def test_a_library_without_the_fastest_variant_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = pretend(monkeypatch, {0}, 3)
    found = Library(path)
    assert (found.variants, found.variant, found.missing) == (("baseline",), "baseline", ("avx2", "avx512"))
    assert library.find_variant() == "baseline"
    assert collect_env.describe_kernels() == f"baseline of baseline ({path.name}); not compiled: avx2, avx512"
    with pytest.raises(ValueError, match="no variant avx512 for this processor, but baseline"):
        Library(path, "avx512")
    caplog.set_level(logging.INFO)
    registry.choose(torch.device("cpu"), torch.bfloat16, {64})
    assert caplog.messages == [
        "CPU kernels: compiled for baseline",
        "This processor runs avx512, which is faster, but the kernels were not compiled for it: install again with "
        "CPU_KERNELS=all and g++ 11 or newer",
    ]


@needs_kernels
def test_a_library_of_another_processor_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = pretend(monkeypatch, {2, 3}, 2)
    assert library.find_variant() is None
    reason = f"{path.name} was compiled for other processors, or ONEDNN_MAX_CPU_ISA excludes this one; install again "
    assert collect_env.describe_kernels() == f"unusable: {reason}with CPU_KERNELS=all"
    registry.choose(torch.device("cpu"), torch.bfloat16, {64})
    assert isinstance(registry.choose_sampling(torch.device("cpu")), SyncSamplingKernels)
    (message,) = caplog.messages
    assert message.startswith("The model runs on plain torch operations, which is much slower: ") and reason in message
