"""Adapters of routers and experts give PEFT's results, in both forms in which PEFT has stored them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.errors import AdapterError
from serve_llm.common.types import Adapter, EngineCoreRequest
from serve_llm.engine.lora.files import read_adapter
from serve_llm.engine.model.lora_targets import find_lora_targets
from serve_llm.engine.model.registry import read_model
from support.adapter_files import write_adapter
from support.adapters import check_as_peft, make_adapter
from support.engine import assert_equal, generate, greedy, make_engine
from support.matrix import mostly_slow
from support.tiny import make_checkpoint

# from PEFT
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

PROMPTS = [[5, 17, 101, 44, 9, 230, 61], [7] * 19, [300, 2, 45]]
OPTIONS: dict[str, object] = {"enable_lora": True, "max_lora_rank": 64, "block_size": 8}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
CASES = [  # family, rank, target modules and parameters, changed fields of LoraConfig
    ("qwen3_moe", 3, ["q_proj"], BOTH, {"use_rslora": True}),
    ("mixtral", 8, ["o_proj"], [*BOTH, "gate.weight"], {}),
    ("gpt_oss", 5, ["k_proj"], BOTH, {"alpha_pattern": {"experts.down_proj": 3}}),
    ("llama4_text", 4, ["q_proj"], BOTH, {}),
    ("deepseek_v3", 16, ["o_proj"], [*BOTH, "gate.weight"], {}),
    ("granitemoe", 8, ["v_proj"], BOTH, {"rank_pattern": {"experts.gate_up_proj": 11}}),
    ("glm4_moe", 7, [], BOTH, {}),
    ("qwen2_moe", 8, ["shared_expert_gate"], ["experts.down_proj", "gate.weight"], {}),
    ("deepseek_v2", 2, [], ["experts.gate_up_proj"], {}),
    ("granitemoeshared", 64, ["input_linear"], [*BOTH, "router.weight"], {}),
]
FAST = (CASES[0], CASES[1], CASES[2], CASES[3])


def ask_all(adapters: list[Adapter | None], **sampling: object) -> list[EngineCoreRequest]:
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    return [
        msgspec.structs.replace(greedy(number, prompt, 6, **sampling), adapter=adapter)
        for number, (prompt, adapter) in enumerate(pairs)
    ]


@pytest.mark.parametrize(("family", "rank", "modules", "parameters", "config"), mostly_slow(CASES, FAST))
def test_as_peft(
    family: str, rank: int, modules: list[str], parameters: list[str], config: dict[str, object], tmp_path: Path
) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family)
    fields = {"r": rank, "target_modules": modules, "target_parameters": parameters} | config
    adapters: list[Adapter | None] = [None]
    for number in range(2):
        adapters.append(make_adapter(checkpoint, tmp_path / f"adapter{number}", family, seed=number, **fields))
    requests = ask_all(adapters)
    check_as_peft(checkpoint, requests, generate(make_engine(checkpoint, **OPTIONS), requests))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_module_per_expert(family: str, tmp_path: Path) -> None:
    """PEFT stored adapters so when each expert's linear layers were modules, and converts them when it loads them."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family, **({"mlp_only_layers": []} if family == "qwen3_moe" else {}))
    up, down = (37, 60), (60, 37)
    names: dict[str, tuple[int, int]] = {}
    for layer in range(3):
        for expert in range(5):
            if family == "mixtral":
                prefix = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                names |= {f"{prefix}.w1": up, f"{prefix}.w3": up, f"{prefix}.w2": down}
            else:
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                names |= {f"{prefix}.gate_proj": up, f"{prefix}.up_proj": up, f"{prefix}.down_proj": down}
    adapter = write_adapter(tmp_path / "adapter", names)
    requests = ask_all([None, adapter])
    check_as_peft(checkpoint, requests, generate(make_engine(checkpoint, **OPTIONS), requests))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Adapter | None]]:
    """Return a checkpoint; no adapter, one of attention, one of experts, and one of half the experts and the router."""
    root = tmp_path_factory.mktemp("experts")
    checkpoint = root / "base"
    make_checkpoint(checkpoint, "mixtral")
    kinds = [([], BOTH), (["q_proj"], ["experts.down_proj", "gate.weight"])]
    adapters: list[Adapter | None] = [None, make_adapter(checkpoint, root / "a", r=3, target_modules=["v_proj"])]
    for number, (modules, parameters) in enumerate(kinds):
        fields = {"r": number + 4, "target_modules": modules, "target_parameters": parameters}
        adapters.append(make_adapter(checkpoint, root / f"e{number}", seed=number, **fields))
    return checkpoint, adapters


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bits_alone_and_in_a_crowd(dtype: str, mixtral: tuple[Path, list[Adapter | None]]) -> None:
    checkpoint, adapters = mixtral
    requests = ask_all(adapters, temperature=1.0, logprobs=2)
    engine = make_engine(checkpoint, dtype=dtype, max_loras=2, **OPTIONS)
    crowd = generate(engine, requests, [number // 2 for number in range(len(requests))])
    plain = make_engine(checkpoint, dtype=dtype, block_size=8)
    alone = make_engine(checkpoint, dtype=dtype, **OPTIONS, enable_prefix_caching=False)
    for request in requests:
        result = generate(plain if request.adapter is None else alone, [request])
        assert_equal(result, {request.id: crowd[request.id]})


HOWS: dict[str, dict[str, object]] = {
    "two ranks": {"tensor": 2},
    "three ranks, two stages": {"tensor": 3, "pipeline": 2},
    "whole experts on two ranks": {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.mark.parametrize("how", HOWS)
def test_several_ranks(how: str, mixtral: tuple[Path, list[Adapter | None]]) -> None:
    checkpoint, adapters = mixtral
    requests = ask_all(adapters)
    one = generate(make_engine(checkpoint, **OPTIONS), requests)
    several = generate(make_engine(checkpoint, **OPTIONS, **HOWS[how]), requests)
    assert {number: result.token_ids for number, result in several.items()} == {
        number: result.token_ids for number, result in one.items()
    }


def test_quantised_experts(mixtral: tuple[Path, list[Adapter | None]], tmp_path: Path) -> None:
    """An adapter of zeros changes nothing; another one does."""
    checkpoint, adapters = mixtral
    engine = make_engine(checkpoint, quantization="int4-g32", **OPTIONS)
    fields = {"target_modules": [], "target_parameters": [*BOTH, "gate.weight"]}
    zeros = make_adapter(checkpoint, tmp_path / "zeros", scale=0.0, **fields)
    plain, unchanged, changed = (generate(engine, ask_all([one], logprobs=1)) for one in (None, zeros, adapters[2]))
    assert_equal(unchanged, plain)
    assert all(changed[number].token_ids != plain[number].token_ids for number in plain)


def test_bad_adapters_of_experts(mixtral: tuple[Path, list[Adapter | None]], tmp_path: Path) -> None:
    checkpoint, adapters = mixtral
    spec, weights = read_model(json.loads((checkpoint / "config.json").read_text()))
    targets = find_lora_targets(spec, weights)
    assert adapters[2] is not None
    source = Path(adapters[2].directory)
    config = json.loads((source / "adapter_config.json").read_text())
    tensors = load_file(source / "adapter_model.safetensors")
    outer = "base_model.model.model.layers.1.mlp.experts"

    def read_error(changed: dict[str, object], kept: dict[str, torch.Tensor], engines: int = 1) -> str:
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changed))
        save_file(kept, tmp_path / "adapter_model.safetensors")
        with pytest.raises(AdapterError) as caught:
            read_adapter(tmp_path, targets if engines == 1 else find_lora_targets(spec, weights, engines=engines), 8)
        return str(caught.value)

    without = {name: one for name, one in tensors.items() if not name.startswith(f"{outer}.base_layer")}
    assert "lacks base_model.model.model.layers.1.block_sparse_moe.experts.gate_up_proj" in read_error({}, without)
    fewer = tensors | {f"{outer}.lora_A.weight": tensors[f"{outer}.lora_A.weight"][4:].clone()}
    assert f"{outer}.lora_A.weight has shape [16, 37], but must have [20, 37]" in read_error({}, fewer)
    assert "target_parameters do not name its weight" in read_error({"target_parameters": [BOTH[0]]}, tensors)
    assert "the rank of model.layers.0.mlp.experts" in read_error({"r": 9}, tensors)
    assert "use_dora: experts take no DoRA adapters" in read_error({"use_dora": True}, tensors)
    assert "several engines share take no adapters" in read_error({}, tensors, engines=2)
    assert "target_parameters must be a list of names" in read_error({"target_parameters": "experts"}, tensors)
