"""The engine's GPU path over tensors of the meta device, which have shapes but no numbers: code that reads a number
back, or mixes host and device tensors, fails. Triton's kernels do not run, but the signatures for which they would be
compiled are recorded.

Only `DeviceCopier` may copy numbers to the device, and nothing may while a step is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.sampling import choose
from serve_llm.engine.transfer import PendingWork
from serve_llm.engine.weights import load
from serve_llm.engine.worker import model_runner, worker
from serve_llm.engine.worker.graphs import CapturedGraph
from serve_llm.kernels import registry
from serve_llm.kernels.triton import sampling
from support import triton
from support.resolved import resolve_all

META = torch.device("meta")
MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
INDEXED = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)


@dataclass(frozen=True)
class Arrived:
    tensor: Tensor

    is_ready = True

    def wait(self) -> Tensor:
        return self.tensor


class NoNumbers(TorchFunctionMode):
    """Refuses tensors made from Python numbers: on a GPU, they are copied from memory that is not pinned."""

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        assert function not in MADE_OF_NUMBERS, f"numbers of the host: {function.__name__}"
        index = args[1] if function in (Tensor.__getitem__, Tensor.__setitem__) else None
        parts = index if isinstance(index, tuple) else (index,)
        assert not any(isinstance(part, list | np.ndarray) for part in parts), "numbers of the host are an index"
        return function(*args, **(kwargs or {}))


@dataclass
class Watch(TorchDispatchMode):
    """Records what happens inside a step. Used as a mode together with `NoNumbers`, it refuses what meta tensors allow:
    host tensors other than those of `DeviceCopier`, and masks as indices, for which a GPU's host waits."""

    copies: int = 0  # to the device
    captured: list[int] = field(default_factory=list)  # sizes
    compiled: list[triton.Launch] = field(default_factory=list)
    is_capturing: bool = False
    is_copying: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        devices = {leaf.device for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)}
        assert self.is_copying or devices <= {META}, f"a tensor of the host: {operator}"
        if operator.overloadpacket in INDEXED:
            assert not any(index is not None and index.dtype == torch.bool for index in args[1]), "a mask is an index"
        return found

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        assert not self.is_capturing, "a copy in a captured step would not be made again"
        self.is_copying = True
        yield
        self.is_copying = False

    def launched(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launch = triton._launch(function, args, kwargs)
        if launch not in self.compiled:
            assert not self.is_capturing, f"compiled in a capture: {launch}"
            self.compiled.append(launch)


class MetaTransfer:
    def __init__(self, watch: Watch) -> None:
        self.watch, self.device = watch, META

    def to_device(self, array: np.ndarray) -> Tensor:
        self.watch.copies += 1
        with self.watch.copying():
            return torch.from_numpy(np.ascontiguousarray(array)).to(META)

    def fill(self, target: Tensor, array: np.ndarray) -> None:
        self.watch.copies += 1
        with self.watch.copying():
            numbers = torch.from_numpy(np.ascontiguousarray(array))
        assert (target.shape, target.dtype, target.device) == (numbers.shape, numbers.dtype, META)

    def to_host(self, tensor: Tensor) -> Arrived:
        assert tensor.device == META and tensor.is_contiguous(), "a copy that is not one of bytes waits"
        with self.watch.copying():
            return Arrived(torch.ones(tensor.shape, dtype=tensor.dtype, device="cpu"))

    def record(self) -> PendingWork:
        return PendingWork(None)


def make_meta_engine(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[EngineCore, Watch]:
    watch = Watch()

    def capture(compute: Callable[[], Tensor]) -> CapturedGraph:
        watch.is_capturing = True
        output = compute()
        watch.is_capturing = False
        watch.captured.append(len(output))
        return CapturedGraph(lambda: None, output)

    def weights(seed: int, dtype: torch.dtype, device: torch.device) -> Any:
        return lambda name, shape, part=None, own=None: torch.empty(
            shape if part is None else _with(shape, part.dimension, len(part.range)), dtype=own or dtype, device=META
        )

    found = registry.with_triton(batch_invariant=bool(options.get("batch_invariant")))
    assert isinstance(found, registry.Kernels), found
    monkeypatch.setattr(load, "choose", lambda *_, **__: found)
    monkeypatch.setattr(load, "build_dummy_loader", weights)
    monkeypatch.setattr(choose, "choose_device_sampling", lambda device: sampling)
    monkeypatch.setattr(model_runner, "DeviceCopier", lambda device: MetaTransfer(watch))
    monkeypatch.setattr(model_runner, "CudaCapture", lambda device: capture)
    monkeypatch.setattr(worker, "compile_kernels", lambda *_: None)  # compiling may wait
    monkeypatch.setattr(InterpretedFunction, "run", lambda self, *args, **more: watch.launched(self, *args, **more))
    start = model_runner.ModelRunner.start

    def watched(self: model_runner.ModelRunner, batch: Any, masks: Any = None) -> Any:
        with watch, NoNumbers():
            return start(self, batch, masks)

    monkeypatch.setattr(model_runner.ModelRunner, "start", watched)
    asked = make_options(str(directory), kv_cache_memory="16MiB", load_format="dummy", **options)
    raw = read_config(directory)
    config, spec, rows = resolve_all(asked, str(directory), raw)
    eager = bool(options.get("enforce_eager"))
    config = replace(config, device="meta", async_scheduling=True, enforce_eager=eager)
    return EngineCore(config, startup.build_executor(config, spec, rows, raw)), watch


def _with(shape: tuple[int, ...], dimension: int, size: int) -> tuple[int, ...]:
    return (*shape[:dimension], size, *shape[dimension + 1 :])
