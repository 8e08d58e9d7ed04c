"""The least that steps and workloads can take on a machine: bytes over its bandwidth, operations over its peak.

Run on a quiet machine: PYTHONPATH=tests python -m bench.roofline [--quantization int8]

Both limits are measured in the same run. Linear layers, the head and attention are each bound by whichever takes
longer; weights are read once a step, cached keys and values once by each sequence; everything else is left out. Prints
what that allows in output tokens/s for each workload, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.model import SHAPE
from bench.workloads import WORKLOADS, Workload
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.kernels import bench as kernel_bench


@dataclass(frozen=True)
class Limits:
    bandwidth: float  # GB/s
    peak: float  # GFLOP/s of a bf16 matrix product


@dataclass(frozen=True)
class Work:
    """What one step reads and computes, by part: bytes and operations."""

    parts: dict[str, tuple[float, float]]

    @property
    def num_bytes(self) -> float:
        return sum(num_bytes for num_bytes, _ in self.parts.values())

    @property
    def operations(self) -> float:
        return sum(operations for _, operations in self.parts.values())

    @property
    def weight_bytes(self) -> float:
        return self.parts["linear"][0] + self.parts["head"][0]

    def least_seconds(self, limits: Limits) -> float:
        found = (max(read / limits.bandwidth, done / limits.peak) for read, done in self.parts.values())
        return sum(found) / 1e9


def step_work(spec: ModelSpec, chunks: Sequence[tuple[int, int]], is_int8: bool = False) -> Work:
    """Of one step. chunks: of each sequence its new tokens, and its context with them; each samples one token. bf16, or
    with is_int8 the linear layers in 8 bits."""
    numbers = sum(_products(spec, index) for index in range(len(spec.layers)))
    head = spec.vocab_size * (spec.embedding_width or spec.width)
    new = sum(count for count, _ in chunks)
    pairs = sum(count * (context - count) + count * (count + 1) / 2 for count, context in chunks)
    keys = sum(layer.mixer.kv_heads * layer.mixer.head_dim for layer in spec.layers)
    queries = sum(layer.mixer.heads * layer.mixer.head_dim for layer in spec.layers)
    return Work(
        {
            "linear": (numbers * (1 if is_int8 else 2), 2 * numbers * new),
            "head": (2 * head, 2 * head * len(chunks)),
            "attention": (2 * 2 * keys * sum(context for _, context in chunks), 4 * queries * pairs),
        }
    )


def workload_steps(workload: Workload) -> Iterable[list[tuple[int, int]]]:
    """The chunks of each step, if the streams' requests start and end together; what is shared has been cached."""
    begin = workload.shared_tokens + workload.prompt_tokens
    for _ in range(workload.requests // workload.streams):
        yield [(workload.prompt_tokens, begin)] * workload.streams
        for done in range(1, workload.output_tokens):
            yield [(1, begin + done)] * workload.streams


def tokens_per_second(spec: ModelSpec, workload: Workload, limits: Limits, is_int8: bool = False) -> float:
    """The most output tokens per second that the limits allow."""
    seconds = sum(step_work(spec, chunks, is_int8).least_seconds(limits) for chunks in workload_steps(workload))
    rounds = workload.requests // workload.streams
    return rounds * workload.streams * workload.output_tokens / seconds


def measure_limits() -> Limits:
    """The best of a few: what a machine can do is more than what it does in a slow moment."""
    found = [kernel_bench.limits() for _ in range(3)]
    return Limits(max(bandwidth for bandwidth, _ in found), max(peak for _, peak in found))


def _products(spec: ModelSpec, index: int) -> int:
    """Numbers in the weights of one layer's products."""
    mixer, ffn = spec.layers[index].mixer, spec.layers[index].ffn
    attention = (2 * mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    return spec.width * (attention + ffn.width * (3 if ffn.gated else 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=("int8",))
    is_int8 = parser.parse_args().quantization == "int8"
    spec, _ = read_model(dict(SHAPE))
    limits = measure_limits()
    found = {name: tokens_per_second(spec, workload, limits, is_int8) for name, workload in WORKLOADS.items()}
    print(f"memory {limits.bandwidth:.0f} GB/s, bf16 matrix product {limits.peak:.0f} GFLOP/s")
    for name, speed in found.items():
        print(f"{name:5} at most {speed:7.1f} output tokens/s")
    print(json.dumps({"bandwidth": limits.bandwidth, "peak": limits.peak, "tokens_per_second": found}))


if __name__ == "__main__":
    main()
