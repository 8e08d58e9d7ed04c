"""--enable-eplb and --eplb-config."""

from __future__ import annotations

import json

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.common.options.eplb import EPLBConfig
from serve_llm.common.options.sources import make_options, parse_args

SHARED = {"data_parallel_size": 2, "enable_expert_parallel": True}


def test_defaults() -> None:
    assert make_options("demo", **SHARED).eplb is None
    assert make_options("demo", **SHARED, enable_eplb=True).eplb == EPLBConfig()
    config = {"step_interval": 10, "num_redundant_experts": 2}
    assert make_options("demo", **SHARED, enable_eplb=True, eplb_config=config).eplb == EPLBConfig(**config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "expected a JSON object, such as"),
        ("{", "--eplb-config"),
        ('{"step_interval": 0}', "step_interval must be a whole number of at least 1"),
        ('{"num_redundant_experts": -1}', "num_redundant_experts must be a whole number of at least 0"),
        ('{"num_redundant_experts": true}', "num_redundant_experts must be a whole number of at least 0"),
        ('{"window_size": 1000}', "'window_size' is not supported: all steps since the last placement count; omit it"),
        ('{"policy": "default"}', "'policy' is not supported; the keys are step_interval, num_redundant_experts"),
    ],
)
def test_wrong_values(text: str, message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_args(["demo", "-dp", "2", "--enable-expert-parallel", "--enable-eplb", "--eplb-config", text], {})
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--enable-eplb"], "--enable-eplb moves experts between engines: give --enable-expert-parallel and a --data-"),
        (["--enable-eplb", "-dp", "2"], "--enable-eplb moves experts between engines"),
        (["--enable-eplb", "--enable-expert-parallel"], "--enable-eplb moves experts between engines"),
        (["--eplb-config", json.dumps({"step_interval": 1})], "--eplb-config needs --enable-eplb"),
        (["--eplb-step-interval", "10"], "--eplb-config takes step_interval and num_redundant_experts, as JSON"),
        (["--num-redundant-experts", "10"], "--eplb-config takes step_interval and num_redundant_experts, as JSON"),
    ],
)
def test_combinations(argv: list[str], message: str) -> None:
    with pytest.raises(OptionError) as raised:
        parse_args(["demo", *argv], {})
    assert message in str(raised.value)
