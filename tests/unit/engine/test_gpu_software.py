"""Reasons why GPUs cannot be used: the driver, torch's build, a missing compiler."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from serve_llm.common.errors import CapacityError
from serve_llm.engine import gpu_software, startup
from serve_llm.engine.gpu_software import GpuSoftware, explain_unusable_gpus, find_missing_compiler, read_gpu_software

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:\n"


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "535.129.03"), ("", None), (None, None)])
def test_versions_are_read_from_files(text: str | None, version: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "version").write_text(text)
    assert read_gpu_software(tmp_path / "version") == (version, torch.__version__, torch.version.cuda)


@pytest.mark.parametrize(
    ("software", "cause"),
    [
        (GpuSoftware("580.65.06", "2.13.0+cu130", "13.0"), None),
        (GpuSoftware("550.1", "2.6.0", "12.4"), None),
        (GpuSoftware("535.129.03", "2.13.0", "13.0"), "CUDA 13.0, which needs driver 580 or newer, but .* has 535.129"),
        (GpuSoftware("580.65.06", "2.13.0+cpu", None), "torch 2.13.0.cpu was built without CUDA; .* torch 2.13.0 from"),
        (GpuSoftware(None, "2.13.0", "13.0"), "torch 2.13.0 finds no NVIDIA driver; .* --gpus all"),
    ],
)
def test_why_torch_cannot_use_gpus(software: GpuSoftware, cause: str | None) -> None:
    found = explain_unusable_gpus(software)
    assert found is None if cause is None else re.search(cause, str(found))


def test_what_triton_compiles_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_software.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setenv("CC", "cc")
    assert str(find_missing_compiler()).startswith("Triton needs Python.h")
    (tmp_path / "Python.h").touch()
    assert find_missing_compiler() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert str(find_missing_compiler()).startswith("Triton needs a C compiler")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_gpus_that_torch_cannot_use_are_no_reason_to_serve_on_the_cpu(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(startup, "list_gpus", lambda visible: ["0", "1"])
    monkeypatch.setattr(startup, "read_gpu_software", lambda: GpuSoftware("535.1", "2.13.0", "13.0"))
    with pytest.raises(
        CapacityError, match=r"this host has 2 GPUs, but torch .*: .* needs driver 580 .*; or use --dev"
    ):
        startup._choose_device(asked)
    monkeypatch.setattr(startup, "read_gpu_software", lambda: GpuSoftware("590.1", "2.13.0", "13.0"))
    with pytest.raises(CapacityError, match=r"driver 590.1, torch 2.13.0, CUDA 13.0; look at nvidia-smi; or use"):
        startup._choose_device(asked)
    assert startup._choose_device("cpu") == "cpu"


def test_a_gpu_without_a_compiler_is_an_error_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(startup, "find_missing_compiler", lambda: "Triton needs a C compiler")
    with pytest.raises(CapacityError, match=r"^--device: Triton needs a C compiler; or use --device cpu$"):
        startup._choose_device("auto")
    monkeypatch.setattr(startup, "find_missing_compiler", lambda: None)
    assert startup._choose_device("auto") == "cuda"
