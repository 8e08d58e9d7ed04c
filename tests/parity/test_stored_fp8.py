"""fp8 checkpoints as a GPU multiplies them, on a CPU: inputs are rounded to 8 bits as the checkpoint says.

CPUs have torch's product for a scale per row; the one for blocks is replaced by a definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from reference.scaled_mm import scaled_mm
from serve_llm.engine.weights import load
from serve_llm.kernels import linear_fp8, linear_fp8_blocks, linear_fp8_stored
from serve_llm.kernels.linear_fp8_stored import pack_stored_fp8
from serve_llm.kernels.registry import PORTABLE
from support.adapter_requests import PROMPTS, ask
from support.adapters import make_adapter
from support.engine import Result, generate, greedy
from support.forward import CPU, Harness, load_whole, read_spec
from support.gpu_path import KERNELS, assert_same, graphs_of, make_gpu_engine
from support.packed_floats import make_packed
from support.parity import random_prompts
from support.reference import reference_logprobs

pytestmark = pytest.mark.skipif(
    not linear_fp8.is_supported(CPU), reason="this torch has no product of 8-bit floats on a CPU"
)
BF16 = torch.bfloat16
BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}  # a rank of two has half a block of keys
OPTIONS = {"block_size": 8, "max_num_seqs": 20, "max_num_batched_tokens": 37, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    for cached in (linear_fp8_blocks.is_supported, linear_fp8_stored._log_once):
        cached.cache_clear()
    yield
    linear_fp8_blocks.is_supported.cache_clear()


def logprobs(directory: Path, prompts: list[list[int]]) -> Tensor:
    spec, weight_map = read_spec(directory)
    return torch.cat(Harness(spec, load_whole(directory, spec, weight_map, dtype=BF16), BF16).logprobs(prompts))


@pytest.mark.parametrize(
    ("form", "rounds"),
    [
        ("fp8-tensor", True),
        ("fp8-channel", True),
        ("fp8-ministral", True),
        ("fbgemm", True),
        ("torchao-fp8-dynamic", True),
        ("fp8-128", True),
        ("fp8-native", False),  # blocks of another size
        ("torchao-fp8", False),
    ],
)
def test_close_to_the_model(form: str, rounds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the inputs shows, but not much."""
    sizes = BLOCKS if form == "fp8-128" else {}
    prompts = random_prompts(make_packed(tmp_path, "llama", form, std=0.1, **sizes))
    exact = torch.cat([reference_logprobs(tmp_path / "plain", prompt) for prompt in prompts])
    spread = exact - exact.mean(-1, keepdim=True)
    unrounded = logprobs(tmp_path / "packed", prompts)
    rounding = replace(PORTABLE, pack_stored_fp8=pack_stored_fp8)
    monkeypatch.setattr(load, "choose", lambda *_, **__: rounding)
    ours = logprobs(tmp_path / "packed", prompts)
    errors = [float((found - exact).norm() / spread.norm()) for found in (unrounded, ours)]
    assert errors[0] < 0.03 and errors[1] < 0.25
    assert (errors[1] > 2 * errors[0]) == rounds


def test_experts_keep_their_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are multiplied in one launch, by the kernels for weights in groups."""
    make_packed(tmp_path, "qwen3_moe", "fp8-channel", moe_intermediate_size=40)
    packed: list[tuple[int, int]] = []

    def noted(weight: linear_fp8_stored.GroupQuantWeight, bias: Tensor | None, dtype: torch.dtype) -> object:
        packed.append(weight.shape)
        return pack_stored_fp8(weight, bias, dtype)

    monkeypatch.setattr(load, "choose", lambda *_, **__: replace(PORTABLE, pack_stored_fp8=noted))
    spec, weight_map = read_spec(tmp_path / "packed")
    load_whole(tmp_path / "packed", spec, weight_map, dtype=BF16)
    assert packed and all(40 not in shape and 2 * 40 not in shape for shape in packed)


def run(
    directory: Path, monkeypatch: pytest.MonkeyPatch, prompts: list[list[int]], **more: object
) -> dict[int, Result]:
    kernels = replace(KERNELS, pack_stored_fp8=pack_stored_fp8)
    engine = make_gpu_engine(directory, monkeypatch, kernels, **OPTIONS, **more)
    requests = [greedy(number, prompt, 6, prompt_logprobs=0) for number, prompt in enumerate(prompts)]
    requests += [greedy(len(prompts) + number, prompt, 9) for number, prompt in enumerate(prompts)]
    results = generate(engine, requests, [number // 2 for number in range(len(requests))])
    if not more:
        assert graphs_of(engine)._capture.sizes, "steps are captured"
    return results


def told(logprobs: Tensor, prompt: list[int]) -> Tensor:
    """The log-probabilities of the prompt's tokens."""
    return logprobs[range(len(prompt) - 1), prompt[1:]]


@pytest.mark.parametrize("form", ["fp8-128", "autofp8"])
def test_captured_and_on_ranks(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=linear_fp8_stored.logger.name)
    prompts = random_prompts(make_packed(tmp_path, "llama", form, **(BLOCKS if form == "fp8-128" else {})))
    captured = run(tmp_path / "packed", monkeypatch, prompts)
    assert_same(run(tmp_path / "packed", monkeypatch, prompts, enforce_eager=True), captured)
    ranks = run(tmp_path / "packed", monkeypatch, prompts, tensor=2)
    exact = torch.cat([told(reference_logprobs(tmp_path / "plain", prompt), prompt) for prompt in prompts])
    spread = (exact - exact.mean()).norm()
    errors = []
    for found in (captured, ranks):
        ours = [one.logprob for number in range(len(prompts)) for one in found[number].prompt_logprobs or ()]
        errors.append(float((torch.tensor(ours) - exact).norm() / spread))
    assert 0.01 < errors[0] < 0.6 and errors[1] < 1.5 * errors[0]
    kinds = {record.getMessage() for record in caplog.records if record.name == linear_fp8_stored.logger.name}
    names = ("128 x 128 block", "128 inputs", "row") if form == "fp8-128" else ("row",)  # a rank may have one block
    sentence = "fp8 weights with a scale per {} are multiplied by inputs that are rounded to 8 bits"
    assert kinds == {sentence.format(name) for name in names}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
def test_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter changes the results by as much as without rounded inputs."""
    make_packed(tmp_path, "llama", "fp8-128", **BLOCKS)
    adapter = make_adapter(tmp_path / "plain", tmp_path / "adapter", seed=2, r=4)
    found = []
    for pack in (None, pack_stored_fp8):
        kernels = replace(KERNELS, pack_stored_fp8=pack)
        engine = make_gpu_engine(
            tmp_path / "packed", monkeypatch, kernels, **OPTIONS, enable_lora=True, max_lora_rank=16
        )
        requests = [ask(number, PROMPTS[1], one, prompt_logprobs=0) for number, one in enumerate((None, adapter))]
        results = generate(engine, requests)
        found.append(
            [torch.tensor([one.logprob for one in results[number].prompt_logprobs or ()]) for number in (0, 1)]
        )
    (plain, adapted), (rounded, both) = found
    assert (adapted - plain).norm() > 3 * (both - adapted).norm() > 0 < (rounded - plain).norm()
