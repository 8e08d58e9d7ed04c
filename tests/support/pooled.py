"""Tiny random embedding models and classifiers, written by transformers, and transformers' results for a prompt."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.tiny import SIZES

DECODERS: dict[str, dict[str, Any]] = {
    "LlamaModel": SIZES["llama"],
    "MistralModel": SIZES["mistral"],
    "Qwen2Model": SIZES["qwen2"],
    "Qwen3Model": SIZES["qwen3"],
    "LlamaForSequenceClassification": SIZES["llama"],
    "MistralForSequenceClassification": SIZES["mistral"],
    "Qwen2ForSequenceClassification": {**SIZES["qwen2"], "num_labels": 5},
    "Qwen3ForSequenceClassification": {**SIZES["qwen3"], "num_labels": 1},
}
_BERT: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 130,
}
_MODERNBERT = {**_BERT, "num_hidden_layers": 4, "local_attention": 20, "norm_bias": True}
_NOMIC_BERT = {**_BERT, "pad_token_id": 0}
_ROBERTA = {**_BERT, "type_vocab_size": 1, "pad_token_id": 1}
ENCODERS: dict[str, dict[str, Any]] = {
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": {**_BERT, "num_labels": 1},
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": {**_ROBERTA, "num_labels": 3},
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": {**_ROBERTA, "num_labels": 1},
    "ModernBertModel": _MODERNBERT,
    "ModernBertForMaskedLM": _MODERNBERT,
    "ModernBertForSequenceClassification": {**_MODERNBERT, "classifier_pooling": "mean", "num_labels": 1},
    "NomicBertModel": _NOMIC_BERT,
    "NomicBertForMaskedLM": _NOMIC_BERT,
    "NomicBertForSequenceClassification": {**_NOMIC_BERT, "num_labels": 3},
    "JinaEmbeddingsV3Model": _ROBERTA,
    "JinaEmbeddingsV3ForMaskedLM": _ROBERTA,
    "JinaEmbeddingsV3ForSequenceClassification": {**_ROBERTA, "num_labels": 3},
    "EuroBertModel": {**SIZES["llama"], "attention_bias": True, "mlp_bias": True},
    "EuroBertForMaskedLM": SIZES["llama"],
    "EuroBertForSequenceClassification": {**SIZES["llama"], "classifier_pooling": "mean", "num_labels": 3},
    "Gemma3TextModel": {**SIZES["gemma3_text"], "use_bidirectional_attention": True},
    "GteModel": _BERT,
    "GteForSequenceClassification": {**_BERT, "type_vocab_size": 0},
}
TOKEN_CLASSIFIERS: dict[str, dict[str, Any]] = {
    "BertForTokenClassification": {**_BERT, "num_labels": 9},
    "RobertaForTokenClassification": {**_ROBERTA, "num_labels": 3},
    "XLMRobertaForTokenClassification": {**_ROBERTA, "num_labels": 1},
    "ModernBertForTokenClassification": {**_MODERNBERT, "classifier_bias": True, "num_labels": 5},
}


def make_pooled_checkpoint(
    directory: Path,
    architecture: str,
    *,
    modules: Sequence[str] = (),
    pooling: str = "lasttoken",
    seed: int = 0,
    std: float = 0.2,
    **overrides: Any,
) -> int:
    """Write a random model of this transformers class. Returns the vocabulary's size.

    modules: sentence-transformers' modules after the transformer, such as "Pooling", "Normalize". pooling: its mode.
    overrides: keys of transformers' config class.
    """
    kind = getattr(transformers, architecture)
    config = _build_config(architecture, **overrides)
    model = kind._from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            middle = 0.0 if architecture.startswith("Gemma") else 1.0  # models whose norms add 1
            parameter.copy_(noise * 0.2 + middle if is_norm else noise * std)
    model.save_pretrained(directory)
    if modules:
        write_modules(directory, modules, pooling, config.hidden_size)
    return int(config.vocab_size)


def pooled_config_of(architecture: str, **overrides: Any) -> dict[str, Any]:
    """Return config.json as `make_pooled_checkpoint` would write it, without a model."""
    config = _build_config(architecture, **overrides)
    config.architectures = [architecture]
    return dict(json.loads(config.to_json_string()))


def _build_config(architecture: str, **overrides: Any) -> transformers.PreTrainedConfig:
    ids = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    sizes = copy.deepcopy({**DECODERS, **ENCODERS, **TOKEN_CLASSIFIERS}[architecture])
    return getattr(transformers, architecture).config_class(**{**ids, **sizes, **overrides})


def write_modules(directory: Path, modules: Sequence[str], pooling: str, size: int) -> None:
    """Write sentence-transformers' files next to a checkpoint. Dense layers keep the size, with a bias and tanh."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, kind in enumerate(modules, 1):
        folder = directory / f"{number}_{kind}"
        folder.mkdir()
        listed.append(
            {"idx": number, "name": str(number), "path": folder.name, "type": f"sentence_transformers.models.{kind}"}
        )
        if kind == "Pooling":
            modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "lasttoken")}
            (folder / "config.json").write_text(json.dumps({"word_embedding_dimension": size, **modes}))
        elif kind == "Dense":
            sizes = {"in_features": size, "out_features": size, "bias": True}
            function = "torch.nn.modules.activation.Tanh"
            (folder / "config.json").write_text(json.dumps({**sizes, "activation_function": function}))
            linear = torch.nn.Linear(size, size)
            tensors = {f"linear.{name}": tensor.detach() for name, tensor in linear.named_parameters()}
            safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (directory / "modules.json").write_text(json.dumps(listed))


@lru_cache(maxsize=2)
def _load(directory: Path, architecture: str) -> PreTrainedModel:
    kind = getattr(transformers, architecture)
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_hidden(directory: Path, architecture: str, ids: Sequence[int]) -> Tensor:
    """Return transformers' last hidden states: (ids, hidden_size)."""
    outputs = _load(directory, architecture)(torch.tensor([list(ids)]), output_hidden_states=True)
    return outputs.hidden_states[-1][0] if architecture.endswith("ForMaskedLM") else outputs.last_hidden_state[0]


@torch.inference_mode()
def reference_logits(directory: Path, architecture: str, ids: Sequence[int], **inputs: Any) -> Tensor:
    """Return transformers' logits of a classifier: (classes,), or of tokens: (ids, classes)."""
    return _load(directory, architecture)(torch.tensor([list(ids)]), **inputs).logits[0]


def pooling_request(number: int, ids: Sequence[int], **fields: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        id=number, prompt_ids=list(ids), sampling=Sampling(max_tokens=0, seed=0), pooling=True, **fields
    )


def compute_vectors(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> dict[int, Tensor]:
    """Return the vector of each pooling request; None for other requests. All run together."""
    engine.add_requests(requests)
    vectors = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None, output.error
            if output.vector is not None:
                vectors[output.id] = torch.frombuffer(bytearray(output.vector), dtype=torch.float32)
        engine.scheduler.check_integrity()
    return vectors
