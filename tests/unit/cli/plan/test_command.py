"""`serve-llm plan` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve_llm.cli.plan.command import main
from serve_llm.common.errors import OptionError
from support import published


@pytest.mark.parametrize(
    ("raw", "options", "refused", "advised"),
    [
        (
            published.GLM_4_5_AIR,
            "--gpu h200 -tp 4 --max-model-len 8192 --speculative-config mtp",
            "captured CUDA graphs do not give out hidden states; add --enforce-eager",
            "--enforce-eager",
        ),
        (  # fp8 is then a storage format only
            published.LLAMA_8B,
            "--gpu a100-80g --quantization fp8",
            "a a100-80g does not multiply 8-bit floats",
            "--batch-invariant",
        ),
    ],
)
def test_what_the_server_demands_can_be_planned(
    raw: dict[str, object],
    options: str,
    refused: str,
    advised: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw))
    asked = [str(tmp_path), *options.split()]
    with pytest.raises(OptionError, match=refused):
        main(asked, {})
    assert main([*asked, advised], {}) == 0
    assert "Fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "options", "refused"),
    [
        (
            {"quantization_config": {"quant_method": "gguf", "architecture": "llama"}},
            "--enable-lora",
            "--enable-lora: adapters do not apply to GGUF files, whose tensors have other names",
        ),
    ],
)
def test_what_the_server_refuses(more: dict[str, object], options: str, refused: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.LLAMA_1B | more))
    asked = [str(tmp_path), "--gpu", "h100"]
    assert main(asked, {}) == 0
    with pytest.raises(OptionError, match=f"^{refused}"):
        main([*asked, *options.split()], {})


def test_an_8_bit_model_may_be_called_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(published.LLAMA_8B | {"quantization_config": stored}))
    asked = [str(tmp_path), "--gpu", "h100"]
    assert main(asked, {}) == 0
    plain = capsys.readouterr().out
    assert main([*asked, "--quantization", "fp8"], {}) == 0
    assert capsys.readouterr().out == plain
    with pytest.raises(OptionError, match=r"^--quantization: awq is a format .* this one is stored as fp8"):
        main([*asked, "--quantization", "awq_marlin"], {})
