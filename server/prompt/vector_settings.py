"""What the checkpoint's files say about texts and vectors: how texts are cut, labels, and how logits become scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from serve_llm.common.errors import ModelError
from serve_llm.common.hub import read_json
from serve_llm.common.sentence_transformers import read_sentence_modules

Activation = Literal["none", "sigmoid", "softmax"]

_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


@dataclass(frozen=True)
class VectorSettings:
    lowercase: bool  # the model reads texts in lower case
    prompt: str  # begins the texts of embeddings
    has_unit_length: bool  # embeddings come with length 1 from the engine
    adds_eos: bool  # a text ends with the end-of-sequence id, whether or not tokenizer.json adds it
    dimensions: tuple[int, ...] | None  # sizes to which embeddings may be cut; empty: any; None: none
    labels: tuple[str, ...]  # names of the classes, as many as logits; may be empty
    activation: Activation  # from a classifier's logits to probabilities
    has_token_classes: bool  # the classes are tokens of the vocabulary; the last one is the score

    def find_label(self, probabilities: Sequence[float]) -> str:
        """Return the name of the most likely class."""
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return self.labels[best] if best < len(self.labels) else f"LABEL_{best}"


def read_vector_settings(
    directory: Path, text_directory: Path, config: dict[str, object], classifier_tokens: tuple[str, ...]
) -> VectorSettings:
    """directory: the checkpoint. text_directory: its tokenizer's. config: config.json. classifier_tokens: those of
    --classifier-from-token. Raises ModelError."""
    modules = read_sentence_modules(directory)
    tokenizer_config = text_directory / "tokenizer_config.json"
    adds_eos = tokenizer_config.is_file() and read_json(tokenizer_config).get("add_eos_token") is True
    labels = classifier_tokens or _read_labels(config)
    return VectorSettings(
        lowercase=modules is not None and modules.lowercase,
        prompt="" if modules is None else modules.prompt,
        has_unit_length=modules is None or modules.normalize,
        adds_eos=adds_eos,
        dimensions=_read_dimensions(config),
        labels=labels,
        activation="softmax" if classifier_tokens else _find_activation(config, len(labels)),
        has_token_classes=bool(classifier_tokens),
    )


def _read_dimensions(config: dict[str, object]) -> tuple[int, ...] | None:
    listed = config.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        if not all(isinstance(size, int) and size > 0 for size in listed):
            raise ModelError("config.json: matryoshka_dimensions must be a list of integers above 0")
        return tuple(listed)
    return () if config.get("is_matryoshka") is True else None


def _read_labels(config: dict[str, object]) -> tuple[str, ...]:
    labels = config.get("id2label")
    if not isinstance(labels, dict):
        return ()
    return tuple(str(labels.get(str(index), f"LABEL_{index}")) for index in range(len(labels)))


def _find_activation(config: dict[str, object], num_labels: int) -> Activation:
    """Return the activation named in a cross-encoder's config.json, else that for the kind of problem or the number of
    classes."""
    section = config.get("sentence_transformers")
    named = section.get("activation_fn") if isinstance(section, dict) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if isinstance(named, str):
        name = named.rpartition(".")[2]
        if name not in _ACTIVATIONS:
            supported = ", ".join(_ACTIVATIONS)
            raise ModelError(f"config.json: the activation {name} of scores is not supported (supported: {supported})")
        return _ACTIVATIONS[name]
    match config.get("problem_type"):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
        case _:
            return "sigmoid" if num_labels == 1 else "softmax"
