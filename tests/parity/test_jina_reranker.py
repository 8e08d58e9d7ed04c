"""jina-reranker-v2 against XLM-RoBERTa of transformers, in float32: the same computation under other names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serve_llm.common.errors import ModelError
from support.engine import make_engine
from support.pooled import compute_vectors, make_pooled_checkpoint, pooling_request, reference_logits

ARCHITECTURE = "XLMRobertaForSequenceClassification"
KEYS = {
    "auto_map": {
        "AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig",
        "AutoModelForSequenceClassification": f"modeling_xlm_roberta.{ARCHITECTURE}",
    },
    "emb_pooler": None,
    "lora_adaptations": None,
    "position_embedding_type": "absolute",
    "use_flash_attn": True,
}
MODULES = {
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if ".attention.self." in name:
            continue
        name = name.replace("embeddings.LayerNorm", "emb_ln").replace("encoder.layer.", "encoder.layers.")
        for theirs, module in MODULES.items():
            base, _, kind = name.rpartition(".")
            if base.endswith(f".{theirs}") and "encoder" in base and module not in name:
                name = f"{base.removesuffix(theirs)}{module}.{kind}"
                break
        renamed[name] = weight
    for layer in range(3):
        for kind in ("weight", "bias"):
            own = [
                weights[f"roberta.encoder.layer.{layer}.attention.self.{one}.{kind}"]
                for one in ("query", "key", "value")
            ]
            renamed[f"roberta.encoder.layers.{layer}.mixer.Wqkv.{kind}"] = torch.cat(own)
    return renamed


def write_reranker(directory: Path, theirs: Path, **more: object) -> None:
    directory.mkdir()
    save_file(rename(load_file(theirs / "model.safetensors")), directory / "model.safetensors")
    config = json.loads((theirs / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | KEYS | more))


@pytest.mark.parametrize("tensor", [1, 2])
def test_equals_xlm_roberta(tensor: int, tmp_path: Path) -> None:
    theirs = tmp_path / "transformers"
    make_pooled_checkpoint(theirs, ARCHITECTURE, std=0.15)
    write_reranker(tmp_path / "jina", theirs)
    chosen = [[2 + (7 * number + 3) % 300 for number in range(count)] for count in (1, 2, 17, 63)]
    engine = make_engine(tmp_path / "jina", tensor=tensor, max_model_len=64, max_num_batched_tokens=64)
    found = compute_vectors(engine, [pooling_request(n, ids) for n, ids in enumerate(chosen)])
    for number, ids in enumerate(chosen):
        torch.testing.assert_close(found[number], reference_logits(theirs, ARCHITECTURE, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changed", [{"position_embedding_type": "rotary"}, {"lora_adaptations": ["retrieval.query"]}], ids=str
)
def test_other_forms_are_refused(changed: dict[str, object], tmp_path: Path) -> None:
    make_pooled_checkpoint(tmp_path / "transformers", ARCHITECTURE)
    write_reranker(tmp_path / "jina", tmp_path / "transformers", **changed)
    with pytest.raises(ModelError, match=next(iter(changed))):
        make_engine(tmp_path / "jina")
