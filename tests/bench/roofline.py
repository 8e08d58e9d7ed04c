"""Compute the lower bound for the time of steps and workloads: bytes over bandwidth, operations over peak throughput.

Run on a quiet machine: PYTHONPATH=tests python -m bench.roofline [--quantization int8]

Both limits are measured in the same run. Linear layers, the head and attention are each bound by the slower of the two;
weights are read once per step, cached keys and values once by each sequence; everything else is ignored. Prints the
resulting output tokens/s for each workload, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.model import SHAPE
from bench.workloads import WORKLOADS, Workload
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.quantization_spec import GroupQuantForm
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import AnyAttentionSpec, AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec
from serve_llm.kernels import bench as kernel_bench


@dataclass(frozen=True)
class Limits:
    bandwidth: float  # GB/s
    peak: float  # GFLOP/s of a bf16 matrix product


@dataclass(frozen=True)
class Work:
    """Bytes read and operations computed by one step, by part."""

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
    """Return the work of one step. chunks: for each sequence the number of new tokens and the context length including
    them; each samples one token. Linear layers are in bf16, or in fewer bits as the spec or is_int8 says; is_int8
    includes the head. bf16 counts as 16 bits also where the kernels hold 12 (decision 0064)."""
    new = sum(count for count, _ in chunks)
    counts = [_products(layer, spec.hidden_size, new) for layer in spec.layers]
    stored, multiplied = sum(read for read, _ in counts), sum(used for _, used in counts)
    head = spec.vocab_size * (spec.embedding_size or spec.hidden_size)
    pairs = sum(count * (context - count) + count * (count + 1) / 2 for count, context in chunks)
    mixers = [layer.attention for layer in spec.layers if not isinstance(layer.attention, GatedDeltaNetSpec)]
    cached = sum(map(_cached_numbers, mixers))  # states are small beside weights and are not counted
    scored = sum(map(_pair_operations, mixers))
    return Work(
        {
            "linear": (stored * (1 if is_int8 else _linear_bytes(spec)), 2 * multiplied * new),
            "head": (head * (1 if is_int8 else _form_bytes(spec.head_form)), 2 * head * len(chunks)),
            "attention": (2 * cached * sum(context for _, context in chunks), scored * pairs),
        }
    )


def workload_steps(workload: Workload) -> Iterable[list[tuple[int, int]]]:
    """Return the chunks of each step, if the streams' requests start and end together and shared prefixes are
    cached."""
    begin = workload.shared_tokens + workload.prompt_tokens
    for _ in range(workload.requests // workload.streams):
        yield [(workload.prompt_tokens, begin)] * workload.streams
        for done in range(1, workload.output_tokens):
            yield [(1, begin + done)] * workload.streams


def tokens_per_second(spec: ModelSpec, workload: Workload, limits: Limits, is_int8: bool = False) -> float:
    """Return the highest number of output tokens per second that the limits allow."""
    seconds = sum(step_work(spec, chunks, is_int8).least_seconds(limits) for chunks in workload_steps(workload))
    rounds = workload.requests // workload.streams
    return rounds * workload.streams * workload.output_tokens / seconds


def measure_limits() -> Limits:
    """Return the best of a few measurements: a slow moment must not lower the machine's limits."""
    found = [kernel_bench.measure_limits() for _ in range(3)]
    return Limits(max(bandwidth for bandwidth, _ in found), max(peak for _, peak in found))


def _products(layer: LayerSpec, width: int, tokens: int) -> tuple[float, float]:
    """Return the number of weights of one layer that a step of so many tokens reads, and that one token multiplies
    with. Experts read: as many as random choices hit on average."""
    attention = _attention_numbers(layer.attention, width)
    if isinstance(layer.ffn, MLPSpec):
        both = attention + _ffn_numbers(layer.ffn, width)
        return both, both
    router, expert = layer.ffn.router, _ffn_numbers(layer.ffn.expert, width)
    shared = attention + width * router.num_experts + _ffn_numbers(layer.ffn.shared_expert, width)
    hit = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** tokens)
    return shared + hit * expert, shared + router.top_k * expert


def _linear_bytes(spec: ModelSpec) -> float:
    """Return the bytes per weight of layers that all have one format."""
    return 1 if spec.fp8 else _form_bytes(None if spec.grouped is None else spec.grouped.default)


def _form_bytes(form: GroupQuantForm | None) -> float:
    """Return the bytes per weight, including its share of scales and zero points. form: None for bf16."""
    if form is None:
        return 2
    scales = 0 if form.group_size is None else form.scale_bytes * (1 + form.has_zeros) / form.group_size
    return form.bits / 8 + scales


def _ffn_numbers(ffn: MLPSpec | None, width: int) -> int:
    return 0 if ffn is None else width * ffn.intermediate_size * (3 if ffn.gated else 2)


def _attention_numbers(attention: AnyAttentionSpec, width: int) -> int:
    if isinstance(attention, GatedDeltaNetSpec):
        keys, values = attention.num_kv_heads * attention.key_dim, attention.num_heads * attention.value_dim
        return width * (2 * keys + 3 * values + 2 * attention.num_heads)
    if not isinstance(attention, MLASpec):
        query_times = 3 if attention.output_gate else 2
        return width * (query_times * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    query_size = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    rank = attention.q_lora_rank
    queries = width * query_size if rank is None else rank * (width + query_size)
    expanded = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    latent = width * attention.head_dim + attention.kv_lora_rank * expanded
    return queries + latent + width * attention.num_heads * attention.v_head_dim


def _cached_numbers(attention: AttentionSpec | MLASpec) -> int:
    """Return the cached numbers of one token in one layer."""
    return attention.head_dim if isinstance(attention, MLASpec) else 2 * attention.num_kv_heads * attention.head_dim


def _pair_operations(attention: AttentionSpec | MLASpec) -> int:
    """Return the operations of one query with one key in one layer. Latent attention works on the cached rows
    themselves."""
    value = attention.kv_lora_rank if isinstance(attention, MLASpec) else attention.head_dim
    return 2 * attention.num_heads * (attention.head_dim + value)


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
