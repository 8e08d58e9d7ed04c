"""Times of the kernels in graphs, from their own benchmark, relative to a copy and a large product measured in the same
run."""

from __future__ import annotations

import torch

from parts import common
from serve_llm.kernels import bench_gpu


@torch.inference_mode()
def main() -> None:
    here = common.place("bench")
    if here.rehearse:
        here.report.not_run("bench", "there is no GPU")
        return
    random = bench_gpu.make_random(here.device)
    bandwidth, peak = bench_gpu.measure_limits(random)
    here.report.measured("copy", bandwidth, "GB/s")
    here.report.measured("bf16 product", peak / 1000, "TFLOP/s")
    for name, timed in bench_gpu.measure_times(random):
        read, done = timed.num_bytes / timed.us / 1000 / bandwidth, timed.operations / timed.us / 1000 / peak
        here.report.measured(name, timed.us, f"µs, {read:.2f} of the copy, {done:.2f} of the product")
    if not bench_gpu.has_paged_varlen():
        here.report.not_run("torch's varlen_attn with a block table", f"not there in torch {torch.__version__}")
    if not bench_gpu.has_grouped_mm():
        here.report.not_run("torch's grouped_mm", f"no kernel for this card in torch {torch.__version__}")


if __name__ == "__main__":
    main()
