"""If config.json has no dtype, it is read from the weight files, and the log says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import make_plan
from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine.weights.headers import find_checkpoint_dtype
from support import published
from support.resolved import resolve_all
from support.tiny import make_checkpoint


def without_dtype(directory: Path) -> dict[str, object]:
    raw = read_config(directory)
    raw.pop("dtype", None)
    (directory / "config.json").write_text(json.dumps(raw))
    return raw


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_the_engine_and_the_plan_take_the_dtype_of_the_weights(
    dtype: str, max_shard_size: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_checkpoint(tmp_path, "llama", dtype=dtype, max_shard_size=max_shard_size)
    raw = without_dtype(tmp_path)
    served = "bfloat16" if dtype == "float16" else dtype  # on a CPU
    config, _, _ = resolve_all(make_options("m", device="cpu"), str(tmp_path), raw)
    planned = make_plan(make_options("m", device="cpu"), HardwareOptions(memory=1 << 30), raw, tmp_path)
    assert config.dtype == planned.config.dtype == served
    assert f" as {served} (dtype: that of most weights: config.json names none) on cpu" in caplog.text
    resolve_all(make_options("m", device="cpu", dtype="bfloat16"), str(tmp_path), raw)
    assert " as bfloat16 on cpu" in caplog.text


def test_config_json_comes_first(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", dtype="bfloat16")
    for key, named in {"dtype": "float32", "torch_dtype": "torch.float16"}.items():
        assert find_checkpoint_dtype({key: named}, tmp_path) == (named.removeprefix("torch."), "")


def test_scales_and_packed_weights_do_not_count(tmp_path: Path) -> None:
    tensors = {
        "layer.weight": torch.zeros(9, 9, dtype=torch.float8_e4m3fn),
        "layer.weight_scale_inv": torch.ones(90),
        "layer.qweight": torch.zeros(90, dtype=torch.int32),
        "norm.weight": torch.ones(2),
        "embedding.weight": torch.ones(5, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert find_checkpoint_dtype({}, tmp_path)[0] == "bfloat16"


def test_without_weights_the_assumption_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint_dtype({}, tmp_path) == find_checkpoint_dtype({}, None)
    dtype, source = find_checkpoint_dtype({}, None)
    assert dtype == "float32" and "no safetensors tell it; see --dtype" in source
    make_checkpoint(tmp_path / "model", "llama")
    raw = without_dtype(tmp_path / "model")
    make_plan(make_options("m", device="cpu"), HardwareOptions(memory=1 << 30), raw)
    assert "float32: an assumption" in caplog.text


def test_a_quantised_model_of_which_only_config_json_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = published.GPT2_XL | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    planned = make_plan(make_options("m"), HardwareOptions(gpu="h100"), raw, tmp_path)
    assert planned.config.dtype == "bfloat16"
    assert "bfloat16: an assumption: config.json names none" in caplog.text


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read: .*; copy or download it again"):
        find_checkpoint_dtype({}, tmp_path)
