"""Decide whether a model generates text, returns vectors, or both, and how vectors are made. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from serve_llm.common.errors import OptionError
from serve_llm.common.hub import resolve_tokenizer
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.sentence_transformers import PoolingType, SentenceModules
from serve_llm.common.tokenizer_files import find_tokenizer
from serve_llm.common.types import PoolingTask
from serve_llm.engine.config import PoolingConfig
from serve_llm.engine.model.spec import ModelSpec, PoolerLayer, PoolerSpec
from serve_llm.engine.model.transformers_spec import TransformersSpec


def resolve_pooling(
    options: EngineOptions, directory: str, spec: ModelSpec | TransformersSpec, modules: SentenceModules | None
) -> tuple[bool, PoolingConfig | None]:
    """Return whether the model generates, and how it makes vectors; None if it makes none or its family determines it.

    modules: those of sentence-transformers, if the checkpoint has them. Raises OptionError, ModelError.
    """
    if isinstance(spec, TransformersSpec):
        _check_generates_only(options)
        return True, None
    _check_conflicts(options, spec)
    generates = spec.lm_head and options.runner != "pooling"
    if spec.pooler is not None:  # a classifier
        return False, None
    if options.classifier_from_token:
        config = PoolingConfig(("last",), classifier_ids=_find_token_ids(options, Path(directory)))
        return generates and options.runner == "generate", config
    wants_vectors = options.convert == "embed" or modules is not None or not generates
    if options.convert == "none" or not wants_vectors:
        if options.pooling_type != "auto":
            raise OptionError("--pooling-type: the model makes no embeddings; add --convert embed, or omit it")
        return generates, None
    if options.runner == "auto" and modules is not None:
        generates = False
    return generates, _resolve_embedding(options, spec, modules)


def find_pooling_task(spec: ModelSpec | TransformersSpec) -> PoolingTask:
    pooler = _pooler_of(spec)
    if pooler is None:
        return "none"
    if pooler.classifies_tokens:
        return "token_classify"
    return "classify" if pooler.is_classifier else "embed"


def find_vector_size(spec: ModelSpec | TransformersSpec) -> int:
    """Numbers of a vector; 0 if the model returns none."""
    pooler = _pooler_of(spec)
    return pooler.vector_size(spec.hidden_size) if pooler is not None and isinstance(spec, ModelSpec) else 0


def find_token_vector_size(spec: ModelSpec | TransformersSpec) -> int:
    """Numbers of the vector of a token; 0 if the model returns none, or if its layers read several poolings."""
    pooler = _pooler_of(spec)
    if pooler is None or not isinstance(spec, ModelSpec):
        return 0
    if pooler.is_classifier and not pooler.classifies_tokens:
        return 0
    if not pooler.layers:
        return spec.hidden_size
    return pooler.layers[-1].outputs if len(pooler.pooling_types) == 1 else 0


def _pooler_of(spec: ModelSpec | TransformersSpec) -> PoolerSpec | None:
    return spec.pooler if isinstance(spec, ModelSpec) else None


def build_pooler_spec(config: PoolingConfig) -> PoolerSpec:
    layers = [
        PoolerLayer(f"module{index}", dense.outputs, dense.bias, dense.activation, folder=dense.folder)
        for index, dense in enumerate(config.dense)
    ]
    return PoolerSpec(
        pooling_types=config.pooling_types,
        layers=tuple(layers),
        token_ids=config.classifier_ids,
        normalize=config.normalize,
        is_classifier=bool(config.classifier_ids),
    )


def _check_generates_only(options: EngineOptions) -> None:
    for name in ("runner", "convert", "pooling_type", "classifier_from_token"):
        if getattr(options, name) not in ("auto", "generate", "none", ()):
            flag = name.replace("_", "-")
            raise OptionError(f"--{flag}: a model in transformers' own code generates text only; omit --model-impl")


def _find_token_ids(options: EngineOptions, directory: Path) -> tuple[int, ...]:
    """Find the ids of the tokens of --classifier-from-token."""
    if options.tokenizer is None:
        tokenizer_directory = directory
    else:
        tokenizer_directory = resolve_tokenizer(options.tokenizer, options.download_dir)
    tokenizer = Tokenizer.from_file(str(find_tokenizer(tokenizer_directory) / "tokenizer.json"))
    ids = []
    for token in options.classifier_from_token:
        token_id = tokenizer.token_to_id(token)
        if token_id is None:
            raise OptionError(f"--classifier-from-token: the vocabulary has no token {token!r}")
        ids.append(token_id)
    return tuple(ids)


def _check_conflicts(options: EngineOptions, spec: ModelSpec) -> None:
    if options.runner == "generate" and not spec.lm_head:
        raise OptionError(
            f"--runner: {spec.architecture} has no LM head, so it cannot generate; use pooling, or omit it"
        )
    if options.convert == "none" and (options.runner == "pooling" or not spec.lm_head):
        raise OptionError("--convert: with none, a model that does not generate has nothing to serve; omit it")
    if options.convert == "classify" and not options.classifier_from_token and not _is_classifier(spec):
        raise OptionError(
            f"--convert: {spec.architecture} has no classification head; name the tokens of its classes with "
            "--classifier-from-token, or omit it"
        )
    if options.convert == "embed" and _is_classifier(spec):
        raise OptionError(f"--convert: {spec.architecture} is a classifier and makes no embeddings; omit it")
    if options.pooling_type != "auto" and (_is_classifier(spec) or options.classifier_from_token):
        raise OptionError("--pooling-type: it is for embeddings; a classifier's is part of the model; omit it")
    if options.classifier_from_token:
        if options.convert in ("embed", "none"):
            raise OptionError("--classifier-from-token: it needs --convert classify, or auto")
        if not spec.lm_head:
            raise OptionError(f"--classifier-from-token: {spec.architecture} has no LM head; omit it")
        if len(options.classifier_from_token) < 2:
            raise OptionError("--classifier-from-token: name at least two tokens, such as: no yes")


def _is_classifier(spec: ModelSpec) -> bool:
    return spec.pooler is not None and spec.pooler.is_classifier


def _resolve_embedding(options: EngineOptions, spec: ModelSpec, modules: SentenceModules | None) -> PoolingConfig:
    if modules is not None:
        config = PoolingConfig(modules.pooling_types, modules.normalize, modules.dense)
    elif spec.is_encoder and options.pooling_type == "auto":
        raise OptionError(
            "--pooling-type: the checkpoint does not say how its hidden states become an embedding (it has no "
            "modules.json); give cls or mean, as the model's card says"
        )
    else:
        config = PoolingConfig(("last",), normalize=True)
    if options.pooling_type != "auto":
        config = replace(config, pooling_types=(cast(PoolingType, options.pooling_type),))
    if config.pooling_types != ("last",) and not spec.is_encoder:
        kinds = " and ".join(config.pooling_types)
        raise OptionError(
            f"--pooling-type: {kinds} is for encoders; of a decoder only the last token has seen the whole prompt, so "
            "only last is supported"
        )
    return config
