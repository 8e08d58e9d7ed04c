"""NCCL with one rank, inside a captured graph; and the tokens of several ranks, compared with those of one.

Each rank needs its own GPU; shapes that need more GPUs are reported as not run. A rehearsal runs its ranks on a CPU.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from parts import common
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.distributed.choose import ExecutorChoice
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.parallel.torch_group import TorchGroup, create_store
from serve_llm.engine.worker.graphs import CudaCapture
from support.engine import generate, greedy, make_engine
from support.resolved import resolve_all
from support.tiny import make_checkpoint

SHAPES = (  # tensor and pipeline parallelism, and --all-reduce
    (2, 1, "nccl"),
    (1, 2, "nccl"),
    (2, 2, "nccl"),
    (2, 1, "symmetric"),
)


def spread(here: common.Place, folder: Path, tensor: int, pipeline: int, all_reduce: str) -> EngineCore:
    options = make_options(
        str(folder),
        device=here.device,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        distributed_executor_backend="mp",
        all_reduce=all_reduce,
        kv_cache_memory="64MiB",
        max_num_seqs=16,
    )
    raw = read_config(folder)
    config, spec, weights = resolve_all(
        options, str(folder), raw, ExecutorChoice("mp", "the check asks for it", here.device)
    )
    return EngineCore(config, startup.build_executor(config, spec, weights, raw))


def nccl_in_a_graph(here: common.Place) -> None:
    store = create_store("127.0.0.1")
    group = TorchGroup(store, "alone", 0, 1, "127.0.0.1", backend="nccl")
    x = torch.ones(1000, device="cuda")
    group.all_reduce(x.clone())  # the communicator is made at the first call
    captured = CudaCapture(torch.device("cuda"))(lambda: group.all_reduce(x * 2))
    x.fill_(3.0)
    captured.replay()
    torch.cuda.synchronize()
    here.report.check("NCCL, one rank, in a captured graph", bool((captured.output == 6.0).all()))
    del captured  # before the communicator, which waits for all graphs that use it


def compare_ranks(here: common.Place, shapes: Sequence[tuple[int, int, str]]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        vocab_size = make_checkpoint(folder, "llama")
        prompts = [list(range(length)) for length in (1, 8, 30)] + [[vocab_size - 1] * 5]
        requests = [greedy(number, prompt, 16) for number, prompt in enumerate(prompts)]
        expected = generate(make_engine(folder, device=here.device), requests)
        for tensor, pipeline, all_reduce in shapes:
            what = f"TP={tensor}, PP={pipeline}, --all-reduce {all_reduce}: tokens of one rank"
            num_gpus = torch.cuda.device_count()
            if not here.rehearse and num_gpus < tensor * pipeline:
                here.report.not_run(what, f"it needs {tensor * pipeline} GPUs, not {num_gpus}")
                continue
            try:
                engine = spread(here, folder, tensor, pipeline, all_reduce)
                with contextlib.closing(engine._executor):
                    found = generate(engine, requests)
            except Exception as error:  # the next one may work
                here.report.check(what, False, repr(error)[:200])
                continue
            same = all(found[number].token_ids == result.token_ids for number, result in expected.items())
            here.report.check(what, same)


def main() -> None:
    here = common.place("ranks")
    if here.rehearse:
        compare_ranks(here, [shape for shape in SHAPES if shape[2] == "nccl"])
        return
    nccl_in_a_graph(here)
    compare_ranks(here, SHAPES)


if __name__ == "__main__":
    main()
