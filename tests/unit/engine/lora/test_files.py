"""A bad adapter is refused as a whole, with one error that names the fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from serve_llm.common.adapter_files import AdapterFiles
from serve_llm.common.errors import AdapterError
from serve_llm.common.types import LoRATarget
from serve_llm.engine.lora.files import KnownAdapter, parse_known_adapter, read_adapter, start_reading
from serve_llm.engine.lora.hashed_files import compute_digest, read_files

PREFIX = "base_model.model.model.layers.0."
TARGETS = {
    "model.layers.0.self_attn.q_proj": LoRATarget("model.layers.0.self_attn.q_proj", 12, 8),
    "model.layers.0.mlp.down_proj": LoRATarget("model.layers.0.mlp.down_proj", 8, 20),
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "use_dora": False,
    "some_future_key": None,
}
Tensors = dict[str, torch.Tensor]
SHAPES = {"self_attn.q_proj": (12, 8), "mlp.down_proj": (8, 20)}


def build_tensors(rank: int = 4) -> Tensors:
    tensors = {}
    for module, (outputs, inputs) in SHAPES.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(outputs, rank)
    return tensors


def write(directory: Path, config: object, tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def read_error(directory: Path, max_rank: int = 16) -> str:
    with pytest.raises(AdapterError) as caught:
        read_adapter(directory, TARGETS, max_rank)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_scales_ranks_and_digest(tmp_path: Path) -> None:
    changed = {"use_rslora": True, "alpha_pattern": {"mlp.down_proj": 3}, "lora_dropout": 0.1}
    directory = write(tmp_path, CONFIG | changed, build_tensors())
    contents = read_adapter(directory, TARGETS, 4)
    assert [module.scale for module in contents.modules.values()] == [3 / 2, 8 / 2]
    assert contents.digest == compute_digest(directory)
    write(tmp_path, CONFIG, build_tensors())
    assert compute_digest(directory) != contents.digest


@pytest.mark.parametrize(
    "changed",
    [{"use_rslora": None, "use_dora": None, "ensure_weight_tying": None, "fan_in_fan_out": None}]
    + [{"task_type": task} for task in ("FEATURE_EXTRACTION", None)],
)
def test_what_changes_nothing(tmp_path: Path, changed: dict[str, object]) -> None:
    contents = read_adapter(write(tmp_path, CONFIG | changed, build_tensors()), TARGETS, 4)
    assert [module.scale for module in contents.modules.values()] == [2, 2]


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.(q_proj|down_proj)", ["q_proj", "model.layers.0.mlp.down_proj"]]
)
def test_ways_to_name_the_modules(tmp_path: Path, targets: object) -> None:
    directory = write(tmp_path, CONFIG | {"target_modules": targets}, build_tensors())
    assert set(read_adapter(directory, TARGETS, 4).modules) == set(TARGETS)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA"),
        ({"task_type": "SEQ_CLS"}, "task_type must be CAUSAL_LM or FEATURE_EXTRACTION, not 'SEQ_CLS'"),
        ({"r": 0}, "r must be a positive integer, not 0"),
        ({"r": True}, "r must be a positive integer"),
        ({"r": None}, "r must be a positive integer"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number, not '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"use_dora": True}, "lacks base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector, which"),
        ({"use_dora": 1}, "use_dora must be true or false, not 1"),
        ({"bias": "all"}, "bias: adapters with biases are not supported"),
        ({"lora_bias": True}, "lora_bias: "),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: "),
        ({"target_parameters": [3]}, "target_parameters must be a list of names"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4 changes the base model's weights"),
        (
            {"init_lora_weights": "lora_ga", "lora_ga_config": {"direction": "ArB2r"}},
            "init_lora_weights: lora_ga changes the base model's weights",
        ),
        ({"some_future_key": {"a": 1}}, "some_future_key: this key is not known"),
        ({"rank_pattern": {"(q_proj": 4}}, "rank_pattern: '(q_proj' is not a regular expression: missing )"),
        ({"alpha_pattern": {"q{9999999999}": 4}}, "'q{9999999999}' is not a regular expression: the repetition number"),
        ({"rank_pattern": {"q" * 4096 + "+": 4}}, "rank_pattern: a pattern has 4,097 characters, more than 4,096"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj must be a positive integer"),
        ({"rank_pattern": {r".*\.q_proj": 5}}, "q_proj.lora_A.weight has shape [4, 8], but must have [5, 8]"),
        ({"target_modules": None}, "target_modules must be"),
        (
            {"target_modules": ["q_proj"]},
            "mlp.down_proj.lora_A.weight is not one of adapter_config.json's target_modules",
        ),
        ({"r": 8}, "has shape [4, 20], but must have [8, 20]"),
        ({"r": 32}, "the rank of model.layers.0.mlp.down_proj is 32, more than --max-lora-rank 16"),
    ],
)
def test_bad_configs(tmp_path: Path, changed: dict[str, object], error: str) -> None:
    assert error in read_error(write(tmp_path, CONFIG | changed, build_tensors()))


def add(name: str, value: torch.Tensor | None) -> Callable[[Tensors], Tensors]:
    """Return the tensors with one added, or one removed."""

    def change(tensors: Tensors) -> Tensors:
        changed: dict[str, torch.Tensor | None] = {**tensors, name: value}
        return {key: tensor for key, tensor in changed.items() if tensor is not None}

    return change


Q_DOWN = f"{PREFIX}self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (add(Q_DOWN, None), f"lacks {Q_DOWN}"),
        (add(Q_DOWN, torch.randn(4, 9)), f"{Q_DOWN} has shape [4, 9], but must have [4, 8]"),
        (add(Q_DOWN, torch.randn(4, 8, 1)), "has shape [4, 8, 1]"),
        (add(Q_DOWN, torch.full((4, 8), torch.nan)), f"{Q_DOWN} contains numbers that are not finite"),
        (add(Q_DOWN, torch.full((4, 8), torch.inf, dtype=torch.bfloat16)), "contains numbers that are not finite"),
        (add(Q_DOWN, torch.ones(4, 8, dtype=torch.int8)), "is stored as I8"),
        (add("base_model.model.lm_head.lora_A.weight", torch.ones(4, 8)), "lm_head.lora_A.weight is not supported"),
        (add(f"{PREFIX}mlp.experts.3.up_proj.lora_A.weight", torch.ones(4, 8)), "the model has no such layer"),
        (
            add(f"{PREFIX}self_attn.q_proj.lora_magnitude_vector", torch.ones(12)),
            "belongs to DoRA, but adapter_config.json",
        ),
        (add("q_proj.lora_A.weight", torch.ones(4, 8)), "q_proj.lora_A.weight is not supported"),
        (lambda tensors: {}, "has no tensors"),
        (lambda tensors: dict(list(tensors.items())[:2]), "mlp.down_proj.lora_A.weight, which adapter_config.json's"),
    ],
)
def test_bad_tensors(tmp_path: Path, change: Callable[[Tensors], Tensors], error: str) -> None:
    assert error in read_error(write(tmp_path, CONFIG, change(build_tensors())))


@pytest.mark.parametrize(
    ("magnitude", "error"),
    [
        (torch.ones(8), "self_attn.q_proj.lora_magnitude_vector has shape [8], but must have [12]"),
        (torch.ones(12, 1), "lora_magnitude_vector has shape [12, 1]"),
        (torch.full((12,), torch.nan), "lora_magnitude_vector contains numbers that are not finite"),
        (None, "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector, which"),
    ],
)
def test_bad_magnitudes(magnitude: torch.Tensor | None, error: str, tmp_path: Path) -> None:
    tensors = build_tensors() | {f"{PREFIX}mlp.down_proj.lora_magnitude_vector": torch.ones(8)}
    changed = add(f"{PREFIX}self_attn.q_proj.lora_magnitude_vector", magnitude)(tensors)
    assert error in read_error(write(tmp_path, CONFIG | {"use_dora": True}, changed))


def test_magnitudes(tmp_path: Path) -> None:
    magnitudes = {f"{PREFIX}{module}.lora_magnitude_vector": torch.ones(shape[0]) for module, shape in SHAPES.items()}
    directory = write(tmp_path, CONFIG | {"use_dora": True}, build_tensors() | magnitudes)
    contents = read_adapter(directory, TARGETS, 4)
    assert [module.magnitude and module.magnitude.shape for module in contents.modules.values()] == [(8,), (12,)]


def test_bad_files(tmp_path: Path) -> None:
    assert "is not a directory" in read_error(tmp_path / "missing")
    directory = write(tmp_path / "adapter", CONFIG, build_tensors())
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    for cut in (0, 7, 100, len(whole) - 1):
        weights.write_bytes(whole[:cut])
        assert f"{weights} cannot be read" in read_error(directory)
    weights.write_bytes(whole)
    (directory / "adapter_config.json").write_text("[" * 100_000)
    assert "is not JSON" in read_error(directory)
    (directory / "adapter_config.json").write_text("[]")
    assert "must be a JSON object" in read_error(directory)
    (directory / "adapter_config.json").write_text(" " * (2**20 + 1))
    assert "is larger than" in read_error(directory)
    weights.rename(directory / "adapter_model.bin")
    assert "has no adapter_model.safetensors; if it is saved as adapter_model.bin, a pickle, `serve-llm" in read_error(
        directory
    )


def read_known(directory: Path, files: AdapterFiles | None = None) -> KnownAdapter:
    with ThreadPoolExecutor(1) as threads:
        return parse_known_adapter(start_reading(threads, directory, TARGETS, 4, files), directory, TARGETS, 4)


@pytest.mark.parametrize("is_sent", [False, True])
def test_a_known_adapter_is_what_was_checked(tmp_path: Path, is_sent: bool) -> None:
    directory = write(tmp_path, CONFIG, build_tensors() | {Q_DOWN: torch.randn(4, 8, dtype=torch.bfloat16)})
    checked = read_adapter(directory, TARGETS, 4)
    known = read_known(directory, read_files(directory) if is_sent else None)
    assert known.files.digest == checked.digest
    assert known.modules == checked.modules


def test_a_known_adapter_that_has_changed_has_another_digest(tmp_path: Path) -> None:
    """Its numbers are not checked again, but nothing uses them."""
    digest = read_adapter(write(tmp_path, CONFIG, build_tensors()), TARGETS, 4).digest
    write(tmp_path, CONFIG, build_tensors() | {Q_DOWN: torch.full((4, 8), torch.nan)})
    assert read_known(tmp_path).files.digest != digest


@pytest.mark.parametrize(
    "header",
    ["", "{", "[]", '{"a": 3}', '{"a": {"dtype": "F32"}}', '{"a": {"dtype": [], "shape": 3, "data_offsets": [0, 4]}}']
    + [f'{{"{Q_DOWN}": {{"dtype": "F32", "shape": [4, 8], "data_offsets": {ends}}}}}' for ends in ("[0, 9]", "[0]")],
)
def test_a_known_adapter_that_is_no_adapter_any_more(tmp_path: Path, header: str) -> None:
    directory = write(tmp_path, CONFIG, build_tensors())
    encoded = header.encode()
    (directory / "adapter_model.safetensors").write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        read_known(directory)
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="cannot be read: No such file"):
        read_known(directory)
