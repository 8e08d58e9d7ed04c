"""Decoders without an LM head: embedding models, and sequence classifiers with a linear layer instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.spec import ModelSpec, PoolerLayer, PoolerSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

Read = Callable[[ConfigReader], tuple[ModelSpec, WeightMap]]


def without_lm_head(read: Read, architecture: str) -> Read:
    """Read the base model of a family, which is how embedding models are published."""

    def read_base_model(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        config.only("is_causal", True, None)
        spec, weights = read(config)
        return replace(spec, architecture=architecture, lm_head=False), weights

    return read_base_model


def as_classifier(read: Read, architecture: str) -> Read:
    """Read the base model of a family with a linear layer on the hidden state of the last token."""

    def read_classifier(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        num_labels = read_num_labels(config)
        spec, weights = read(config)
        pooler = PoolerSpec(("last",), (PoolerLayer("score", num_labels, bias=False),), is_classifier=True)
        spec = replace(spec, architecture=architecture, lm_head=False, pooler=pooler)
        rule = WeightRule("score.weight", ("pooler.score.weight",))
        return spec, replace(weights, rules=(*weights.rules, rule), outside=("score.",))

    return read_classifier


def read_num_labels(config: ConfigReader) -> int:
    """The number of classes: the entries of id2label, otherwise num_labels, otherwise transformers' default."""
    labels = config.inner("id2label")
    if labels is not None:
        return len(labels.keys)
    return config.integer("num_labels", 2, highest=2**20)
