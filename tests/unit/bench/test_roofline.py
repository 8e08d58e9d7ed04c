import pytest

from bench.model import SHAPE, tensors
from bench.roofline import Limits, Work, step_work, tokens_per_second, workload_steps
from bench.workloads import WORKLOADS, Workload
from serve_llm.engine.model.registry import read_model

SMALL = SHAPE | {"vocab_size": 5000, "num_hidden_layers": 2}


def test_each_part_is_bound_by_memory_or_arithmetic() -> None:
    work = Work({"linear": (40e9, 100e9), "attention": (10e9, 300e9)})
    assert work.least_seconds(Limits(bandwidth=20.0, peak=100.0)) == pytest.approx(2.0 + 3.0)


def test_a_step_reads_all_matrices_once_and_each_cache_once() -> None:
    spec, _ = read_model(dict(SMALL))
    matrices = sum(tensor.nbytes for tensor in tensors(SMALL).values() if tensor.dim() == 2)
    one, eight = step_work(spec, [(1, 256)]), step_work(spec, [(1, 256)] * 8)
    assert one.weight_bytes == eight.weight_bytes == matrices  # the tied head is one of them
    assert one.operations - one.parts["attention"][1] == matrices
    cached = 2 * 2 * 2 * 64 * 2 * 256  # keys and values, layers, heads, numbers of a head, bytes, tokens
    assert (one.parts["attention"][0], eight.parts["attention"][0]) == (cached, 8 * cached)
    assert eight.operations == pytest.approx(8 * one.operations)
    assert step_work(spec, [(1, 256)], is_int8=True).parts["linear"][0] == one.parts["linear"][0] / 2


def test_a_workload_is_its_steps() -> None:
    spec, _ = read_model(dict(SMALL))
    workload = Workload("w", streams=2, prompt_tokens=8, output_tokens=3, requests=4, shared_tokens=16)
    steps = list(workload_steps(workload))
    assert steps == [[(8, 24)] * 2, [(1, 25)] * 2, [(1, 26)] * 2] * 2
    limits = Limits(50.0, 400.0)
    seconds = sum(step_work(spec, chunks).least_seconds(limits) for chunks in steps)
    assert tokens_per_second(spec, workload, limits) == pytest.approx(12 / seconds)
    assert tokens_per_second(spec, WORKLOADS["W1"], Limits(100.0, 1e9)) == pytest.approx(
        2 * tokens_per_second(spec, WORKLOADS["W1"], Limits(50.0, 1e9)), rel=1e-3
    )
