"""gpt-oss checkpoints whose experts are stored as MXFP4, with the same weights in floating point."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from support.tiny import make_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 96}  # whole blocks of 32; two ranks share 3 blocks of columns
STORED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def random_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8, generator=generator)
    return blocks, torch.randint(120, 126, blocks.shape[:-1], dtype=torch.uint8, generator=generator)


def make_mxfp4(directory: Path) -> int:
    """Write a random gpt-oss with its experts as blocks to directory/packed, and with the values that transformers
    decodes from them to directory/plain. Returns the vocabulary's size."""
    plain, packed = directory / "plain", directory / "packed"
    vocab_size = make_checkpoint(plain, "gpt_oss", **SIZES)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = random_blocks(experts, outputs, inputs)
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert tensors[name].shape == stored.pop(name).shape
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, plain / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    return vocab_size
