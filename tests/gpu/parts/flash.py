"""FlashAttention-3 as the engine's backend: the cases of `parts.attention`, its times next to Triton's on the same
cache, and an 8B engine that uses it. The library comes from vLLM's wheel, because the Hub cannot be reached here."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from floors import CONTEXT, LLAMA_8B
from torch import Tensor

from parts import attention, common, flash_library
from parts.attention_times import Bench, blocks_of
from parts.kernels import choose, tell
from parts.speed import decoding, prefill
from serve_llm import LLM
from serve_llm.kernels.backends.flash_attention import FlashAttention

STEPS = (  # names, new tokens of each sequence, contexts
    ("prompts, 4 x 2048", 2048, [2048] * 4),
    ("prompts, 1 x 8192", 8192, [8192]),
    ("prompts, 1 x 32768", 32768, [32768]),
    ("100 new tokens behind 64k", 100, [65536]),
    (f"decode, 64 x {CONTEXT}", 1, [CONTEXT] * 64),
    ("decode, 1 x 32768", 1, [32768]),
)


def check_cases(here: common.Place) -> None:
    """Check the cases that it supports, and report why it does not support the others."""
    device, offered = torch.device(here.device), 0
    for case in attention.CASES:
        checks = list(attention.flash_checks(device, [case]))
        if not checks:
            reason = str(attention.flash_offer(device, case))
            if "when tried" in reason:  # it failed, or its results were wrong
                here.report.check(f"FlashAttention-3, {case.name}", False, reason)
            else:
                here.report.not_run(f"FlashAttention-3, {case.name}", reason)
        for name, call, most in checks:
            tell(here, ((name, found(), most) for found in (call,)), name)
            offered += 1
    here.report.measured("cases that it computes", offered, f"of {len(attention.CASES)}")


def compare_times(here: common.Place) -> None:
    bench = Bench(here)
    ours = choose()  # `bench.kernels` uses FlashAttention-3 here
    flash = FlashAttention(flash_library.FlashLibrary())
    for name, new, contexts in STEPS:
        num_bytes = bench.cached_bytes(sum(contexts))

        def make(
            attend: Callable[..., Tensor], new: int = new, contexts: Sequence[int] = contexts
        ) -> Callable[[], object]:
            made = bench.paged(bench.cache(blocks_of(contexts)), new, contexts)
            return partial(attend, *made.args, **made.keywords)

        try:
            triton = bench.micros(name, partial(make, ours.paged_attention), num_bytes)
            theirs = bench.micros(name, partial(make, flash), num_bytes)
        except Exception as error:  # the next one may work
            here.report.check(name, False, repr(error)[:200])
            continue
        here.report.measured(f"{name}: Triton", triton, "µs")
        here.report.measured(f"{name}: FlashAttention-3", theirs, "µs")
        here.report.measured(f"{name}: Triton's speed over FlashAttention-3's", theirs / triton)


def measure_engine(here: common.Place) -> None:
    found, spec = common.limits(here.rehearse), LLAMA_8B.spec()
    with LLM(here.folder(LLAMA_8B), max_num_seqs=64, attention_backend="flash", **here.options()) as llm:
        prefill(here, "8B", llm, spec, found)
        decoding(here, "8B", llm, spec, found, (64,))


@torch.inference_mode()
def main() -> None:
    here = common.place("flash")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            if here.rehearse:
                raise ImportError("no GPU")
            flash_library.install(Path(temporary))
        except (ImportError, OSError, RuntimeError) as error:
            here.report.not_run("FlashAttention-3", f"{error!r:.200}")
            return
        for measure in (check_cases, compare_times, measure_engine):
            try:
                measure(here)
            except Exception as error:  # the next one may work
                here.report.check(measure.__name__, False, repr(error)[:300])


if __name__ == "__main__":
    main()
