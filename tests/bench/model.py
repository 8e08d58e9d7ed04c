"""The benchmark model: the shape of Qwen2 0.5B with random weights and the demo model's tokenizer.

Written once into a folder among other temporary files. Rows of the embedding (which is also the head) for which the
tokenizer has no text are zero, so that generated tokens can be turned into text at the usual cost.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from serve_llm.common.hub import resolve_model

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
IDS = range(300, 4000)  # ids for which the tokenizer has text
TOKENIZER_IDS = 4096
FOLDER = "serve-llm-bench-qwen2-0.5b-shape"


def model_folder() -> Path:
    """Return the checkpoint's folder. Writes it if it does not exist (a few seconds, 1 GB)."""
    folder = Path(tempfile.gettempdir()) / FOLDER
    if not folder.exists():
        making = Path(tempfile.mkdtemp(prefix=FOLDER))
        try:
            save_file(tensors(SHAPE), making / "model.safetensors", {"format": "pt"})
            (making / "config.json").write_text(json.dumps(SHAPE))
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(resolve_model("demo")) / name, making)
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return folder


def tensors(shape: dict[str, object]) -> dict[str, Tensor]:
    """Return random bf16 weights under the names of a Qwen2 checkpoint."""
    generator = torch.Generator().manual_seed(1)
    sizes = {name: value for name, value in shape.items() if isinstance(value, int)}
    width, up = sizes["hidden_size"], sizes["intermediate_size"]
    head_dim = width // sizes["num_attention_heads"]
    keys = sizes["num_key_value_heads"] * head_dim

    def random(*size: int) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    embedding = random(sizes["vocab_size"], width)
    embedding[TOKENIZER_IDS:] = 0
    found = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(width, dtype=torch.bfloat16)}
    for layer in range(sizes["num_hidden_layers"]):
        for name, outputs in (("q", width), ("k", keys), ("v", keys)):
            found[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = random(outputs, width)
            found[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = random(outputs)
        found[f"model.layers.{layer}.self_attn.o_proj.weight"] = random(width, width)
        for name in ("gate", "up"):
            found[f"model.layers.{layer}.mlp.{name}_proj.weight"] = random(up, width)
        found[f"model.layers.{layer}.mlp.down_proj.weight"] = random(width, up)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    return found
