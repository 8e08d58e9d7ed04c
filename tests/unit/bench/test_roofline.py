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
    assert one.weight_bytes == eight.weight_bytes == matrices  # includes the tied head
    assert one.operations - one.parts["attention"][1] == matrices
    cached = 2 * 2 * 2 * 64 * 2 * 256  # keys and values, layers, heads, head_dim, bytes, tokens
    assert (one.parts["attention"][0], eight.parts["attention"][0]) == (cached, 8 * cached)
    assert eight.operations == pytest.approx(8 * one.operations)
    int8 = step_work(spec, [(1, 256)], is_int8=True)
    assert int8.weight_bytes == matrices / 2


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
LATENT = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


def test_of_experts_those_are_read_that_are_hit() -> None:
    spec, _ = read_model(dict(EXPERTS))
    expert, shared = 3 * 64 * 32, 64 * (2 * 4 + 2 * 2) * 16 + 64 * 8
    one, many = step_work(spec, [(1, 16)]), step_work(spec, [(1, 16)] * 500)
    assert one.parts["linear"] == pytest.approx((2 * 3 * (shared + 2 * expert), 2 * 3 * (shared + 2 * expert)))
    assert many.parts["linear"][0] == pytest.approx(2 * 3 * (shared + 8 * expert)), "all of them"
    assert many.parts["linear"][1] == pytest.approx(500 * one.parts["linear"][1])
    assert 2 < (step_work(spec, [(1, 16)] * 2).parts["linear"][0] / 6 - shared) / expert < 4


def test_latent_attention_reads_one_row_of_a_token_for_all_heads() -> None:
    spec, _ = read_model(dict(LATENT))
    work = step_work(spec, [(1, 100)])
    row = 24 + 8
    assert work.parts["attention"] == (2 * 2 * row * 100, 2 * 2 * 4 * (row + 24) * 100)
    attention = 64 * 4 * (16 + 8) + 64 * row + 24 * 4 * (16 + 12) + 64 * 4 * 12
    assert work.parts["linear"][0] == 2 * 2 * (attention + 3 * 64 * 96)


def test_products_in_8_bit_floats_are_half_as_large() -> None:
    spec, _ = read_model(dict(SMALL))
    plain, small = step_work(spec, [(1, 16)]), step_work(spec.with_fp8(), [(1, 16)])
    assert small.parts["linear"] == (plain.parts["linear"][0] / 2, plain.parts["linear"][1])
    assert small.parts["head"] == plain.parts["head"]


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
